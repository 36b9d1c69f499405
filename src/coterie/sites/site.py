"""A site: a few clients with their data, which answers asks that come as blocks of bytes, and only those it allows.

What it computes is what a loop over its clients computes (coterie.fleet.loop), from the version of their memory that
the message's round says. It never raises at whoever asked and never tells them more than a sentence: what it does not
answer is refused, and its own log says why. Every answer is logged: who asked, what, and how many numbers left.

Batches are drawn with the site's own secret unless a seed is shared, which is for tests: who can predict a batch can
aim at it. Initial models and sketches follow the run's seed, which everyone knows.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import Answer, Ask, Fit, Gradient, Loss, Own
from coterie.data.population import SPLITS, Population
from coterie.errors import CoterieError, SettingError
from coterie.fleet import wire
from coterie.fleet.compress import squeezed
from coterie.fleet.loop import Kept, LoopFleet
from coterie.fleet.remote import identity, secret_seed
from coterie.fleet.wire import Arrays, WireError
from coterie.settings import whole
from coterie.sites.versions import Versions


@dataclass(frozen=True)
class Limits:
    """What a site answers at all."""

    kinds: tuple[str, ...] = ("gradient", "loss", "fit", "predict", "evaluate")
    per_round: int = 200  # asks in a round, repeated ones included
    per_batch: int = 64  # models that may be asked about on one batch: each tells something else about the same samples
    least_batch: int = 8  # samples that an answer is a mean over
    most_steps: int = 10_000  # of training in one ask
    own_rows: bool = False  # whether a model that lives here may leave
    message_mb: int = 1024  # the largest message that is read

    def __post_init__(self) -> None:
        """Refuse what says nothing."""
        for kind in self.kinds:
            if kind not in wire.KINDS:
                raise SettingError(f"limits.kinds: there is no ask {kind!r}, there are {', '.join(wire.KINDS)}")
        for name in ("per_round", "per_batch", "least_batch", "most_steps", "message_mb"):
            whole(f"limits.{name}", getattr(self, name), 1)


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
    """The place for clipping and noise, and for masks of secure sums."""

    def rows(self, what: Leaving, rows: Tensor) -> Tensor:
        """Gradients or updates, one per pair, before they are summed or leave."""
        ...

    def sums(self, what: Leaving, sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's part of the sums of give="sum", as it leaves."""
        ...


@dataclass(frozen=True)
class ClipAndNoise:
    """Rows cut to a norm, with Gaussian noise of `noise`·`clip` on every number.

    Noise follows from the site's secret and the ask's place, so that a repeated message cannot average it away. How
    much privacy that is depends on how often is asked: accounting is the user's.
    """

    clip: float
    noise: float
    secret: int

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not (self.clip > 0 and self.noise >= 0):
            raise SettingError(f"guard: clip is above 0 and noise at least 0, not {self.clip} and {self.noise}")

    def rows(self, what: Leaving, rows: Tensor) -> Tensor:
        """Clip, then add noise."""
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows = rows * (self.clip / norm.clamp(min=self.clip))
        noisy = []
        for pair, row in enumerate(rows):
            key = draws.fold_int(self.secret, draws.name("noise"), draws.name(what.run), what.round, what.place, pair)
            z = draws.normal(draws.fold(torch.tensor(key), torch.arange(len(row))))
            noisy.append(row + self.noise * self.clip * z.to(row.dtype))
        return torch.stack(noisy)

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

    def _refuse(self, why: str, head: dict[str, Any], asker: str, detail: str = "") -> bytes:
        self._log(
            {"refused": why, "detail": detail, "asker": asker, "round": head.get("round"), "run": head.get("run")}
        )
        return wire.seal({"refused": " ".join(why.split())[: wire.NAME]})

    def _answered(self, head: dict[str, Any], arrays: Arrays, asker: str) -> bytes:
        run, seed = wire.field(head, "run", str), wire.field(head, "seed", int)
        clients, versions = self._opened(run, seed)
        if head.get("hello") is True:
            return self._introduce(clients)
        t = wire.field(head, "round", int)
        watch = head.get("watch") is True
        opening = -1 if watch else wire.field(head, "opening", int)
        phase = 0 if watch else wire.field(head, "phase", int)
        if t < 0 or (not watch and (opening < 0 or phase < 1)):
            raise WireError("rounds, openings and phases are not negative")
        base = versions.latest() if watch else versions.at(t, opening, phase)
        before = versions.read(base)
        clients._restore(dict(before))
        clients.t, clients.means = t, arrays
        if "collect" in head:
            return self._collected(clients, wire.field(head, "collect", list))
        asks = self._asks(head, arrays, clients, watch)
        versions.count(t, len(asks), self.limits.per_round)
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
            name = f"{draws.name(run) & ((1 << 63) - 1):x}-{seed}"
            folder = None if self.folder is None else self.folder / "state" / name
            secret = None if self.share_seed else self.secret
            clients = _Clients(self.population, secret, seed=seed, device=self.device, dtype=self.dtype)
            self._runs[run, seed] = (clients, Versions(folder, self.kept))
        return self._runs[run, seed]

    def _introduce(self, clients: _Clients) -> bytes:
        """Who is here: keys, how much data each has, and how wide their models are."""
        sizes = torch.stack([clients._sizes[split] for split in SPLITS], 1)
        self._log({"hello": list(self.population.keys)})
        return wire.seal(
            {"clients": list(self.population.keys)},
            {"identity": identity(self.secret), "sizes": sizes, "widths": clients._widths.clone()},
        )

    def _collected(self, clients: _Clients, memories: Sequence[Any]) -> bytes:
        """Buffers, for methods that evaluate one model with everyone's mean."""
        found: Arrays = {}
        for c, key in enumerate(self.population.keys):
            for memory in memories:
                if not isinstance(memory, str):
                    raise WireError("a memory is a name")
                found |= {f"{key}/{memory}/{name}": value for name, value in clients.buffers_of(c, memory).items()}
        self._log({"collected": sum(v.numel() for v in found.values())})
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
        if isinstance(ask.models, Own) and isinstance(ask, Fit) and ask.give == "rows" and not limits.own_rows:
            raise WireError("a model that lives at this site stays here")
        if not isinstance(ask, (Gradient, Loss, Fit)):
            return
        batch = ask.plan.batch if isinstance(ask, Fit) else ask.batch
        sizes = clients._sizes[ask.split][ask.clients]
        least = int(sizes.min()) if batch is None else min(batch, int(sizes.min()))
        if least < limits.least_batch:
            raise WireError(f"a batch of {least} is too small: this site answers for {limits.least_batch} or more")
        if isinstance(ask, Fit):
            steps = max(ask.plan.steps_for(int(size)) for size in sizes)
            if steps > limits.most_steps:
                raise WireError(f"{steps} steps are too many: this site takes {limits.most_steps}")
        which = torch.stack([ask.clients, torch.zeros_like(ask.clients) if ask.draw is None else ask.draw])
        often = int(torch.unique(which, dim=1, return_counts=True)[1].max())
        if often > limits.per_batch:
            raise WireError(f"{often} models on one batch are too many: this site answers for {limits.per_batch}")

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
        "batch": ask.plan.batch if isinstance(ask, Fit) else getattr(ask, "batch", None),
        "place": place,
        "numbers": sum(v.numel() for v in arrays.values()),
        "bytes": sum(v.numel() * v.element_size() for v in arrays.values()),
    }


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


__all__ = ["ClipAndNoise", "Guard", "Leaving", "Limits", "Site", "part"]
