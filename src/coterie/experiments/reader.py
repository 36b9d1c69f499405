"""Experiment files: found by name or path, changed by scales and from the command line, checked key by key."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from coterie import algorithms as registry
from coterie.algorithm import Algorithm
from coterie.asks import Plan
from coterie.data.population import Population
from coterie.errors import SettingError
from coterie.experiments import populations
from coterie.experiments.budget import Budget
from coterie.fleet.attacks import Attack
from coterie.fleet.participation import Count, Fraction, Rule, Schedule, Stay
from coterie.settings import build, hint

TEXTS, TABLES = (
    ("name", "about", "scale", "next"),
    ("population", "run", "plan", "participation", "attack", "algorithms", "scales"),
)


@dataclass(frozen=True)
class Attendance:
    """The `[participation]` table: who is there in a round. Several rules hold together."""

    fraction: float | None = None
    count: int | None = None
    by_size: bool = False  # goes with count
    schedule: tuple[tuple[str, ...], ...] | None = None
    stay: tuple[tuple[str, int, int | None], ...] = ()  # key, first round, first round gone or "none"

    def __post_init__(self) -> None:
        """Build the rules once, which checks them."""
        if self.by_size and self.count is None:
            raise SettingError("by_size goes with count")
        self.rules()

    def rules(self) -> list[Rule]:
        """The rules of this table."""
        found: list[Rule] = []
        if self.fraction is not None:
            found.append(Fraction(self.fraction))
        if self.count is not None:
            found.append(Count(self.count, self.by_size))
        if self.schedule is not None:
            found.append(Schedule(self.schedule))
        if self.stay:
            found.append(Stay(self.stay))
        return found


@dataclass(frozen=True)
class Experiment:
    """One experiment at one scale, every name and type in it checked."""

    name: str
    scale: str
    about: str
    next: str  # what to try after it, said at its end
    budget: Budget
    attendance: Attendance
    attack: Attack | None  # None: nobody attacks, and everybody counts
    given: dict[str, Any] = field(repr=False)  # the tables it was made of, scales applied and left out
    source: str = ""  # the file, for what is said about it

    @property
    def algorithms(self) -> list[str]:
        """The algorithms that are compared, in their order."""
        return list(self.given["algorithms"])

    @property
    def remote(self) -> bool:
        """Whether the clients are real sites, and their data there."""
        return bool(self.given["population"].get("kind") == "sites")

    def population(self, seed: int) -> Population:
        """The clients of a seed, its attackers named."""
        try:
            people = populations.make(self.given["population"], seed)
        except SettingError as error:
            raise SettingError(f"{self.source}: [population] {error}") from None
        try:
            return people if self.attack is None else self.attack.on(people)
        except SettingError as error:
            raise SettingError(f"{self.source}: [attack] {error}") from None

    def algorithm(self, name: str, groups: Sequence[int] | None = None, **told: Any) -> Algorithm:
        """An algorithm with the settings of its table, on top of the `[plan]` that all share.

        `groups` and whatever else is told come from the population (Population.told).
        """
        settings = dict(self.given["algorithms"][name])
        kind = registry.ALGORITHMS.get(name.partition("-")[0])
        if kind is not None and "plan" in {f.name for f in dataclasses.fields(kind)}:  # type: ignore[arg-type]
            own, shared = settings.get("plan", {}), dict(self.given["plan"])
            if isinstance(own, Mapping):
                if {"steps", "epochs"} & set(own):  # the one replaces the other
                    shared = {k: v for k, v in shared.items() if k not in ("steps", "epochs")}
                settings["plan"] = {**shared, **own}
        try:
            return registry.make(name, settings, rounds=self.budget.rounds, groups=groups, **told)
        except SettingError as error:
            raise SettingError(f"{self.source}: [algorithms] {error}") from None

    def altered(self, changes: Mapping[str, Any]) -> "Experiment":
        """The same with other values at some paths."""
        tables = _copy(self.given)
        for path, value in changes.items():
            _put(tables, path, value, self.source)
        return _checked(tables, self.source)


def names() -> list[str]:
    """The experiments that come with the package."""
    folder = resources.files("coterie.experiments")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def read(
    which: str,
    *,
    scale: str | None = None,
    algorithms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    sets: Sequence[str] = (),
    tuned: Path | None = None,
) -> Experiment:
    """An experiment by name or FILE.toml, at a scale; later changes win: scale, tuned file, algorithms, seeds, sets."""
    text, source = _text(which)
    tables = _parse(text, source)
    tables.setdefault("name", Path(source).stem)
    base = tables.setdefault("scale", "paper")
    scales = _table(tables.pop("scales", {}), f"{source}: scales")
    if scale is not None and scale != base:
        if scale not in scales:
            raise SettingError(f"{source}: no scale is called {scale!r}: {hint(scale, [base, *scales])}")
        tables["scale"] = scale
        for path, value in _flat(_table(scales[scale], f"{source}: scales.{scale}")).items():
            _put(tables, path, value, f"{source}: scales.{scale}")
    have = _table(tables.setdefault("algorithms", {}), f"{source}: algorithms")
    if algorithms is not None:
        for name in algorithms:
            known = [*have, *registry.ALGORITHMS, *registry.VARIANTS]
            if name not in known:
                raise SettingError(f"--algorithms: no algorithm is called {name!r}: {hint(name, known)}")
        tables["algorithms"] = {name: have.get(name, {}) for name in algorithms}
    if tuned is not None:
        for path, value in _tuned(tuned).items():
            if path.split(".")[1] in tables["algorithms"]:
                _put(tables, path, value, str(tuned))
    if seeds is not None:
        _put(tables, "run.seeds", list(seeds), "--seeds")
    for change in sets:
        path, equals, value = change.partition("=")
        if not equals:
            raise SettingError(f"--set takes path=value, for example run.rounds=20, not {change!r}")
        _put(tables, path.strip(), literal(value.strip()), f"--set {path.strip()}")
    return _checked(tables, source)


def plain(experiment: Experiment) -> dict[str, Any]:
    """The tables again, complete: every setting of every algorithm, but for what the run itself fills in."""
    tables = _copy(experiment.given)
    tables["run"] = dataclasses.asdict(experiment.budget)
    for name, table in tables["algorithms"].items():
        full = dataclasses.asdict(experiment.algorithm(name))  # type: ignore[call-overload]
        for known in ("rounds", "groups", "targets", "pools"):
            if known not in table:
                full.pop(known, None)
        if isinstance(full.get("plan"), dict):
            filled = {"steps": None, "epochs": None, "rounds": experiment.budget.rounds}
            full["plan"] = {k: v for k, v in full["plan"].items() if k not in filled or v != filled[k]}
        tables["algorithms"][name] = full
    tables.pop("plan")
    return tables


def fingerprint(experiment: Experiment) -> str:
    """A hash of everything that an experiment says: what a site approves, and what it refuses anything else than."""
    text = json.dumps(plain(experiment), sort_keys=True, ensure_ascii=False, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def restore(tables: Mapping[str, Any], source: str) -> Experiment:
    """An experiment from the tables a record holds."""
    return _checked(_copy(dict(tables)), source)


def literal(text: str) -> Any:
    """A value in TOML syntax; what is not one is a bare word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _text(which: str) -> tuple[str, str]:
    if which.endswith(".toml"):
        path = Path(which)
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                f"the experiment file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
    if which not in names():
        near = f"{which}.toml"
        also = f"; the file {near} is given as {near}" if Path(near).exists() else ""
        raise SettingError(f"no experiment is called {which!r}: {hint(which, names())}{also} (see: coterie list)")
    return resources.files("coterie.experiments").joinpath(f"{which}.toml").read_text("utf-8"), f"{which}.toml"


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{source} is not TOML: {error}") from None


