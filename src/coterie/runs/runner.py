"""Drives one run: rounds, measuring, the record, checkpoints. No tensor of a round is looked at before measuring."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Evaluate, Fit, Own, Plan
from coterie.data.population import SPLITS, Population
from coterie.errors import RecordError
from coterie.experiments.budget import Budget
from coterie.fleet.base import Fleet
from coterie.graph.compare import compare, found, given_to
from coterie.runs.best import Best, Measured, named, revealed
from coterie.runs.checkpoint import Checkpoint
from coterie.runs.files import DiskFullError
from coterie.runs.listeners import Label, Listener
from coterie.runs.packing import pack, unpack
from coterie.runs.record import Record, true_graph

EARLY = 8  # a graph should stand after this part of the rounds


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a run ended: finished with a result, or paused without."""

    status: str
    rounds: int
    result: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # "best" and "last", as the record names them
    lines: list[dict[str, Any]] = field(default_factory=list)  # what this process measured
    state: Any = None
    graph: Tensor | None = None  # of the last round


def drive(
    fleet: Fleet,
    algorithm: Algorithm,
    budget: Budget,
    *,
    name: str = "",
    record: Record | None = None,
    point: Checkpoint | None = None,
    listeners: Sequence[Listener] = (),
    stop: threading.Event | None = None,
) -> Outcome:
    """One run to its end, or until `stop` is set, from the start or from a checkpoint; without a record nothing stays.

    Everything a run needs is in its arguments, so several may go on in threads of one process.
    """
    run = _Run(fleet, algorithm, budget, name, record, listeners)
    try:
        return run.go(point, stop or threading.Event())
    except DiskFullError as error:
        run.close("paused", str(error))
        raise
    except BaseException as error:
        run.close("failed", f"{type(error).__name__}: {error}")
        raise


