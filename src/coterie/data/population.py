"""A population: clients with private data and an architecture each, packed so that shared samples are stored once."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from coterie.data.dataset import Dataset
from coterie.data.partitions import Partition
from coterie.errors import DataError, ModelError
from coterie.tasks import Classification, Task, infer, task

SPLITS = ("train", "validation", "test")
SERVER = "server"  # a reserved key: a client that may hold public data and takes no part
Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Client:
    """A participant. Data are (inputs, targets) as tensors or arrays, or any map-style data set of such pairs."""

    key: str
    train: Any
    validation: Any = None
    test: Any = None
    model: Model | None = None  # None: the population's
    seed: int | None = None  # of this client's own draws; None: the fleet's


@dataclass(frozen=True)
class _Holding:
    """Some samples of a block: two tensors that several clients may share, and which of their rows."""

    inputs: Tensor
    targets: Tensor
    rows: Tensor


class Stream(Protocol):
    """Training data without end: sample k of client c is a pure function of c and k (see coterie.data.synthetic)."""

    def samples(self, clients: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of samples; the two tensors are broadcast against each other."""
        ...


@dataclass(frozen=True, eq=False)
class Population:
    """What a fleet is built on. Make one with `population(…)` or `deal(…)`."""

    keys: tuple[str, ...]
    inputs: Tensor  # N × sample shape: every sample once
    targets: Tensor
    index: dict[str, tuple[Tensor, ...]]  # split → per client, the samples it holds
    task: Task
    architectures: tuple[Model, ...]
    architecture: tuple[int, ...]  # of each client
    relabel: Tensor | None = None  # n × C: client i sees class y as relabel[i, y]
    groups: tuple[int, ...] | None = None  # the true cluster of each client, where there is one
    public: dict[str, Tensor] = field(default_factory=dict)
    public_labels: dict[str, Tensor] = field(default_factory=dict)  # of those public inputs that have any
    transform: Callable[[Tensor, Tensor | None], Tensor] | None = None  # (samples, keys or None when evaluating)
    seeds: tuple[int | None, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    stream: Stream | None = None  # training data that are made online; `index["train"]` then only says how much counts
    stream_clients: Tensor | None = None  # n: the stream's own number of each client
    server: int = 0  # how many reserved clients stand behind the n ordinary ones (0 or 1)
    helped: tuple[str, ...] = ()  # the keys of those who are to be helped, where the others only help
    pools: tuple[int, ...] | None = None  # n: which of the helped each client may help; without it the only one
    truth: Tensor | None = None  # n × d: the best model of each client, where it is known
    attackers: tuple[str, ...] = ()  # the keys of those who lie: see coterie.fleet.attacks

    @property
    def n(self) -> int:
        """How many clients take part."""
        return len(self.keys) - self.server

    def online(self, split: str) -> bool:
        """Whether the samples of a split are made as they are asked for."""
        return self.stream is not None and split == "train"

    @property
    def told(self) -> dict[str, Any]:
        """What an algorithm with a setting of that name is told unless a user says otherwise."""
        return {"groups": self.groups, "targets": self.helped or None, "pools": self.pools}

    @property
    def parameters(self) -> list[int]:
        """How many trainable parameters each client's model has."""
        made = [self.make(a).parameters() for a in range(len(self.architectures))]
        count = [sum(p.numel() for p in each if p.requires_grad) for each in made]
        return [count[a] for a in self.architecture[: self.n]]

    def sizes(self, split: str) -> Tensor:
        """How many samples each client has in a split."""
        return torch.tensor([len(rows) for rows in self.index[split][: self.n]])

    def counts(self) -> Tensor | None:
        """Training samples of each class at each client, as it sees them: n × C; None where samples have no class."""
        known = self.stream is None and self.targets.ndim == 1 and len(self.targets) > 0  # of real sites none are
        if not isinstance(self.task, Classification) or not known:
            return None
        held = [self.labels(i, rows) for i, rows in enumerate(self.index["train"][: self.n])]
        return torch.stack([torch.bincount(own.long(), minlength=self.task.classes) for own in held])

    def reordered(self, order: Sequence[int]) -> "Population":
        """The same population with its clients in another order, or only some of them."""
        order = [*order, *range(self.n, len(self.keys))]
        pick = torch.tensor(order)
        used = list(dict.fromkeys(self.architecture[i] for i in order))
        return replace(
            self,
            keys=tuple(self.keys[i] for i in order),
            index={split: tuple(rows[i] for i in order) for split, rows in self.index.items()},
            architectures=tuple(self.architectures[a] for a in used),
            architecture=tuple(used.index(self.architecture[i]) for i in order),
            relabel=None if self.relabel is None else self.relabel[pick],
            groups=None if self.groups is None else tuple(self.groups[i] for i in order[: len(order) - self.server]),
            pools=None if self.pools is None else tuple(self.pools[i] for i in order[: len(order) - self.server]),
            truth=None if self.truth is None else self.truth[pick[: len(order) - self.server]],
            seeds=tuple(self.seeds[i] for i in order),
            stream_clients=None if self.stream_clients is None else self.stream_clients[pick],
        )

    def make(self, architecture: int) -> nn.Module:
        """A new module of an architecture; a module given by the user lends its weights and is never changed."""
        model = self.architectures[architecture]
        made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        if not isinstance(made, nn.Module):
            raise ModelError(f"the model of architecture {architecture} is {type(made).__name__}, not an nn.Module")
        return made

    def check(self) -> None:
        """Refuse, in one sentence that names the client and the thing, what could only fail later."""
        if not self.n:
            raise DataError("a population has at least one client")
        if len(set(self.keys)) != len(self.keys):
            twice = next(k for k in self.keys if self.keys.count(k) > 1)
            raise DataError(f"two clients have the key {twice!r}: keys must differ")
        if self.inputs.is_floating_point():
            bad = ~torch.isfinite(self.inputs.reshape(len(self.inputs), -1)).all(1)
            if bad.any():
                raise DataError(f"client {self._holder(int(bad.nonzero()[0]))}: inputs contain NaN or infinity")
        for i, key in enumerate(self.keys):
            if i < self.n and not len(self.index["train"][i]):
                raise DataError(f"client {key!r} has no training data: give it at least one sample or leave it out")
        probes: dict[int, Tensor] = {}
        for i, key in enumerate(self.keys):
            held = torch.cat([self.index[split][i] for split in SPLITS])
            if not len(held):
                continue
            if int(held.min()) < 0 or int(held.max()) >= len(self.inputs):
                wrong = int(held.min()) if int(held.min()) < 0 else int(held.max())
                raise DataError(f"client {key!r} holds sample {wrong}, and there are {len(self.inputs)} in all")
            a = self.architecture[i]
            if a not in probes:
                probes[a] = self._probe(a, held[:2], key)
            self._check_labels(i, probes[a].shape[-1])
        for name, labels in self.public_labels.items():
            there = len(self.public[name])
            if labels.shape != (there,) or labels.is_floating_point():
                raise DataError(f"public inputs {name!r} need a class each, {there} in all, not {tuple(labels.shape)}")
        for i, key in enumerate(self.keys):  # a stray label is its holder's, so all labels come first
            held = torch.cat([self.index[split][i] for split in SPLITS])
            if len(held):
                output = probes[self.architecture[i]][:1]
                self.task.check(output.expand(len(held), *output.shape[1:]), self.labels(i, held), repr(key))

    def _check_labels(self, client: int, width: int) -> None:
        """Name the client, the split and the label that its model has no output for."""
        if not isinstance(self.task, Classification):
            return
        for split in SPLITS:
            labels = self.labels(client, self.index[split][client])
            if len(labels) and not labels.is_floating_point() and labels.ndim == 1 and int(labels.max()) >= width:
                raise DataError(
                    f"client {self.keys[client]!r}: {split} label {int(labels.max())} is out of range: "
                    f"its model has {width} outputs, for labels 0 to {width - 1}"
                )

    def labels(self, client: int, rows: Tensor) -> Tensor:
        """The targets of some samples as a client sees them."""
        targets = self.targets[rows]
        return targets if self.relabel is None else self.relabel[client][targets]

    def _probe(self, architecture: int, rows: Tensor, key: str) -> Tensor:
        from coterie.tasks import logits_of

        module = self.make(architecture).eval()
        like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(1))
        x = self.inputs[rows]
        if self.transform is not None:
            x = self.transform(x, None)
        try:
            with torch.no_grad():
                return logits_of(module(x.to(like.dtype) if x.is_floating_point() else x))
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            line = str(error).strip().splitlines()[0]
            shape = tuple(self.inputs.shape[1:])
            raise ModelError(f"client {key!r}: its model cannot take samples of shape {shape}: {line}") from error

    def _holder(self, row: int) -> str:
        for i, key in enumerate(self.keys):
            if any(bool((self.index[split][i] == row).any()) for split in SPLITS):
                return repr(key)
        return "(none)"


