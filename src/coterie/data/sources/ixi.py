"""IXI Tiny as FLamby's Fed-IXI lays it out: T1 images of heads and masks of brains, from three hospitals.

`7kd5wj7v7p-3/IXI_sample/IXI012-HH-1211/{T1,label}/*.nii.gz`; FLamby's `metadata_tiny.csv` says which patients are for
testing. Everything is brought to 48 × 60 × 48 by averaging (masks: the nearest voxel), images to mean 0, deviation 1.
"""

import csv
import io
import re
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.sources import nifti, store, unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, Form, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

HOSPITALS = ("Guys", "HH", "IOP")
SHAPE = (48, 60, 48)
_ARCHIVE, _DIVISION = "7kd5wj7v7p-3.zip", "metadata_tiny.csv"
_SUBJECT = re.compile(r"(?:^|/)IXI(\d{3})-([A-Za-z]+)-[^/]*/(T1|label)/[^/]+\.nii(?:\.gz)?$")


def resized(volume: NDArray[Any], shape: tuple[int, ...], nearest: bool) -> NDArray[Any]:
    """A volume at another size: averaged over what each voxel covers, or the nearest voxel."""
    given = torch.from_numpy(np.ascontiguousarray(volume, dtype=np.float32))[None, None]
    mode = "nearest-exact" if nearest else "area"
    return torch.nn.functional.interpolate(given, size=shape, mode=mode)[0, 0].numpy()


def _division(folder: Path) -> dict[int, str]:
    places = sorted(folder.rglob(_DIVISION))
    if not places:
        raise DataError(f"IXI: {_DIVISION} is missing; it belongs in {folder}")
    rows = csv.DictReader(io.StringIO(places[0].read_text(encoding="utf-8", errors="replace")))
    try:
        return {int(row["Patient ID"]): row["Split"] for row in rows}
    except (csv.Error, KeyError, TypeError, ValueError) as problem:
        raise DataError(f"{_DIVISION} must have the columns Patient ID and Split: {problem}") from problem


def decode(folder: Path, out: Writer, progress: Progress, *, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Every subject's image and mask, the division's training patients first."""
    division = _division(folder)
    found: dict[int, dict[str, Any]] = {}
    with progress.bar("IXI", None, unit="files") as advance:
        for path, content in unpack.contents(folder, _ARCHIVE, lambda path: _SUBJECT.search(path) is not None):
            match = _SUBJECT.search(path)
            assert match is not None
            patient, hospital, kind = int(match[1]), match[2], match[3]
            if hospital not in HOSPITALS or division.get(patient) not in ("train", "test"):
                raise DataError(
                    f"IXI: {path} is of no hospital of {HOSPITALS}, or {_DIVISION} has no patient {patient}"
                )
            volume = nifti.parse(PurePosixPath(path).name, content)
            if volume.ndim != 3:
                raise DataError(f"IXI: {path} has {volume.ndim} axes, but 3 are expected")
            subject = found.setdefault(patient, {"hospital": HOSPITALS.index(hospital)})
            if kind == "label":
                subject[kind] = (resized(volume, shape, nearest=True) > 0.5).astype(np.uint8)
            else:
                image = resized(volume, shape, nearest=False)
                subject[kind] = (image - image.mean()) / max(float(image.std()), 1e-8)
            advance(1)
    for patient, subject in found.items():
        for kind in ("T1", "label"):
            if kind not in subject:
                raise DataError(f"IXI: the {kind} of patient IXI{patient:03d} is missing from {_ARCHIVE} in {folder}")
    order = sorted(found, key=lambda patient: (division[patient] != "train", patient))
    if not order or division[order[0]] != "train":
        raise DataError(f"IXI: no patient for training in {_ARCHIVE} in {folder}")
    with out.rows("inputs", np.float32, (len(order), 1, *shape)) as append:
        for patient in order:
            append(found[patient]["T1"][None, None])
    out.array("targets", np.stack([found[patient]["label"] for patient in order]))
    out.array("groups", np.array([found[patient]["hospital"] for patient in order]))
    train = sum(division[patient] == "train" for patient in order)
    return {
        "train": train,
        "owners": list(HOSPITALS),
        "classes": ["background", "brain"],
        "division": "FLamby's; the publisher gives none",
    }


def read(folder: Path, facts: dict[str, Any]) -> Dataset:
    """The installed volumes, mapped into memory."""
    return Dataset(
        name=folder.name,
        inputs=store.array(folder, "inputs"),
        targets=store.array(folder, "targets"),
        train=facts["train"],
        classes=tuple(facts["classes"]),
        groups=np.asarray(store.array(folder, "groups")),
        facts={key: value for key, value in facts.items() if key not in ("train", "classes")},
    )


SPEC = Spec(
    name="ixi",
    title="IXI Tiny, brain masks, three hospitals (FLamby)",
    licence="CC BY-SA 3.0",
    size=395_000_000,
    forms=(
        Form(
            OFFICIAL,
            (
                Raw(
                    _ARCHIVE,
                    f"https://prod-dcd-datasets-cache-zipfiles.s3.eu-west-1.amazonaws.com/{_ARCHIVE}",
                    "md5:eecb83422a2685937a955251fa45cb03",
                    unpacked=("**/T1/*.nii*", "**/label/*.nii*"),
                ),
                Raw(
                    _DIVISION,
                    f"https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_ixi/metadata/{_DIVISION}",
                ),
            ),
            decode,
        ),
    ),
    open=read,
)
