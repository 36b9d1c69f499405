"""A site: a few clients with their data, which answers asks that come as blocks of bytes, and only those it allows.

What it computes is what a loop over its clients computes (coterie.fleet.loop), from the version of their memory that
the message's round says. It never raises at whoever asked and never tells them more than a sentence: what it does not
answer is refused, and its own log says why. Every answer is logged: who asked, what, and how many numbers left.

Batches are drawn with the site's own secret unless a seed is shared, which is for tests: who can predict a batch can
aim at it. Initial models and sketches follow the run's seed, which everyone knows.
"""

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from coterie import draws
from coterie.asks import Answer, Ask, Evaluate, Fit, Gradient, Loss, Own
from coterie.data.population import SPLITS, Population
from coterie.errors import CoterieError, RecordError, SettingError
from coterie.fleet import wire
from coterie.fleet.compress import squeezed
from coterie.fleet.loop import Kept, LoopFleet
from coterie.fleet.remote import identity, secret_seed
from coterie.fleet.wire import Arrays, WireError
from coterie.runs import files
from coterie.settings import whole
from coterie.sites.versions import Versions

STUDIES = "state/studies.json"  # the names under which the experiment was served, in their order


@dataclass(frozen=True)
class Limits:
    """What a site answers at all."""

    kinds: tuple[str, ...] = ("gradient", "loss", "fit", "predict", "evaluate")
    per_round: int = 1000  # models that may be asked about in a round, as often as they are
    per_batch: int = 64  # different models on one batch: each tells something else about the same samples
    least_batch: int = 8  # samples that an answer is a mean over
    most_steps: int = 10_000  # of training in one ask
    own_rows: bool = False  # whether a model that lives here may leave
    buffers: bool = True  # whether BatchNorm's statistics may leave, for methods that evaluate everyone's mean
    studies: int = 20  # how often the experiment may be served anew
    message_mb: int = 1024  # the largest message that is read

    def __post_init__(self) -> None:
        """Refuse what says nothing."""
        for kind in self.kinds:
            if kind not in wire.KINDS:
                raise SettingError(f"limits.kinds: there is no ask {kind!r}, there are {', '.join(wire.KINDS)}")
        for name in ("per_round", "per_batch", "least_batch", "most_steps", "studies", "message_mb"):
            whole(f"limits.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Scope:
    """What an experiment says it will do; a site answers for nothing beyond."""

    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int

    def check(self, algorithm: str, seed: int, t: int = 0) -> None:
        """Refuse a run, or a round, of which the experiment says nothing."""
        if algorithm not in self.algorithms or seed not in self.seeds:
            raise WireError("the experiment has no such algorithm, or no such seed")
        if t > self.rounds:
            raise WireError(f"the experiment has {self.rounds} rounds")


@dataclass(frozen=True)
class Leaving:
    """What is about to leave, for those who alter it: which ask, where in the run, and who else is asked the same."""

    ask: Ask
    keys: tuple[str, ...]  # of the clients, pair by pair
    run: str
    round: int
    place: int
    among: tuple[str, ...]  # of a sum: the clients of all its pairs, everywhere


class Guard(Protocol):
    """The place for clipping and noise, and for masks of secure sums.

    Losses, metrics and predictions do not pass here: what may not leave as it is, `limits.kinds` leaves out.
    """

    def rows(self, what: Leaving, rows: Tensor) -> Tensor:
        """Gradients or updates, one per pair, before they are summed or leave."""
        ...

    def sums(self, what: Leaving, sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's part of the sums of give="sum", as it leaves: where masks that cancel are added.

        Whoever adds them agrees with the sites of `what.among` on masks for `what.run`, `what.round` and `what.place`.
        Nothing brings masks of a site that then fails back; its phase is lost.
        """
        ...


@dataclass(frozen=True)
class ClipAndNoise:
    """Rows cut to a norm, with Gaussian noise of `noise`·`clip` on every number.

    Noise follows from the site's secret and the very row that it hides, by a cryptographic hash: a repeated question
    gets the same noise and cannot average it away, two rows that differ in anything get noises that have nothing to do
    with each other, and entries that are known to be zero tell nothing of the noise on others. How much privacy that is
    depends on how often is asked: accounting is the user's.
    """

    clip: float
    noise: float
    secret: bytes

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not (self.clip > 0 and self.noise >= 0):
            raise SettingError(f"guard: clip is above 0 and noise at least 0, not {self.clip} and {self.noise}")

    def rows(self, what: Leaving, rows: Tensor) -> Tensor:
        """Clip, then add noise."""
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows = rows * (self.clip / norm.clamp(min=self.clip))
        return torch.stack([row + self.noise * self.clip * self._normal(row) for row in rows]) if self.noise else rows

    def _normal(self, row: Tensor) -> Tensor:
        """Standard normal numbers that nobody without the secret can make."""
        key = hashlib.blake2b(row.cpu().numpy().tobytes(), key=hashlib.sha256(b"noise " + self.secret).digest())
        stream = hashlib.shake_256(key.digest()).digest(8 * len(row))
        uniform = ((np.frombuffer(stream, dtype="<u8") >> 11) + 0.5) * 2.0**-53
        return torch.from_numpy(ndtri(uniform)).to(row)

    def sums(self, what: Leaving, sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows were dealt with before they were summed."""
        return sums, weight


class _Clients(LoopFleet):
    """A loop over the site's clients, whose draws are the site's own where it has a secret."""

    means: Arrays
    known: list[int]

    def __init__(self, population: Population, secret: bytes | None, **settings: Any) -> None:
        super().__init__(population, **settings)
        self.means = {}
        self.known = self._client_keys  # to everyone, as the run's seed is
        if secret is not None:
            own = secret_seed(secret)
            self._client_keys = [draws.fold_int(draws.name(key), own) for key in population.keys]
            self._ids = torch.tensor(self._client_keys)

    def _squeezed(self, ask: Gradient | Fit, pair: int, row: Tensor, place: int) -> Tensor:
        if ask.compress is None:
            return row
        key = wire.hash_keys(ask, self.known, self.t, place)[pair : pair + 1]
        return squeezed(row[None].cpu(), ask.compress, key)[0].to(row.device)

    def _buffers_of(self, ask: Ask, pair: int, row: Tensor) -> Kept:
        if getattr(ask, "buffers", "personal") != "averaged":
            return super()._buffers_of(ask, pair, row)
        c = int(ask.clients[pair])
        mine = self._remembered(c, ask.memory)
        mark = f"averaged/{int(self._architecture[c])}/{ask.memory}"
        return {name: wire.array(self.means, f"{mark}/{name}", v.dtype, *v.shape).to(v.device)
                for name, v in mine.items()}  # fmt: skip


@dataclass
class Site:
    """Answers blocks with blocks. Without a folder it remembers and logs nothing beyond this process."""

    population: Population
    secret: bytes  # its own, kept on its disk
    folder: Path | None = None
    limits: Limits = field(default_factory=Limits)
    experiment: str = ""  # the hash of the experiment it approved
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    share_seed: bool = False  # for tests: draw as a simulator would
    guard: Guard | None = None
    scope: Scope | None = None  # None: nothing is known of the experiment
    kept: int = 3  # rounds a server can go back
    _runs: dict[tuple[str, int], tuple[_Clients, Versions]] = field(default_factory=dict, repr=False)

    def answer(self, block: bytes, asker: str = "") -> bytes:
        """The answer to a message; a refusal in one sentence where there is none."""
        head: dict[str, Any] = {}
        try:
            head, arrays = wire.unseal(block, self.limits.message_mb << 20)
            if wire.field(head, "experiment", str) != self.experiment:
                raise WireError("this site has not approved this experiment")
            return self._answered(head, arrays, asker)
        except CoterieError as error:
            return self._refuse(str(error), head, asker)
        except Exception as error:  # whatever a model or the data raise is this site's own business
            return self._refuse(f"{type(error).__name__} at the site", head, asker, detail=str(error))

    def model(self, client: str, run: str, seed: int) -> nn.Module:
        """The personal model that lives here, as it is now."""
        clients, versions = self._opened(run, seed)
        clients._restore(versions.read(versions.newest))
        c = self.population.keys.index(client)
        slots = [name.partition("/")[2] for name in clients._client_state[c] if name.startswith("own/")]
        if len(slots) != 1:
            raise RecordError(f"no model of {client!r} lives here: ask whoever runs the server for it")
        own = Own(slots[0])
        row = clients._row(Loss(torch.tensor([c]), own), 0)
        return copy.deepcopy(clients._module(c, row, clients._remembered(c, own.slot))).cpu().eval()

    def _refuse(self, why: str, head: dict[str, Any], asker: str, detail: str = "") -> bytes:
        self._log(
            {"refused": why, "detail": detail, "asker": asker, "round": head.get("round"), "run": head.get("run")}
        )
        return wire.seal({"refused": " ".join(why.split())[: wire.NAME]})

    def _answered(self, head: dict[str, Any], arrays: Arrays, asker: str) -> bytes:
        run, seed = wire.field(head, "run", str), wire.field(head, "seed", int)
        clients, versions = self._opened(run, seed)
        if head.get("hello") is True:
            return self._introduce(clients, asker)
        t = wire.field(head, "round", int)
        watch = head.get("watch") is True
        opening = -1 if watch else wire.field(head, "opening", int)
        phase = 0 if watch else wire.field(head, "phase", int)
        if t < 0 or (not watch and (opening < 0 or phase < 1)):
            raise WireError("rounds, openings and phases are not negative")
        if self.scope is not None:
            self.scope.check(run.rpartition("/")[2], seed, t)
        heard = wire.field(head, "heard", list)
        if [type(number) for number in heard] != [int, int]:
            raise WireError("heard is an opening and a phase")
        base = versions.settled(heard) if watch else versions.at(t, opening, phase, heard)
        before = versions.read(base)
        clients._restore(dict(before))
        clients.t, clients.means = t, arrays
        if "collect" in head:
            return self._collected(clients, wire.field(head, "collect", list), asker, run, t)
        asks = self._asks(head, arrays, clients, watch)
        pairs, batches = 0, dict[str, set[str]]()
        for _, place, ask, _ in asks:
            pairs += ask.m
            for batch, model in self._questions(ask, t, place, base):
                batches.setdefault(batch, set()).add(model)
        bucket = versions.round if watch else t  # whoever watches says any round
        versions.count(bucket, pairs, batches, self.limits.per_round, self.limits.per_batch)
        answers: Arrays = {}
        precision = wire.field(head, "precision", str)
        if precision not in ("full", *wire.PRECISIONS):
            raise WireError(f"there is no precision {precision!r}")
        lines = []
        for name, place, ask, among in asks:
            answer = self._guarded(clients, ask, Leaving(ask, self._keys(ask), run, t, place, among))
            mine: Arrays = {}
            wire.write_answer(ask, answer, mine, name, precision, wire.hash_keys(ask, clients.known, t, place))
            lines.append(_line(ask, self._keys(ask), place, mine))
            answers |= mine
        if not watch:
            after = clients._kept()
            same = after.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in after.items())
            versions.keep(t, opening, phase, base, None if same else after)
        versions.save()
        for line in lines:
            self._log({"asker": asker, "run": run, "seed": seed, "round": t, "phase": phase, "watch": watch, **line})
        return wire.seal({"to": [t, opening, phase]}, answers)

    def _opened(self, run: str, seed: int) -> tuple[_Clients, Versions]:
        if (run, seed) not in self._runs:
            self._admit(run, seed)
            name = f"{draws.name(run) & ((1 << 63) - 1):x}-{seed}"
            folder = None if self.folder is None else self.folder / "state" / name
            secret = None if self.share_seed else self.secret
            clients = _Clients(self.population, secret, seed=seed, device=self.device, dtype=self.dtype)
            self._runs[run, seed] = (clients, Versions(folder, self.kept))
        return self._runs[run, seed]

    def _admit(self, run: str, seed: int) -> None:
        """Refuse what the experiment does not say, and one study too many."""
        study, _, algorithm = run.rpartition("/")
        if self.scope is not None:
            self.scope.check(algorithm, seed)
        if self.folder is None:
            return
        known = self.folder / STUDIES
        studies = files.read_json(known) if known.exists() else []
        if study not in studies:
            if len(studies) >= self.limits.studies:
                raise WireError(f"the experiment was served {len(studies)} times: this site takes part in no more")
            known.parent.mkdir(exist_ok=True)
            files.write_json(known, [*studies, study])

    def _introduce(self, clients: _Clients, asker: str) -> bytes:
        """Who is here: keys, how much data each has, and how wide their models are."""
        sizes = torch.stack([clients._sizes[split] for split in SPLITS], 1)
        self._log({"asker": asker, "hello": list(self.population.keys), "numbers": sizes.numel()})
        return wire.seal(
            {"clients": list(self.population.keys)},
            {"identity": identity(self.secret), "sizes": sizes, "widths": clients._widths.clone()},
        )

    def _collected(self, clients: _Clients, memories: Sequence[Any], asker: str, run: str, t: int) -> bytes:
        """Buffers, for methods that evaluate one model with everyone's mean."""
        if not self.limits.buffers:
            raise WireError("buffers stay at this site")
        found: Arrays = {}
        for c, key in enumerate(self.population.keys):
            for memory in memories:
                if not isinstance(memory, str):
                    raise WireError("a memory is a name")
                found |= {f"{key}/{memory}/{name}": value for name, value in clients.buffers_of(c, memory).items()}
        numbers = sum(v.numel() for v in found.values())
        self._log({"asker": asker, "run": run, "round": t, "ask": "buffers", "numbers": numbers})
        return wire.seal({"collected": len(found)}, found)

    def _asks(
        self, head: dict[str, Any], arrays: Arrays, clients: _Clients, watch: bool
    ) -> list[tuple[str, int, Ask, tuple[str, ...]]]:
        """The asks of a message, all of them allowed."""
        numbers = {key: i for i, key in enumerate(self.population.keys)}
        found = []
        for given in wire.field(head, "asks", list):
            if not isinstance(given, dict):
                raise WireError("an ask must be an object")
            name, place = wire.field(given, "name", str), wire.field(given, "place", int)
            ask = wire.read_ask(given, arrays, name, numbers, self.dtype, torch.device(self.device))
            among = given.get("among", [])
            if not isinstance(among, list) or not all(isinstance(key, str) for key in among):
                raise WireError("`among` must be keys")
            if watch and (getattr(ask, "track", False) or getattr(ask, "keep", None) is not None):
                raise WireError("an observer changes nothing")
            clients._check(ask)
            self._allow(ask, clients)
            found.append((name, place, ask, tuple(among)))
        return found

    def _allow(self, ask: Ask, clients: _Clients) -> None:
        """Refuse what the limits do not allow."""
        limits = self.limits
        if ask.kind not in limits.kinds:
            raise WireError(f"this site answers no {ask.kind}")
        if isinstance(ask.models, Own) and isinstance(ask, Fit) and ask.give != "nothing" and not limits.own_rows:
            raise WireError("a model that lives at this site stays here")  # an update with a strong pull is that model
        if not isinstance(ask, (Gradient, Loss, Fit, Evaluate)):
            return
        batch = _batch(ask)
        sizes = clients._sizes[ask.split][ask.clients]
        if isinstance(ask, Evaluate) and not bool(sizes.any()):
            return  # nothing is measured
        least = int(sizes.min()) if batch is None else min(batch, int(sizes.min()))
        if least < limits.least_batch:
            raise WireError(f"a batch of {least} is too small: this site answers for {limits.least_batch} or more")
        if isinstance(ask, Fit):
            steps = max(ask.plan.steps_for(int(size)) for size in sizes)
            if steps > limits.most_steps:
                raise WireError(f"{steps} steps are too many: this site takes {limits.most_steps}")

    def _questions(self, ask: Ask, t: int, place: int, base: str) -> list[tuple[str, str]]:
        """On which batch each pair asks, and about which model, where that is about a batch."""
        if not isinstance(ask, (Gradient, Loss, Fit, Evaluate)):
            return []
        if _batch(ask) is None:
            where = f"all {ask.split}"
        elif getattr(ask.plan if isinstance(ask, Fit) else ask, "sampling", None) == "epoch":
            where = f"{t} epoch {ask.split} {ask.memory}"  # wherever in the epoch
        else:
            where = f"{t} {place} {ask.split}"
        if isinstance(ask.models, Own):
            marks = [f"{base} {ask.models.slot}"] * ask.m
        else:
            rows = [hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=8).hexdigest() for row in ask.models]
            marks = rows if ask.at is None else [rows[k] for k in ask.at.tolist()]
        chosen = getattr(ask, "draw", None)
        draw = [0] * ask.m if chosen is None else chosen.tolist()
        return [(f"{where} {key} {d}", mark) for key, d, mark in zip(self._keys(ask), draw, marks, strict=True)]

    def _guarded(self, clients: _Clients, ask: Ask, what: Leaving) -> Answer:
        """The answer, with rows and sums as the guard lets them go."""
        guard = self.guard
        if guard is None or not (isinstance(ask, Gradient) or (isinstance(ask, Fit) and ask.give != "nothing")):
            return clients._one(ask, what.place, metered=False)
        plain = replace(ask, compress=None)
        if isinstance(plain, Gradient):
            plain = replace(plain, give="rows", into=None, outputs=None, weights=None, sketch=None)
        answer = clients._one(plain, what.place, metered=False)
        good = answer.ok[:, None]
        start = torch.zeros(())
        if isinstance(ask, Fit) and ask.give == "rows":
            looked = Fit(
                ask.clients, ask.models, replace(ask.plan, steps=0, epochs=None), at=ask.at, give="rows", track=False
            )
            start = clients._one(looked, what.place, metered=False).rows  # what leaves is start + a guarded update
        rows = start + guard.rows(what, answer.rows - start)
        rows = torch.stack([clients._squeezed(ask, pair, row, what.place) for pair, row in enumerate(rows)]).where(
            good, 0
        )
        if not isinstance(ask, Gradient):
            return replace(answer, rows=rows)
        if ask.give == "sum":
            assert ask.into is not None
            weight = torch.ones(ask.m, dtype=rows.dtype) if ask.weights is None else ask.weights.to(rows.dtype)
            weight = weight.to(rows.device).where(answer.ok, 0)
            sums = rows.new_zeros(ask.outputs or 0, rows.shape[1])
            sums.index_add_(0, ask.into.to(rows.device), weight[:, None] * rows)
            total = rows.new_zeros(ask.outputs or 0).index_add_(0, ask.into.to(rows.device), weight)
            sums, total = guard.sums(what, sums, total)
            return replace(answer, rows=torch.empty(0), sums=sums, weight=total)
        if ask.sketch is not None:
            rows = torch.stack([clients._sketched(row, ask.sketch, what.place) for row in rows])
        return replace(answer, rows=rows)

    def _keys(self, ask: Ask) -> tuple[str, ...]:
        return tuple(self.population.keys[c] for c in ask.clients.tolist())

    def _log(self, line: dict[str, Any]) -> None:
        """One line of the site's own log."""
        if self.folder is None:
            return
        text = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line}, default=str)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(text + "\n")


