"""What finished runs left in their folders, read back; anything that is not as it must be is said in one sentence."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from coterie.errors import RecordError
from coterie.runs.files import read_json
from coterie.runs.record import known


def read(path: Path) -> dict[str, Any]:
    """One JSON file of a record."""
    if not path.is_file():
        raise RecordError(f"{path} is missing: name a folder that `coterie run` wrote")
    found = read_json(path)
    if not isinstance(found, dict):
        raise RecordError(f"{path} is damaged: it must hold a table, not {type(found).__name__}")
    return found


def about(run: Path) -> dict[str, Any]:
    """What a run says of itself."""
    found = read(run / "run.json")
    known(found, run / "run.json")
    wanted = ("status", "experiment", "scale", "algorithm", "seed", "keys", "main", "higher", "resplit")
    for key in wanted:
        if key not in found:
            raise RecordError(f"{run / 'run.json'} is damaged: it has no {key!r}")
    return found


def finished(run: Path) -> dict[str, Any]:
    """The result of a run, with the folder it lies in under "run" and what the run says of itself under "about"."""
    told = about(run)
    if told["status"] != "finished":
        why = f" ({told['why']})" if told.get("why") else ""
        raise RecordError(
            f"{run} is {told['status']}{why}, not finished: "
            f"go on with `coterie resume {run}`, or name finished runs only"
        )
    result = read(run / "result.json")
    for key in ("metrics", "last", "clients", "ledger"):
        if not isinstance(result.get(key), dict):
            raise RecordError(f"{run / 'result.json'} is damaged: it has no table {key!r}")
    if told["main"] not in result["metrics"] or len(result["clients"].get(told["main"], ())) != len(told["keys"]):
        raise RecordError(
            f"{run / 'result.json'} is damaged: it must say {told['main']!r} for each of {len(told['keys'])} clients"
        )
    return {**result, "algorithm": told["algorithm"], "seed": told["seed"], "run": str(run), "about": told}


def runs(folders: Iterable[str | Path]) -> list[Path]:
    """Every run folder at or below the given ones, once; algorithms in the experiment's order, seeds in theirs."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise RecordError(f"there is no folder {folder}: name one that `coterie run` wrote")
        below = [path.parent for path in folder.rglob("run.json")]
        if not below:
            raise RecordError(f"{folder} holds no run: name a folder that `coterie run` wrote")
        for run in sorted(below, key=_place):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _place(run: Path) -> tuple[str, int, str, int, str]:
    """By folder, then as the experiment lists its algorithms, then by seed."""
    out, algorithm, seed = run.parent.parent, run.parent.name, run.name.rpartition("-")[2]
    order = [run.parent.name]
    if (out / "experiment.json").is_file():
        order = list(read(out / "experiment.json").get("experiment", {}).get("algorithms", ()))
    rank = order.index(algorithm) if algorithm in order else len(order)
    return str(out), rank, algorithm, int(seed) if seed.isdigit() else 0, run.name


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a last one that was never finished is left out."""
    path = run / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): name a folder that `coterie run` wrote") from None
    whole = text.splitlines(keepends=True)
    try:
        return [json.loads(line) for line in whole if line.endswith("\n")]
    except ValueError as error:
        raise RecordError(f"{path} is damaged ({error}): bring it back from a copy, or run again") from None


def tensors(path: Path) -> dict[str, NDArray[Any]]:
    """A file of tensors."""
    try:
        return dict(load_file(path))
    except FileNotFoundError:
        raise RecordError(f"{path} is missing: name a folder that `coterie run` wrote") from None
    except (OSError, SafetensorError) as error:
        raise RecordError(f"{path} cannot be read ({error}): bring it back from a copy, or run again") from None


def graphs(run: Path) -> tuple[dict[int, NDArray[np.float64]], NDArray[np.float64] | None]:
    """The learned graph of every recorded round, in order, and the true one where there is one."""
    held = {name: w.astype(np.float64) for name, w in tensors(run / "graphs.safetensors").items()}
    rounds = {int(name.removeprefix("round-")): w for name, w in held.items() if name != "true"}
    return dict(sorted(rounds.items())), held.get("true")
