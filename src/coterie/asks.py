"""The five questions a fleet can be asked, and their answers.

An ask names m pairs (client, model). `clients` holds m client numbers; `models` is a matrix of parameter rows, one
vector for all pairs, or `Own(slot)`: the model that lives at the client and never travels. `at` says which row each
pair means (m numbers), or the mean of which rows (m×q: midpoints, built chunk by chunk); without it row p belongs to
pair p. Asks are frozen plain values: indices and scalars live on the host, matrices wherever the fleet computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from coterie.errors import AskError, SettingError
from coterie.schedules import rates

Sampling = Literal["fresh", "epoch"]
Buffers = Literal["personal", "averaged", "recalibrated"]
OPTIMISERS = ("sgd", "adam", "adamw")
DISTANCES = ("squares", "cross_entropy", "logits")


PER_PAIR = {"per_pair": True}  # marks the fields that hold one entry per pair


def _index(value: Any, what: str) -> Tensor:
    index = torch.as_tensor(value, device="cpu")
    if index.numel() and (index.is_floating_point() or index.dtype == torch.bool):
        raise AskError(f"{what} must be whole numbers, not {index.dtype}")
    return index.long()


def _rows_named(at: Any, what: str, m: int, rows: int) -> Tensor:
    """Which row each pair means, or which rows it means the mean of."""
    index = _index(at, what)
    if index.ndim not in (1, 2) or len(index) != m:
        raise AskError(f"`{what}` must have {m} entries, one per pair, not shape {tuple(index.shape)}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise AskError(f"`{what}` must name rows 0 to {rows - 1}, not {int(index.min())} to {int(index.max())}")
    return index


@dataclass(frozen=True)
class Own:
    """The model that lives at the client under a name; it begins as the fleet's initial model, shared or not."""

    slot: str = "model"
    shared: bool = True


