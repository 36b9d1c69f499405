"""What travels, counted by hand: three numbers per ask and client, for every kind of ask and every way to give."""

from collections.abc import Callable

import pytest
import torch

from builders import classes, linear, mlp
from coterie.asks import Ask, Distil, Drift, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict, Pull
from coterie.data.population import Client, population
from coterie.fleet.base import Fleet
from coterie.fleet.faults import Faulty
from coterie.fleet.ledger import Ledger
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]
D = 21  # a linear model of 6 inputs and 3 classes
PUBLIC = 13 * 3  # public inputs × classes: a Predict's answer, and one target of a Distil
PLAN = Plan(steps=1, batch=4)
ONE = torch.zeros(4, dtype=torch.long)


def x(f: Fleet, rows: int = 4) -> torch.Tensor:
    return torch.zeros(rows, D, dtype=f.dtype)


def targets(f: Fleet, r: int) -> torch.Tensor:
    return torch.full((r, 13, 3), 1 / 3, dtype=f.dtype)


def same_rows(f: Fleet) -> Ask:
    start, at = x(f), torch.tensor([2, 0, 2, 1])
    return Fit(f.everyone, start, PLAN, at=at, pull=Pull(start, at=at))


def same_row(f: Fleet) -> Ask:
    start = x(f)[0]
    return Fit(f.everyone, start, PLAN, pull=Pull(start, 0.3))


# name → (ask, up of each of four clients, down of each, down when every payload counts once)
Four = list[int]
CASES: dict[str, tuple[Callable[[Fleet], Ask], Four, Four, int]] = {
    "a gradient each": (lambda f: Gradient(f.everyone, x(f), 4), [D] * 4, [D] * 4, 4 * D),
    "one model for all": (lambda f: Gradient(f.everyone, x(f)[0], 4), [D] * 4, [D] * 4, D),
    "two models by at": (lambda f: Gradient([0, 1, 2], x(f), 4, at=[3, 1, 3]), [D, D, D, 0], [D, D, D, 0], 2 * D),
    "the same model twice at a client": (  # the row travels once, the two gradients twice
        lambda f: Gradient([0, 0, 0, 1], x(f), 4, at=[2, 2, 1, 2], draw=[1, 2, 3, 4], track=False),
        [3 * D, D, 0, 0],
        [2 * D, D, 0, 0],
        2 * D,
    ),
    "midpoints are rows of their own": (
        lambda f: Gradient([0, 1, 1], x(f), 4, at=[[0, 1], [0, 1], [1, 2]], track=False),
        [D, 2 * D, 0, 0],
        [D, 2 * D, 0, 0],
        2 * D,
    ),
    "a sketch": (lambda f: Gradient(f.everyone, x(f)[0], 4, sketch=5), [5] * 4, [D] * 4, D),
    "sums: one row up per client and output": (
        lambda f: Gradient([0, 0, 0, 1], x(f), 4, at=[0, 1, 2, 0], give="sum", into=[0, 0, 1, 1], track=False),
        [2 * D, D, 0, 0],
        [3 * D, D, 0, 0],
        3 * D,
    ),
    "a gram matrix takes the gradients": (
        lambda f: Gradient(f.everyone, x(f)[0], 4, give="gram", group=ONE),
        [D] * 4,
        [D] * 4,
        D,
    ),
    "a sketched gram matrix": (
        lambda f: Gradient(f.everyone, x(f)[0], 4, give="gram", group=ONE, sketch=7),
        [7] * 4,
        [D] * 4,
        D,
    ),
    "an own gradient": (lambda f: Gradient(f.everyone, Own(), 4), [D] * 4, [0] * 4, 0),
    "a loss": (lambda f: Loss([0, 0, 2], x(f), 4, at=[0, 1, 1]), [2, 0, 1, 0], [2 * D, 0, D, 0], 2 * D),
    "an own loss": (lambda f: Loss(f.everyone, Own()), [1] * 4, [0] * 4, 0),
    "updates": (lambda f: Fit(f.everyone, x(f)[0], PLAN), [D] * 4, [D] * 4, D),
    "models": (lambda f: Fit([1, 3], x(f, 2), PLAN, give="rows"), [0, D, 0, D], [0, D, 0, D], 2 * D),
    "nothing": (lambda f: Fit(f.everyone, x(f)[0], PLAN, give="nothing", keep="a"), [0] * 4, [D] * 4, D),
    "an own fit": (lambda f: Fit(f.everyone, Own(), PLAN, give="nothing"), [0] * 4, [0] * 4, 0),
    "an own fit that shows its model": (lambda f: Fit(f.everyone, Own(), PLAN, give="rows"), [D] * 4, [0] * 4, 0),
    "some columns": (lambda f: Fit(f.everyone, x(f)[0], PLAN, columns=torch.arange(5)), [5] * 4, [D] * 4, D),
    "a pull to a row each": (
        lambda f: Fit(f.everyone, x(f)[0], PLAN, pull=Pull(x(f) + 1)),
        [D] * 4,
        [2 * D] * 4,
        5 * D,
    ),
    "a pull to one row": (lambda f: Fit(f.everyone, x(f), PLAN, pull=Pull(x(f)[0])), [D] * 4, [2 * D] * 4, 5 * D),
    "a pull to other rows": (
        lambda f: Fit(f.everyone, x(f), PLAN, pull=Pull(x(f) + 1)),
        [D] * 4,
        [2 * D] * 4,
        8 * D,
    ),
    "a pull to the start": (same_row, [D] * 4, [D] * 4, D),
    "a pull to the starts by at": (same_rows, [D] * 4, [D] * 4, 3 * D),
    "a pull to the start of another": (
        lambda f: (lambda rows: Fit(f.everyone, rows, PLAN, at=[0, 1, 2, 3], pull=Pull(rows, at=[1, 0, 2, 2])))(x(f)),
        [D] * 4,
        [2 * D] * 4,
        7 * D,
    ),
    "pull and drift by at": (
        lambda f: Fit(
            f.everyone, Own(), PLAN, pull=Pull(x(f), at=[0, 1, 0, 1]), drift=Drift(x(f), at=[[0, 1]] * 3 + [[1, 2]])
        ),
        [D] * 4,
        [2 * D] * 4,
        2 * D + 2 * D,
    ),
    "a rider that a client already has": (
        lambda f: Fit(
            [2, 2], x(f, 2), PLAN, draw=[1, 2], track=False, pull=Pull(x(f)[0] + 1), drift=Drift(x(f), at=[1, 2])
        ),
        [0, 0, 2 * D, 0],
        [0, 0, 2 * D + D + 2 * D, 0],
        2 * D + D + 2 * D,
    ),
    "targets to choose from": (
        lambda f: Fit(f.everyone, Own(), PLAN, give="nothing", distil=Distil(targets(f, 5), "public", at=[[0, 1]] * 4)),
        [0] * 4,
        [2 * PUBLIC] * 4,
        2 * PUBLIC,
    ),
    "all targets": (
        lambda f: Fit([0, 2], Own(), PLAN, give="nothing", distil=Distil(targets(f, 3), "public")),
        [0] * 4,
        [3 * PUBLIC, 0, 3 * PUBLIC, 0],
        3 * PUBLIC,
    ),
    "predictions": (lambda f: Predict([0, 0, 1], x(f), at=[0, 1, 0]), [2 * PUBLIC, PUBLIC, 0, 0], [2 * D, D, 0, 0],
                    2 * D),
    "metrics": (lambda f: Evaluate(f.everyone, x(f)[0], metrics=("loss", "accuracy")), [2] * 4, [D] * 4, D),
    "all metrics": (lambda f: Evaluate([1], Own()), [0, 7, 0, 0], [0] * 4, 0),
}  # fmt: skip
PEOPLE = classes(linear)


