"""What enters a fleet wrongly is refused there, in one sentence that names the client and the thing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from builders import batchnorm, classes, linear, mlp
from coterie.algorithms import ALGORITHMS, make
from coterie.asks import Ask, Distil, Drift, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict, Pull
from coterie.data.digits import digits
from coterie.data.partitions import partition
from coterie.data.population import Client, population
from coterie.errors import AskError, CoterieError, DeviceError, ModelError, SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]
PLAN = Plan(steps=1, batch=4)
ALL = [0, 1, 2, 3]


def some_without() -> Any:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 6, generator=g), torch.arange(9) % 3
    clients = [Client("full", (x, y), (x, y), (x, y)), Client("no test", (x, y))]
    return population(clients, model=linear)


def x(rows: int = 4, width: int = 21, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(rows, width, dtype=dtype)


WIDE = "but the model of client 'site-2' has 21 parameters"
REFUSED: dict[str, tuple[Callable[[], Ask], type[CoterieError], str]] = {
    "rows too wide": (lambda: Gradient([2], x(1, 22), 4), ModelError, f"rows are 22 wide, {WIDE}"),
    "rows too narrow": (lambda: Fit([2, 0], x(2, 20), PLAN), ModelError, f"rows are 20 wide, {WIDE}"),
    "one row too wide": (lambda: Loss([2], torch.zeros(3)), ModelError, f"rows are 3 wide, {WIDE}"),
    "pull too wide": (lambda: Fit([2], x(1), PLAN, pull=Pull(x(1, 9))), ModelError, f"pull are 9 wide, {WIDE}"),
    "drift too wide": (lambda: Fit([2], x(1), PLAN, drift=Drift(x(1, 9))), ModelError, f"drift are 9 wide, {WIDE}"),
    "own pull too wide": (lambda: Fit([2], Own(), PLAN, pull=Pull(x(1, 9))), ModelError, f"pull are 9 wide, {WIDE}"),
    "rows of another dtype": (
        lambda: Predict(ALL, x(dtype=torch.float64)),
        AskError,
        "the rows are torch.float64, the fleet computes in torch.float32",
    ),
    "drift of another dtype": (
        lambda: Fit(ALL, x(), PLAN, drift=Drift(x(dtype=torch.float64))),
        AskError,
        "the rows of the drift are torch.float64",
    ),
    "rows on another device": (
        lambda: Loss(ALL, torch.zeros(4, 21, device="meta")),
        AskError,
        "the rows are on meta, the fleet on cpu",
    ),
    "a client too many": (lambda: Evaluate([0, 4], x(2)), AskError, "there are clients 0 to 3, not 4"),
    "a client below zero": (lambda: Evaluate([0, -1], x(2)), AskError, "there are clients 0 to 3, not -1"),
    "an unknown split": (lambda: Loss(ALL, x(), split="val"), AskError, "no split 'val': there are train, validation"),
    "an unknown split to judge on": (lambda: Evaluate(ALL, x(), "dev"), AskError, "no split 'dev'"),
    "an unknown metric": (
        lambda: Evaluate(ALL, x(), metrics=("acc",)),
        AskError,
        "no metric 'acc' in classification: there are accuracy",
    ),
    "unknown public inputs": (
        lambda: Predict(ALL, x(), inputs="publik"),
        AskError,
        "no public inputs called 'publik': there are public",
    ),
    "unknown inputs to distil on": (
        lambda: Fit(ALL, x(), PLAN, distil=Distil(torch.zeros(1, 13, 3), "other")),
        AskError,
        "no public inputs called 'other'",
    ),
    "targets for other inputs": (
        lambda: Fit(ALL, x(), PLAN, distil=Distil(torch.zeros(1, 12, 3), "public")),
        AskError,
        "distil has targets for 12 inputs, but 'public' are 13",
    ),
    "columns beyond the row": (
        lambda: Fit(ALL, x(), PLAN, columns=torch.tensor([3, 21])),
        AskError,
        "columns are numbered 0 to 20, not up to 21",
    ),
    "columns below zero": (lambda: Fit(ALL, x(), PLAN, columns=torch.tensor([-1])), AskError, "columns are numbered"),
    "a gradient tracked twice": (lambda: Gradient([1, 1], x(2), 4), AskError, "tracked once in an ask"),
    "a fit tracked twice": (lambda: Fit([1, 1], x(2), PLAN), AskError, "say track=False"),
    "a fit kept twice": (lambda: Fit([1, 1], x(2), PLAN, track=False, keep="a"), AskError, "tracked once"),
    "a loss tracked twice": (
        lambda: Loss([1, 1], x(2), 4, sampling="epoch", track=True),
        AskError,
        "tracked once",
    ),
}


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    made: Fleet = request.param(classes(linear))
    return made


@pytest.mark.parametrize("name", REFUSED)
def test_asks_that_do_not_fit_the_fleet(name: str, fleet: Fleet) -> None:
    make, error, says = REFUSED[name]
    fleet.begin(0)
    before = fleet.ledger.totals()
    for ask in (fleet.ask, fleet.watch):
        if ask == fleet.watch and "twice" in name:
            continue  # a watcher tracks nothing
        with pytest.raises(error) as caught:
            ask(make())
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    assert fleet.ledger.totals() == before
    assert not [k for k in fleet.state() if not k.startswith("ledger/")]


def test_names_of_splits_and_parts(fleet: Fleet) -> None:
    with pytest.raises(AskError, match="no split 'dev': there are train, validation, test"):
        fleet.sizes("dev")
    with pytest.raises(ModelError, match="no parameter below 'classifier'"):
        fleet.columns("classifier")
    with pytest.raises(AskError, match="give it a client with the key 'server'"):
        fleet.server  # noqa: B018


@pytest.mark.parametrize("kind", FLEETS)
def test_a_split_without_data(kind: type[Fleet]) -> None:
    fleet = kind(some_without())
    both = torch.arange(2)
    for ask in (
        Loss(both, Own(), split="test"),
        Gradient(both, Own(), 4, split="test"),
        Fit(both, Own(), PLAN, split="test"),
    ):
        with pytest.raises(AskError, match="client 'no test' has no test data to answer with"):
            fleet.ask(ask)
    assert fleet.ask(Loss([0], Own(), split="test")).ok.all()
    metrics = fleet.ask(Evaluate(both, Own())).metrics  # to be judged on nothing is no error: there is no number
    assert all(value[1].isnan() and not value[0].isnan() for value in metrics.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("kind", FLEETS)
def test_cuda_where_there_is_none(kind: type[Fleet]) -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(DeviceError, match="CUDA was asked for, but torch sees no CUDA device here: use --device"):
            kind(classes(), device=device)


@pytest.mark.parametrize("kind", FLEETS)
def test_whole_numbers_are_no_dtype_to_compute_in(kind: type[Fleet]) -> None:
    with pytest.raises(SettingError, match=r"a fleet computes in a floating dtype, not torch\.int64"):
        kind(classes(), dtype=torch.int64)


@pytest.mark.parametrize("kind", FLEETS)
def test_mixed_architectures_where_they_must_be_equal(kind: type[Fleet]) -> None:
    fleet = kind(classes([mlp, linear, batchnorm]))
    mixed = r"different architectures \(\{'site-0': 83, 'site-1': 21, 'site-2': 91\}\): only Own models"
    for look in (
        lambda: fleet.d,
        lambda: fleet.initial(),
        lambda: fleet.initial(shared=False),
        lambda: fleet.columns("head"),
    ):
        with pytest.raises(ModelError, match=mixed):
            look()
    widths = "clients 'site-0' and 'site-1' have models of different widths"
    for ask in (
        Gradient(ALL, Own(), 4),
        Gradient(ALL, Own(), 4, give="sum", into=[0, 0, 0, 0]),
        Gradient(ALL, Own(), 4, give="gram", group=[0, 0, 0, 0]),
        Gradient(ALL, Own(), 4, sketch=3),
        Fit(ALL, Own(), PLAN),
        Fit(ALL, Own(), PLAN, give="rows"),
    ):
        with pytest.raises(ModelError, match=widths):
            fleet.ask(ask)
    with pytest.raises(ModelError, match="rows are 83 wide, but the model of client 'site-1' has 21 parameters"):
        fleet.ask(Loss(ALL, torch.zeros(83)))
    assert fleet.ask(Gradient([0, 3], Own(), 4)).rows.shape == (2, 83)  # those that are equal may be asked together
    fleet.ask(Fit(ALL, Own(), PLAN, give="nothing"), Predict(ALL, Own()), Evaluate(ALL, Own()), Loss(ALL, Own()))


@pytest.mark.parametrize("name", [n for n, kind in ALGORITHMS.items() if not kind.mixed])
def test_algorithms_for_equal_models_refuse_mixed_ones_at_once(name: str) -> None:
    fleet = StackedFleet(classes([mlp, linear]))
    with pytest.raises(ModelError, match="different architectures"):
        make(name, rounds=2, groups=(0, 0, 1, 1)).init(fleet)


def test_more_groups_than_clients() -> None:
    with pytest.raises(SettingError, match="true group of each of 4 clients, not 5"):
        make("oracle", groups=(0, 1, 2, 3, 4)).init(StackedFleet(classes()))
    g = torch.randn(4, 6)
    with pytest.raises(CoterieError, match="3 groups given for 2 clients"):
        population([Client(k, (g, torch.zeros(4))) for k in "ab"], model=lambda: nn.Linear(6, 1), groups=[0, 1, 2])
    with pytest.raises(CoterieError, match="clients"):
        partition("iid", digits(), clients=5000)


class Data(nn.Module):
    """Its path depends on its data, which no stack can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else -self.a(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x + torch.randn_like(x) * 0.1) if self.training else self.a(x)


@pytest.mark.parametrize(
    ("model", "says"), [(Data, "Data cannot run under vmap"), (Noisy, "Noisy draws random numbers")]
)
def test_models_that_no_stack_can_take_are_sent_to_the_loop(model: type[nn.Module], says: str) -> None:
    people = classes(model)
    fleet = StackedFleet(people)
    for ask in (Gradient(ALL, fleet.initial(), 4), Fit(ALL, Own(), PLAN)):
        with pytest.raises(ModelError, match=f"{says}.*LoopFleet"):
            fleet.ask(ask)
        loops = [LoopFleet(people).ask(ask) for _ in range(2)]
        assert loops[0].ok.all()
        assert torch.equal(loops[0].rows, loops[1].rows)  # keyed there too
