"""TinyImageNet (64×64, 200 classes) and MiniImageNet (84×84, 100 classes)."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.sources import images, pickles, unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import FILES, OFFICIAL, Form, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

_TINY = "tiny-imagenet-200.zip"
_MINI = "mini-imagenet.tar.gz"
_SPLITS = ("train", "val", "test")


def tiny(
    folder: Path, out: Writer, progress: Progress, *, counts: tuple[int, int] = (100_000, 10_000)
) -> dict[str, Any]:
    """`wnids.txt` orders the classes; `train/CLASS/images/*.JPEG`; `val/images/*.JPEG` with `val_annotations.txt`.

    The publisher's `test` folder has no labels; as everybody does, its validation images are what is tested on.
    """
    lists = {
        PurePosixPath(path).name: content.decode("utf-8", "replace")
        for path, content in unpack.contents(
            folder, _TINY, lambda path: PurePosixPath(path).name in ("wnids.txt", "words.txt", "val_annotations.txt")
        )
    }
    for name in ("wnids.txt", "val_annotations.txt"):
        if name not in lists:
            raise DataError(f"TinyImageNet: {name} is missing from {_TINY} in {folder}")
    order = {wnid: number for number, wnid in enumerate(lists["wnids.txt"].split())}
    words = dict(line.split("\t", 1) for line in lists.get("words.txt", "").splitlines() if "\t" in line)
    held = dict(line.split("\t")[:2] for line in lists["val_annotations.txt"].splitlines() if "\t" in line)

    def side(part: str) -> Iterator[images.Batch]:
        wanted = unpack.contents(
            folder, _TINY, lambda path: f"/{part}/" in f"/{path}" and path.lower().endswith(".jpeg")
        )
        for path, content in wanted:
            place = PurePosixPath(path)
            wnid = place.name.split("_")[0] if part == "train" else held.get(place.name, "")
            if wnid not in order:
                raise DataError(f"TinyImageNet: the image {path} belongs to no class of wnids.txt")
            yield images.picture(path, content).transpose(2, 0, 1)[None], np.array([order[wnid]])

    def both() -> Iterator[images.Batch]:
        yield from side("train")
        yield from side("val")

    classes = tuple(words.get(wnid, wnid) for wnid in order)
    return images.write(out, progress, "TinyImageNet", both(), counts, (3, 64, 64), classes)


def _sorted(found: dict[str, list[NDArray[np.uint8]]], out: Writer, progress: Progress, held: int) -> dict[str, Any]:
    """The last `held` images of each class, in the publisher's order, become the test side."""
    counts = {wnid: len(pictures) for wnid, pictures in found.items()}
    if not counts or min(counts.values()) <= held:
        raise DataError(
            f"MiniImageNet: a class must have more than {held} images; counted: {sorted(counts.items())[:3]}"
        )

    def batches() -> Iterator[images.Batch]:
        for part in (slice(None, -held), slice(-held, None)):
            for label, wnid in enumerate(sorted(found)):
                for picture in found[wnid][part]:
                    yield picture.transpose(2, 0, 1)[None], np.array([label])

    test = held * len(counts)
    facts = images.write(
        out,
        progress,
        "MiniImageNet",
        batches(),
        (sum(counts.values()) - test, test),
        (3, 84, 84),
        tuple(sorted(found)),
    )
    return facts | {
        "resplit": True,
        "division": f"the last {held} images of each of the {len(counts)} classes are for testing; the publisher "
        "divides by class (64/16/20)",
    }


def _small(name: str, content: bytes) -> NDArray[np.uint8]:
    """A picture at 84×84, the side that MiniImageNet is used at."""
    from PIL import Image

    picture = images.picture(name, content)
    if picture.shape[:2] == (84, 84):
        return picture
    return np.asarray(Image.fromarray(picture).resize((84, 84), Image.Resampling.BILINEAR))


def mini_csv(folder: Path, out: Writer, progress: Progress, *, held: int = 100) -> dict[str, Any]:
    """`train.csv`, `val.csv`, `test.csv` (filename,label) and a folder `images` of JPEG files."""
    lists: dict[str, str] = {}
    pictures: dict[str, bytes] = {}
    for path, content in unpack.contents(folder, _MINI, lambda path: path.lower().endswith((".csv", ".jpg", ".jpeg"))):
        if path.endswith(".csv"):
            lists[PurePosixPath(path).name] = content.decode("utf-8", "replace")
        else:
            pictures[PurePosixPath(path).name] = content
    found: dict[str, list[NDArray[np.uint8]]] = {}
    for part in _SPLITS:
        if f"{part}.csv" not in lists:
            raise DataError(f"MiniImageNet: {part}.csv is missing from {_MINI} in {folder}")
        try:
            rows = list(csv.DictReader(io.StringIO(lists[f"{part}.csv"])))
        except csv.Error as problem:
            raise DataError(f"MiniImageNet: {part}.csv is no table: {problem}") from problem
        for row in rows:
            name, wnid = row.get("filename") or "", row.get("label") or ""
            if name not in pictures or not wnid:
                raise DataError(
                    f"MiniImageNet: images/{name}, named by {part}.csv, is missing from {_MINI} in {folder}"
                )
            found.setdefault(wnid, []).append(_small(name, pictures[name]))
    return _sorted(found, out, progress, held)


def mini_pickles(folder: Path, out: Writer, progress: Progress, *, held: int = 100) -> dict[str, Any]:
    """`mini-imagenet-cache-{train,val,test}.pkl`: `image_data` (N × 84 × 84 × 3) and `class_dict` (class → rows)."""
    found: dict[str, list[NDArray[np.uint8]]] = {}
    for part in _SPLITS:
        path = folder / f"mini-imagenet-cache-{part}.pkl"
        told = pickles.loads(path.name, path.read_bytes())
        try:
            told = {key.decode() if isinstance(key, bytes) else key: value for key, value in told.items()}
            pictures = np.asarray(told["image_data"])
            if pictures.dtype != np.uint8 or pictures.shape[1:] != (84, 84, 3):
                raise ValueError(f"images of shape {pictures.shape} and type {pictures.dtype}")
            for wnid, rows in told["class_dict"].items():
                name = wnid.decode() if isinstance(wnid, bytes) else str(wnid)
                found[name] = [pictures[row] for row in rows]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as problem:
            raise DataError(f"{path.name} is no part of MiniImageNet: {problem!r}") from problem
    return _sorted(found, out, progress, held)


TINY = Spec(
    name="tiny-imagenet",
    title="TinyImageNet",
    licence="ImageNet's terms: research and teaching only",
    size=1_352_500_000,
    forms=(
        Form(
            OFFICIAL,
            (
                Raw(
                    _TINY,
                    f"http://cs231n.stanford.edu/{_TINY}",
                    "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
                    unpacked=("**/wnids.txt", "**/val_annotations.txt"),
                ),
            ),
            tiny,
        ),
    ),
    open=images.read,
)

MINI = Spec(
    name="mini-imagenet",
    title="MiniImageNet",
    licence="ImageNet's terms: research and teaching only",
    size=1_271_000_000,
    forms=(
        Form(FILES, (Raw(_MINI, unpacked=("**/train.csv", "**/val.csv", "**/test.csv")),), mini_csv),
        Form(FILES, tuple(Raw(f"mini-imagenet-cache-{part}.pkl") for part in _SPLITS), mini_pickles),
    ),
    open=images.read,
    hint="its authors give lists of ImageNet files; collections of them go by these names",
)
