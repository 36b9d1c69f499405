"""What every fleet promises: the protocol, the ledger, keyed draws, versions per round, and the form of its answers.

Randomness is counter-based. Client c has the key K = fold(name(key of c), seed). Its stream of samples of a split is
endless permutations: permutation e sorts the samples i by fold(fold(fold(K, "permutation"), split), e) folded with i.
`sampling="epoch"` reads on at the place kept at the client. "fresh" takes a place from fold(… K, "fresh", split, t,
place, draw) modulo RING permutations; its k-th sample is the k-th from there round the same permutation, and after a
whole pass the next one. So a batch is a uniform subset without replacement, a batch as large as the data is all of
them, and batches of different rounds, asks or draws are independent given the permutations. No ask sorts anything.
The k-th sample of data that are made online is the stream's sample start + k, where a fresh start is modulo FRESH.
"""

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from coterie import draws
from coterie.asks import ABSENT, Answer, Ask, Coarse, Drift, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict, Pull
from coterie.data.population import SPLITS, Population
from coterie.errors import AskError, DeviceError, ModelError, SettingError
from coterie.fleet.compress import coarsened
from coterie.fleet.layout import Layout, keyed
from coterie.fleet.ledger import Ledger
from coterie.tasks import Classification, LanguageModel, logits_of

RING = 8  # how many permutations a fresh batch is drawn from
_SEEDED = threading.Lock()  # torch draws initial weights from one generator per process; seeds may run in threads
FRESH = 1 << 40  # how far from its beginning a fresh batch of an online stream may start
RECALIBRATION = 512  # batch of the pass that recalibrates buffers


