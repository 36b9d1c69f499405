"""GoEmotions: comments with some of 28 emotions each, which Ekman's theory puts into 7 groups."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.dataset import Dataset
from coterie.data.sources import store, texts
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, Form, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError, SettingError

_LENGTH = 64
_HERE = "https://raw.githubusercontent.com/google-research/google-research/master/goemotions/data"
_NAMES, _EKMAN = "emotions.txt", "ekman_mapping.json"
_PARTS = ("train.tsv", "dev.tsv", "test.tsv")
_FILES = {
    "train.tsv": "1c254a142be5c00e80d819b9ae1bbd36d94b2eeb8f4b1271846508d57e57d9c5",
    "dev.tsv": "575489c079c9de1097062a01738f998590d6b7ead66dd1c9fd1d2ba01fd8bc62",
    "test.tsv": "0587b2dd8b27b97352adbfc3fb083d46005c8946657fdc2b1ca8b1cc7f1f8be4",
    _NAMES: "45c3ef86782d2a4d7fedcd6d8c111aa0d0e94720689bd164fac94fefb4495a89",
    _EKMAN: "d6b1fea382917c1685c42e1324a0344106be9390f52a3850ce032656d103a328",
}


def parse(name: str, content: str, classes: int) -> list[tuple[str, list[int]]]:
    """Comments and their emotions: text, emotions with commas, the comment's own number."""
    found = []
    for number, line in enumerate(content.removesuffix("\n").split("\n"), 1):  # a comment may hold other line ends
        cells = line.split("\t")
        try:
            emotions = [int(emotion) for emotion in cells[1].split(",")]
        except (IndexError, ValueError):
            raise DataError(f"{name}, line {number}: {line[:40]!r} is no comment with its emotions") from None
        if not all(0 <= emotion < classes for emotion in emotions):
            raise DataError(f"{name}, line {number}: an emotion of {emotions} is not among the {classes} of {_NAMES}")
        found.append((cells[0], emotions))
    return found


def ekman(content: str, names: list[str]) -> tuple[list[str], list[int]]:
    """Ekman's groups, and the group of each emotion; neutral is a group of its own."""
    try:
        told = {**json.loads(content), "neutral": ["neutral"]}
        groups = sorted(told)
        return groups, [next(number for number, group in enumerate(groups) if name in told[group]) for name in names]
    except (ValueError, TypeError, StopIteration) as problem:
        raise DataError(f"{_EKMAN} does not give every emotion of {_NAMES} a group") from problem


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path.name} is no text in UTF-8: {problem}") from problem


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """The publisher's three parts, in order; its `dev` part are the last training rows, for validation."""
    read_text = {name: _text(folder / name) for name in _FILES}
    names = read_text[_NAMES].split()
    groups, group = ekman(read_text[_EKMAN], names)
    parts = [parse(name, read_text[name], len(names)) for name in _PARTS]
    comments = [comment for part in parts for comment in part]
    facts = texts.write(out, [text for text, _ in comments], _LENGTH)
    several = np.zeros((len(comments), len(names)), dtype=np.uint8)
    for row, (_, emotions) in enumerate(comments):
        several[row, emotions] = 1
    out.array("targets", several)
    return facts | {
        "parts": [len(part) for part in parts],
        "classes": names,
        "owners": groups,
        "group_of_class": group,
    }


def read(folder: Path, facts: dict[str, Any], labels: str = "one") -> Dataset:
    """Comments with exactly one emotion, and which (`groups`: its Ekman group); or all, with 28 yes or no each."""
    if labels not in ("one", "all"):
        raise SettingError(f"GoEmotions is read with labels 'one' or 'all', not {labels!r}")
    several = np.asarray(store.array(folder, "targets"))
    inputs = np.asarray(store.array(folder, "inputs"))
    part = np.repeat(np.arange(3), facts["parts"])
    keep = several.sum(1) == 1 if labels == "one" else np.ones(len(several), dtype=bool)
    ends = np.cumsum([int((keep & (part == number)).sum()) for number in range(3)]).tolist()
    single = several.argmax(1)[keep]
    facts = {key: value for key, value in facts.items() if key not in ("parts", "classes")} | {
        "classes_named": list(facts["classes"]),
        "dropped": f"{int((~keep).sum())} comments with several emotions" if labels == "one" else "",
    }
    return Dataset(
        name=folder.name,
        inputs=inputs[keep],
        targets=single if labels == "one" else several,
        train=ends[1],
        classes=tuple(facts.pop("classes_named")) if labels == "one" else (),
        groups=np.array(facts["group_of_class"])[single] if labels == "one" else None,
        facts=facts,
        validation=ends[1] - ends[0],
    )


SPEC = Spec(
    name="goemotions",
    title="GoEmotions, 28 emotions in Ekman's 7 groups",
    licence="Apache-2.0 (code), CC BY 4.0 (data)",
    size=40_000_000,
    forms=(
        Form(
            OFFICIAL,
            tuple(Raw(name, f"{_HERE}/{name}", sha) for name, sha in _FILES.items()),
            decode,
        ),
    ),
    open=read,
    needs=("minilm",),
    settings=("labels",),
)