def population(
    clients: Sequence[Client],
    *,
    model: Model | None = None,
    task: "Task | str | None" = None,
    groups: Sequence[int] | None = None,
    public: Mapping[str, Any] | None = None,
    transform: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> Population:
    """Pack clients with their own data. Tensors and data sets that several clients share are stored once.

    The task is taken from the targets when it is not given: whole numbers are classes, floats are regression.
    `public` are inputs that everyone holds, by name; a pair of inputs and classes where these are known too.
    A client with the key "server" holds public data and takes no part.
    """
    ordered = [c for c in clients if c.key != SERVER] + [c for c in clients if c.key == SERVER]
    cache: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}
    held = {s: [_hold(getattr(c, s), c.key, s, cache) for c in ordered] for s in SPLITS}
    blocks: dict[tuple[int, int], int] = {}
    parts: list[_Holding] = []
    total = 0
    first: _Holding | None = None
    index: dict[str, list[Tensor]] = {s: [] for s in SPLITS}
    for split in SPLITS:
        for client, holding in zip(ordered, held[split], strict=True):
            if holding is None:
                index[split].append(torch.empty(0, dtype=torch.long))
                continue
            first = first or holding
            _alike(first, holding, client.key, split)
            block = (id(holding.inputs), id(holding.targets))
            if block not in blocks:
                blocks[block] = total
                total += len(holding.inputs)
                parts.append(holding)
            index[split].append(holding.rows + blocks[block])
    if first is None:
        raise DataError("no client has any data")
    inputs = parts[0].inputs if len(parts) == 1 else torch.cat([p.inputs for p in parts])
    targets = parts[0].targets if len(parts) == 1 else torch.cat([p.targets for p in parts])
    architectures: list[Model] = []
    architecture = []
    for client in ordered:
        chosen = client.model if client.model is not None else model
        if chosen is None:
            raise ModelError(f"client {client.key!r} has no model: give it one, or give the population one for all")
        if not callable(chosen):
            raise ModelError(
                f"client {client.key!r}: a model is an nn.Module or a function that makes one, not a "
                f"{type(chosen).__name__}; clients with models of their own are Client(…, model=…)"
            )
        place = next((i for i, a in enumerate(architectures) if a is chosen), None)
        if place is None:
            place = len(architectures)
            architectures.append(chosen)
        architecture.append(place)
    servers = sum(c.key == SERVER for c in ordered)
    if groups is not None and len(groups) != len(ordered) - servers:
        raise DataError(f"{len(groups)} groups given for {len(ordered) - servers} clients: one each is needed")
    whose = [(c.key, h) for split in SPLITS for c, h in zip(ordered, held[split], strict=True) if h is not None]
    made = Population(
        keys=tuple(c.key for c in ordered),
        inputs=inputs,
        targets=targets,
        index={s: tuple(rows) for s, rows in index.items()},
        task=_task(task, targets, whose),
        architectures=tuple(architectures),
        architecture=tuple(architecture),
        groups=None if groups is None else tuple(int(g) for g in groups),
        **_published(public or {}),
        transform=transform,
        seeds=tuple(c.seed for c in ordered),
        server=servers,
    )
    made.check()
    return made