def _line(ask: Ask, keys: Sequence[str], place: int, arrays: Arrays) -> dict[str, Any]:
    """What the log says of one ask."""
    return {
        "ask": ask.kind,
        "give": getattr(ask, "give", None),
        "clients": sorted(set(keys)),
        "pairs": ask.m,
        "batch": _batch(ask),
        "place": place,
        "numbers": sum(v.numel() for v in arrays.values()),
        "bytes": sum(v.numel() * v.element_size() for v in arrays.values()),
    }


def _batch(ask: Ask) -> int | None:
    """Samples that an answer is a mean over; None: the whole split."""
    return ask.plan.batch if isinstance(ask, Fit) else getattr(ask, "batch", None)


def part(population: Population, clients: Sequence[int]) -> Population:
    """Some clients of a population as a site has them: architectures keep their numbers, data of others are gone."""
    index, kept = {}, torch.unique(torch.cat([population.index[s][c] for s in SPLITS for c in clients]))
    place = torch.zeros(len(population.inputs), dtype=torch.long)
    place[kept] = torch.arange(len(kept))
    for split in SPLITS:
        index[split] = tuple(place[population.index[split][c]] for c in clients)
    pick = torch.tensor(list(clients))
    return replace(
        population,
        keys=tuple(population.keys[c] for c in clients),
        inputs=population.inputs[kept],
        targets=population.targets[kept],
        index=index,
        architecture=tuple(population.architecture[c] for c in clients),
        relabel=None if population.relabel is None else population.relabel[pick],
        groups=None,
        seeds=tuple(population.seeds[c] for c in clients) if population.seeds else (),
        stream_clients=None if population.stream_clients is None else population.stream_clients[pick],
        server=0,
    )


__all__ = ["STUDIES", "ClipAndNoise", "Guard", "Leaving", "Limits", "Scope", "Site", "part"]