def _tuned(path: Path) -> dict[str, Any]:
    """What a sweep has chosen: its `[tuned]` table."""
    try:
        found = _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"the tuned settings {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    values = _table(found.get("tuned"), f"{path}: tuned")
    for place in values:
        if not place.startswith("algorithms.") or place.count(".") < 2:
            raise SettingError(f"{path}: tuned settings are called algorithms.NAME.SETTING, not {place!r}")
    return values


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{where} must be a table, not {value!r}")
    return dict(value)


def _copy(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tables.items()}


def _flat(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Paths and values of a scale, whether its keys were written "run.rounds" or run.rounds."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        if key in TABLES and isinstance(value, Mapping):
            found |= {f"{key}.{k}": v for k, v in value.items()}
        else:
            found[key] = value
    return found


def _put(tables: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set the value at a dotted path, whose first step may be left out for an algorithm: cobo.rho."""
    steps = path.split(".")
    known = tables.get("algorithms", {})
    if steps[0] not in (*TEXTS, *TABLES) and steps[0] in known:
        steps = ["algorithms", *steps]
    if steps[0] not in (*TEXTS, *TABLES) or steps[0] == "scales":
        there = [*TEXTS, *(t for t in TABLES if t != "scales"), *known]
        raise SettingError(f"{where}: there is no {steps[0]!r} to set: {hint(steps[0], there)}")
    if len(steps) > 1 and steps[0] == "algorithms" and steps[1] not in known:
        raise SettingError(f"{where}: {steps[1]!r} is not among the algorithms: {hint(steps[1], known)}")
    place: Any = tables
    for done, step in enumerate(steps[:-1]):
        if not isinstance(place, dict):
            raise SettingError(f"{where}: {'.'.join(steps[:done])} is {place!r}, no table that could hold {step!r}")
        place = place.setdefault(step, {})
    if not isinstance(place, dict):
        raise SettingError(f"{where}: {'.'.join(steps[:-1])} is {place!r}, no table that could hold {steps[-1]!r}")
    place[steps[-1]] = value
    if steps[0] == "plan":  # for all algorithms, and later than what the file says of one of them
        for own in known.values():
            if isinstance(own, dict) and isinstance(own.get("plan"), dict):
                own["plan"].pop(steps[-1], None)


def _checked(tables: dict[str, Any], source: str) -> Experiment:
    """Every key known, every type right, every algorithm buildable."""
    for key, value in tables.items():
        if key not in (*TEXTS, *TABLES):
            raise SettingError(f"{source}: there is no key {key!r}: {hint(key, [*TEXTS, *TABLES])}")
        if key in TEXTS and not isinstance(value, str):
            raise SettingError(f"{source}: {key} must be text, not {value!r}")
        if key in TABLES:
            _table(value, f"{source}: {key}")
    name = tables["name"]
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise SettingError(f"{source}: a name is made of letters, digits, - and _, not {name!r}")
    for needed in ("population", "run"):
        if needed not in tables:
            raise SettingError(f"{source}: the table [{needed}] is missing")
    if not tables.get("algorithms"):
        raise SettingError(f"{source}: at least one table [algorithms.NAME] is needed")
    for label, table in tables["algorithms"].items():
        _table(table, f"{source}: algorithms.{label}")
    tables.setdefault("plan", {})
    try:
        build(Plan, {"steps": 1} | tables["plan"] if "epochs" not in tables["plan"] else tables["plan"], "plan")
        budget = build(Budget, tables["run"], "run")
        attendance = build(Attendance, tables.get("participation", {}), "participation")
        attack = build(Attack, tables["attack"], "attack") if "attack" in tables else None
    except SettingError as error:
        raise SettingError(f"{source}: {error}") from None
    made = Experiment(
        name=name,
        scale=tables["scale"],
        about=tables.get("about", ""),
        next=tables.get("next", ""),
        budget=budget,
        attendance=attendance,
        attack=attack,
        given=tables,
        source=source,
    )
    for label in made.algorithms:
        made.algorithm(label)
    return made