class _Run:
    def __init__(
        self, fleet: Fleet, algorithm: Algorithm, budget: Budget, name: str, record: Record | None,
        listeners: Sequence[Listener],
    ) -> None:  # fmt: skip
        self.fleet, self.algorithm, self.budget, self.record = fleet, algorithm, budget, record
        task = fleet.task
        population = fleet.population
        self.true_models = population.truth
        self.main, self.higher = main_of(population)
        for metric in budget.metrics or ():
            task.higher_is_better(metric)  # refuses what the task does not know
        wanted = budget.metrics or task.metrics
        self.metrics = tuple(m for m in task.metrics if m in wanted or m in (task.main, "loss"))
        self.label = Label(name or type(algorithm).__name__.lower(), fleet.seed, budget.rounds, self.main)
        self.listeners = listeners
        there: list[str] = [s for s in budget.splits if bool(fleet.sizes(s).any())]
        self.splits = there or ["train"]  # everyone has training data
        self.best = Best(fleet.n, task.main, task.higher_is_better(task.main), keep=budget.keep_models)
        self.sizes = {s: fleet.sizes(s).double() for s in SPLITS}
        self.lines: list[dict[str, Any]] = []
        self.rounds: list[tuple[int, Info]] = []  # not yet written
        self.attackers = torch.tensor([key in population.attackers for key in fleet.keys])
        self.helped = torch.tensor([fleet.keys.index(key) for key in population.helped], dtype=torch.long)
        self.judged = ~self.attackers
        if len(self.helped):
            self.judged = torch.zeros(fleet.n, dtype=torch.bool).index_fill(0, self.helped, True)
        groups = population.groups
        self.truth = None if len(self.helped) else true_graph(groups)
        self.group = None if groups is None or not len(self.helped) else torch.tensor(groups)
        self.early: dict[str, Tensor] = {}  # the graph after an eighth of the rounds, by that round
        self.exact = {"graphs": 0, "exact": 0}  # of the graphs drawn, how many join exactly the true groups
        self.done = 0
        self.before = 0.0  # seconds of earlier processes
        self.began = time.perf_counter()

    def go(self, point: Checkpoint | None, stop: threading.Event) -> Outcome:
        fleet, algorithm, budget = self.fleet, self.algorithm, self.budget
        state = algorithm.init(fleet)
        if point is not None:
            state = self.restore(point, type(state))
        for each in self.listeners:
            each.begin(self.label, self.done)
        last = self.measure(state) if point is None else None
        graph: Tensor | None = None
        while self.done < budget.rounds and not (budget.patience and self.best.stale >= budget.patience):
            if stop.is_set():
                return self.pause(state)
            fleet.begin(self.done)
            state, info = algorithm.round(fleet, state)
            info = self.watched(info)
            self.done += 1
            last, graph = None, info.graph
            if self.done == -(-budget.rounds // EARLY):
                self.early = {str(self.done): graph}
            self.rounds.append((self.done, info if budget.draws(self.done) else _light(info)))
            if budget.evaluates(self.done):
                last = self.measure(state)
            if budget.saves(self.done) and self.done < budget.rounds:
                self.save(state)
            for each in self.listeners:
                each.round(self.label, self.done)
        return self.finish(state, last, graph)

    def watched(self, info: Info) -> Info:
        """With the weight that those who count give to attackers, where there are any.

        Where some are helped and the others only help, their rows are all that is kept of it.
        """
        if self.attacked:
            rows = info.graph[self.judged.to(info.graph.device)]
            info = replace(info, extra={**info.extra, "on_attackers": given_to(rows, self.attackers).mean()})
        if not len(self.helped):
            return info
        here = self.helped.to(info.graph.device)
        loss = None if info.loss is None else info.loss[here.to(info.loss.device)]
        return replace(info, graph=info.graph[here], ok=info.ok[here.to(info.ok.device)], loss=loss)

    @property
    def attacked(self) -> bool:
        """Whether some clients attack, or are left out as if they did."""
        return bool(self.attackers.any())

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def measure(self, state: Any, *, write: bool = True) -> Measured:
        """Metrics of every client on every split; the only place, with checkpoints, where the host waits."""
        models = self.algorithm.personal(state)
        now = self.values(models)
        if not write:
            return now
        better = self.best.update(self.done, now)
        self.best.take(better, self.fleet, models, self.algorithm.buffers == "averaged")
        self.write(self.training())
        self.write([self.line("personal", split, values) for split, values in now.items()])
        if self.budget.after_local:
            self.write([self.line("after", split, values) for split, values in self.after(models).items()])
        for each in self.listeners:
            for split, values in now.items():
                each.evaluation(self.label, self.done, split, {m: float(v.nanmean()) for m, v in values.items()})
        return now

    def values(self, models: Tensor | Own, clients: Tensor | None = None) -> Measured:
        """Metrics of some clients (all by default) on every split, on the host: of those who count, NaN of others.

        Attackers do not count, and where some are helped only they do. Where true models are known, `distance` is the
        squared distance to the client's own.
        """
        clients = self.fleet.everyone if clients is None else clients
        place = self.judged[clients].nonzero().flatten()
        rows = models[place.to(models.device)] if isinstance(models, Tensor) and models.ndim == 2 else models
        counted, policy = clients[place], self.algorithm.buffers
        asks = [Evaluate(counted, rows, split, metrics=self.metrics, buffers=policy) for split in self.splits]
        answers = self.fleet.watch(*asks)
        found = {}
        for split, answer in zip(self.splits, answers if isinstance(answers, tuple) else (answers,), strict=True):
            values = {m: answer.metrics[m] for m in self.metrics}
            if self.true_models is not None and isinstance(rows, Tensor):
                values["distance"] = (rows.double().cpu() - self.true_models[counted]).square().sum(1)
            found[split] = {
                m: torch.full((len(clients),), torch.nan, dtype=torch.float64).index_copy(0, place, v.double().cpu())
                for m, v in values.items()
            }
        return found

    def after(self, models: Tensor | Own) -> Measured:
        """The same after one more local training by the algorithm's plan, one architecture at a time."""
        plan = getattr(self.algorithm, "plan", None)
        if not isinstance(plan, Plan):
            return {}
        fleet, plan = self.fleet, plan.at(self.done)
        architecture = torch.tensor(fleet.population.architecture[: fleet.n])
        none = torch.full((fleet.n,), torch.nan, dtype=torch.float64)
        found: Measured = {split: {} for split in self.splits}
        for a in architecture.unique():
            clients = (architecture == a).nonzero().flatten()
            start = models if isinstance(models, Own) or models.ndim == 1 else models[clients.to(models.device)]
            rows = fleet.watch(Fit(clients, start, plan, give="rows", track=False)).rows
            for split, values in self.values(rows, clients).items():
                for metric, value in values.items():
                    found[split].setdefault(metric, none.clone())[clients] = value
        return found

    def line(self, models: str, split: str, values: dict[str, Tensor]) -> dict[str, Any]:
        """One evaluation as the metrics hold it."""
        size = self.sizes[split]
        made = {
            "round": self.done,
            "kind": "evaluation",
            "models": models,
            "split": split,
            "clients": {m: v.tolist() for m, v in values.items()},
            "mean": {m: float(v.nanmean()) for m, v in values.items()},
            "weighted": {m: _weighted(v, size) for m, v in values.items()},
        }
        self.lines.append(made)
        return made

    def training(self) -> list[dict[str, Any]]:
        """Lines about the rounds since the last time, brought to the host."""
        lines = []
        for done, info in self.rounds:
            loss = None if info.loss is None else info.loss.tolist()
            lines.append({"round": done, "kind": "training", "loss": loss, "ok": info.ok.tolist(), "extra": info.extra})
            if info.graph.numel() and self.record is not None:
                self.record.graph(done, info.graph)
            if info.graph.numel() and self.truth is not None:
                self.exact["graphs"] += 1
                self.exact["exact"] += found(info.graph, self.truth)
        self.rounds = []
        return lines

    # ---- the record --------------------------------------------------------------------------------------------------

    def write(self, lines: list[dict[str, Any]]) -> None:
        if self.record is not None and lines:
            self.record.lines(lines)

    def save(self, state: Any) -> None:
        """A checkpoint after this round."""
        if self.record is None:
            return
        self.write(self.training())
        tree, tensors = pack(state, "algorithm")
        best, more = pack(self.best.state(), "runner")
        early, graph = pack(self.early, "early")
        fleet, kept = pack(self.fleet.state(), "fleet")
        note = {"algorithm": tree, "runner": best, "early": early, "fleet": fleet, "seconds": self.seconds}
        note["found"] = self.exact
        self.record.save(Checkpoint(self.done, note, tensors | more | graph | kept))

    def restore(self, point: Checkpoint, kind: type) -> Any:
        """Go back to a checkpoint; the state of the algorithm."""
        device = self.fleet.device
        self.best.load(unpack(point.note["runner"], point.tensors, dict, device))
        self.early = unpack(point.note["early"], point.tensors, dict, device)
        self.fleet.load(unpack(point.note["fleet"], point.tensors, dict, device))
        self.done, self.before = point.round, point.note["seconds"]
        self.exact = dict(point.note["found"])
        return unpack(point.note["algorithm"], point.tensors, kind, device)

    def pause(self, state: Any) -> Outcome:
        if self.record is not None:
            if self.done:
                self.save(state)
            self.record.mark("paused", rounds_run=self.done, seconds=self.seconds)
        self.tell_end("paused")
        return Outcome("paused", self.done, lines=self.lines, state=state)

    def finish(self, state: Any, last: Measured | None, graph: Tensor | None) -> Outcome:
        """The result and the models of a run that has come to its end."""
        last = self.measure(state, write=False) if last is None else last
        self.write(self.training())
        models: dict[str, dict[str, Tensor]] = {}
        if self.budget.keep_models:
            personal = self.algorithm.personal(state)
            rows, buffers = revealed(self.fleet, personal, averaged=self.algorithm.buffers == "averaged")
            models["last"] = named(self.fleet.keys, rows, buffers)
            models["best"] = named(self.fleet.keys, self.best.rows, self.best.buffers)
        split = self.reported(last)
        result = {
            "algorithm": self.label.algorithm,
            "seed": self.label.seed,
            "split": split,
            "metrics": self.summary(self.best.measured[split], split),
            "last": self.summary(last[split], split),
            "validation": {m: float(v.nanmean()) for m, v in self.best.measured.get("validation", {}).items()},
            "train": {m: float(v.nanmean()) for m, v in self.best.measured.get("train", {}).items()},
            "clients": {m: v.tolist() for m, v in self.best.measured[split].items()},
            "clients_last": {m: v.tolist() for m, v in last[split].items()},
            "best_round": self.best.round.tolist(),
            "graph": self.graphs(graph),
            "found": self.exact,
            "on_attackers": self.trusted(graph),
            "targets": self.targets(last, graph),
            "ledger": self.fleet.ledger.totals(),
            "seconds": self.seconds,
            "rounds_run": self.done,
            "run": "" if self.record is None else str(self.record.folder),
        }
        if self.record is not None:
            if graph is not None:
                self.record.graph(self.done, graph)
            self.record.finish(result, models)
        self.tell_end("finished")
        return Outcome("finished", self.done, result, models, self.lines, state, graph)

    def graphs(self, last: Tensor | None) -> dict[str, dict[str, float]]:
        """How near the true graph the learned one was, by the round: early, and in the end."""
        if self.truth is None:
            return {}
        kept = self.early if last is None else {**self.early, str(self.done): last}
        return {done: compare(graph, self.truth) for done, graph in kept.items()}

    def trusted(self, last: Tensor | None) -> dict[str, float]:
        """The weight that honest clients gave to attackers, by the round: early, and in the end."""
        if not self.attacked:
            return {}
        kept = self.early if last is None else {**self.early, str(self.done): last}
        rows = {done: w if len(self.helped) else w[self.judged.to(w.device)] for done, w in kept.items()}
        return {done: float(given_to(w, self.attackers).mean()) for done, w in rows.items()}

    def targets(self, last: Measured, graph: Tensor | None) -> dict[str, dict[str, Any]]:
        """Of each who is helped: the metrics in the end, and which share of its weight each true group has."""
        if not len(self.helped):
            return {}
        split = self.reported(last)
        found = {}
        for k, client in enumerate(self.helped.tolist()):
            made: dict[str, Any] = {m: float(v[client]) for m, v in last[split].items()}
            if graph is not None and self.group is not None:
                mass = graph[k].cpu().double()
                made["mass"] = {str(g): float(mass[self.group == g].sum()) for g in self.group.unique().tolist()}
            found[self.fleet.keys[client]] = made
        return found

    def reported(self, last: Measured) -> str:
        """The split that tables show."""
        return next(name for name in ("test", "validation", "train") if name in last)

    def summary(self, values: dict[str, Tensor], split: str) -> dict[str, Any]:
        """The numbers of a table: plain means, the spread over clients, and the main metric in more ways."""
        main = values[self.main]
        main = main[~main.isnan()]
        worst = (main.min() if self.higher else main.max()) if len(main) else torch.nan
        return {
            **{m: float(v.nanmean()) for m, v in values.items()},
            f"{self.main}_std_clients": float(main.std(correction=0)) if len(main) else torch.nan,
            f"{self.main}_weighted": _weighted(values[self.main], self.sizes[split]),
            "worst_client": float(worst),
            "share_improved": None,  # known once `local` has run on the same seed
        }

    def close(self, status: str, why: str) -> None:
        """Say that it went wrong, if the disk still lets us."""
        if self.record is not None and self.record.status == "running":
            with suppress(RecordError):
                self.record.mark(status, rounds_run=self.done, seconds=self.seconds, why=why)
        self.tell_end(status)

    def tell_end(self, status: str) -> None:
        for each in self.listeners:
            each.end(self.label, status)

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began


def main_of(population: Population) -> tuple[str, bool]:
    """What tables show first, and whether more of it is better: distances where the true models are known."""
    task = population.task
    return ("distance", False) if population.truth is not None else (task.main, task.higher_is_better(task.main))


def _light(info: Info) -> Info:
    """What the metrics need of a round, without its graph."""
    return Info(torch.empty(0), info.ok, info.loss, info.extra)


def _weighted(values: Tensor, size: Tensor) -> float:
    """Mean over clients by their samples; those without a value do not count."""
    there = ~values.isnan()
    return float((values[there] * size[there]).sum() / size[there].sum()) if bool(there.any()) else torch.nan
