"""Who hears of a run while it goes on. Runs of a batch speak from threads of their own, in any order."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from coterie.errors import SettingError


@dataclass(frozen=True)
class Label:
    """Which run speaks."""

    algorithm: str
    seed: int
    rounds: int
    main: str


class Listener:
    """Hears nothing; subclasses hear what they want."""

    def begin(self, run: Label, done: int) -> None:
        """A run begins or goes on."""

    def round(self, run: Label, done: int) -> None:
        """A round is over; called often, so be quick and never look at a tensor."""

    def evaluation(self, run: Label, done: int, split: str, mean: Mapping[str, float]) -> None:
        """Models were measured."""

    def end(self, run: Label, status: str) -> None:
        """A run is over or paused."""

    def tell(self, message: str) -> None:
        """Something a user should know."""

    def close(self) -> None:
        """No more runs."""


class Terminal(Listener):
    """A bar per algorithm on a terminal, with the latest mean; nothing but messages elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._at: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description:<18}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("rounds  {task.fields[latest]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._progress.start()

    def begin(self, run: Label, done: int) -> None:
        """Make room in the bar for the run's rounds."""
        if self._progress is None:
            return
        with self._lock:
            if run.algorithm not in self._bars:
                self._bars[run.algorithm] = self._progress.add_task(run.algorithm, total=0, latest="")
            bar = self._bars[run.algorithm]
            total = self._progress.tasks[bar].total or 0
            self._progress.update(bar, total=total + run.rounds, advance=done)
            self._at[run.algorithm, run.seed] = done

    def round(self, run: Label, done: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.advance(self._bars[run.algorithm])
            self._at[run.algorithm, run.seed] = done

    def evaluation(self, run: Label, done: int, split: str, mean: Mapping[str, float]) -> None:
        """Show the latest mean."""
        if self._progress is not None:
            latest = f"{run.main} {mean[run.main]:.3f}"
            self._progress.update(self._bars[run.algorithm], latest=latest)

    def end(self, run: Label, status: str) -> None:
        """A run that stopped early fills its share of the bar."""
        if self._progress is not None and status == "finished":
            left = run.rounds - self._at.get((run.algorithm, run.seed), run.rounds)
            self._progress.advance(self._bars[run.algorithm], left)

    def tell(self, message: str) -> None:
        """Above the bars."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bars as they are."""
        if self._progress is not None:
            self._progress.stop()


class TensorBoard(Listener):
    """Means over clients as TensorBoard scalars, one run per algorithm and seed."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SettingError(
                "run.track names tensorboard, which is not installed: pip install coterie[track]"
            ) from None
        self._make: Any = SummaryWriter
        self.folder = folder
        self._writers: dict[tuple[str, int], Any] = {}

    def begin(self, run: Label, done: int) -> None:
        """A writer of its own; rounds after `done` are written anew."""
        folder = self.folder / run.algorithm / f"seed-{run.seed}"
        self._writers[run.algorithm, run.seed] = self._make(str(folder), purge_step=done + 1 if done else None)

    def evaluation(self, run: Label, done: int, split: str, mean: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for metric, value in mean.items():
            self._writers[run.algorithm, run.seed].add_scalar(f"{split}/{metric}", value, done)

    def end(self, run: Label, status: str) -> None:
        """Flush and close."""
        self._writers.pop((run.algorithm, run.seed)).close()