class Fleet(ABC):
    """All clients, and the only door to them. Subclasses answer; this class checks, counts and remembers.

    Indices (`clients`, `present`, `everyone`) live on the host, matrices on `device`.
    """

    def __init__(self, population: Population, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise SettingError(f"a fleet computes in a floating dtype, not {dtype}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise DeviceError("CUDA was asked for, but torch sees no CUDA device here: use --device cpu")
        self.population, self.seed, self.device, self.dtype = population, seed, device, dtype
        self.keys = population.keys[: population.n]
        self.n = population.n
        self.task = population.task
        seeds = population.seeds or (None,) * len(population.keys)
        self._client_keys = [
            draws.fold_int(draws.name(key), seed if own is None else own)
            for key, own in zip(population.keys, seeds, strict=True)
        ]
        self._ids = torch.tensor(self._client_keys)
        self._modules = [keyed(self._made(a)).to(dtype) for a in range(len(population.architectures))]
        self._layouts = [Layout.of(module) for module in self._modules]
        self._sizes = {split: torch.tensor([len(rows) for rows in population.index[split]]) for split in SPLITS}
        self._architecture = torch.tensor(population.architecture)
        self._widths = torch.tensor([layout.d for layout in self._layouts])[self._architecture]
        self.ledger = Ledger(self.n)
        self.t = 0
        self.phases = 0  # asked so far in this round
        self.present = torch.ones(self.n, dtype=torch.bool)
        self._place = 0
        self._before: tuple[int, dict[str, Tensor], Ledger] | None = None
        self._shapes: dict[str, torch.Size] = {}  # of predictions on public inputs

    # ---- what a fleet tells ------------------------------------------------------------------------------------------

    @property
    def everyone(self) -> Tensor:
        """The number of every client."""
        return torch.arange(self.n)

    @property
    def most(self) -> int:
        """How many clients are there in a round at most."""
        return self.n

    @property
    def ids(self) -> Tensor:
        """A 64-bit number per client that depends on its key and seed, not on its place."""
        return self._ids[: self.n]

    @property
    def server(self) -> Tensor:
        """The number of the reserved client that holds public data."""
        if not self.population.server:
            raise AskError("this population has no server data: give it a client with the key 'server'")
        return torch.tensor([self.n])

    @property
    def d(self) -> int:
        """How wide a row of parameters is."""
        return self._common.d

    @property
    def _common(self) -> Layout:
        """The layout that all clients share."""
        kinds: list[int] = self._architecture[: self.n].unique().tolist()
        if len(kinds) > 1:
            names = {self.keys[int((self._architecture == a).nonzero()[0])]: self._layouts[a].d for a in kinds}
            raise ModelError(f"clients have different architectures ({names}): only Own models and predictions apply")
        return self._layouts[kinds[0]]

    def predictions(self, inputs: str = "public") -> torch.Size:
        """The shape of everyone's predictions on some public inputs: P×C, as a rule."""
        if inputs in self._shapes:
            return self._shapes[inputs]
        if inputs not in self.population.public:
            known = ", ".join(self.population.public) or "none"
            raise AskError(f"no public inputs called {inputs!r}: there are {known}")
        x, shapes = self.population.public[inputs], {}
        for a in self._architecture.unique().tolist():
            c = int((self._architecture == a).nonzero()[0])
            try:
                probe = x[:1] if self.population.transform is None else self.population.transform(x[:1], None)
                module = self._made(a).to(self.dtype).eval()
                with torch.no_grad():
                    out = logits_of(module(probe.to(self.dtype) if probe.is_floating_point() else probe))
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                line = str(error).strip().splitlines()[0]
                raise ModelError(
                    f"the model of client {self.population.keys[c]!r} cannot take the public inputs {inputs!r}, "
                    f"of shape {tuple(x.shape[1:])}: {line}"
                ) from error
            shapes[self.population.keys[c]] = tuple(out.shape[1:])
        if len(set(shapes.values())) > 1:
            raise ModelError(f"predictions on {inputs!r} have different shapes: {shapes}; classes must be the same")
        self._shapes[inputs] = torch.Size((len(x), *next(iter(shapes.values()))))
        return self._shapes[inputs]

    def sizes(self, split: str = "train") -> Tensor:
        """How many samples each client has in a split."""
        if split not in self._sizes:
            raise AskError(f"no split {split!r}: there are {', '.join(SPLITS)}")
        return self._sizes[split][: self.n]

    def online(self, split: str) -> bool:
        """Whether the samples of a split are made as they are asked for."""
        return self.population.online(split)

    def columns(self, part: str) -> Tensor:
        """The columns of a part of the model, by the name of its parameters: "head" is the last layer."""
        return self._common.columns(part)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """From which column to which each parameter tensor lies in a row."""
        starts = self._common.starts
        return tuple(itertools.pairwise(starts))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter tensor, in the same order."""
        return tuple(map(tuple, self._common.shapes))

    def initial(self, shared: bool = True) -> Tensor:
        """The initial models, n×d: the same for everyone, or one per client drawn with its key."""
        self._common  # noqa: B018  (raises for mixed architectures)
        return self._initial(range(self.n), shared).to(self.device)

    def labelled(self, inputs: str = "public") -> Tensor:
        """The classes of public inputs as targets: P×C, a one in every row."""
        if inputs not in self.population.public_labels:
            known = ", ".join(self.population.public_labels) or "none"
            raise AskError(f"no classes are known of public inputs {inputs!r} (of these: {known}): give them as a pair")
        labels = self.population.public_labels[inputs].long()
        width = self.predictions(inputs)[-1]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < width:
            raise AskError(
                f"public inputs {inputs!r} have classes {int(labels.min())} to {int(labels.max())}, "
                f"and the clients' models outputs for 0 to {width - 1}"
            )
        return torch.nn.functional.one_hot(labels, width).to(self.device, self.dtype)

    def _made(self, architecture: int, key: int | None = None) -> torch.nn.Module:
        """A new module; what it draws while it is made, its frozen parts included, follows from the key."""
        key = draws.fold_int(draws.name("initial"), self.seed, architecture) if key is None else key
        with _seeded(key):
            return self.population.make(architecture)

    def _initial(self, clients: Iterable[int], shared: bool) -> Tensor:
        """Initial rows of clients of one architecture, on the host. A user's own module keeps its weights if shared."""
        clients = list(clients)
        made: dict[Any, Tensor] = {}
        for c in clients:
            a = int(self._architecture[c])
            own = self.population.seeds[c] if self.population.seeds else None
            seed = self.seed if own is None else own
            mark = (a, seed) if shared else c
            if mark in made:
                continue
            key = draws.fold_int(draws.name("initial"), seed, a) if shared else self._client_keys[c]
            module = self._made(a, key)
            if not shared and isinstance(self.population.architectures[a], torch.nn.Module):
                with _seeded(key):
                    for part in module.modules():
                        if callable(reset := getattr(part, "reset_parameters", None)):
                            reset()
            made[mark] = self._layouts[a].row(module).to(self.dtype)
        if shared and len(made) == 1:
            return next(iter(made.values())).expand(len(clients), -1)
        seeds = self.population.seeds
        return torch.stack(
            [made[(int(self._architecture[c]), self.seed if not seeds or seeds[c] is None else seeds[c])]
             if shared else made[c] for c in clients]
        )  # fmt: skip

    def uniform(self, tag: str, *clients: Tensor) -> Tensor:
        """A number in [0, 1) for each client, or for each tuple of clients in any order, this round: float64, host."""
        ids = torch.stack([self._ids[torch.as_tensor(c)] for c in clients]).sort(dim=0).values
        key: Tensor = torch.tensor(draws.fold_int(draws.name(tag), self.seed, self.t))
        for row in ids:
            key = draws.fold(key ^ row, 0)
        return draws.unit(key)

    def generator(self, tag: str) -> torch.Generator:
        """A host generator for what an algorithm draws as a whole this round."""
        return draws.generator(draws.fold_int(draws.name(tag), self.seed, self.t))

    def reveal(self, models: Tensor | Own) -> list[Tensor]:
        """The model of every client as a row, for records and reports: a simulator can, a deployment must not."""
        if isinstance(models, Tensor):
            return list(models if models.ndim == 2 else models.expand(self.n, -1))
        rows = []
        for c in range(self.n):
            look = Fit(torch.tensor([c]), models, Plan(steps=0), give="rows", track=False)
            rows.append(self.watch(look).rows[0])
        return rows

    def module(self, client: int, row: Tensor, memory: str = "model") -> torch.nn.Module:
        """A new module of the client's architecture with this row and the client's buffers, in eval mode."""
        a = int(self._architecture[client])
        module = self._made(a).to(self.dtype)
        self._layouts[a].load(module, row.to("cpu"))
        own = dict(module.named_buffers())
        for name, value in self.buffers_of(client, memory).items():
            own[name].copy_(value.to("cpu"))
        return module.eval()

    @abstractmethod
    def buffers_of(self, client: int, memory: str) -> dict[str, Tensor]:
        """The buffers a client keeps under a memory."""

    # ---- rounds and versions -----------------------------------------------------------------------------------------

    def begin(self, t: int) -> None:
        """Open round t. Opening the round that is already open takes every client back to its version before it."""
        if self._before is not None and t == self._before[0]:
            self._restore(dict(self._before[1]))
            self.ledger = self._before[2].copy()
        elif self._before is not None and t < self._before[0]:
            raise AskError(f"round {t} is over: clients keep their version before round {self._before[0]} only")
        else:
            self._before = (t, dict(self._kept()), self.ledger.copy())
        self.t, self._place, self.phases = t, 0, 0
        self.present = torch.ones(self.n, dtype=torch.bool)

    def state(self) -> dict[str, Tensor]:
        """Everything the clients remember, and the ledger: what a checkpoint holds."""
        return dict(self._kept()) | {f"ledger/{k}": v for k, v in self.ledger.state().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave; the next `begin` opens any round."""
        self.ledger.load({k.partition("/")[2]: v for k, v in state.items() if k.startswith("ledger/")})
        self._restore({k: v for k, v in state.items() if not k.startswith("ledger/")})
        self._before = None

    def reset(self) -> None:
        """Forget everything: the fleet as it was made."""
        self._restore({})
        self.ledger, self._before, self.t = Ledger(self.n), None, 0

    @abstractmethod
    def _kept(self) -> dict[str, Tensor]:
        """What clients remember now, by name. Tensors in it are never changed in place."""

    @abstractmethod
    def _restore(self, kept: dict[str, Tensor]) -> None:
        """Go back to what `_kept` gave."""

    # ---- asking ------------------------------------------------------------------------------------------------------

    @overload
    def ask(self, ask: Ask, /) -> Answer: ...
    @overload
    def ask(self, *asks: Ask) -> tuple[Answer, ...]: ...
    def ask(self, *asks: Ask) -> Answer | tuple[Answer, ...]:
        """One phase: the asks are answered in order, and a later one sees what an earlier one did to Own models.

        One ask gives one answer, several a tuple.
        """
        self.phases += 1
        answers = []
        for ask in asks:
            answers.append(self._one(ask, self._place, metered=True))
            self._place += 1
        return answers[0] if len(answers) == 1 else tuple(answers)

    @overload
    def watch(self, ask: Ask, /) -> Answer: ...
    @overload
    def watch(self, *asks: Ask) -> tuple[Answer, ...]: ...
    def watch(self, *asks: Ask) -> Answer | tuple[Answer, ...]:
        """Ask as an observer: nothing is counted or kept, nobody is absent, and no later draw depends on it."""
        present, self.present = self.present, torch.ones(self.n, dtype=torch.bool)
        try:
            answers = tuple(self._one(observed(ask), -1, metered=False) for ask in asks)
        finally:
            self.present = present
        return answers[0] if len(answers) == 1 else answers

    def _one(self, ask: Ask, place: int, *, metered: bool) -> Answer:
        self._check(ask)
        if isinstance(ask, Fit) and ask.distil is not None and ask.distil.coarse is not None:
            targets = coarsened(ask.distil.targets, ask.distil.coarse)
            ask = replace(ask, distil=replace(ask.distil, targets=targets))
        here = ask.clients >= self.n
        here = here | self.present[ask.clients.clamp(max=self.n - 1)]
        if not bool(here.any()):
            return self._silence(ask)
        if bool(here.all()):
            answer = self._answer(ask, place)
            charged = ask
        else:
            pairs = here.nonzero().flatten()
            charged = ask.take(pairs)
            answer = self._spread(ask, self._answer(charged, place), pairs)
        if metered:
            self._charge(charged, answer)
        return answer

    def _answer(self, ask: Ask, place: int) -> Answer:
        match ask:
            case Gradient():
                return self._gradient(ask, place)
            case Loss():
                return self._loss(ask, place)
            case Fit():
                return self._fit(ask, place)
            case Predict():
                return self._predict(ask)
            case Evaluate():
                return self._evaluate(ask)
        raise AskError(f"{type(ask).__name__} is not a question a fleet can be asked")

    @abstractmethod
    def _gradient(self, ask: Gradient, place: int) -> Answer: ...
    @abstractmethod
    def _loss(self, ask: Loss, place: int) -> Answer: ...
    @abstractmethod
    def _fit(self, ask: Fit, place: int) -> Answer: ...
    @abstractmethod
    def _predict(self, ask: Predict) -> Answer: ...
    @abstractmethod
    def _evaluate(self, ask: Evaluate) -> Answer: ...

    def _silence(self, ask: Ask) -> Answer:
        """The answer where nobody who was asked is there: zeros of the right shapes."""

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        m = ask.m
        width = ask.models.shape[1] if isinstance(ask.models, Tensor) else int(self._widths[ask.clients[:1]].sum())
        reason = torch.full((m,), ABSENT, dtype=torch.int8, device=self.device)
        match ask:
            case Gradient(give="sum"):
                outputs = ask.outputs or 0
                return Answer(reason, sums=zeros(outputs, width), weight=zeros(outputs), loss=zeros(m))
            case Gradient(give="gram"):
                groups, size = ask.gram_shape
                return Answer(reason, gram=zeros(groups, size, size), loss=zeros(m))
            case Gradient():
                return Answer(reason, rows=zeros(m, ask.sketch or width), loss=zeros(m))
            case Fit():
                rows = zeros(m, width) if ask.give != "nothing" else torch.empty(0)
                choice = zeros(m, dtype=torch.long) if ask.distil is not None else torch.empty(0)
                return Answer(reason, rows=rows, loss=zeros(m), choice=choice)
            case Loss():
                return Answer(reason, loss=zeros(m))
            case Predict():
                return Answer(reason, outputs=zeros(m, *self.predictions(ask.inputs)))
            case Evaluate():
                names = ask.metrics or self.task.metrics
                return Answer(reason, metrics={name: zeros(m, dtype=torch.float64) for name in names})
        raise AskError(f"{type(ask).__name__} is not a question a fleet can be asked")

    def _spread(self, ask: Ask, part: Answer, pairs: Tensor) -> Answer:
        """Answers of the pairs that were asked, among zeros and the reason `absent` for the others."""
        where = pairs.to(self.device)

        def full(values: Tensor) -> Tensor:
            if values.shape[:1] != (len(pairs),):
                return values
            out = torch.zeros(ask.m, *values.shape[1:], dtype=values.dtype, device=values.device)
            out[where.to(values.device)] = values
            return out

        reason = torch.full((ask.m,), ABSENT, dtype=torch.int8, device=part.reason.device)
        reason[where.to(reason.device)] = part.reason
        return Answer(
            reason=reason,
            rows=full(part.rows) if part.rows.ndim == 2 else part.rows,
            sums=part.sums,
            weight=part.weight,
            gram=part.gram,
            loss=full(part.loss) if part.loss.ndim == 1 and len(part.loss) else part.loss,
            outputs=full(part.outputs) if part.outputs.ndim > 1 else part.outputs,
            choice=full(part.choice),
            metrics={name: full(value) for name, value in part.metrics.items()},
        )

    # ---- refusing what makes no sense --------------------------------------------------------------------------------

    def _check(self, ask: Ask) -> None:
        if ask.m == 0:
            return
        low, high = int(ask.clients.min()), int(ask.clients.max())
        if low < 0 or high >= len(self.population.keys):
            raise AskError(f"there are clients 0 to {self.n - 1}, not {low if low < 0 else high}")
        if isinstance(ask.models, Tensor):
            self._check_rows("rows", ask.models, ask.clients)
        elif isinstance(ask, Gradient) or (isinstance(ask, Fit) and ask.give != "nothing"):
            wrong = (self._widths[ask.clients] != self._widths[ask.clients[0]]).nonzero()
            if len(wrong):
                one, other = (self.population.keys[int(ask.clients[i])] for i in (0, int(wrong[0])))
                raise ModelError(
                    f"clients {one!r} and {other!r} have models of different widths: ask them apart, "
                    "or for losses, predictions or a Fit that gives nothing"
                )
        tracked = isinstance(ask, (Gradient, Loss, Fit)) and (
            ask.track or (isinstance(ask, Fit) and ask.keep is not None)
        )
        if tracked and len(set(ask.clients.tolist())) != ask.m:
            raise AskError(
                "a client can be tracked once in an ask: say track=False where it answers for several models"
            )
        split = getattr(ask, "split", None)
        if split is not None and split not in SPLITS:
            raise AskError(f"no split {split!r}: there are {', '.join(SPLITS)}")
        if split is not None and not isinstance(ask, Evaluate):
            empty = (self._sizes[split][ask.clients] == 0).nonzero()
            if len(empty):
                c = int(ask.clients[int(empty[0])])
                raise AskError(f"client {self.population.keys[c]!r} has no {split} data to answer with")
            batch = ask.plan.batch if isinstance(ask, Fit) else getattr(ask, "batch", None)
            if batch is None and self.online(split):
                raise AskError("data that are made online have no whole split to ask about: name a batch")
        inputs = ask.inputs if isinstance(ask, Predict) else None
        if isinstance(ask, Fit):
            inputs = ask.distil.inputs if ask.distil is not None else None
            if ask.pull is not None:
                self._check_rows("rows of the pull", ask.pull.rows, ask.clients)
            if ask.drift is not None:
                self._check_rows("rows of the drift", ask.drift.rows, ask.clients)
            if ask.columns is not None and len(ask.columns):
                narrow = int(self._widths[ask.clients].min())
                if int(ask.columns.min()) < 0 or int(ask.columns.max()) >= narrow:
                    raise AskError(f"columns are numbered 0 to {narrow - 1}, not up to {int(ask.columns.max())}")
        shape = None if inputs is None else self.predictions(inputs)
        if isinstance(ask, Fit) and ask.distil is not None and shape is not None:
            told = ask.distil.targets.shape[1:]
            if told[:1] != shape[:1]:
                raise AskError(f"distil has targets for {told[0]} inputs, but {inputs!r} are {shape[0]}")
            if told != shape:
                raise AskError(f"distil has targets of shape {tuple(told)}, but predictions are {tuple(shape)}")
        says = ask if isinstance(ask, Predict) else getattr(ask, "distil", None)
        if says is not None and says.coarse is not None and not isinstance(self.task, (Classification, LanguageModel)):
            raise AskError(f"what is made coarse are probabilities of classes, and {self.task.name} has others")
        if isinstance(ask, Evaluate) and ask.metrics is not None:
            for name in ask.metrics:
                if name not in self.task.metrics:
                    raise AskError(f"no metric {name!r} in {self.task.name}: there are {', '.join(self.task.metrics)}")

    def _check_rows(self, what: str, rows: Tensor, clients: Tensor) -> None:
        wrong = (self._widths[clients] != rows.shape[-1]).nonzero()
        if len(wrong):
            c = int(clients[int(wrong[0])])
            raise ModelError(
                f"{what} are {rows.shape[-1]} wide, but the model of client {self.population.keys[c]!r} "
                f"has {int(self._widths[c])} parameters"
            )
        if rows.device.type != self.device.type:
            raise AskError(f"the {what} are on {rows.device}, the fleet on {self.device}")
        if rows.dtype != self.dtype:
            raise AskError(f"the {what} are {rows.dtype}, the fleet computes in {self.dtype}")

    # ---- counting ----------------------------------------------------------------------------------------------------

    def _charge(self, ask: Ask, answer: Answer, heard: Tensor | None = None) -> None:
        """What this ask moved. `sent` goes pair by pair, a row that a client already got in this ask only once.

        `heard` (default: all) are the pairs whose answers came.
        """
        real = (ask.clients < self.n).nonzero().flatten()
        if len(real) < ask.m:
            if not len(real):
                return
            ask = ask.take(real)
        m, clients = ask.m, ask.clients.numpy()
        widths = self._widths[ask.clients].numpy()
        down = np.zeros(m, dtype=np.int64)
        once = 0
        if isinstance(ask.models, Tensor):
            first, distinct = _distinct(ask.at, clients, m)
            down += widths * first
            once += distinct * int(ask.models.shape[1])
        up = np.zeros(m, dtype=np.int64)
        squeezed = widths
        if isinstance(ask, (Gradient, Fit)) and ask.compress is not None:
            squeezed = np.array([ask.compress.numbers(int(width), self.dtype.itemsize) for width in widths])
        match ask:
            case Gradient():
                if ask.give == "sum":
                    first, _ = _distinct(ask.into, clients, m)
                    up += squeezed * first
                else:
                    up += squeezed if ask.sketch is None else ask.sketch
            case Loss():
                up += 1
            case Fit():
                if ask.give != "nothing":
                    up += squeezed if ask.columns is None else len(ask.columns)
                for rider in (ask.pull, ask.drift):
                    if rider is not None and not is_start(rider, ask):
                        lone = torch.zeros(m, dtype=torch.long) if rider.rows.ndim == 1 else None
                        first, distinct = _distinct(rider.at if lone is None else lone, clients, m)
                        down += widths * first
                        once += distinct * int(rider.rows.shape[-1])
                if ask.distil is not None:
                    each = self._on_its_way(ask.distil.targets.shape[1:], ask.distil.coarse)
                    down += ask.distil.q * each
                    at = ask.distil.at
                    once += each * (len(ask.distil.targets) if at is None else len(set(at.flatten().tolist())))
            case Predict():
                up += self._on_its_way(answer.outputs.shape[1:], ask.coarse)
            case Evaluate():
                up += len(ask.metrics or self.task.metrics)
        if heard is not None:
            up *= heard[real].numpy()
        self.ledger.charge(ask.kind, clients, up, down, once, self.dtype.itemsize, self._up_itemsize(ask))

    def _on_its_way(self, shape: Sequence[int], how: Coarse | None) -> int:
        """How many numbers predictions of this shape are on their way."""
        return math.prod(shape) if how is None else how.numbers(shape, self.dtype.itemsize)

    def _up_itemsize(self, ask: Ask) -> int:
        """Bytes of a number in an answer."""
        return self.dtype.itemsize


def observed(ask: Ask) -> Ask:
    """An ask that leaves no trace at the client."""
    if isinstance(ask, (Gradient, Loss)):
        return replace(ask, track=False)
    return replace(ask, track=False, keep=None) if isinstance(ask, Fit) else ask


@contextmanager
def _seeded(key: int) -> Iterator[None]:
    """Let a module draw from torch's generator as a key says, without moving the caller's."""
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.manual_seed(key & ((1 << 63) - 1))
        yield


def is_start(rider: Pull | Drift, ask: Fit) -> bool:
    """Whether a pull is towards the very rows that training starts from, which travel anyway."""
    if isinstance(ask.models, Own) or isinstance(rider, Drift):
        return False
    rows = rider.rows if rider.rows.ndim == 2 else rider.rows[None]
    if rows.shape != ask.models.shape or rows.data_ptr() != ask.models.data_ptr():
        return False
    if len(rows) == 1 or rider.at is ask.at:
        return True
    return rider.at is not None and ask.at is not None and torch.equal(rider.at, ask.at)


def _distinct(rows: Tensor | None, clients: np.ndarray[Any, Any], m: int) -> tuple[np.ndarray[Any, Any], int]:
    """Which pairs are the first of their (client, row), and how many distinct rows there are in all."""
    if rows is None:
        return np.ones(m, dtype=np.int64), m
    if rows.ndim == 1 and bool((clients[1:] > clients[:-1]).all()):  # everyone once
        return np.ones(m, dtype=np.int64), int(np.count_nonzero(np.bincount(rows.numpy())))
    at = rows.numpy().reshape(m, -1)
    _, inverse = np.unique(at, axis=0, return_inverse=True) if at.shape[1] > 1 else np.unique(at, return_inverse=True)
    inverse = inverse.reshape(-1)
    distinct = int(inverse.max()) + 1 if m else 0
    _, places = np.unique(clients * distinct + inverse, return_index=True)
    first = np.zeros(m, dtype=np.int64)
    first[places] = 1
    return first, distinct