def deal(
    dataset: Dataset,
    partition: Partition,
    *,
    model: Model | Sequence[Model],
    task: "Task | str | None" = None,
    public: Mapping[str, Any] | None = None,
    transform: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    prefix: str = "client-",
    keys: Sequence[str] | None = None,
) -> Population:
    """Deal a data set to clients as a partition says. Samples are shared memory: no copy per client.

    `model` is one architecture for all, or one per client (equal objects are one architecture). Without `keys`, clients
    are called by the prefix and their number.
    """
    n = len(partition.train)
    models = list(model) if isinstance(model, Sequence) else [model] * n
    if len(models) != n:
        raise DataError(f"{len(models)} models given for {n} clients: give one for all, or one each")
    distinct = list({id(m): m for m in models}.values())
    place = {id(m): i for i, m in enumerate(distinct)}
    width = len(str(n - 1))
    named = tuple(f"{prefix}{i:0{width}d}" for i in range(n)) if keys is None else tuple(keys)
    targets = _shared(dataset.targets)
    if partition.relabel is not None:
        targets = targets.long()  # labels name columns of `relabel`, and torch takes bytes for masks
    made = Population(
        keys=named,
        inputs=_shared(dataset.inputs),
        targets=targets,
        index={s: tuple(torch.as_tensor(rows) for rows in getattr(partition, s)) for s in SPLITS},
        task=_task(task, targets),
        architectures=tuple(distinct),
        architecture=tuple(place[id(m)] for m in models),
        relabel=None if partition.relabel is None else torch.as_tensor(partition.relabel).long(),
        groups=None if partition.groups is None else tuple(int(g) for g in partition.groups),
        **_published(public or {}),
        transform=transform,
        helped=tuple(named[i] for i in partition.helped),
        seeds=(None,) * n,
        facts={
            **dataset.facts,
            **partition.facts,
            "data": dataset.name,
            "resplit": partition.resplit or bool(dataset.facts.get("resplit")),
        },
    )
    made.check()
    return made


