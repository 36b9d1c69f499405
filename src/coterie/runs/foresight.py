"""How long an experiment will take, and how much memory: a few of its rounds, driven as it would drive them.

The rounds tried lie all over the run, since some algorithms ask more in the beginning than later. Of an ask that takes
long only a part is asked (the first steps of a training, some of the pairs), and the rest is reckoned in proportion.
"""

import importlib
import itertools
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from coterie.asks import Answer, Ask, Fit
from coterie.experiments.reader import Experiment
from coterie.fleet.base import Fleet
from coterie.fleet.wrapper import Wrapper
from coterie.runs.listeners import Label, Listener
from coterie.runs.study import Study

LEAST, MOST = 9, 48  # rounds tried
PATIENCE = 3.0  # seconds for them, where they are short
LONG = 3.0  # seconds that an ask may take to be asked in full


@dataclass(frozen=True)
class Foreseen:
    """What one algorithm takes, all seeds together."""

    algorithm: str
    seconds: float
    memory: int  # bytes at the peak: of the process, on a GPU of what torch holds there
    whole: bool  # whether every ask was asked in full; if not, there may be more memory to it


class Hurried(Wrapper):
    """Asks a part of what would take long, adds up in `owed` how much longer it would have taken, and skips rounds."""

    def __init__(self, inner: Fleet, pace: "Pace") -> None:
        super().__init__(inner)
        self.pace, self.owed, self.whole = pace, 0.0, True

    def begin(self, t: int) -> None:
        """Open, instead of round t, the t-th of those that are tried."""
        self.inner.begin(self.pace.round(t))

    def ask(self, *asks: Ask) -> Any:
        """The answers, of which those to long asks are partial."""
        return self._hurried(asks, self.inner.ask)

    def watch(self, *asks: Ask) -> Any:
        """The same for an observer."""
        return self._hurried(asks, self.inner.watch)

    def _hurried(self, asks: Sequence[Ask], put: Callable[[Ask], Answer]) -> Answer | tuple[Answer, ...]:
        answers = tuple(
            self._fewer_steps(ask, put) if isinstance(ask, Fit) else self._fewer_pairs(ask, put) for ask in asks
        )
        return answers[0] if len(answers) == 1 else answers

    def _fewer_steps(self, ask: Fit, put: Callable[[Ask], Answer]) -> Answer:
        sizes = self.inner._sizes[ask.split][ask.clients].tolist()
        steps = fmean(map(ask.plan.steps_for, sizes)) if sizes else 0
        if steps <= 12:
            return put(ask)
        _, two = self._timed(_steps(ask, 2), self.inner.watch)
        self.owed -= two
        if two / 2 * steps < LONG:
            return put(ask)
        answer, eight = self._timed(_steps(ask, 8), put)
        each = (eight - two) / 6 if eight > two else eight / 8  # two that took longer were the first, or interrupted
        self.owed += each * (steps - 8)
        return answer

    def _fewer_pairs(self, ask: Ask, put: Callable[[Ask], Answer]) -> Answer:
        if ask.m < 8:
            return put(ask)
        part = torch.linspace(0, ask.m - 1, max(2, ask.m // 16)).long().unique()
        _, some = self._timed(ask.take(part), self.inner.watch)
        self.owed -= some
        if some * ask.m / len(part) < LONG:
            return put(ask)
        answer, took = self._timed(ask.take(part), put)
        self.owed += took * (ask.m / len(part) - 1)
        self.whole = False
        return self.inner._spread(ask, answer, part)

    def _timed(self, ask: Ask, put: Callable[[Ask], Answer]) -> tuple[Answer, float]:
        start = time.perf_counter()
        answer = put(ask)
        if self.inner.device.type == "cuda":
            torch.cuda.synchronize()
        return answer, time.perf_counter() - start


def _steps(ask: Fit, count: int) -> Fit:
    return replace(ask, plan=replace(ask.plan, steps=count, epochs=None))


@dataclass
class Pace:
    """Which rounds are tried, the same ones by all seeds of a batch, and as many as there is time for."""

    rounds: int
    tried: int | None = None  # how many; known after the third
    began: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def round(self, i: int) -> int:
        """The i-th of them: the first three, then one from each of equal parts of the run."""
        with self.lock:
            if i <= 1:  # the first one may have compiled something
                self.began = time.perf_counter()
            if i < 3:
                return i
            if self.tried is None:
                each = (time.perf_counter() - self.began) / 2
                self.tried = min(self.rounds, max(LEAST, min(MOST, int(PATIENCE / max(each, 1e-9)))))
            parts = max(1, self.tried - 3)
            return max(i, 3 + (2 * (i - 3) + 1) * (self.rounds - 3) // (2 * parts))


class Clock(Listener):
    """Notes when each round of one seed ended, what is still owed included, and stops all when enough have."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.hurried: list[Hurried] = []
        self.seed = 0
        self.ends: list[float] = []

    def begin(self, run: Label, done: int) -> None:
        """Before models are measured for the first time."""
        self._note(run)

    def round(self, run: Label, done: int) -> None:
        """A round, with what followed it."""
        self._note(run)
        tried = self.hurried[0].pace.tried
        if tried is not None and done >= tried:
            self.stop.set()

    def _note(self, run: Label) -> None:
        if run.seed == self.seed:
            self.ends.append(time.perf_counter() + self.hurried[0].owed)


class _Trial(Study):
    """A study with hurried fleets that measures, and saves, more often."""

    clock: Clock

    def _fleets(self, algorithm: str, batch: Sequence[int]) -> list[Fleet]:
        pace = Pace(self.experiment.budget.rounds)
        self.clock.hurried = [Hurried(fleet, pace) for fleet in super()._fleets(algorithm, batch)]
        self.clock.seed, self.clock.ends = batch[0], []
        return [*self.clock.hurried]


def foresee(experiment: Experiment, device: str) -> Iterator[Foreseen]:
    """Each algorithm's share, one after the other."""
    importlib.import_module("coterie.report.figures")  # a run ends with them: on a CPU their libraries count
    budget = experiment.budget
    often = experiment.altered({"run.evaluate_every": 4, "run.checkpoint_every": 8})
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        study = _Trial(Path(folder), often, device)
        for name in experiment.algorithms:
            _forget_peak(device)
            seconds, whole = 0.0, True
            for batch in study._batches(name):
                study.clock = clock = Clock()
                study._batch(name, batch, [clock], clock.stop)
                spent = [b - a for a, b in itertools.pairwise(clock.ends)]
                seconds += _reckoned(spent, budget.rounds, budget.evaluate_every, budget.checkpoint_every)
                whole = whole and all(fleet.whole for fleet in clock.hurried)
            yield Foreseen(name, seconds, _peak(device), whole)


def _reckoned(spent: Sequence[float], rounds: int, evaluate_every: int, checkpoint_every: int) -> float:
    """Seconds of a run, from those of its first round and of others; of these, every fourth one was measured after,
    and every eighth one saved as well. The first three stand for themselves, the others for their part of the run.
    """
    if len(spent) < 3:
        return sum(spent)

    def extra(start: int) -> float:
        """What every eighth round took more than those beside it, which were neither measured nor saved."""
        beside = [
            spent[i] - fmean(spent[k] for k in (i - 1, i + 1) if k < len(spent)) for i in range(start, len(spent), 8)
        ]
        return max(0.0, median(beside)) if beside else 0.0

    measured = extra(3)
    saved = max(0.0, extra(7) - measured)
    part = (rounds - 3) / max(1, len(spent) - 3)
    alone = [s - measured * (n % 4 == 0) - saved * (n % 8 == 0) for n, s in enumerate(spent, 1)]
    weights = [1.0 if n < 3 else part for n in range(1, len(spent))]
    evaluations, saves = -(-rounds // evaluate_every), (rounds - 1) // checkpoint_every
    later = (rounds - 1) * fmean(alone[1:], weights)
    return spent[0] + later + evaluations * measured + (saves + 1) * saved


def _forget_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
