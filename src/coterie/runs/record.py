"""The folder of one run: what is in it, and how it is opened, added to, and taken back to a checkpoint."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from coterie.errors import RecordError
from coterie.runs import checkpoint, files
from coterie.runs.checkpoint import Checkpoint

FORMAT = 1
RUN, METRICS, GRAPHS, RESULT = "run.json", "metrics.jsonl", "graphs.safetensors", "result.json"
CHECKPOINTS, MODELS = "checkpoints", "models"
Tell = Callable[[str], None]  # where to say what a user should know


class Record:
    """Writes one run. `about` is run.json; metrics and graphs are appended, everything else is written whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about: dict[str, Any] = {}
        self._graphs: dict[str, Tensor] = {}
        self._unsaved = False

    @property
    def status(self) -> str:
        """How the run stands; empty if it has not begun."""
        return str(self.about.get("status", ""))

    def read(self) -> "Record":
        """Open what is there, which may be nothing."""
        path = self.folder / RUN
        if path.exists():
            self.about = files.read_json(path)
            known(self.about, path)
        return self

    def begin(self, about: dict[str, Any], truth: Tensor | None) -> None:
        """Start from nothing; what an earlier try left goes."""
        with files.explained("the folder", self.folder):
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True)
        self.about = {"format": FORMAT, "status": "running", **about}
        files.write_json(self.folder / RUN, self.about)
        files.write(self.folder / METRICS, b"")
        self._graphs = {} if truth is None else {"true": truth.float()}
        self._unsaved = bool(self._graphs)

    def mark(self, status: str, **more: Any) -> None:
        """Say how the run stands."""
        self.about = {**self.about, "status": status, **more}
        files.write_json(self.folder / RUN, self.about)

    # ---- adding ------------------------------------------------------------------------------------------------------

    def lines(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append to the metrics."""
        text = "".join(json.dumps(files.plain(line), allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
        path = self.folder / METRICS
        with files.explained("the metrics", path), path.open("ab") as file:
            file.write(text.encode())

    def graph(self, done: int, graph: Tensor) -> None:
        """Keep the graph of a round; it reaches the disk with the next checkpoint."""
        self._graphs[f"round-{done:06d}"] = graph.detach().float().cpu()
        self._unsaved = True

    def save(self, point: Checkpoint) -> None:
        """Everything up to here onto the disk, the checkpoint last: it vouches for the rest."""
        self._save_graphs()
        path = self.folder / METRICS
        with files.explained("the metrics", path), path.open("rb+") as file:
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
        point = Checkpoint(point.round, {**point.note, "metrics_bytes": size}, point.tensors)
        checkpoint.save(self.folder / CHECKPOINTS, point)

    def finish(self, result: dict[str, Any], models: dict[str, dict[str, Tensor]]) -> None:
        """The last words: graphs, models, the result, and that it is over."""
        self._save_graphs()
        for which, tensors in models.items():
            path = self.folder / MODELS / f"{which}.safetensors"
            with files.explained("the folder", path.parent):
                path.parent.mkdir(exist_ok=True)
            files.write(path, encode(checkpoint.bare(tensors)))
        files.write_json(self.folder / RESULT, result)
        self.mark("finished", rounds_run=result["rounds_run"], seconds=result["seconds"])

    def _save_graphs(self) -> None:
        if self._unsaved:
            files.write(self.folder / GRAPHS, encode(checkpoint.bare(self._graphs)))
            self._unsaved = False

    # ---- going on ----------------------------------------------------------------------------------------------------

    def good(self, tell: Tell) -> list[Checkpoint]:
        """The checkpoints that are whole, newest first; the others are told about."""
        found = []
        for done in checkpoint.rounds(self.folder / CHECKPOINTS):
            try:
                point = checkpoint.load(self.folder / CHECKPOINTS, done)
                if (self.folder / METRICS).stat().st_size < point.note["metrics_bytes"]:
                    raise RecordError(
                        f"{self.folder / METRICS} ends before round {done}, so its checkpoint is of no use"
                    )
                found.append(point)
            except (RecordError, OSError, KeyError) as error:
                tell(f"{error}; an earlier one is used")
        return found

    def rewind(self, point: Checkpoint, tell: Tell) -> None:
        """Take the record back to a checkpoint: later lines, graphs and checkpoints go."""
        path = self.folder / METRICS
        with files.explained("the metrics", path):
            os.truncate(path, point.note["metrics_bytes"])
        checkpoint.drop_after(self.folder / CHECKPOINTS, point.round)
        with suppress(OSError):
            (self.folder / RESULT).unlink()
        self._graphs = {}
        if (self.folder / GRAPHS).exists():
            try:
                graphs = decode((self.folder / GRAPHS).read_bytes())
                self._graphs = {k: v for k, v in graphs.items() if k == "true" or int(k[6:]) <= point.round}
            except (SafetensorError, ValueError, OSError) as error:
                tell(f"{self.folder / GRAPHS} is damaged ({error}): graphs before round {point.round} are lost")
        self.mark("running")


def known(about: Any, path: Path) -> None:
    """Refuse the record of a newer version."""
    found = about.get("format") if isinstance(about, dict) else None
    if not isinstance(found, int):
        raise RecordError(f"{path} is no record of Coterie: it says no format")
    if found > FORMAT:
        raise RecordError(
            f"{path} was written by a newer Coterie (format {found}; this one reads up to {FORMAT}): update Coterie"
        )


def true_graph(groups: Iterable[int] | None) -> Tensor | None:
    """The true graph of true groups."""
    if groups is None:
        return None
    group = torch.tensor(list(groups))
    return (group[:, None] == group[None, :]).float()
