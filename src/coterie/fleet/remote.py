"""Clients that live elsewhere: every phase is one message to each site, whatever carries it.

The server's part of a deployment. It knows what an experiment declares (keys, architectures, task, public inputs) and
no data. Sites answer with small fleets of their own (coterie.sites); `Transport` carries blocks of bytes between them,
in this process or through Flower. What is late, lost, refused, malformed or not finite is not ok, with zero values.

Rounds are opened with a number that only grows, also from one server process to the next, so that a site can tell a
round begun anew (it goes back to its version before that round) from an old or repeated message (it does not). Sites
present themselves when they are first seen. Each has an identity that only it can repeat: nobody else can claim its
clients while the run lasts, and a site that returns gets its rows and neighbours back.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import (
    ABSENT,
    LATE,
    MALFORMED,
    NONFINITE,
    OK,
    REFUSED,
    Answer,
    Ask,
    Evaluate,
    Fit,
    Gradient,
    Loss,
    Own,
    Plan,
    Predict,
)
from coterie.data.population import SPLITS, Population
from coterie.errors import AskError, CoterieError
from coterie.fleet import wire
from coterie.fleet.base import Fleet, observed
from coterie.fleet.layout import buffers
from coterie.fleet.reduce import Sink
from coterie.fleet.wire import Arrays, Precision, WireError

LARGEST = 4 << 30  # bytes of a reply that are looked at, beyond what was asked for


@dataclass(frozen=True)
class Reply:
    """What came back from a site: a block, or the reason why there is none."""

    block: bytes = b""
    reason: int = OK


class Transport(Protocol):
    """Carries blocks to sites and back. Addresses are the transport's own; a site may come back under another one."""

    def there(self) -> Sequence[str]:
        """The addresses of the sites that can be reached now."""
        ...

    def exchange(self, blocks: Mapping[str, bytes]) -> Mapping[str, Reply]:
        """Send each site its block; the replies that came in time. A site that is left out was late."""
        ...

    def greet(self, addresses: Sequence[str], block: bytes) -> Mapping[str, Reply]:
        """Send a block to sites that nobody knows yet; what comes back soon, to this one or to an earlier greeting."""
        ...


