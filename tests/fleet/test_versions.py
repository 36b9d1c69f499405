"""A client answers round t from its version before t: retries leave no trace, and a saved fleet goes on bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from builders import Dropping, batchnorm, classes, linear, mlp
from coterie.asks import Answer, Fit, Gradient, Loss, Own, Plan, Predict
from coterie.errors import AskError
from coterie.fleet.base import Fleet
from coterie.fleet.faults import Faulty
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Fraction, Participation
from coterie.fleet.stacked import StackedFleet

BASE = {"batch": 6, "sampling": "epoch", "keep_optimiser": True}
SGD = Plan(steps=2, lr=0.1, momentum=0.9, **BASE)
ADAM = Plan(epochs=1, lr=0.01, optimiser="adam", **BASE)
MIXED = [mlp, batchnorm]


def fleets(make: object = batchnorm) -> dict[str, Callable[[], Fleet]]:
    people = classes(make, size=9, ragged=3)  # type: ignore[arg-type]
    options = {"seed": 4, "dtype": torch.float64}
    return {
        "stacked": lambda: StackedFleet(people, **options),
        "stacked, two rows at once": lambda: StackedFleet(people, chunk=2, **options),
        "loop": lambda: LoopFleet(people, **options),
        "half away": lambda: Participation(StackedFleet(people, **options), Fraction(0.5)),
        "faulty and half away": lambda: Participation(
            Faulty(LoopFleet(people, **options), ["site-1"]), Fraction(0.5)
        ),
    }  # fmt: skip


FLEETS = fleets()


def phases(fleet: Fleet) -> list[Answer]:
    """Everything that a client remembers moves: models, buffers, optimisers, and places in streams."""
    return [
        fleet.ask(Fit(fleet.everyone, Own("a"), SGD, give="nothing")),
        *fleet.ask(
            Fit([2, 0, 1], Own("a"), SGD, give="nothing", memory="other"),
            Fit(fleet.everyone, Own("b", shared=False), ADAM, give="nothing"),
            Loss(fleet.everyone, Own("b", shared=False), 5, sampling="epoch", track=True),
            Predict(fleet.everyone, Own("a")),
        ),
    ]


def wide_phases(fleet: Fleet) -> list[Answer]:
    """What only populations of one architecture can be asked."""
    x = fleet.initial() * (1 + 0.1 * fleet.t)
    return [
        *phases(fleet),
        fleet.ask(Gradient(fleet.everyone, x, 5, sampling="epoch")),
        fleet.ask(Fit(fleet.everyone, x[0], SGD, keep="b")),
        fleet.ask(Gradient(fleet.everyone, Own("b"), 5)),
    ]


def mischief(fleet: Fleet) -> None:
    """Another first try: other questions, other slots, to other clients."""
    fleet.ask(Loss(fleet.everyone, Own("a"), 3))
    fleet.ask(Fit([3, 1], Own("a"), SGD, give="nothing"), Fit([0], Own("new"), ADAM, give="nothing"))
    fleet.uniform("noise", fleet.everyone)


def same(one: list[Answer], other: list[Answer]) -> None:
    for a, b in zip(one, other, strict=True):
        for name in ("reason", "rows", "loss", "outputs"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", FLEETS)
def test_a_round_asked_twice_is_as_if_the_first_try_never_happened(name: str) -> None:
    once, twice = FLEETS[name](), FLEETS[name]()
    for t in (0, 4):
        once.begin(t)
        expected = wide_phases(once)
        for attempt in (mischief, wide_phases, None):
            twice.begin(t)
            if attempt is not None:
                attempt(twice)
        same(wide_phases(twice), expected)
        same_state(twice.state(), once.state())
        assert twice.ledger.totals() == once.ledger.totals()
    assert {k.rpartition("/")[2] for k in once.state()} >= {"a", "b", "momentum_buffer", "exp_avg", "step", "train"}


@pytest.mark.parametrize("name", FLEETS)
def test_a_saved_fleet_goes_on_bit_for_bit(name: str) -> None:
    fleet = FLEETS[name]()
    fleet.begin(1)
    wide_phases(fleet)
    saved = fleet.state()
    frozen = {k: v.clone() for k, v in saved.items()}
    fresh = FLEETS[name]()
    fresh.begin(0)
    mischief(fresh)  # what was there before is gone
    fresh.load({k: v.clone() for k, v in saved.items()})
    same_state(fresh.state(), frozen)
    for t in (2, 3):
        for each in (fleet, fresh):
            each.begin(t)
        same(wide_phases(fleet), wide_phases(fresh))
    same_state(fleet.state(), fresh.state())
    assert fleet.ledger.totals() == fresh.ledger.totals()
    assert any(not torch.equal(v, frozen[k]) for k, v in fleet.state().items())
    same_state(saved, frozen)  # later rounds did not write into what was given away


@pytest.mark.parametrize("name", ["stacked", "loop"])
@pytest.mark.parametrize("models", [MIXED, [Dropping, linear]], ids=["mlp and batchnorm", "dropout and linear"])
def test_so_do_populations_of_two_architectures(name: str, models: object) -> None:
    make = fleets(models)[name]
    fleet, fresh, retried = make(), make(), make()
    fleet.begin(0)
    phases(fleet)
    fresh.load(fleet.state())
    retried.load(fleet.state())
    retried.begin(1)
    mischief(retried)
    for each in (fleet, fresh, retried):
        each.begin(1)
    expected = phases(fleet)
    same(phases(fresh), expected)
    same(phases(retried), expected)
    same_state(fleet.state(), fresh.state())
    same_state(fleet.state(), retried.state())


@pytest.mark.parametrize("name", ["stacked", "loop"])
def test_keys_may_be_any_text(name: str) -> None:
    make = {"stacked": StackedFleet, "loop": LoopFleet}[name]
    people = classes()
    object.__setattr__(people, "keys", ("ledger", "a/b", "own/model", "0"))
    fleet, fresh = make(people), make(people)
    fleet.begin(0)
    fleet.ask(Fit(fleet.everyone, Own(), SGD, give="nothing"))
    fresh.load(fleet.state())
    same_state(fresh.state(), fleet.state())
    for a, b in zip(fleet.reveal(Own()), fresh.reveal(Own()), strict=True):
        assert torch.equal(a, b)
    assert len({tuple(row.tolist()) for row in fresh.reveal(Own())}) == 4


@pytest.mark.parametrize("name", FLEETS)
def test_an_older_round_is_refused_until_something_is_loaded(name: str) -> None:
    fleet = FLEETS[name]()
    fleet.begin(3)
    with pytest.raises(AskError, match="round 2 is over: clients keep their version before round 3 only"):
        fleet.begin(2)
    assert fleet.t == 3
    fleet.load(fleet.state())
    fleet.begin(2)
    assert fleet.t == 2


@pytest.mark.parametrize("name", FLEETS)
def test_a_round_that_was_begun_changes_nothing_by_itself(name: str) -> None:
    fleet, other = FLEETS[name](), FLEETS[name]()
    fleet.begin(0)
    wide_phases(fleet)
    other.load(fleet.state())
    for t in (1, 2, 3):
        fleet.begin(t)
        assert fleet.phases == 0
    other.begin(3)
    same(wide_phases(fleet), wide_phases(other))
    assert fleet.phases == 5


@pytest.mark.parametrize("name", FLEETS)
def test_watching_leaves_no_trace(name: str) -> None:
    watched, other = FLEETS[name](), FLEETS[name]()
    for each in (watched, other):
        each.begin(0)
        wide_phases(each)
    before = {k: v.clone() for k, v in watched.state().items()}
    x = watched.initial()
    watched.watch(Fit(watched.everyone, Own("a"), SGD))
    watched.watch(Fit(watched.everyone, x, SGD, keep="b"))
    watched.watch(Gradient(watched.everyone, Own("a"), 4, sampling="epoch"))
    watched.watch(Loss(watched.everyone, x, 4, sampling="epoch", track=True))
    assert watched.watch(Loss(watched.everyone, x)).ok.all()  # whoever is away
    same_state(watched.state(), before)
    same(wide_phases(watched), wide_phases(other))
