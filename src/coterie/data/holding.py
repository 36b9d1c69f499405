"""Data that stay where they are: what an experiment says of them beforehand, and reading and checking them there.

A `Schema` is the `[population.data]` table of an experiment whose clients are real sites: everything that a model's
shape and the meaning of its outputs depend on. `read` makes a client's own files into tensors of that form, or says in
one sentence what does not fit; `declare` makes the population that everybody may know, without a sample in it, and
`hold` the same with the data of some of its clients.
"""

import csv
import hashlib
import importlib.util
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coterie import draws
from coterie.data.population import SPLITS, Model, Population
from coterie.data.tabular import prepare
from coterie.errors import DataError, SettingError
from coterie.tasks import Task

GAPS = ("", "na", "nan", "n/a", "null", "none", "?")  # what a table writes where a value is missing
DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int64": torch.long}
SPLIT = "split"  # the column of a table that says which split a row is in, where it has one
MODES = ("1", "L", "P", "RGB")  # of images that lose nothing as bytes
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
Samples = dict[str, tuple[Tensor, Tensor]]  # split → inputs and targets


@dataclass(frozen=True)
class Schema:
    """What the data of every client must look like."""

    columns: tuple[str, ...] = ()  # of a table: the inputs, in this order
    shape: tuple[int, ...] = ()  # of a sample that is no row of a table; images are channels × height × width
    dtype: Literal["float32", "uint8", "int64"] = "float32"  # of inputs; images are uint8
    target: str = "target"  # the column of a table with the label, or the value, to be learned
    classes: tuple[str, ...] = ()  # the label map: what this calls its i-th is label i; none: values, not labels
    missing: Literal["refuse", "mean"] = "refuse"  # a gap in a table; "mean": of the client's own training rows
    scale: Literal["none", "client"] = "none"  # "client": columns get mean 0 and deviation 1 on its own training rows
    validation: float = 0.0  # share of the samples where the data do not say themselves which are which
    test: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what nothing could fit."""
        if bool(self.columns) == bool(self.shape):
            raise SettingError("give either the columns of a table or the shape of a sample")
        if len(set(self.columns)) != len(self.columns) or self.target in self.columns:
            raise SettingError("columns must differ from one another and from the target")
        if self.shape and min(self.shape) < 1:
            raise SettingError(f"a shape is made of numbers above 0, not {list(self.shape)}")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) == 1:
            raise SettingError("classes must be at least two different names, or none where values are learned")
        if self.columns and self.dtype != "float32":
            raise SettingError("the columns of a table are float32")
        if self.shape and (self.missing, self.scale) != ("refuse", "none"):
            raise SettingError("gaps are filled and columns scaled in tables only")
        if not (0 <= self.validation and 0 <= self.test and self.validation + self.test < 1):
            raise SettingError("validation and test are shares, and leave something to train on")

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.shape or (len(self.columns),)


@dataclass(frozen=True)
class Public:
    """Inputs that everyone holds, in one and the same file."""

    samples: int
    sha256: str  # of the file

    def read(self, file: Path, schema: Schema) -> Tensor:
        """The inputs, of which everyone has the same."""
        kept = replace(schema, columns=(), shape=schema.sample, missing="refuse", scale="none", classes=())
        try:
            inputs = _file(str(file))["inputs"]
        except KeyError:
            raise DataError(f"{file} has no inputs") from None
        found = _checked(Found({"train": (inputs, torch.zeros(len(inputs)))}), kept).samples["train"][0]
        if len(found) != self.samples:
            raise DataError(f"{file} has {len(found)} public inputs, and {self.samples} are declared")
        return found


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@dataclass(frozen=True)
class Found:
    """A client's data as models see them, and what there is to say about them."""

    samples: Samples
    facts: dict[str, Any] = field(default_factory=dict)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(kind: str, source: str, schema: Schema, key: str) -> Found:
    """A client's data: `kind` is csv, images, tensors or loader, `source` a path, or FILE.py:FUNCTION."""
    if kind not in READERS:
        raise SettingError(f"data are read as {', '.join(READERS)}, not {kind!r}")
    try:
        return _checked(READERS[kind](source, schema, key), schema)
    except DataError as error:
        raise DataError(f"client {key!r}, {source}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"client {key!r}: {source} cannot be read: {error}") from None


def _csv(source: str, schema: Schema, key: str) -> Found:
    """A table with a header line; commas, semicolons or tabs."""
    if not schema.columns:
        raise DataError("the experiment declares samples of a shape, not columns of a table")
    with Path(source).open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        comma = max((",", ";", "\t"), key=first.count)
        lines = csv.DictReader(file, delimiter=comma)
        header = [name.strip() for name in lines.fieldnames or ()]
        lines.fieldnames = header
        for wanted in (*schema.columns, schema.target):
            if wanted not in header:
                raise DataError(f"there is no column {wanted!r}; there are {', '.join(header)}")
        if twice := next((name for name in (*schema.columns, schema.target) if header.count(name) > 1), None):
            raise DataError(f"there are two columns {twice!r}")
        rows = list(lines)
    table = np.empty((len(rows), len(schema.columns)))
    labels = []
    for i, row in enumerate(rows):
        line = f"row {i + 1}"
        if None in row or None in row.values():
            raise DataError(f"{line} has more or fewer values than the header has names")
        for j, name in enumerate(schema.columns):
            table[i, j] = _number(row[name], f"{line}, column {name!r}")
        labels.append(_label(row[schema.target], schema, f"{line}, column {schema.target!r}"))
    targets = torch.tensor(np.array(labels)) if labels else torch.empty(0)
    places = _own_splits(rows) if SPLIT in header and SPLIT not in schema.columns else _splits(len(rows), schema, key)
    gaps = {name: int(n) for name, n in zip(schema.columns, np.isnan(table).sum(0), strict=True) if n}
    if gaps and schema.missing == "refuse":
        raise DataError(
            f"the column {next(iter(gaps))!r} has {next(iter(gaps.values()))} gaps; the experiment fills none"
        )
    return Found(_dealt(torch.from_numpy(_scaled(table, places, schema)), targets, places), {"gaps": gaps})


def _number(text: str | None, where: str) -> float:
    text = (text or "").strip()
    if text.lower() in GAPS:
        return np.nan
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{where}: {text!r} is no number") from None
    if np.isinf(value):
        raise DataError(f"{where}: the value is infinite")
    return value


def _label(text: str | None, schema: Schema, where: str) -> int | list[float]:
    text = (text or "").strip()
    if schema.classes:
        if text not in schema.classes:
            raise DataError(f"{where}: {text!r} is none of the classes {', '.join(schema.classes)}")
        return schema.classes.index(text)
    value = _number(text, where)
    if np.isnan(value):
        raise DataError(f"{where}: the value to be learned is missing")
    return [value]


def _own_splits(rows: Sequence[Mapping[str, str]]) -> dict[str, NDArray[np.int64]]:
    said = [(row[SPLIT] or "").strip() for row in rows]
    for i, word in enumerate(said):
        if word not in SPLITS:
            raise DataError(f"row {i + 1}: the split is {word!r}, not {', '.join(SPLITS)}")
    return {split: np.flatnonzero([word == split for word in said]) for split in SPLITS}


def _scaled(table: NDArray[np.float64], places: Mapping[str, NDArray[np.int64]], schema: Schema) -> NDArray[np.float32]:
    """Gaps filled by training means, and columns scaled by training rows, if the experiment says so."""
    train = places["train"]
    if schema.scale == "client":
        return prepare(table, [train], [np.arange(len(table))], "client")
    if np.isnan(table).any():
        empty = np.isnan(table[train]).all(0) if len(train) else np.ones(table.shape[1], dtype=bool)
        if empty.any():
            raise DataError(f"the column {schema.columns[int(empty.argmax())]!r} has no value among training rows")
        table = np.where(np.isnan(table), np.nanmean(table[train], 0), table)
    return table.astype(np.float32)


def _images(source: str, schema: Schema, key: str) -> Found:
    """A folder per class, named after it; above those, if there are any, a folder per split."""
    from PIL import Image, UnidentifiedImageError

    root = Path(source)
    if len(schema.shape) != 3 or schema.shape[0] not in (1, 3) or schema.dtype != "uint8":
        raise DataError("the experiment declares no images (a shape of 1 or 3 channels, height, width, and uint8)")
    if not root.is_dir():
        raise DataError("it is no folder")
    said = [split for split in SPLITS if (root / split).is_dir()]
    parts = {split: root / split for split in said} if said else {"": root}
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    owner: list[str] = []
    others = 0
    for split, folder in parts.items():
        for below in sorted(p for p in folder.iterdir() if not p.name.startswith(".")):
            if not below.is_dir() or below.name not in schema.classes:
                raise DataError(f"{below.relative_to(root)} is no folder of a class: {', '.join(schema.classes)}")
            for path in sorted(p for p in below.iterdir() if not p.name.startswith(".")):
                if path.suffix.lower() not in IMAGES:
                    others += 1
                    continue
                try:
                    with Image.open(path) as image:
                        if image.mode not in MODES:
                            raise DataError(f"{path.relative_to(root)} is {image.mode}, not one of {', '.join(MODES)}")
                        array = np.asarray(image.convert("L" if schema.shape[0] == 1 else "RGB"))
                except (UnidentifiedImageError, OSError) as error:
                    raise DataError(f"{path.relative_to(root)} is no image: {error}") from None
                array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
                if array.shape != schema.shape:
                    raise DataError(f"{path.relative_to(root)} has shape {array.shape}, not {schema.shape}")
                pixels.append(array)
                labels.append(schema.classes.index(below.name))
                owner.append(split)
    if not pixels:
        raise DataError("there is no image in it")
    places = (
        {split: np.flatnonzero([o == split for o in owner]) for split in SPLITS}
        if said
        else _splits(len(pixels), schema, key)
    )
    facts = {"files that are no images": others} if others else {}
    return Found(_dealt(torch.from_numpy(np.stack(pixels)), torch.tensor(labels), places), facts)


def _tensors(source: str, schema: Schema, key: str) -> Found:
    """A safetensors or npz file with inputs and targets, or with train/inputs, train/targets and so on. No pickle."""
    found = _file(source)
    if {"inputs", "targets"} <= set(found):
        _together(found["inputs"], found["targets"], "")
        return Found(_dealt(found["inputs"], found["targets"], _splits(len(found["inputs"]), schema, key)))
    samples = {}
    for split in SPLITS:
        if f"{split}/inputs" in found:
            if f"{split}/targets" not in found:
                raise DataError(f"it has {split}/inputs and no {split}/targets")
            samples[split] = found[f"{split}/inputs"], found[f"{split}/targets"]
    if not samples:
        raise DataError(f"it has neither inputs and targets nor train/inputs and so on, but {', '.join(found)}")
    return Found(samples)


def _file(source: str) -> dict[str, Tensor]:
    try:
        return _arrays(source) if source.endswith(".npz") else load_file(source)
    except (SafetensorError, zipfile.BadZipFile, ValueError, TypeError) as error:
        raise DataError(f"it is no safetensors file, nor npz with plain arrays: {error}") from None


def _arrays(source: str) -> dict[str, Tensor]:
    with np.load(source, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def function(source: str) -> Callable[..., Any]:
    """A function of the site's own code, given as FILE.py:FUNCTION."""
    path, colon, name = source.rpartition(":")
    if not colon:
        raise DataError(f"own code is given as FILE.py:FUNCTION, not {source!r}")
    spec = importlib.util.spec_from_file_location("coterie_site_code", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise DataError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise DataError(f"{path} has no function {name!r}")
    made: Callable[..., Any] = found
    return made


def _loader(source: str, schema: Schema, key: str) -> Found:
    """The user's own function: its key and schema in, pairs by split, or one pair, out."""
    load = function(source)
    try:
        given = load(key, schema)
    except Exception as error:
        raise DataError(f"the loader raised {type(error).__name__}: {error}") from error
    pairs = dict(given) if isinstance(given, Mapping) else {"": given}
    samples: Samples = {}
    for split, pair in pairs.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise DataError("a loader returns (inputs, targets), or those by split")
        try:
            samples[split] = torch.as_tensor(pair[0]), torch.as_tensor(pair[1])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"what the loader returns are no arrays: {error}") from None
    if "" not in samples:
        return Found(samples)
    inputs, targets = samples[""]
    _together(inputs, targets, "")
    return Found(_dealt(inputs, targets, _splits(len(inputs), schema, key)))


READERS = {"csv": _csv, "images": _images, "tensors": _tensors, "loader": _loader}


def _splits(samples: int, schema: Schema, key: str) -> dict[str, NDArray[np.int64]]:
    """Shares in an order that follows from the client's key."""
    order = torch.randperm(samples, generator=draws.generator(draws.name(f"splits of {key}"))).numpy()
    test, validation = round(schema.test * samples), round(schema.validation * samples)
    cut = np.split(order, [test, test + validation])
    return {"test": np.sort(cut[0]), "validation": np.sort(cut[1]), "train": np.sort(cut[2])}


def _dealt(inputs: Tensor, targets: Tensor, places: Mapping[str, NDArray[np.int64]]) -> Samples:
    return {s: (inputs[torch.from_numpy(p)], targets[torch.from_numpy(p)]) for s, p in places.items() if len(p)}


def _together(inputs: Tensor, targets: Tensor, split: str) -> None:
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise DataError(f"{split} inputs and targets are not one for one".strip())


def _checked(found: Found, schema: Schema) -> Found:
    """Shapes, types and labels as declared; what is merely written differently (a float64) is brought to it."""
    samples: Samples = {}
    wanted = DTYPES[schema.dtype]
    for split, (inputs, targets) in found.samples.items():
        if split not in SPLITS:
            raise DataError(f"there is no split {split!r}: there are {', '.join(SPLITS)}")
        _together(inputs, targets, split)
        if inputs.shape[1:] != schema.sample:
            raise DataError(f"{split} inputs have shape {tuple(inputs.shape[1:])}, and {schema.sample} is declared")
        if inputs.dtype != wanted and not (inputs.is_floating_point() and wanted.is_floating_point):
            raise DataError(f"{split} inputs are {inputs.dtype}, and {schema.dtype} is declared")
        if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
            raise DataError(f"{split} inputs contain NaN or infinity")
        if schema.classes:
            if targets.ndim != 1 or targets.is_floating_point():
                raise DataError(f"{split} targets must be labels, one whole number per sample")
            if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(schema.classes):
                raise DataError(f"{split} labels must lie in 0 to {len(schema.classes) - 1}")
            targets = targets.long()
        else:
            targets = targets.float().reshape(len(targets), -1)
            if not bool(torch.isfinite(targets).all()):
                raise DataError(f"{split} targets contain NaN or infinity")
        samples[split] = inputs.to(wanted).contiguous(), targets.contiguous()
    if "train" not in samples:
        raise DataError("there are no training samples")
    facts = {split: len(pair[0]) for split, pair in samples.items()} | found.facts
    if schema.classes:
        count = torch.bincount(samples["train"][1], minlength=len(schema.classes))
        facts["training labels"] = dict(zip(schema.classes, count.tolist(), strict=True))
    return Found(samples, facts)


# ---- populations -----------------------------------------------------------------------------------------------------


def declare(
    keys: Sequence[str],
    schema: Schema,
    architectures: Sequence[Model],
    architecture: Sequence[int],
    task: Task,
    transform: Any = None,
    outputs: int = 1,
    public: Mapping[str, Public] | None = None,
) -> Population:
    """What is known of the clients before any of them is there; of public inputs, how many there are."""
    if len(set(keys)) != len(keys) or not keys:
        raise SettingError("clients must be different names, at least one")
    targets = torch.empty(0, dtype=torch.long) if schema.classes else torch.empty(0, outputs)
    none = torch.empty(0, dtype=torch.long)
    return Population(
        keys=tuple(keys),
        inputs=torch.empty(0, *schema.sample, dtype=DTYPES[schema.dtype]),
        targets=targets,
        index={split: (none,) * len(keys) for split in SPLITS},
        task=task,
        architectures=tuple(architectures),
        architecture=tuple(architecture),
        transform=transform,
        public={
            name: torch.zeros(each.samples, *schema.sample, dtype=DTYPES[schema.dtype])
            for name, each in (public or {}).items()
        },
        seeds=(None,) * len(keys),
        facts={"data": "at the sites", "division": "each site's own"},
    )


def hold(
    declared: Population, samples: Mapping[str, Samples], public: Mapping[str, Tensor] | None = None
) -> Population:
    """Some clients of a declared population, with their data; architectures keep their numbers."""
    numbers = [declared.keys.index(key) for key in samples]
    index: dict[str, list[Tensor]] = {split: [] for split in SPLITS}
    inputs, targets, total = [], [], 0
    for held in samples.values():
        for split in SPLITS:
            count = len(held[split][0]) if split in held else 0
            index[split].append(torch.arange(total, total + count))
            if count:
                inputs.append(held[split][0])
                targets.append(held[split][1])
                total += count
    made = replace(
        declared,
        keys=tuple(samples),
        inputs=torch.cat(inputs),
        targets=torch.cat(targets),
        index={split: tuple(rows) for split, rows in index.items()},
        architecture=tuple(declared.architecture[i] for i in numbers),
        public=dict(public or {}),
        seeds=(None,) * len(numbers),
    )
    made.check()
    return made


def fit(declared: Population, schema: Schema) -> None:
    """Refuse models that take no samples of this form, or have no output for its last class."""
    sample = torch.zeros(1, *schema.sample, dtype=DTYPES[schema.dtype])
    value = declared.targets.new_zeros(1, *declared.targets.shape[1:])
    target = torch.tensor([len(schema.classes) - 1]) if schema.classes else value
    hold(declared, {key: {"train": (sample, target)} for key in declared.keys})
