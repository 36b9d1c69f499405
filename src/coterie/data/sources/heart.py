"""Heart disease in four hospitals, as FLamby's Fed-Heart-Disease prepares and divides the UCI files.

The last three measurements are missing almost everywhere and are left out; patients with another gap are left out; the
kinds of chest pain and of resting ECG become one column each beyond the first: 13 features, 740 patients. Two thirds
of each hospital are for training, drawn by scikit-learn with FLamby's seed, both sides with equal shares of the ill.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.sources import store
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, Form, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

HOSPITALS = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
_HERE = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
_PAIN, _ECG, _USED = 2, 6, 10  # columns 10 to 12 are the ones left out; 13 is the diagnosis
_KINDS = {_PAIN: (1, 2, 3, 4), _ECG: (0, 1, 2)}
FEATURES = (
    *("age", "sex", "blood pressure", "cholesterol", "blood sugar", "heart rate", "exercise angina", "ST depression"),
    *("pain 2", "pain 3", "pain 4", "ECG 1", "ECG 2"),
)


def parse(name: str, text: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Features and diagnosis (0 or 1) of the patients without gaps."""
    try:
        rows = [[np.nan if cell == "?" else float(cell) for cell in line.split(",")] for line in text.split()]
    except ValueError as problem:
        raise DataError(f"{name} is no table of numbers: {problem}") from problem
    if not rows or any(len(row) != 14 for row in rows):
        raise DataError(f"{name} must have 14 columns in every row")
    table = np.array(rows)
    table = table[~np.isnan(table[:, [*range(_USED), 13]]).any(1)]
    plain = [column for column in range(_USED) if column not in _KINDS]
    dummies = [table[:, column] == kind for column, kinds in _KINDS.items() for kind in kinds[1:]]
    for column, kinds in _KINDS.items():
        if not np.isin(table[:, column], kinds).all():
            raise DataError(f"{name}: column {column} has values beyond {kinds}")
    return np.column_stack([table[:, plain], *dummies]), (table[:, 13] > 0).astype(np.int64)


def divide(ill: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which patients of a hospital are for training: FLamby's division."""
    from sklearn.model_selection import train_test_split

    enough = len(np.unique(ill)) > 1 and min(np.bincount(ill)) > 2
    train, _ = train_test_split(
        np.arange(len(ill)),
        test_size=1.0 - 0.66,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=ill if enough else None,
    )
    return np.isin(np.arange(len(ill)), train)


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """Four files to one table, training patients first."""
    parts: list[tuple[NDArray[Any], ...]] = []
    for number, name in enumerate(HOSPITALS):
        file = f"processed.{name}.data"
        features, ill = parse(file, (folder / file).read_text(encoding="latin-1"))
        parts.append((features, ill, np.full(len(ill), number), divide(ill)))
    features, ill, hospital, train = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(~train, kind="stable")
    out.array("inputs", features[order])
    out.array("targets", ill[order])
    out.array("groups", hospital[order])
    return {
        "train": int(train.sum()),
        "columns": FEATURES,
        "owners": list(HOSPITALS),
        "classes": ["healthy", "ill"],
        "division": "FLamby's: two thirds of each hospital for training; the publisher gives none",
    }


def read(folder: Path, facts: dict[str, Any]) -> Dataset:
    """An installed table with owners."""
    return Dataset(
        name=folder.name,
        inputs=np.asarray(store.array(folder, "inputs")),
        targets=np.asarray(store.array(folder, "targets")),
        train=facts["train"],
        classes=tuple(facts["classes"]),
        groups=np.asarray(store.array(folder, "groups")),
        facts={key: value for key, value in facts.items() if key not in ("train", "classes")},
    )


SPEC = Spec(
    name="heart-disease",
    title="Heart disease, four hospitals (FLamby)",
    licence="CC BY 4.0",
    size=100_000,
    forms=(
        Form(
            OFFICIAL,
            tuple(
                Raw(f"processed.{name}.data", f"{_HERE}/processed.{name}.data", f"md5:{md5}")
                for name, md5 in HOSPITALS.items()
            ),
            decode,
        ),
    ),
    open=read,
)
