"""Choosing settings: on validation data only, with other seeds than those reported, as many trials for everyone.

Every trial is an ordinary experiment in a folder of its own, whose name follows from its settings, so a sweep that was
stopped goes on where it was. Test data are not even measured.
"""

import hashlib
import itertools
import json
import math
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import RecordError, SettingError
from coterie.experiments import toml
from coterie.experiments.reader import Experiment, plain
from coterie.runs import files
from coterie.runs.listeners import Listener
from coterie.runs.record import FORMAT
from coterie.runs.study import EXPERIMENT, Study
from coterie.settings import real, whole

SWEEP, TUNED = "sweep.json", "tuned.toml"
Settings = dict[str, Any]  # path below the algorithm → value


class Sweep:
    """The trials of a grid over one experiment, or of the best settings of an earlier sweep over it.

    What is best for few rounds need not be best for many: `again` is an earlier sweep's file and how many of each
    algorithm's settings to try once more, with this one's rounds and seeds.
    """

    def __init__(
        self,
        experiment: Experiment,
        grid: Sequence[tuple[str, list[Any]]],
        seeds: Sequence[int],
        trials: int | None,
        rounds_share: float,
        device: str,
        out: Path | None,
        again: tuple[Path, int] | None = None,
    ) -> None:
        real("--rounds-share", rounds_share, 0, 1)
        if trials is not None:
            whole("--trials", trials, 1)
        reported = sorted(set(seeds) & set(experiment.budget.seeds))
        if reported:
            raise SettingError(f"seed {reported[0]} is reported by {experiment.name}: tune on others, such as 1000")
        self.experiment, self.device, self.grid = experiment, device, dict(grid)
        if bool(grid) == bool(again):
            raise SettingError("a sweep takes a --grid, or the best of an earlier sweep --again, and not both")
        self.budget = {
            "run.seeds": list(seeds),
            "run.rounds": max(1, math.ceil(rounds_share * experiment.budget.rounds)),
            "run.splits": ["validation"],
            "run.keep_models": False,
        }
        earlier: dict[str, Any] = {}
        if again is None:
            self.trials = self._trials(trials)
        elif trials is not None:
            raise SettingError("--trials is for a grid: of an earlier sweep as many are tried again as --best says")
        else:
            earlier = _earlier(again[0], self.experiment)
            self.grid, self.trials = earlier["grid"], self._best(earlier, again[1])
        self.told = {
            "format": FORMAT,
            "experiment": plain(experiment),
            "grid": self.grid,
            "budget": self.budget,
            "trials_each": len(next(iter(self.trials.values()))),
        }
        if again is not None:
            self.told["again"] = {"best": again[1], "of": earlier["budget"]}
        self.untouched = [name for name in experiment.algorithms if name not in self.trials]
        for name, settings in ((name, s) for name, found in self.trials.items() for s in found):
            self._altered(name, settings)  # refuses what no trial could run, before anything is written
        self.out = out or self._free(Path("runs") / f"sweep-{experiment.name}-{experiment.scale}")

    def _trials(self, most: int | None) -> dict[str, list[Settings]]:
        """The settings to try, as many for each algorithm; where its grid has more points, some are drawn."""
        points: dict[str, list[Settings]] = {}
        used: set[str] = set()
        for name in self.experiment.algorithms:
            axes = {}
            for path, values in self.grid.items():
                first, _, rest = path.removeprefix("algorithms.").partition(".")
                if first == name and rest:
                    axes[rest] = values
                elif first == "plan" and rest and hasattr(self.experiment.algorithm(name), "plan"):
                    axes[path] = values
                else:
                    continue
                used.add(path)
            points[name] = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
        unused = [path for path in self.grid if path not in used]
        if unused:
            plans = any(hasattr(self.experiment.algorithm(name), "plan") for name in self.experiment.algorithms)
            known = ", ".join([*(["plan.…"] if plans else []), *(f"{name}.…" for name in self.experiment.algorithms)])
            raise SettingError(f"--grid {unused[0]} fits none of the algorithms chosen; what begins so would: {known}")
        points = {name: found for name, found in points.items() if found != [{}]}  # nothing to choose
        count = min(len(found) for found in points.values())
        count = count if most is None else min(count, most)
        return {name: random.Random(name).sample(found, count) for name, found in points.items()}

    def _best(self, earlier: Mapping[str, Any], count: int) -> dict[str, list[Settings]]:
        """The best settings of an earlier sweep, as many for each algorithm."""
        whole("--best", count, 1)
        found: dict[str, list[Settings]] = {}
        for name in self.experiment.algorithms:
            known = [t for t in earlier["tried"].get(name, ()) if t["score"] is not None]
            known.sort(key=lambda t: t["score"], reverse=bool(known) and known[0]["higher"])
            found[name] = [t["settings"] for t in known]
        missing = ", ".join(name for name, settings in found.items() if not settings)
        if missing:
            raise SettingError(f"that sweep has no finished trial of {missing}: choose others with --algorithms")
        count = min(count, *(len(settings) for settings in found.values()))
        return {name: settings[:count] for name, settings in found.items()}

    def go(self, listeners: Sequence[Listener], stop: threading.Event) -> dict[str, Settings]:
        """Run the trials that are missing; the chosen settings of each algorithm, by their path below it."""
        self._open()
        tried: dict[str, list[dict[str, Any]]] = {}
        chosen: dict[str, Settings] = {}
        for name, trials in self.trials.items():
            tried[name] = []
            for settings in trials:
                found = self._trial(name, settings, listeners, stop)
                if stop.is_set():
                    return {}
                tried[name].append(found)
            better = max if tried[name][0]["higher"] else min
            scores = [t for t in tried[name] if t["score"] is not None]
            if not scores:
                raise RecordError(f"no trial of {name} has a finite {tried[name][0]['metric']} on validation data")
            chosen[name] = better(scores, key=lambda t: t["score"])["settings"]
            files.write_json(self.out / SWEEP, {**self.told, "tried": tried, "chosen": chosen})
        tuned = {f"algorithms.{n}.{path}": v for n, settings in chosen.items() for path, v in settings.items()}
        about = f"# chosen on validation data, {self.told['trials_each']} trials each; all of them: {SWEEP}\n"
        files.write(self.out / TUNED, (about + toml.dump({"tuned": tuned})).encode())
        return chosen

    def _free(self, usual: Path) -> Path:
        """The usual folder if it is free or this sweep's, else the next number."""
        out, number = usual, 1
        while out.exists() and any(out.iterdir()) and not self._mine(out):
            number += 1
            out = usual.with_name(f"{usual.name}-{number}")
        return out

    def _mine(self, out: Path) -> bool:
        """Whether a folder holds this very sweep."""
        path = out / SWEEP
        before = files.read_json(path) if path.exists() else {}
        return all(before.get(k) == v for k, v in files.plain(self.told).items())

    def _altered(self, name: str, settings: Settings) -> Experiment:
        """The experiment of one trial."""
        changes = {f"algorithms.{name}.{path}": value for path, value in settings.items()}
        return _only(self.experiment.altered({**self.budget, **changes}), name)

    def _open(self) -> None:
        """A new folder, or the one of this very sweep."""
        path = self.out / SWEEP
        if path.exists():
            if not self._mine(self.out):
                raise RecordError(f"{self.out} holds another sweep: choose another --out")
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise RecordError(f"{self.out} is already used: choose another --out")
        with files.explained("the folder", self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        files.write_json(path, {**self.told, "tried": {}, "chosen": {}})

    def _trial(
        self, name: str, settings: Settings, listeners: Sequence[Listener], stop: threading.Event
    ) -> dict[str, Any]:
        """One point of the grid over the tuning seeds."""
        mark = hashlib.sha256(json.dumps(files.plain(settings), sort_keys=True).encode()).hexdigest()[:10]
        out = self.out / "trials" / f"{name}-{mark}"
        if (out / EXPERIMENT).exists():
            study = Study.find(out)
        else:
            study = Study.begin(self._altered(name, settings), out, device=self.device)
        results = study.go(listeners, stop)
        about = study.record(name, study.experiment.budget.seeds[0]).about
        scores = [r["validation"].get(about["main"]) for r in results]
        known = [s for s in scores if s is not None]
        return {
            "settings": settings,
            "metric": about["main"],
            "higher": about["higher"],
            "scores": dict(zip([str(r["seed"]) for r in results], scores, strict=True)),
            "score": sum(known) / len(known) if known and len(known) == len(scores) else None,
            "folder": str(out.relative_to(self.out)),
        }


def _earlier(path: Path, experiment: Experiment) -> dict[str, Any]:
    """What an earlier sweep over the same experiment wrote."""
    if not path.is_file():
        raise SettingError(f"there is no file {path}: --again takes the {SWEEP} of an earlier sweep")
    earlier: Any = files.read_json(path)
    if not isinstance(earlier, dict) or not {"experiment", "grid", "budget", "tried"} <= earlier.keys():
        raise SettingError(f"{path} is not the {SWEEP} of a sweep, which --again takes")
    about, mine = earlier["experiment"], files.plain(plain(experiment))
    for table in sorted({*about, *mine} - {"run", "algorithms", "about", "next"}):
        if about.get(table) != mine.get(table):
            raise SettingError(f"{path} is of another experiment: its {table} is {about.get(table)!r}")
    for name, tried in earlier["tried"].items():
        if tried and name in experiment.algorithms:
            swept = tried[0]["settings"]
            if _without(about["algorithms"][name], swept) != _without(mine["algorithms"][name], swept):
                raise SettingError(f"{path} has other settings of {name}: say the same --set as for that sweep")
    return earlier


def _without(settings: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Settings but for those at some paths."""
    left = dict(settings)
    for path in paths:
        first, _, rest = path.partition(".")
        if not rest:
            left.pop(first, None)
        elif isinstance(left.get(first), Mapping):
            left[first] = _without(left[first], {rest: None})
    return left


def _only(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one of its algorithms."""
    given: Mapping[str, Any] = experiment.given["algorithms"][name]
    return experiment.altered({"algorithms": {name: given}})
