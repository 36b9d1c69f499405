"""All runs of one experiment: their folders, which of them go together, and going on where they stopped."""

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import coterie
from coterie.data.population import SPLITS, Population
from coterie.errors import CoterieError, RecordError, SettingError
from coterie.experiments import reader
from coterie.experiments.reader import Experiment
from coterie.fleet import seeds
from coterie.fleet.attacks import Attacked
from coterie.fleet.base import Fleet
from coterie.fleet.layout import Layout
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation
from coterie.fleet.stacked import StackedFleet
from coterie.runs import files, workers
from coterie.runs.checkpoint import Checkpoint
from coterie.runs.files import DiskFullError
from coterie.runs.listeners import Listener, TensorBoard
from coterie.runs.record import FORMAT, RESULT, Record, Tell, known, true_graph
from coterie.runs.runner import Outcome, drive, main_of

EXPERIMENT = "experiment.json"
SMALL = 500_000  # parameters of all clients together
COPIES = 30  # of every model: states, gradients, moments, and what a batch leaves behind
Result = dict[str, Any]
Together = Callable[..., Sequence[Fleet]]  # (populations, seeds, **what a stacked fleet takes) → a fleet per seed


class Study:
    """One experiment in one folder. Made by `begin` or `find`."""

    queue = 0.0  # seconds to wait for another process that has the folder
    remote = False  # whether its clients are real sites
    together: Together = staticmethod(seeds.together)  # makes fleets that compute as one, each for a thread of its own

    def __init__(self, out: Path, experiment: Experiment, device: str) -> None:
        if experiment.remote and not self.remote:
            raise SettingError(f"{experiment.source}: the data are at real sites: see `coterie serve --help`")
        self.out, self.experiment, self.device = out, experiment, device
        self._populations: dict[int, Population] = {}

    @classmethod
    def begin(
        cls, experiment: Experiment, out: Path | None, *, device: str = "cpu", command: str = "", **own: Any
    ) -> "Study":
        """A folder of its own: the one that is wanted, or runs/NAME-SCALE with the first number that is free."""
        if out is None:
            base = Path("runs") / f"{experiment.name}-{experiment.scale}"
            out, number = base, 1
            while _used(out):
                number += 1
                out = base.with_name(f"{base.name}-{number}")
        elif _used(out):
            raise RecordError(f"{out} is already used: choose another --out, or go on with `coterie resume {out}`")
        study = cls(out, experiment, device, **own)
        study.population(experiment.budget.seeds[0])  # what cannot be dealt leaves no folder behind
        with files.explained("the folder", out):
            out.mkdir(parents=True, exist_ok=True)
        about = {
            "format": FORMAT,
            "experiment": reader.plain(experiment),
            "source": experiment.source,
            "device": device,
            "command": command,
            "versions": versions(),
            "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
            **study.own(),
        }
        files.write_json(out / EXPERIMENT, about)
        return study

    @classmethod
    def find(cls, folder: Path) -> "Study":
        """The study that a folder, or the folder of one of its runs, belongs to."""
        for out in (folder, folder.parent.parent):
            path = out / EXPERIMENT
            if path.is_file():
                about = files.read_json(path)
                known(about, path)
                experiment = reader.restore(about["experiment"], str(path))
                if "serving" in about:
                    from coterie.runs.served import Served

                    return Served.of(out, about, experiment)
                return cls(out, experiment, about["device"])
        raise RecordError(f"{folder} holds no experiment of Coterie: there is no {EXPERIMENT} in it")

    def own(self) -> dict[str, Any]:
        """What experiment.json says of this kind of study besides."""
        return {}

    def record(self, algorithm: str, seed: int) -> Record:
        """The record of one run, which may not have begun."""
        return Record(self.out / algorithm / f"seed-{seed}").read()

    def results(self) -> list[Result]:
        """Of the runs that are finished, in the experiment's order."""
        found = []
        for algorithm in self.experiment.algorithms:
            for seed in self.experiment.budget.seeds:
                path = self.out / algorithm / f"seed-{seed}" / RESULT
                if path.exists() and self.record(algorithm, seed).status == "finished":
                    found.append(files.read_json(path))
        return found

    def go(
        self, listeners: Sequence[Listener] = (), stop: threading.Event | None = None, only: Sequence[str] | None = None
    ) -> list[Result]:
        """Run what is not finished, from its last checkpoint where there is one.

        An algorithm that fails on purpose does not take the others with it; its error is raised at the end.
        """
        stop = stop or threading.Event()
        heard = [*listeners]
        if "tensorboard" in self.experiment.budget.track:
            heard.append(TensorBoard(self.out / "tensorboard"))
        names = list(self.experiment.algorithms if only is None else only)
        most = self.experiment.budget.workers

        def work(algorithm: str, listeners: Sequence[Listener]) -> None:
            self._runs(algorithm, listeners, stop)

        with self._locked(), self._threads():
            if most > 1 and len(names) > 1 and not self.device.startswith("cuda") and workers.able():
                for seed in self.experiment.budget.seeds:
                    self.population(seed)  # made once, before the processes part
                problems = workers.side_by_side(names, work, most, heard, stop)
            else:
                problems = []
                for algorithm in names:
                    try:
                        work(algorithm, heard)
                    except DiskFullError:
                        raise
                    except CoterieError as problem:
                        problems.append(problem)
            if stop.is_set():
                return self.results()
            self._improved()
        if problems:
            raise problems[0]
        return self.results()

    def _runs(self, algorithm: str, listeners: Sequence[Listener], stop: threading.Event) -> None:
        """All seeds of one algorithm; what goes wrong on purpose names it, after the other seeds had their turn."""
        error: CoterieError | None = None
        for batch in self._batches(algorithm):
            if stop.is_set():
                return
            try:
                self._batch(algorithm, batch, listeners, stop)
            except DiskFullError as problem:
                how = f"free some space and go on with `coterie resume {self.out}`"
                raise DiskFullError(f"{problem}; {how}") from problem
            except CoterieError as problem:
                error = error or type(problem)(f"{algorithm}: {problem}")
        if error is not None:
            raise error

    # ---- one batch ---------------------------------------------------------------------------------------------------

    def _batches(self, algorithm: str) -> list[tuple[int, ...]]:
        """Seeds that run together: as they began, else all of them where memory allows."""
        every = self.experiment.budget.seeds
        begun = [record.about["batch"] for seed in every if (record := self.record(algorithm, seed)).status]
        found = list(dict.fromkeys(tuple(batch) for batch in begun))
        left = tuple(seed for seed in every if not any(seed in batch for batch in found))
        return found + ([left] if left and self._fits(left) else [(seed,) for seed in left])

    def _fits(self, chosen: Sequence[int]) -> bool:
        """Whether these seeds can be one stack; one that has to be cut into chunks would win nothing."""
        if self.experiment.budget.fleet != "stacked":
            return False
        populations = [self.population(seed) for seed in chosen]
        if not seeds.batchable(populations):
            return False
        rows = sum(sum(self._widths(p)[a] for a in p.architecture) for p in populations)
        if self.device.startswith("cuda"):
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return bool(rows * getattr(torch, self.experiment.budget.dtype).itemsize * COPIES < free)

    def _widths(self, population: Population) -> list[int]:
        """Parameters of each architecture."""
        return [Layout.of(population.make(a)).d for a in range(len(population.architectures))]

    def _batch(
        self, algorithm: str, batch: tuple[int, ...], listeners: Sequence[Listener], stop: threading.Event
    ) -> None:
        """The runs of some seeds, side by side."""

        def tell(message: str) -> None:
            for each in listeners:
                each.tell(message)

        records = [self.record(algorithm, seed) for seed in batch]
        points = common([r for r in records if r.status], tell) if all(r.status for r in records) else {}
        going: list[tuple[int, Record, Checkpoint | None]] = []
        for seed, record in zip(batch, records, strict=True):
            if record.status == "finished" and record.folder not in points:
                continue
            point = points.get(record.folder)
            if point is None:
                people = self.population(seed)
                record.begin(self._about(algorithm, seed, batch), None if people.helped else true_graph(people.groups))
            else:
                record.rewind(point, tell)
            going.append((seed, record, point))
        if not going:
            return
        fleets = self._fleets(algorithm, [seed for seed, _, _ in going])

        def run(fleet: Fleet, seed: int, record: Record, point: Checkpoint | None) -> Outcome:
            try:
                made = self.experiment.algorithm(algorithm, **self.population(seed).told)
                return drive(
                    fleet, made, self.experiment.budget, name=algorithm, record=record, point=point,
                    listeners=listeners, stop=stop,
                )  # fmt: skip
            finally:
                close = getattr(fleet, "close", None)
                if close is not None:
                    close()

        if len(going) == 1:
            run(fleets[0], *going[0])
            return
        problems: list[BaseException] = []

        def guarded(fleet: Fleet, *which: Any) -> None:
            try:
                run(fleet, *which)
            except BaseException as problem:
                problems.append(problem)

        threads = [
            threading.Thread(target=guarded, args=(f, *g), daemon=True) for f, g in zip(fleets, going, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def _fleets(self, algorithm: str, batch: Sequence[int]) -> list[Fleet]:
        """A fleet for each seed, of which this algorithm may be told."""
        budget = self.experiment.budget
        dtype = getattr(torch, budget.dtype)
        autocast = None if budget.autocast is None else getattr(torch, budget.autocast)
        options: dict[str, Any] = {"device": self.device, "dtype": dtype}
        people = [self.population(seed) for seed in batch]
        fleets: list[Fleet]
        if budget.fleet == "loop":
            fleets = [LoopFleet(p, seed=s, **options) for p, s in zip(people, batch, strict=True)]
        elif len(batch) > 1:
            fleets = [*self.together(people, list(batch), autocast=autocast, **options)]
        else:
            fleets = [StackedFleet(p, seed=s, autocast=autocast, **options) for p, s in zip(people, batch, strict=True)]
        return [self._wrapped(fleet) for fleet in fleets]

    def _wrapped(self, fleet: Fleet) -> Fleet:
        """With the attackers and the absences of the experiment."""
        attack, rules = self.experiment.attack, self.experiment.attendance.rules()
        if attack is not None and attack.alters:
            fleet = Attacked(fleet, attack)
        return Participation(fleet, *rules) if rules else fleet

    def population(self, seed: int) -> Population:
        """The clients of a seed, dealt once for all algorithms."""
        if seed not in self._populations:
            self._populations[seed] = self.experiment.population(seed)
        return self._populations[seed]

    def _about(self, algorithm: str, seed: int, batch: Sequence[int]) -> dict[str, Any]:
        """What run.json says from the start."""
        experiment, population = self.experiment, self.population(seed)
        facts, (main, higher) = dict(population.facts), main_of(population)
        return {
            "experiment": experiment.name,
            "scale": experiment.scale,
            "algorithm": algorithm,
            "settings": experiment.algorithm(algorithm, **population.told),
            "seed": seed,
            "batch": list(batch),
            "rounds": experiment.budget.rounds,
            "keys": population.keys[: population.n],
            "groups": population.groups,
            "attackers": population.attackers,
            "sizes": {split: population.sizes(split) for split in SPLITS},
            "parameters": population.parameters,
            "labels": population.counts(),
            "relabel": population.relabel,
            "task": population.task.name,
            "main": main,
            "higher": higher,
            "helped": population.helped,
            "pools": population.pools,
            "resplit": bool(facts.pop("resplit", False)),
            "facts": facts,
            "versions": versions(),
            "device": self.device,
            "seconds": 0.0,
        }

    # ---- the folder --------------------------------------------------------------------------------------------------

    def _improved(self) -> None:
        """Fill in which share of the clients does better than alone, where `local` has run on the same seed."""
        results = self.results()
        alone = {r["seed"]: r for r in results if r["algorithm"] == "local"}
        for result in results:
            local = alone.get(result["seed"])
            if local is None or result is local:
                continue
            about = self.record(result["algorithm"], result["seed"]).about
            for table, clients in (("metrics", "clients"), ("last", "clients_last")):
                pairs = zip(result[clients][about["main"]], local[clients][about["main"]], strict=True)
                known = [(a, b) for a, b in pairs if a is not None and b is not None]
                better = sum(a > b if about["higher"] else a < b for a, b in known)
                result[table]["share_improved"] = better / len(known) if known else None
            files.write_json(self.out / result["algorithm"] / f"seed-{result['seed']}" / RESULT, result)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """One thread where models are so small that two would only wait for each other."""
        population, before = self.population(self.experiment.budget.seeds[0]), torch.get_num_threads()
        if population.n * max(self._widths(population)) < SMALL:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; a killed one lets go."""
        with files.explained("the folder", self.out):
            lock = FileLock(self.out / ".lock", timeout=self.queue)
            try:
                lock.acquire()
            except Timeout:
                raise RecordError(f"{self.out} is in use by another process: wait for it, or stop it first") from None
        try:
            yield
        finally:
            lock.release()


def common(records: Sequence[Record], tell: Tell) -> dict[Path, Checkpoint]:
    """From where the runs of a batch go on: the newest round of which every unfinished one has a good checkpoint.

    Those that finished after that round go along again, so that the batch is what it was; a round from which they can
    is preferred. Runs that are not in the answer are finished, or begin anew.
    """
    unfinished = [r for r in records if r.status != "finished"]
    if not unfinished:
        return {}
    good = {r.folder: {p.round: p for p in r.good(tell)} for r in records}
    shared = set.intersection(*(set(good[r.folder]) for r in unfinished))

    def along(done: int) -> list[Record]:
        return [r for r in records if r.status == "finished" and r.about["rounds_run"] > done]

    whole = [done for done in shared if all(done in good[r.folder] for r in along(done))]
    if not shared:
        return {}
    newest = max(whole or shared)
    going = unfinished + [r for r in along(newest) if newest in good[r.folder]]
    return {r.folder: good[r.folder][newest] for r in going}


def versions() -> dict[str, str]:
    """What made a record."""
    return {"coterie": coterie.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}


def _used(folder: Path) -> bool:
    with files.explained("the folder", folder):
        if folder.exists() and not folder.is_dir():
            raise RecordError(f"{folder} is a file, not a folder for a record")
        return folder.is_dir() and any(folder.iterdir())