@pytest.mark.parametrize(("kind", "dtype"), [(StackedFleet, torch.float32), (LoopFleet, torch.float64)])
@pytest.mark.parametrize("name", CASES)
def test_numbers_and_bytes_are_those_counted_by_hand(name: str, kind: type[Fleet], dtype: torch.dtype) -> None:
    make, up, down, once = CASES[name]
    fleet, b = kind(PEOPLE, dtype=dtype), dtype.itemsize
    fleet.begin(0)
    ask = make(fleet)
    assert fleet.ask(ask).ok.all()
    sent = fleet.ledger.sent[ask.kind]
    assert sent[:, 0].tolist() == up
    assert sent[:, 2].tolist() == down
    assert (sent[:, 1] == b * sent[:, 0]).all()
    assert (sent[:, 3] == b * sent[:, 2]).all()
    assert fleet.ledger.broadcast[ask.kind].tolist() == [sum(up), b * sum(up), once, b * once]
    assert list(fleet.ledger.sent) == [ask.kind]


@pytest.mark.parametrize("name", CASES)
def test_absent_clients_move_nothing_and_the_others_what_they_moved_before(name: str) -> None:
    make, up, down, _ = CASES[name]
    for away in range(4):
        fleet = StackedFleet(PEOPLE)
        fleet.begin(0)
        fleet.present[away] = False
        ask = make(fleet)
        fleet.ask(ask)
        here = [c != away for c in range(4)]
        sent = fleet.ledger.sent.get(ask.kind, torch.zeros(4, 4).numpy())
        assert sent[:, 0].tolist() == [n * h for n, h in zip(up, here, strict=True)]
        assert sent[:, 2].tolist() == [n * h for n, h in zip(down, here, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_wrapper_counts_what_would_have_moved(name: str) -> None:
    make, up, down, once = CASES[name]
    fleet = Faulty(LoopFleet(PEOPLE), ["site-1"])
    fleet.begin(0)
    ask = make(fleet)
    fleet.ask(ask)
    assert fleet.ledger.sent[ask.kind][:, 0].tolist() == up
    assert fleet.ledger.sent[ask.kind][:, 2].tolist() == down
    assert fleet.ledger.broadcast[ask.kind].tolist()[2] == once


@pytest.mark.parametrize("kind", FLEETS)
def test_nobody_there_is_nothing_moved(kind: type[Fleet]) -> None:
    fleet = kind(PEOPLE)
    fleet.begin(0)
    fleet.present[:] = False
    for make, *_ in CASES.values():
        ask = make(fleet)
        answer = fleet.ask(ask)
        assert set(answer.why) == {"absent"}
        assert len(answer.reason) == ask.m
    assert fleet.ledger.totals() == Ledger(4).totals()


@pytest.mark.parametrize("kind", FLEETS)
def test_asks_add_up_by_kind_and_watching_counts_nothing(kind: type[Fleet]) -> None:
    fleet = kind(PEOPLE)
    fleet.begin(0)
    fleet.ask(Gradient(fleet.everyone, x(fleet)[0], 4), Loss([0], x(fleet)[:1], 4))
    fleet.ask(Gradient([3], x(fleet)[:1], 4))
    before = fleet.ledger.copy()
    for make, *_ in CASES.values():
        fleet.watch(make(fleet))
    fleet.reveal(Own())
    totals = fleet.ledger.totals()
    assert totals == before.totals() == {
        "sent": {
            "up": {"numbers": 5 * D + 1, "bytes": 4 * (5 * D + 1)},
            "down": {"numbers": 6 * D, "bytes": 24 * D},
        },
        "broadcast": {
            "up": {"numbers": 5 * D + 1, "bytes": 4 * (5 * D + 1)},
            "down": {"numbers": 3 * D, "bytes": 12 * D},
        },
    }  # fmt: skip
    assert fleet.ledger.sent["gradient"][:, 0].tolist() == [D, D, D, 2 * D]


@pytest.mark.parametrize("kind", FLEETS)
def test_the_server_is_no_client_of_the_ledger(kind: type[Fleet]) -> None:
    g = torch.Generator().manual_seed(0)
    own = [(torch.randn(5, 6, generator=g), torch.arange(5) % 3) for _ in range(3)]
    fleet = kind(population([Client(k, d) for k, d in zip(("a", "b", "server"), own, strict=True)], model=linear))
    fleet.begin(0)
    fleet.ask(Fit(fleet.server, x(fleet)[:1], PLAN))
    assert fleet.ledger.totals() == Ledger(2).totals()
    fleet.ask(Fit([0, 2, 1], x(fleet), PLAN, at=[1, 2, 1]))
    assert fleet.ledger.sent["fit"][:, [0, 2]].tolist() == [[D, D], [D, D]]
    assert fleet.ledger.broadcast["fit"].tolist() == [2 * D, 8 * D, D, 4 * D]


def test_clients_of_different_widths_send_their_own() -> None:
    for kind in FLEETS:
        fleet = kind(classes([linear, mlp]))
        fleet.begin(0)
        for c, width in ((0, D), (1, 83)):
            fleet.ask(Fit([c], torch.zeros(1, width), PLAN))
        assert fleet.ledger.sent["fit"][:, [0, 2]].tolist() == [[D, D], [83, 83], [0, 0], [0, 0]]


def test_a_copy_does_not_follow_and_tensors_bring_it_back() -> None:
    fleet = StackedFleet(PEOPLE)
    fleet.ask(Gradient(fleet.everyone, x(fleet), 4), Loss(fleet.everyone, x(fleet), 4))
    copy, state, totals = fleet.ledger.copy(), fleet.ledger.state(), fleet.ledger.totals()
    other = Ledger(4)
    other.load(state)
    fleet.ask(Gradient(fleet.everyone, x(fleet), 4))
    for kept in (copy, other):
        assert kept.totals() == totals
    assert fleet.ledger.totals() != totals
    assert {k: v.tolist() for k, v in other.state().items()} == {k: v.tolist() for k, v in state.items()}