@dataclass(frozen=True)
class Plan:
    """How a client trains, in scalars only: for how long, on what batches, with which of torch's optimisers.

    `schedule` follows the run, one tick a round: an algorithm asks with `plan.at(t)`, whose rate is that of round t.
    """

    steps: int | None = None
    epochs: int | None = None  # an epoch is ceil(samples / batch) full batches
    batch: int | None = 32  # None: the whole split at every step
    lr: float = 0.1
    optimiser: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = None  # largest norm of a gradient
    ahead: float = 0.0  # α: a step's gradient is that of the model one plain step at this rate further, on a new batch
    keep_optimiser: bool = False  # whether momentum and Adam's moments outlive the ask, at the client
    sampling: Sampling = "fresh"
    schedule: str = "constant"  # see coterie.schedules
    rounds: int | None = None  # how long the schedule is

    def __post_init__(self) -> None:
        """Refuse what no client could follow."""
        if (self.steps is None) == (self.epochs is None):
            raise SettingError("a plan has either steps or epochs, and exactly one of them")
        if min(self.steps or 0, self.epochs or 0) < 0 or (self.batch is not None and self.batch < 1):
            raise SettingError("steps and epochs must be at least 0, batch at least 1")
        if self.optimiser not in OPTIMISERS:
            raise SettingError(f"no optimiser {self.optimiser!r}: there are {', '.join(OPTIMISERS)}")
        if not 0 <= self.lr < float("inf"):
            raise SettingError(f"the rate lr must be at least 0 and finite, not {self.lr}")
        if not (0 <= self.momentum < float("inf") and 0 <= self.weight_decay < float("inf")):
            raise SettingError("momentum and weight_decay must be at least 0 and finite")
        if not (all(0 <= beta < 1 for beta in self.betas) and self.eps >= 0):
            raise SettingError(f"betas must be at least 0 and below 1, eps at least 0, not {self.betas} and {self.eps}")
        if self.clip is not None and not self.clip > 0:
            raise SettingError(f"clip, the largest norm of a gradient, must be above 0, not {self.clip}")
        if self.rounds is not None and self.rounds < 1:
            raise SettingError(f"a schedule lasts at least one round, not {self.rounds}")
        if self.nesterov and self.momentum == 0:
            raise SettingError("Nesterov's momentum needs momentum above 0")
        if not 0 <= self.ahead < float("inf"):
            raise SettingError(f"ahead, the rate of a look ahead, must be at least 0 and finite, not {self.ahead}")
        if self.ahead and (self.optimiser != "sgd" or self.weight_decay):
            raise SettingError("a plan that looks ahead has the optimiser sgd, and no weight_decay")
        if self.sampling not in ("fresh", "epoch"):
            raise SettingError(f"sampling is 'fresh' or 'epoch', not {self.sampling!r}")

    def at(self, t: int) -> "Plan":
        """The plan of round t: the same, with that round's rate."""
        if self.schedule == "constant":
            return self
        if self.rounds is None:
            raise SettingError(f"the schedule {self.schedule!r} must know how many rounds there are: set plan.rounds")
        return replace(
            self, lr=rates(self.schedule, self.lr, self.rounds)[min(t, self.rounds - 1)], schedule="constant"
        )

    @property
    def batches(self) -> int:
        """How many batches a step takes."""
        return 2 if self.ahead else 1

    def steps_for(self, samples: int) -> int:
        """How many steps a client with this many samples takes."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * (1 if self.batch is None else -(-samples // self.batch))


@dataclass(frozen=True)
class Compress:
    """How a gradient or an update travels. It arrives as wide as it was; only the ledger and the values tell.

    topk: the `share` of its entries of largest magnitude, and their places. quantise: every entry in `bits` bits, by
    unbiased rounding to levels of the largest magnitude, which travels too. sketch: Count-Sketch with `share` buckets
    an entry, hashed anew for each client and ask, and read back without bias.
    """

    kind: Literal["none", "topk", "quantise", "sketch"] = "none"
    share: float = 0.1
    bits: int = 8

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not 0 < self.share <= 1:
            raise SettingError(f"compress.share must be above 0 and at most 1, not {self.share}")
        if not 2 <= self.bits <= 16:
            raise SettingError(f"compress.bits must be from 2 to 16, not {self.bits}")

    def kept(self, width: int) -> int:
        """How many entries, or buckets, a row of this width has left."""
        return max(1, round(self.share * width))

    def numbers(self, width: int, itemsize: int) -> int:
        """How much travels for a row, in numbers of this many bytes."""
        match self.kind:
            case "topk":
                return 2 * self.kept(width)
            case "quantise":
                return 1 - (-width * self.bits // (8 * itemsize))
            case "sketch":
                return self.kept(width)
        return width


@dataclass(frozen=True)
class Coarse:
    """How probabilities travel: rounded to the nearest of 2^bits levels from 0 to 1, or as they are.

    With `top`, only those of the likeliest classes of each input, and their numbers in as few bits as do; what is left
    of the mass is spread evenly over the other classes.
    """

    bits: int | None = None
    top: int | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.bits is not None and not 1 <= self.bits <= 16:
            raise SettingError(f"coarse.bits must be from 1 to 16, not {self.bits}")
        if self.top is not None and self.top < 1:
            raise SettingError(f"coarse.top must be at least 1, not {self.top}")

    def kept(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is left of probabilities of this shape, classes last."""
        return tuple(shape) if self.top is None else (*shape[:-1], min(self.top, shape[-1]))

    def bytes(self, shape: Sequence[int], itemsize: int) -> tuple[int, int]:
        """How many bytes travel for the probabilities, and for the numbers of the classes."""
        count = math.prod(self.kept(shape))
        places = 0 if self.top is None else count * place_bits(shape[-1])
        return -(-count * (self.bits or 8 * itemsize) // 8), -(-places // 8)

    def numbers(self, shape: Sequence[int], itemsize: int) -> int:
        """The same in numbers of this many bytes."""
        return -(-sum(self.bytes(shape, itemsize)) // itemsize)


def place_bits(classes: int) -> int:
    """Bits that name one of so many classes."""
    return max(1, (classes - 1).bit_length())


@dataclass(frozen=True, eq=False)
class Pull:
    """A proximal term: weight/2 · ‖x − row‖² is added to the loss of a Fit."""

    rows: Tensor
    weight: float | Tensor = 1.0  # one for all, or one per pair
    at: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Drift:
    """A row that is added to every gradient of a Fit."""

    rows: Tensor
    at: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Distil:
    """Targets on public inputs: weight · mean over a public batch of a distance to them joins the loss.

    With p = Task.soft(model(x) / temperature), probabilities or the numbers of a regression, the distance is
    ‖target(x) − p‖² ("squares"), −Σ target(x) log p ("cross_entropy"), or the mean over outputs of
    |target(x) − model(x)| ("logits"). `alone`: nothing but the targets is learned; no private sample is looked at, an
    epoch is one over the public inputs, the loss told is the distance.

    `targets` is r×P×C. With `at` of shape m×q a client gets q targets, computes its own outputs on all P inputs before
    the first step, and keeps the nearest in squared distance over the whole stack; the answer's `choice` says which.
    Without `at` each gets all r. The gradient goes through train mode as that of the loss does; buffers see private
    batches only.
    """

    targets: Tensor
    inputs: str
    weight: float | Tensor = 1.0
    batch: int = 128
    at: Tensor | None = None
    loss: Literal["squares", "cross_entropy", "logits"] = "squares"
    temperature: float = 1.0
    alone: bool = False
    coarse: Coarse | None = None  # how the targets travel

    def __post_init__(self) -> None:
        """Refuse what nobody could follow."""
        if self.loss not in DISTANCES:
            raise AskError(f"a distance to targets is one of {', '.join(DISTANCES)}, not {self.loss!r}")
        if not 0 < self.temperature < float("inf"):
            raise AskError(f"a temperature is above 0 and finite, not {self.temperature}")
        if self.batch < 1:
            raise AskError(f"a public batch has at least one input, not {self.batch}")

    @property
    def how(self) -> tuple[Any, ...]:
        """Everything but targets and weights."""
        return self.inputs, self.batch, self.loss, self.temperature, self.alone, self.coarse

    @property
    def q(self) -> int:
        """How many targets each client gets."""
        return len(self.targets) if self.at is None else self.at[:1].numel()


@dataclass(frozen=True, eq=False)
class Ask:
    """What all five have in common."""

    kind: ClassVar[str]
    clients: Tensor
    models: Tensor | Own
    at: Tensor | None = field(default=None, kw_only=True, metadata=PER_PAIR)
    memory: str = field(default="", kw_only=True)  # which state at the client: buffers, optimiser, place in the stream

    def __post_init__(self) -> None:
        """Bring indices to the host and refuse what does not fit together."""
        clients = _index(self.clients, "clients").reshape(-1)
        self._set(clients=clients)
        if not self.memory:
            self._set(memory=self.models.slot if isinstance(self.models, Own) else "model")
        m = len(clients)
        if isinstance(self.models, Own):
            if self.at is not None:
                raise AskError("an Own model is the client's own: `at` cannot choose another")
            return
        if self.models.ndim not in (1, 2):
            raise AskError(f"models must be one row or a matrix of rows, not of shape {tuple(self.models.shape)}")
        if self.models.ndim == 1:
            self._set(models=self.models[None], at=torch.zeros(m, dtype=torch.long) if self.at is None else self.at)
        rows = self.models.shape[0]
        if self.at is None:
            if rows != m:
                raise AskError(f"{m} pairs but {rows} rows: say with `at` which row belongs to which pair")
            return
        self._set(at=_rows_named(self.at, "at", m, rows))

    def _set(self, **values: Any) -> None:
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def _per_pair(self, key: str, *, whole: bool = True) -> None:
        """Make a per-pair field a host vector with one entry per pair."""
        value = getattr(self, key)
        if value is None:
            return
        vector = _index(value, key) if whole else torch.as_tensor(value)
        if vector.ndim == 0:
            vector = vector.expand(self.m)
        if vector.shape != (self.m,):
            raise AskError(f"{key} must have {self.m} entries, one per pair, not shape {tuple(vector.shape)}")
        self._set(**{key: vector})

    @property
    def m(self) -> int:
        """How many pairs."""
        return len(self.clients)

    def take(self, pairs: Tensor) -> Self:
        """The same question for some of the pairs (a host vector of pair numbers)."""
        changes: dict[str, Any] = {"clients": self.clients[pairs]}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("per_pair") and isinstance(value, Tensor):
                changes[f.name] = value[pairs.to(value.device)]
        if isinstance(self.models, Tensor) and self.at is None:
            changes["at"] = pairs
        for f in fields(self):
            rider = getattr(self, f.name)
            if isinstance(rider, (Pull, Drift, Distil)):
                changes[f.name] = _take_rider(rider, pairs)
        return replace(self, **changes)


def _check_rider(name: str, rider: Any, m: int) -> Any:
    """A rider with its indices on the host, if it fits m pairs."""
    rows = rider.targets if isinstance(rider, Distil) else rider.rows
    if rider.at is not None:
        rider = replace(rider, at=_rows_named(rider.at, f"{name}.at", m, 1 if rows.ndim == 1 else len(rows)))
    elif not isinstance(rider, Distil) and rows.ndim == 2 and len(rows) != m:
        raise AskError(f"{name} has {len(rows)} rows for {m} pairs: say with `at` which is whose")
    weight = getattr(rider, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim and weight.shape != (m,):
        raise AskError(f"{name}.weight must have {m} entries, one per pair, not shape {tuple(weight.shape)}")
    return rider


def _take_rider(rider: Any, pairs: Tensor) -> Any:
    changes: dict[str, Any] = {}
    if rider.at is not None:
        changes["at"] = rider.at[pairs]
    elif not isinstance(rider, Distil) and rider.rows.ndim == 2:
        changes["at"] = pairs
    weight = getattr(rider, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 1:
        changes["weight"] = weight[pairs.to(weight.device)]
    return replace(rider, **changes)


@dataclass(frozen=True, eq=False)
class _Batched(Ask):
    """An ask about a batch of a split: `batch` samples (None: the whole split), equal for one client within one ask.

    Give different `draw`s for fresh batches per pair. `sampling="epoch"` goes on where the client's last tracked batch
    of this memory and split ended.
    """

    batch: int | None = None
    split: str = field(default="train", kw_only=True)
    sampling: Sampling = field(default="fresh", kw_only=True)
    draw: Tensor | None = field(default=None, kw_only=True, metadata=PER_PAIR)
    track: bool = field(default=False, kw_only=True)  # whether buffers and the place in the stream move on

    def __post_init__(self) -> None:
        """Check the batch too."""
        super().__post_init__()
        if self.batch is not None and self.batch < 1:
            raise AskError(f"a batch has at least one sample, not {self.batch}")
        if self.sampling not in ("fresh", "epoch"):
            raise AskError(f"sampling is 'fresh' or 'epoch', not {self.sampling!r}")
        self._per_pair("draw")


def _slots(group: Tensor) -> tuple[Tensor, int, int]:
    """For each pair its place inside its group, in the order of the pairs; how many groups; the largest one's size."""
    if not len(group):
        return group, 0, 0
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group)
    starts = torch.cumsum(counts, 0) - counts
    slot = torch.empty_like(group)
    slot[order] = torch.arange(len(group)) - starts[group[order]]
    return slot, len(counts), int(counts.max())


@dataclass(frozen=True, eq=False)
class Gradient(_Batched):
    """∇ of the mean loss on a batch, in train mode.

    give="rows": m×d. "sum": Σ weight·gradient into given output rows, with the total weight that arrived. "gram":
    inner products inside groups of pairs, streamed (groups × q × q, in the order of the pairs). `sketch=k`: k random
    projections per gradient, the same for all pairs of the ask, which keep inner products and norms in expectation.
    """

    kind: ClassVar[str] = "gradient"
    track: bool = field(default=True, kw_only=True)
    give: Literal["rows", "sum", "gram"] = field(default="rows", kw_only=True)
    weights: Tensor | None = field(default=None, kw_only=True, metadata=PER_PAIR)  # of each pair in its sum
    into: Tensor | None = field(default=None, kw_only=True, metadata=PER_PAIR)  # the output row of each pair
    outputs: int | None = field(default=None, kw_only=True)  # how many output rows; default: as many as `into` names
    group: Tensor | None = field(default=None, kw_only=True, metadata=PER_PAIR)  # the group of each pair, from 0
    slot: Tensor | None = field(
        default=None, kw_only=True, repr=False, metadata=PER_PAIR
    )  # derived: place in its group
    gram_shape: tuple[int, int] = field(default=(0, 0), kw_only=True, repr=False)  # derived: groups, largest group
    sketch: int | None = field(default=None, kw_only=True)
    compress: Compress | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Sums need outputs, Gram matrices need groups."""
        super().__post_init__()
        for key in ("into", "group"):
            self._per_pair(key)
        self._per_pair("weights", whole=False)
        if self.give not in ("rows", "sum", "gram"):
            raise AskError(f"a gradient is given as 'rows', 'sum' or 'gram', not {self.give!r}")
        if (self.give == "sum") != (self.into is not None):
            raise AskError("give='sum' goes with `into`, the output row of each pair, and nothing else does")
        if self.give != "sum" and (self.weights is not None or self.outputs is not None):
            raise AskError("`weights` and `outputs` go with give='sum', and with nothing else")
        if (self.give == "gram") != (self.group is not None):
            raise AskError("give='gram' goes with `group`, the group of each pair, and nothing else does")
        if isinstance(self.into, Tensor):
            if self.m and int(self.into.min()) < 0:
                raise AskError("output rows are numbered from 0")
            most = int(self.into.max()) + 1 if self.m else 0
            if self.outputs is None:
                self._set(outputs=most)
            elif most > self.outputs:
                raise AskError(f"`into` names output row {most - 1} of {self.outputs}")
        if isinstance(self.group, Tensor) and self.m and int(self.group.min()) < 0:
            raise AskError("groups are numbered from 0")
        if isinstance(self.group, Tensor) and self.slot is None:
            slot, groups, size = _slots(self.group)
            self._set(slot=slot, gram_shape=(groups, size))
        if self.sketch is not None and (self.sketch < 1 or self.give == "sum"):
            raise AskError("a sketch has at least one number, and is given as rows or gram")
        if self.sketch is not None and self.compress is not None:
            raise AskError("a gradient is sketched or compressed, not both")


@dataclass(frozen=True, eq=False)
class Loss(_Batched):
    """The mean loss on a batch, in eval mode: m numbers. It never moves buffers."""

    kind: ClassVar[str] = "loss"
    buffers: Buffers = field(default="personal", kw_only=True)


@dataclass(frozen=True, eq=False)
class Fit(Ask):
    """Local training by a plan.

    give="rows": the trained models; "update": trained minus start; "nothing". `keep` stores the trained model at the
    client as Own(keep); a tracked Fit of an Own model moves that model. Its loss is the mean over the steps taken.
    """

    kind: ClassVar[str] = "fit"
    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    give: Literal["rows", "update", "nothing"] = field(default="update", kw_only=True)
    split: str = field(default="train", kw_only=True)
    draw: Tensor | None = field(default=None, kw_only=True, metadata=PER_PAIR)
    keep: str | None = field(default=None, kw_only=True)
    pull: Pull | None = field(default=None, kw_only=True)
    drift: Drift | None = field(default=None, kw_only=True)
    distil: Distil | None = field(default=None, kw_only=True)
    columns: Tensor | None = field(default=None, kw_only=True)  # numbers of the columns that move; default: all
    compress: Compress | None = field(default=None, kw_only=True)  # of an update
    track: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """A trained model has one home."""
        super().__post_init__()
        self._per_pair("draw")
        if self.give not in ("rows", "update", "nothing"):
            raise AskError(f"a Fit gives 'rows', 'update' or 'nothing', not {self.give!r}")
        if self.compress is not None and self.give != "update":
            raise AskError("what is compressed is an update: say give='update'")
        if isinstance(self.models, Own):
            if self.keep not in (None, self.models.slot):
                raise AskError("a Fit of an Own model stays in its own slot")
            self._set(keep=self.models.slot if self.track else None)
        for name in ("pull", "drift", "distil"):
            if (rider := getattr(self, name)) is not None:
                self._set(**{name: _check_rider(name, rider, self.m)})
        if self.columns is not None:
            self._set(columns=_index(self.columns, "columns"))
        if self.plan.ahead and any(r is not None for r in (self.columns, self.pull, self.drift, self.distil)):
            raise AskError("a plan that looks ahead goes without columns, pull, drift and distil")

    @property
    def public_only(self) -> bool:
        """Whether no private sample is looked at."""
        return self.distil is not None and self.distil.alone

    def steps_for(self, samples: int) -> int:
        """How many steps a client with this many private samples takes."""
        if self.distil is not None and self.distil.alone:
            return replace(self.plan, batch=self.distil.batch).steps_for(int(self.distil.targets.shape[1]))
        return self.plan.steps_for(samples)


@dataclass(frozen=True, eq=False)
class Predict(Ask):
    """Outputs on public inputs, which are referred to by name: m×P×C, in eval mode; `soft`: as Task.soft has them."""

    kind: ClassVar[str] = "predict"
    inputs: str = "public"
    buffers: Buffers = field(default="personal", kw_only=True)
    soft: bool = field(default=False, kw_only=True)
    coarse: Coarse | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Only probabilities have a range to be rounded in."""
        super().__post_init__()
        if self.coarse is not None and not self.soft:
            raise AskError("what is made coarse are probabilities: say soft=True")


@dataclass(frozen=True, eq=False)
class Evaluate(Ask):
    """The task's metrics on a whole split, per pair, in eval mode."""

    kind: ClassVar[str] = "evaluate"
    split: str = "test"
    metrics: tuple[str, ...] | None = field(default=None, kw_only=True)  # default: all the task has
    buffers: Buffers = field(default="personal", kw_only=True)


OK, ABSENT, NONFINITE, LATE, MALFORMED, REFUSED = range(6)
REASONS = ("ok", "absent", "not finite", "late", "malformed", "refused")
_NOTHING = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back. A pair that is not ok has a reason, and its values are zero; no algorithm checks for NaN.

    Only the fields of the ask are there: `rows` (Gradient, Fit), `sums` and `weight` (give="sum"), `gram`, `loss`,
    `outputs` (Predict), `choice` (a Fit that distils: which of its targets each client took), `metrics` (Evaluate).
    """

    reason: Tensor  # m codes, see REASONS
    rows: Tensor = _NOTHING
    sums: Tensor = _NOTHING
    weight: Tensor = _NOTHING
    gram: Tensor = _NOTHING
    loss: Tensor = _NOTHING
    outputs: Tensor = _NOTHING
    choice: Tensor = _NOTHING
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ok(self) -> Tensor:
        """Which pairs were answered."""
        return self.reason == OK

    @property
    def why(self) -> list[str]:
        """The reason of every pair, in words."""
        return [REASONS[code] for code in self.reason.tolist()]