def _published(public: Mapping[str, Any]) -> dict[str, Any]:
    """Public inputs, and the classes of those that came with them."""
    pairs = {name: x if isinstance(x, tuple) else (x,) for name, x in public.items()}
    return {
        "public": {name: torch.as_tensor(pair[0]) for name, pair in pairs.items()},
        "public_labels": {name: torch.as_tensor(pair[1]) for name, pair in pairs.items() if len(pair) > 1},
    }


def online(population: Population, stream: Stream) -> Population:
    """The same clients, whose training batches are fresh samples of a stream; client i is the stream's client i.

    The training data dealt before only say how much a client's data count, and what an epoch is.
    """
    return replace(population, stream=stream, stream_clients=torch.arange(population.n))


def _shared(array: Any) -> Tensor:
    """The same memory as a tensor."""
    with warnings.catch_warnings():  # torch warns that a memory map is read-only; nothing here writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))


def _task(given: "Task | str | None", targets: Tensor, whose: Sequence[tuple[str, _Holding]] = ()) -> Task:
    """The task that was given, or the one that the targets look like; if they cannot, whose it is."""
    if given is not None and given != "classification":
        return task(given)
    try:
        return infer(targets)
    except DataError:
        for key, holding in whose:
            try:
                infer(holding.targets[holding.rows])
            except DataError as error:
                raise DataError(f"client {key!r}: {error}") from None
        raise


def _alike(first: _Holding, other: _Holding, key: str, split: str) -> None:
    for what in ("inputs", "targets"):
        a, b = getattr(first, what), getattr(other, what)
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise DataError(
                f"client {key!r}: its {split} {what} are {b.dtype} of shape {tuple(b.shape[1:])}, "
                f"the others' are {a.dtype} of shape {tuple(a.shape[1:])}"
            )


def _hold(data: Any, key: str, split: str, cache: dict[tuple[int, int], tuple[Any, Tensor, Tensor]]) -> _Holding | None:
    """Bring any accepted form of data to a block and the rows of it that are meant."""
    rows: Tensor | None = None
    while isinstance(data, Subset):
        chosen = torch.as_tensor(data.indices).long()
        rows = chosen if rows is None else chosen[_within(rows, len(chosen), key, split)]
        data = data.dataset
    if data is None:
        return None
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data[0], tuple):
        mark: Any = data
        pair: Any = data
    elif isinstance(data, TensorDataset) and len(data.tensors) == 2:
        mark, pair = data, data.tensors
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        mark, pair = data, None
    else:
        raise DataError(
            f"client {key!r}: its {split} data are {type(data).__name__}, not (inputs, targets) or a data set"
        )
    place = (id(mark), 0) if pair is None else (id(pair[0]), id(pair[1]))
    if place not in cache:
        if pair is None:
            samples = [data[i] for i in range(len(data))]
            if not samples:
                return None
            try:
                x = torch.stack([torch.as_tensor(s[0]) for s in samples])
                y = torch.stack([torch.as_tensor(s[1]) for s in samples])
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                raise DataError(f"client {key!r}: its {split} samples do not stack: {error}") from error
        else:
            x, y = torch.as_tensor(pair[0]), torch.as_tensor(pair[1])
        if not x.ndim or not y.ndim:
            raise DataError(f"client {key!r}: its {split} data are one number, not samples along the first axis")
        if len(x) != len(y):
            raise DataError(f"client {key!r}: {len(x)} {split} inputs but {len(y)} targets")
        whole = y if y.is_floating_point() or y.dtype == torch.bool else y.long()
        cache[place] = (mark, x, whole)  # the mark is kept so its id stays
    _, x, y = cache[place]
    if rows is None:
        rows = torch.arange(len(x))
    return _Holding(x, y, _within(rows, len(x), key, split)) if len(rows) else None


def _within(rows: Tensor, samples: int, key: str, split: str) -> Tensor:
    """The rows of a subset, if there are such samples."""
    wrong = rows[(rows < 0) | (rows >= samples)]
    if len(wrong):
        raise DataError(f"client {key!r}: its {split} subset names sample {int(wrong[0])} of {samples}")
    return rows