class InProcess:
    """Sites in this process: functions from block to block."""

    def __init__(self, sites: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.sites = dict(sites)

    def there(self) -> Sequence[str]:
        """All of them."""
        return list(self.sites)

    def exchange(self, blocks: Mapping[str, bytes]) -> Mapping[str, Reply]:
        """One after the other."""
        return {address: Reply(self.sites[address](block)) for address, block in blocks.items()}

    def greet(self, addresses: Sequence[str], block: bytes) -> Mapping[str, Reply]:
        """They answer at once."""
        return self.exchange(dict.fromkeys(addresses, block))


@dataclass
class Heard:
    """What is known of the sites: who stands behind which address, and who may speak for a client."""

    home: dict[int, str] = field(default_factory=dict)  # client → address
    identity: dict[int, Tensor] = field(default_factory=dict)  # client → its site's identity, 32 bytes
    sizes: dict[int, Tensor] = field(default_factory=dict)  # client → how many samples it has, split by split
    met: dict[str, bool] = field(default_factory=dict)  # address → whether it was accepted


@dataclass(frozen=True)
class _Part:
    """What of a phase's ask goes to one site."""

    number: int  # of the ask in its phase
    place: int  # of the ask in its round
    pairs: Tensor  # which of its pairs
    ask: Ask  # about them


class RemoteFleet(Fleet):
    """Clients at sites that a transport reaches. `population` declares them: see `declared`.

    `experiment` is the hash that sites approved, `run` the name under which they keep this run's state; `precision` is
    that of rows on their way up. `tell` hears of sites that come, and of what they refuse. Runs of one server share
    what was `heard` of the sites. A round waits so many seconds (`patience`) while nobody at all is there.
    """

    def __init__(
        self,
        population: Population,
        transport: Transport,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        experiment: str = "",
        run: str = "run",
        precision: Precision = "full",
        tell: Callable[[str], None] = lambda message: None,
        heard: Heard | None = None,
        patience: float = 0.0,
    ) -> None:
        super().__init__(population, seed=seed, device=torch.device(device), dtype=dtype)
        self.patience = patience
        self.transport, self.experiment, self.run, self.tell = transport, experiment, run, tell
        self.precision = precision
        self.opening = 0
        self._last = torch.full((len(population.keys), 2), -1)  # opening and phase of each one's last answer
        self._sizes = {split: torch.ones(len(population.keys), dtype=torch.long) for split in SPLITS}
        self._numbers = {key: i for i, key in enumerate(population.keys)}
        self._heard = Heard() if heard is None else heard
        for client in self._heard.sizes:
            self._count(client)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def meet(self) -> Tensor:
        """Greet the sites that are new; which clients can be reached now."""
        addresses = list(self.transport.there())
        new = [a for a in addresses if a not in self._heard.met]
        if new:
            hello = wire.seal({**self._signed(), "hello": True})
            for address, reply in self.transport.greet(new, hello).items():
                if reply.reason != OK:
                    continue  # greeted again next time
                try:
                    self._heard.met[address] = self._welcome(address, *wire.unseal(reply.block, 1 << 24))
                except CoterieError as error:
                    self._heard.met[address] = False
                    self.tell(f"the site at {address} is not taken in: {error}")
        here = torch.zeros(self.n, dtype=torch.bool)
        for client, address in self._heard.home.items():
            if client < self.n:
                here[client] = address in addresses
        return here

    def _welcome(self, address: str, head: dict[str, Any], arrays: Arrays) -> bool:
        if "refused" in head:
            raise WireError(f"it refused: {wire.field(head, 'refused', str)}")
        identity = wire.array(arrays, "identity", torch.uint8, 32)
        keys = wire.field(head, "clients", list)
        sizes = wire.array(arrays, "sizes", torch.long, len(keys), len(SPLITS))
        widths = wire.array(arrays, "widths", torch.long, len(keys))
        for key, size, width in zip(keys, sizes, widths.tolist(), strict=True):
            number = self._numbers.get(key) if isinstance(key, str) else None
            if number is None:
                raise WireError(f"the experiment declares no client {str(key)[: wire.NAME]!r}")
            if width != int(self._widths[number]):
                raise WireError(f"the model of {key!r} has {width} parameters there, {int(self._widths[number])} here")
            if int(size.min()) < 0 or int(size[0]) < 1:
                raise WireError(f"client {key!r} has no training data")
            known = self._heard.identity.get(number)
            if known is not None and not torch.equal(known, identity):
                raise WireError(f"client {key!r} belongs to another site")
        for key, size in zip(keys, sizes, strict=True):
            number = self._numbers[key]
            self._heard.identity[number] = identity
            self._heard.home[number] = address
            self._heard.sizes[number] = size
            self._count(number)
        self.tell(f"{', '.join(keys)}: here, at {address}")
        return True

    def _count(self, client: int) -> None:
        """Take over how much data a client says it has."""
        for split, count in zip(SPLITS, self._heard.sizes[client].tolist(), strict=True):
            self._sizes[split][client] = count

    def await_clients(self, least: int, seconds: float, pause: float = 1.0) -> int:
        """Wait until so many clients are there; how many are."""
        end = time.monotonic() + seconds
        while (here := int(self.meet().sum())) < least:
            if time.monotonic() > end:
                raise AskError(f"{here} of {least} clients are there after {seconds:g} seconds")
            time.sleep(pause)
        return here

    def _signed(self) -> dict[str, Any]:
        return {"experiment": self.experiment, "run": self.run, "seed": self.seed}

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def begin(self, t: int) -> None:
        """Open round t with those who are there. Sites go back to their version before it, if they saw it before."""
        super().begin(t)
        self.opening = max(self.opening + 1, time.time_ns())
        self.present = self.meet()
        if self.patience and not bool(self.present.any()):
            self.tell(f"round {t} waits: nobody is there")
            self.await_clients(1, self.patience)
            self.present = self.meet()

    def state(self) -> dict[str, Tensor]:
        """The ledger, the last opening, and who speaks for whom; models and memory stay at the sites."""
        known = {f"identity/{c}": identity for c, identity in self._heard.identity.items()}
        return super().state() | {"opening": torch.tensor(self.opening), "last": self._last.clone()} | known

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on where a server stopped; sites come back to their version before the round that is opened next."""
        self.opening, self._last = max(self.opening, int(state["opening"])), state["last"].cpu().clone()
        for name, identity in state.items():
            if name.startswith("identity/"):
                self._heard.identity.setdefault(int(name.partition("/")[2]), identity.cpu())
        super().load({name: value for name, value in state.items() if name.startswith("ledger/")})

    def _kept(self) -> dict[str, Tensor]:
        return {}

    def _restore(self, kept: dict[str, Tensor]) -> None:
        """Nothing is kept here."""

    # ---- asking ------------------------------------------------------------------------------------------------------

    def ask(self, *asks: Ask) -> Any:
        """One phase: one message to each site that is asked anything."""
        self.phases += 1
        first, self._place = self._place, self._place + len(asks)
        answers = self._phase(asks, first, {"round": self.t, "opening": self.opening, "phase": self.phases})
        return answers[0] if len(answers) == 1 else tuple(answers)

    def watch(self, *asks: Ask) -> Any:
        """Ask as an observer. Metrics of clients who do not answer are not a number: nothing was measured."""
        present, self.present = self.present, self.meet()
        try:
            answers = self._phase([observed(ask) for ask in asks], -1, {"round": self.t, "watch": True}, metered=False)
        finally:
            self.present = present
        for k, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            if isinstance(ask, Evaluate):
                gone = ~answer.ok.cpu()
                known = {name: value.masked_fill(gone, torch.nan) for name, value in answer.metrics.items()}
                answers[k] = replace(answer, metrics=known)
        return answers[0] if len(answers) == 1 else tuple(answers)

    def reveal(self, models: Tensor | Own) -> list[Tensor]:
        """The rows of a matrix; models that live at sites only where every site lets them go."""
        if isinstance(models, Tensor):
            return super().reveal(models)
        rows: list[Tensor] = [torch.empty(0)] * self.n
        for a in self._architecture[: self.n].unique():
            clients = (self._architecture[: self.n] == a).nonzero().flatten()
            answer = self.watch(Fit(clients, models, Plan(steps=0), give="rows", track=False))
            if not bool(answer.ok.all()):
                wrong = int(clients[int((~answer.ok).nonzero()[0])])
                raise AskError(f"the model {models.slot!r} of client {self.keys[wrong]!r} stays at its site")
            for c, row in zip(clients.tolist(), answer.rows, strict=True):
                rows[c] = row
        return rows

    def buffers_of(self, client: int, memory: str) -> dict[str, Tensor]:
        """Buffers live at the sites; a record of a deployment holds no models with them (run.keep_models = false)."""
        if not buffers(self._modules[int(self._architecture[client])]):
            return {}
        raise AskError("buffers stay at the sites: set run.keep_models = false")

    def _phase(self, asks: Sequence[Ask], first: int, head: dict[str, Any], *, metered: bool = True) -> list[Answer]:
        """Split the asks by site, send, gather, and put the answers together."""
        if not self._heard.home:
            self.meet()  # asked before any round
        charged: list[Ask | None] = []
        spread: list[Tensor | None] = []
        for ask in asks:
            self._check(ask)
            here = (ask.clients >= self.n) | self.present[ask.clients.clamp(max=self.n - 1)]
            here = here & torch.tensor([c in self._heard.home for c in ask.clients.tolist()], dtype=torch.bool)
            pairs = None if bool(here.all()) else here.nonzero().flatten()
            charged.append(None if not bool(here.any()) else ask if pairs is None else ask.take(pairs))
            spread.append(pairs)
        left = [(k, ask) for k, ask in enumerate(charged) if ask is not None]
        placed = [(ask, first + k if metered else first) for k, ask in left]
        answers = dict(zip([k for k, _ in left], self._sent(placed, head), strict=True))
        done = []
        for k, ask in enumerate(asks):
            here_ask, pairs = charged[k], spread[k]
            if here_ask is None:
                done.append(self._silence(ask))
                continue
            answer = answers[k]
            if metered:
                reason = answer.reason.cpu()
                self._charge(here_ask, answer, (reason == OK) | (reason == NONFINITE))
            done.append(answer if pairs is None else self._spread(ask, answer, pairs))
        return done

    def _sent(self, asks: Sequence[tuple[Ask, int]], head: dict[str, Any]) -> list[Answer]:
        """The answers to asks about clients who are all there."""
        means = self._averaged_buffers([ask for ask, _ in asks], head)
        homes = sorted({self._heard.home[c] for ask, _ in asks for c in ask.clients.tolist()})
        parts: dict[str, list[_Part]] = {}
        blocks = {}
        for address in homes:
            mine = torch.tensor([self._heard.home.get(c) == address for c in range(len(self.population.keys))])
            arrays: Arrays = dict(means)
            told: list[dict[str, Any]] = []
            parts[address] = []
            for k, (ask, place) in enumerate(asks):
                pairs = mine[ask.clients].nonzero().flatten()
                if not len(pairs):
                    continue
                there = _separate(ask.take(pairs))
                earlier = [each["name"] for each in told] if "watch" in head else []  # the ledger counts ask by ask
                ask_head = wire.write_ask(there, self.population.keys, arrays, str(k), earlier)
                told.append(ask_head | {"place": place, "name": str(k)})
                if isinstance(ask, Gradient) and ask.give == "sum":
                    told[-1]["among"] = [self.population.keys[c] for c in ask.clients.tolist()]
                parts[address].append(_Part(k, place, pairs, there))
            signed = {**self._signed(), **head, **self._settled(address)}
            blocks[address] = wire.seal({**signed, "asks": told, "precision": self.precision}, arrays)
        replies = self.transport.exchange(blocks)
        gathered = [_Gathered(self, ask, place) for ask, place in asks]
        for address in homes:
            to = [head["round"], head.get("opening", -1), head.get("phase", 0)]
            answers = self._heard_from(address, replies.get(address, Reply(reason=LATE)), parts[address], to)
            for part, answer in zip(parts[address], answers, strict=True):
                gathered[part.number].take(part.pairs, part.ask, answer)
        return [each.answer() for each in gathered]

    def _heard_from(self, address: str, reply: Reply, parts: Sequence[_Part], to: list[int]) -> list[Answer | int]:
        """A site's answers, or the reason why there are none."""
        if reply.reason != OK:
            return [reply.reason] * len(parts)
        try:
            head, arrays = wire.unseal(reply.block, self._most(parts))
            if "refused" in head:
                self.tell(f"the site at {address} refused: {wire.field(head, 'refused', str)}")
                return [REFUSED] * len(parts)
            if head.get("to") != to:
                raise WireError("it answers another message")
            found: list[Answer | int] = []
            for part in parts:
                keys = wire.hash_keys(part.ask, self._client_keys, self.t, part.place)
                what = self._expected(part.ask)
                found.append(wire.read_answer(part.ask, what, arrays, str(part.number), self.precision, keys))
            if to[1] >= 0:
                self._last[self._at(address)] = torch.tensor(to[1:])
            return found
        except (CoterieError, RuntimeError, OverflowError) as error:
            self.tell(f"the answer from {address} is malformed: {error}")
            return [MALFORMED] * len(parts)

    def _at(self, address: str) -> list[int]:
        """The clients who live there."""
        return [c for c, home in self._heard.home.items() if home == address]

    def _settled(self, address: str) -> dict[str, list[int]]:
        """For a message: the last answer of a site that was heard. It forgets what it did for a later one."""
        return {"heard": self._last[self._at(address)[0]].tolist()}

    def _most(self, parts: Sequence[_Part]) -> int:
        """Bytes that a reply may have: what was asked for, and some framing."""
        numbers = 0
        for part in parts:
            numbers += sum(torch.Size(shape).numel() for _, shape in self._expected(part.ask).fields.values())
        return min(LARGEST, 8 * numbers + (1 << 20))

    def _expected(self, ask: Ask) -> wire.Expected:
        width = int(self._widths[ask.clients[0]]) if ask.m else 0
        outputs = tuple(self.predictions(ask.inputs)) if isinstance(ask, Predict) else ()
        return wire.expected(ask, width, self.dtype, outputs, self.task.metrics)

    def _averaged_buffers(self, asks: Sequence[Ask], head: dict[str, Any]) -> Arrays:
        """Means over everyone's buffers, for asks about averaged ones: they are asked for in a message before."""
        memories = {a.memory for a in asks if getattr(a, "buffers", "personal") == "averaged"}
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        fresh = {a: buffers(module) for a, module in enumerate(self._modules)}
        if not memories or not any(fresh.values()):
            return {}
        here = self.meet()
        homes = {self._heard.home[c] for c in here.nonzero().flatten().tolist()}
        asked = {**self._signed(), **head, "collect": sorted(memories)}
        replies = self.transport.exchange({home: wire.seal(asked | self._settled(home)) for home in sorted(homes)})
        for c in here.nonzero().flatten().tolist():
            reply, a = replies.get(self._heard.home[c], Reply(reason=LATE)), int(self._architecture[c])
            try:
                if reply.reason != OK:
                    continue
                _, arrays = wire.unseal(reply.block, LARGEST)
                for memory in memories:
                    for name, value in fresh[a].items():
                        mine = wire.array(arrays, f"{self.keys[c]}/{memory}/{name}", value.dtype, *value.shape)
                        if not bool(torch.isfinite(mine.double()).all()):
                            raise WireError("buffers are not finite")
                        mark = f"averaged/{a}/{memory}/{name}"
                        sums[mark] = sums.get(mark, 0) + mine.double()
                        counts[mark] = counts.get(mark, 0) + 1
            except CoterieError as error:
                self.tell(f"buffers of {self.keys[c]}: {error}")
        return {
            mark: (total / counts[mark]).to(fresh[int(mark.split("/")[1])][mark.split("/", 3)[3]].dtype)
            for mark, total in sums.items()
        }

    # A phase is answered as a whole, by `_sent`.

    def _gradient(self, ask: Gradient, place: int) -> Answer:
        return self._sent([(ask, place)], self._open)[0]

    def _loss(self, ask: Loss, place: int) -> Answer:
        return self._sent([(ask, place)], self._open)[0]

    def _fit(self, ask: Fit, place: int) -> Answer:
        return self._sent([(ask, place)], self._open)[0]

    def _predict(self, ask: Predict) -> Answer:
        return self._sent([(ask, -1)], self._open)[0]

    def _evaluate(self, ask: Evaluate) -> Answer:
        return self._sent([(ask, -1)], self._open)[0]

    def _up_itemsize(self, ask: Ask) -> int:
        squeezed = (isinstance(ask, (Gradient, Fit)) and ask.compress is not None) or (
            isinstance(ask, Predict) and ask.coarse is not None
        )
        if self.precision == "full" or squeezed or isinstance(ask, (Loss, Evaluate)):
            return self.dtype.itemsize
        return wire.PRECISIONS[self.precision].itemsize

    @property
    def _open(self) -> dict[str, Any]:
        return {"round": self.t, "opening": self.opening, "phase": self.phases}


def _separate(ask: Ask) -> Ask:
    """Sums apart for each client: what one client contributes is what it sends, and can be checked or masked."""
    if not isinstance(ask, Gradient) or ask.into is None:
        return ask
    both, inverse = torch.unique(torch.stack([ask.clients, ask.into]), dim=1, return_inverse=True)
    return replace(ask, into=inverse, outputs=both.shape[1])


class _Gathered:
    """The answer to one ask, from the answers of sites about some of its pairs."""

    def __init__(self, fleet: RemoteFleet, ask: Ask, place: int) -> None:
        self.fleet, self.ask, self.place = fleet, ask, place
        self.blank = fleet._silence(ask)
        self.reason = self.blank.reason.clone()
        plain = replace(ask, give="rows", into=None, outputs=None, weights=None, group=None, slot=None) if (
            isinstance(ask, Gradient) and ask.give == "gram"
        ) else ask  # fmt: skip
        self.values = fleet._silence(plain) if plain is not ask else self.blank

    def take(self, pairs: Tensor, there: Ask, answer: Answer | int) -> None:
        """What a site says about some pairs, or why it says nothing."""
        where = pairs.to(self.reason.device)
        if isinstance(answer, int):
            self.reason[where] = answer
            return
        self.reason[where] = answer.reason.to(self.reason.device)
        mine = self.values
        if mine.loss.numel():
            mine.loss[where] = answer.loss.to(mine.loss.device)
        if mine.outputs.ndim > 1:
            mine.outputs[where] = answer.outputs.to(mine.outputs.device)
        if mine.choice.numel():
            mine.choice[where] = answer.choice.to(mine.choice.device)
        for name, value in mine.metrics.items():
            value[where] = answer.metrics[name].to(value.device)
        if mine.sums.ndim > 1:
            assert isinstance(there, Gradient)
            assert isinstance(self.ask, Gradient)
            assert self.ask.into is not None
            assert there.into is not None
            into = torch.zeros(there.outputs or 0, dtype=torch.long)
            into[there.into] = self.ask.into[pairs]
            mine.sums.index_add_(0, into.to(mine.sums.device), answer.sums.to(mine.sums.device))
            mine.weight.index_add_(0, into.to(mine.sums.device), answer.weight.to(mine.sums.device))
        if mine.rows.ndim > 1:
            rows = answer.rows.to(mine.rows.device)
            if isinstance(there, Fit) and there.columns is not None and rows.shape[1] != mine.rows.shape[1]:
                rows = self._filled(there, rows, answer.ok)
            mine.rows[where] = rows

    def _filled(self, ask: Fit, moved: Tensor, ok: Tensor) -> Tensor:
        """Rows whose other columns are those of the start."""
        assert ask.columns is not None
        rows = torch.zeros(len(moved), self.values.rows.shape[1], dtype=moved.dtype, device=moved.device)
        if ask.give == "rows":
            start, at = wire.distinct(ask.models, ask.at, ask.m)  # type: ignore[arg-type]
            rows = start[at.to(start.device)].where(ok.to(start.device)[:, None], 0)
        rows[:, ask.columns.to(rows.device)] = moved
        return rows

    def answer(self) -> Answer:
        """All of it, with inner products formed here."""
        reason, values, ask = self.reason.to(torch.int8), self.values, self.ask
        if not (isinstance(ask, Gradient) and ask.give == "gram"):
            return replace(values, reason=reason)
        assert ask.group is not None
        sink = Sink(replace(ask, sketch=None), values.rows.shape[1], self.fleet.dtype, self.fleet.device, 0)
        order = torch.argsort(ask.group, stable=True)
        there = order.to(values.rows.device)
        if ask.m:
            sink.take(order, values.rows[there], (reason == OK)[there])
        return sink.answer(reason, values.loss)


def declared(population: Population) -> Population:
    """What a server may know of a population: everything but the data, and how much of it there is."""
    none = torch.zeros(1, dtype=torch.long)
    n = len(population.keys)
    return replace(
        population,
        inputs=population.inputs[:0],
        targets=population.targets[:0],
        index={split: tuple(none for _ in range(n)) for split in SPLITS},
        relabel=None,
        stream=None,
        stream_clients=None,
    )


def identity(secret: bytes) -> Tensor:
    """What a site shows of its secret: nobody else can show it first, and nothing follows from it."""
    return torch.frombuffer(bytearray(hashlib.sha256(b"coterie site " + secret).digest()), dtype=torch.uint8)


def secret_seed(secret: bytes) -> int:
    """The seed of a site's own draws."""
    return draws.name("seed " + hashlib.sha256(b"coterie draws " + secret).hexdigest())


__all__ = ["ABSENT", "Heard", "InProcess", "RemoteFleet", "Reply", "Transport", "declared", "identity", "secret_seed"]
