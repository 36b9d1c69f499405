"""A site's folder: its copy of the experiment, what it allows, its data made ready, its secret, its state and log.

site.toml          clients and where their data are, limits, the hash of the experiment that was approved
experiment.toml    a copy, every setting written out: read it before approving it
secret             32 random bytes that seed the site's own draws; never leaves
data/KEY.safetensors   made ready once, so that a process that answers one message need not read tables or images
public/NAME.safetensors   inputs that everyone holds
bin/flwr-clientapp     what Flower's node starts for each message: this site's own Coterie (coterie.sites.worker)
bin/flwr-…             what it would start for work of other kinds: nothing
state/, log.jsonl      see coterie.sites.site
"""

import dataclasses
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor, nn

from coterie.data import holding
from coterie.data.holding import Found, Schema
from coterie.data.population import SPLITS
from coterie.errors import CoterieError, DataError, RecordError, SettingError
from coterie.experiments import populations, reader, toml
from coterie.experiments.reader import Experiment
from coterie.fleet import wire
from coterie.runs import files
from coterie.settings import build, hint
from coterie.sites import worker
from coterie.sites.site import STUDIES, ClipAndNoise, Guard, Limits, Scope, Site

SITE, EXPERIMENT, SECRET = "site.toml", "experiment.toml", "secret"
DATA, PUBLIC, PROGRAMS = "data", "public", "bin"


@dataclass(frozen=True)
class Guarded:
    """The `[guard]` table: what is done to rows and sums before they leave.

    Either rows are cut to a norm and get noise of that many norms, or the site's own code does what it does: a function
    that makes a `coterie.sites.site.Guard` of the site's secret.
    """

    clip: float | None = None
    noise: float = 0.0
    code: str | None = None  # FILE.py:FUNCTION

    def __post_init__(self) -> None:
        """Refuse both and neither."""
        if (self.clip is None) == (self.code is None):
            raise SettingError("give clip (and noise), or code = 'FILE.py:FUNCTION'")

    def made(self, secret: bytes) -> Guard:
        """The guard of a site."""
        if self.code is None:
            return ClipAndNoise(float(self.clip or 0), self.noise, secret)
        guard: Guard = holding.function(self.code)(secret)
        return guard


@dataclass(frozen=True)
class Settings:
    """site.toml."""

    clients: dict[str, dict[str, str]]  # key → how its data are read: {csv = "…"}
    approved: str = ""
    device: str = "cpu"
    share_seed: bool = False  # for tests: batches that everyone can predict
    limits: Limits = field(default_factory=Limits)
    guard: Guarded | None = None


class SiteFolder:
    """Made by `prepare`, opened by its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / SITE).is_file():
            raise RecordError(f"{folder} is no site: there is no {SITE} in it (see: coterie site prepare --help)")
        self.settings = _settings(folder / SITE)
        self.experiment = reader.read(str(folder / EXPERIMENT))
        self.hash = reader.fingerprint(self.experiment)

    @classmethod
    def prepare(
        cls, folder: Path, experiment: Experiment, key: str, kind: str, source: str, public: Sequence[Path] = ()
    ) -> Found:
        """Add a client to a site, new or not: read and check its data, and make them ready."""
        declared, schema = _declared(experiment)
        if key not in declared.keys:
            raise SettingError(f"the experiment declares no client {key!r}: {hint(key, declared.keys)}")
        known = _settings(folder / SITE) if (folder / SITE).exists() else Settings({})
        given = dataclasses.asdict(known)  # written out, so that everything can be seen and changed
        text = toml.dump(reader.plain(experiment))
        if (folder / EXPERIMENT).exists() and (folder / EXPERIMENT).read_text("utf-8") != text:
            raise SettingError(f"{folder} is a site of another experiment: give another folder")
        found = holding.read(kind, source, schema, key)
        holding.hold(declared, {key: found.samples})  # whether the model takes them
        shared = _public(experiment, schema, public, folder)
        with files.explained("the site's folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(stat.S_IRWXU)  # the secret, data and models are nobody else's
            for name in (DATA, PUBLIC, PROGRAMS):
                (folder / name).mkdir(parents=True, exist_ok=True)
            if not (folder / SECRET).exists():
                files.write(folder / SECRET, secrets.token_bytes(32))
                (folder / SECRET).chmod(stat.S_IRUSR | stat.S_IWUSR)
            files.write(folder / EXPERIMENT, text.encode())
            for name, program in worker.programs().items():
                files.write(folder / PROGRAMS / name, program.encode())
                (folder / PROGRAMS / name).chmod(stat.S_IRWXU)
        parts = {f"{split}/{what}": t for split, pair in found.samples.items()
                 for what, t in zip(("inputs", "targets"), pair, strict=True)}  # fmt: skip
        files.write(folder / DATA / f"{key}.safetensors", encode(parts))
        for name, inputs in shared.items():
            files.write(folder / PUBLIC / f"{name}.safetensors", encode({"inputs": inputs}))
        given["clients"][key] = {kind: str(Path(source).absolute())}
        _write(folder / SITE, given)
        return found

    def check(self) -> dict[str, Found]:
        """Read every client's data anew, compare them with what was made ready, and say what there is."""
        declared, schema = _declared(self.experiment)
        told = {}
        for key, how in self.settings.clients.items():
            ((kind, source),) = how.items()
            found = told[key] = holding.read(kind, source, schema, key)
            ready = self._ready(key)
            same = ready.keys() == found.samples.keys() and all(
                torch.equal(a, b) for split in ready for a, b in zip(ready[split], found.samples[split], strict=True)
            )
            if not same:
                raise DataError(f"{source} has changed since it was prepared: coterie site prepare it again")
            holding.hold(declared, {key: found.samples})
        return told

    def approve(self, mark: str) -> None:
        """Agree to the experiment of this hash, which must be the one that is here."""
        if mark != self.hash:
            raise SettingError(f"the experiment in {self.folder} has the hash {self.hash}, not {mark[:80]}")
        _write(self.folder / SITE, dataclasses.asdict(self.settings) | {"approved": mark})

    def site(self) -> Site:
        """The site itself, with the data that were made ready."""
        declared, _ = _declared(self.experiment)
        secret = (self.folder / SECRET).read_bytes()
        settings, guard, budget = self.settings, self.settings.guard, self.experiment.budget
        if settings.approved != self.hash:
            raise SettingError("this site has not approved the experiment in its folder")
        return Site(
            holding.hold(
                declared,
                {key: self._ready(key) for key in settings.clients},
                {name: _tensors(self.folder / PUBLIC / f"{name}.safetensors")["inputs"] for name in declared.public},
            ),
            secret,
            self.folder,
            settings.limits,
            experiment=self.hash,
            dtype=getattr(torch, budget.dtype),
            device=settings.device,
            share_seed=settings.share_seed,
            guard=None if guard is None else guard.made(secret),
            scope=Scope(tuple(self.experiment.algorithms), budget.seeds, budget.rounds),
        )

    def model(self, client: str, algorithm: str | None = None, seed: int | None = None) -> nn.Module:
        """A client's personal model, of the newest study, where it lives here."""
        if client not in self.settings.clients:
            raise SettingError(f"no client {client!r} is at this site: {hint(client, self.settings.clients)}")
        algorithms, seeds = self.experiment.algorithms, self.experiment.budget.seeds
        if algorithm is None and len(algorithms) > 1:
            raise SettingError(f"--algorithm must say which of {', '.join(algorithms)}")
        if not (self.folder / STUDIES).exists():
            raise RecordError(f"{self.folder} was not asked anything yet")
        study = files.read_json(self.folder / STUDIES)[-1]
        run = f"{study}/{algorithms[0] if algorithm is None else algorithm}"
        with FileLock(self.folder / ".lock"):
            return self.site().model(client, run, seeds[0] if seed is None else seed)

    def answer(self, block: bytes, asker: str) -> bytes:
        """A message's answer; one message at a time, whatever starts processes here."""
        with FileLock(self.folder / ".lock"):
            return self.site().answer(block, asker)

    def _ready(self, key: str) -> holding.Samples:
        parts = _tensors(self.folder / DATA / f"{key}.safetensors")
        return {s: (parts[f"{s}/inputs"], parts[f"{s}/targets"]) for s in SPLITS if f"{s}/inputs" in parts}


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with files.explained("the site's data", path):
            return decode(path.read_bytes())
    except SafetensorError as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def _public(experiment: Experiment, schema: Schema, given: Sequence[Path], folder: Path) -> dict[str, Tensor]:
    """The public inputs among these files, by their names; those that a site has already are not needed again."""
    wanted = populations.public_of(experiment.given["population"].get("public"))
    found: dict[str, Tensor] = {}
    for file in given:
        with files.explained("the public inputs", file):
            mark = holding.digest(file)
        names = [name for name, each in wanted.items() if each.sha256 == mark]
        if not names:
            raise DataError(f"{file} has the SHA-256 {mark}, and is none of the experiment's public inputs")
        found |= {name: wanted[name].read(file, schema) for name in names}
    for name in wanted:
        if name not in found and not (folder / PUBLIC / f"{name}.safetensors").exists():
            raise DataError(f"the experiment has public inputs {name!r}: give their file with --public")
    return found


def answer(folder: Path, block: bytes, asker: str) -> bytes:
    """A site's answer; a refusal, in one sentence that names no path, where it cannot even be opened."""
    try:
        return SiteFolder(folder).answer(block, asker)
    except CoterieError as error:
        why = " ".join(str(error).split()).replace(str(folder), "the site")
    except Exception as error:
        why = f"{type(error).__name__} at the site"
    return wire.seal({"refused": why[: wire.NAME]})


def _declared(experiment: Experiment) -> Any:
    table = experiment.given["population"]
    if not experiment.remote:
        raise SettingError(f"{experiment.source}: its clients are no real sites: [population] kind = 'sites' is needed")
    return experiment.population(0), populations.schema_of(table["data"])


def schema(experiment: Experiment) -> Schema:
    """What an experiment of real sites says of their data."""
    found: Schema = _declared(experiment)[1]
    return found


def _settings(path: Path) -> Settings:
    import tomllib

    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from None
    clients = given.pop("clients", None)
    if not isinstance(clients, Mapping):
        raise SettingError(f"{path}: the tables [clients.NAME] are missing")
    for key, how in clients.items():
        if not isinstance(how, Mapping) or len(how) != 1 or next(iter(how)) not in holding.READERS:
            raise SettingError(f"{path}: [clients.{key}] says one of {', '.join(holding.READERS)}, and where it is")
    made = build(Settings, given | {"clients": {}}, str(path))
    try:
        torch.empty(0, device=made.device)
    except (RuntimeError, AssertionError):
        raise SettingError(f"{path}: torch sees no device {made.device!r} here") from None
    return dataclasses.replace(made, clients={key: dict(how) for key, how in clients.items()})


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    """site.toml, with what is not set left out."""
    files.write(path, toml.dump({k: v for k, v in settings.items() if v is not None}).encode())


__all__ = ["EXPERIMENT", "PROGRAMS", "SITE", "Guarded", "Settings", "SiteFolder", "answer", "schema"]
