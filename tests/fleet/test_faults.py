"""One client says NaN, infinity or nothing in time: its answers are zero and not ok, and nobody else notices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import batchnorm, classes, linear, mlp
from coterie.asks import Answer, Ask, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict
from coterie.data.population import Client, population
from coterie.fleet.base import Fleet
from coterie.fleet.faults import Alter, Faulty, nan, one_infinity
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]
BAD = 1
CLIENTS = torch.tensor([0, 1, 2, 1, 3, 0])
AT = torch.tensor([3, 0, 2, 1, 1, 2])
DRAW = torch.arange(6)
INTO = torch.tensor([0, 1, 0, 0, 2, 2])
GROUP = torch.tensor([1, 0, 1, 1, 0, 0])
WEIGHTS = torch.linspace(0.2, 1.2, 6, dtype=torch.float64)
PLAN = Plan(steps=3, batch=5, lr=0.1, momentum=0.9)
MANY = {"at": AT, "draw": DRAW}


def rows(fleet: Fleet) -> Tensor:
    return fleet.initial(shared=False) * 1.5


ASKS: dict[str, Callable[[Fleet], Ask]] = {
    "rows": lambda f: Gradient(CLIENTS, rows(f), 4, track=False, **MANY),
    "sketch": lambda f: Gradient(CLIENTS, rows(f), 4, sketch=6, track=False, **MANY),
    "update": lambda f: Fit(CLIENTS, rows(f), PLAN, track=False, **MANY),
    "models": lambda f: Fit(CLIENTS, rows(f), PLAN, give="rows", track=False, **MANY),
    "nothing": lambda f: Fit(f.everyone, rows(f), PLAN, give="nothing", keep="a"),
    "own": lambda f: Fit(f.everyone, Own(), PLAN, give="rows"),
    "loss": lambda f: Loss(CLIENTS, rows(f), 4, **MANY),
    "predict": lambda f: Predict(CLIENTS, rows(f), at=AT),
}
SUM: dict[str, Any] = {"give": "sum", "into": INTO, "weights": WEIGHTS, "outputs": 4}
GRAM: dict[str, Any] = {"give": "gram", "group": GROUP}


def exactly(answer: Answer, expected: Answer, bad: list[bool], reason: str) -> None:
    """Zeros and the reason where bad; elsewhere the very numbers of the undisturbed run."""
    assert answer.why == [reason if b else "ok" for b in bad]
    hidden = torch.tensor(bad)
    for name in ("rows", "loss", "outputs"):
        value, undisturbed = getattr(answer, name), getattr(expected, name)
        assert value.shape == undisturbed.shape
        if len(value):
            assert torch.equal(value[~hidden], undisturbed[~hidden])
            assert not value[hidden].any()
            assert undisturbed[hidden].any()


def begun(fleet: Fleet) -> Fleet:
    fleet.begin(0)
    return fleet


@pytest.mark.parametrize("alter", [nan, one_infinity])
@pytest.mark.parametrize("kind", FLEETS)
@pytest.mark.parametrize("name", ASKS)
def test_what_is_not_finite_on_its_way_counts_as_zero(name: str, kind: type[Fleet], alter: Alter) -> None:
    people = classes(batchnorm)
    fleet = begun(Faulty(kind(people, dtype=torch.float64), [f"site-{BAD}"], alter))
    ask = ASKS[name](fleet)
    expected = begun(kind(people, dtype=torch.float64)).ask(ask)
    exactly(fleet.ask(ask), expected, (ask.clients == BAD).tolist(), "not finite")


@pytest.mark.parametrize("kind", FLEETS)
def test_sums_and_inner_products_leave_out_what_did_not_arrive(kind: type[Fleet]) -> None:
    people = classes(mlp)
    bare = kind(people, dtype=torch.float64)
    each = begun(bare).ask(ASKS["rows"](bare)).rows
    for fleet, good in (
        (Faulty(kind(people, dtype=torch.float64), ["site-1"]), CLIENTS != BAD),
        (Faulty(kind(people, dtype=torch.float64), [], late=["site-1", "site-3"]), (CLIENTS != 1) & (CLIENTS != 3)),
        (Faulty(kind(people, dtype=torch.float64), []), CLIENTS >= 0),
    ):
        ask = Gradient(CLIENTS, rows(bare), 4, track=False, **MANY, **SUM)
        answer = begun(fleet).ask(ask)
        sums, weight = torch.zeros(4, bare.d, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        for p in range(6):
            if good[p]:
                sums[INTO[p]] += WEIGHTS[p] * each[p]
                weight[INTO[p]] += WEIGHTS[p]
        assert answer.ok.tolist() == good.tolist()
        torch.testing.assert_close(answer.sums, sums, rtol=0, atol=1e-12)
        torch.testing.assert_close(answer.weight, weight, rtol=0, atol=1e-12)

        gram = torch.zeros(2, 3, 3, dtype=torch.float64)
        slot = [0, 0, 1, 2, 1, 2]
        for p in range(6):
            for q in range(6):
                if good[p] and good[q] and GROUP[p] == GROUP[q]:
                    gram[GROUP[p], slot[p], slot[q]] = each[p] @ each[q]
        answer = begun(fleet).ask(Gradient(CLIENTS, rows(bare), 4, track=False, **MANY, **GRAM))
        assert answer.ok.tolist() == good.tolist()
        torch.testing.assert_close(answer.gram, gram, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
def test_a_sketched_gram_passes_through_a_wrapper_unchanged(kind: type[Fleet]) -> None:
    people = classes(mlp)
    fleets = [kind(people, dtype=torch.float64), Faulty(kind(people, dtype=torch.float64), [])]
    asks = [Gradient(CLIENTS, rows(fleets[0]), 4, sketch=9, track=False, **MANY, **more) for more in ({}, GRAM)]
    one, other = (begun(fleet).ask(*asks) for fleet in fleets)
    torch.testing.assert_close(one[0].rows, other[0].rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(one[1].gram, other[1].gram, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
@pytest.mark.parametrize("name", [*ASKS, "metrics"])
def test_late_is_late_whatever_was_said(name: str, kind: type[Fleet]) -> None:
    people = classes(batchnorm)
    fleet = begun(Faulty(kind(people, dtype=torch.float64), [f"site-{BAD}"], nan, late=[f"site-{BAD}"]))
    ask = (ASKS | {"metrics": lambda f: Evaluate(CLIENTS, rows(f), at=AT)})[name](fleet)
    expected = begun(kind(people, dtype=torch.float64)).ask(ask)
    answer = fleet.ask(ask)
    bad = ask.clients == BAD
    exactly(answer, expected, bad.tolist(), "late")
    for metric, value in answer.metrics.items():
        assert not value[bad].any()
        assert torch.equal(value[~bad], expected.metrics[metric][~bad])


def test_an_alteration_sees_the_ask_and_finite_lies_get_through() -> None:
    seen = []

    def flip(ask: Ask, values: Tensor) -> Tensor:
        seen.append((ask.kind, tuple(values.shape)))
        return -values

    people = classes(linear)
    fleet = begun(Faulty(LoopFleet(people, dtype=torch.float64), ["site-1"], flip))
    bare = begun(LoopFleet(people, dtype=torch.float64))
    ask = Fit(fleet.everyone, rows(fleet), PLAN)
    answer, honest = fleet.ask(ask), bare.ask(ask)
    assert answer.ok.all()
    assert torch.equal(answer.rows[1], -honest.rows[1])
    assert torch.equal(answer.rows[[0, 2, 3]], honest.rows[[0, 2, 3]])
    assert seen == [("fit", (1, 21)), ("fit", (1,))]


# Clients that diverge by themselves


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", FLEETS)
def test_a_model_that_diverged_hurts_nobody_else(kind: type[Fleet], poison: float) -> None:
    people = classes(mlp)
    fleet, calm = (kind(people, dtype=torch.float64) for _ in range(2))
    x = rows(fleet)
    bad = x.clone()
    bad[BAD] = poison
    each = torch.tensor([0, 1, 2, 3])
    sick = (each == BAD).tolist()
    for make in (
        lambda x: Gradient(each, x, 4),
        lambda x: Gradient(each, x, 4, sketch=5),
        lambda x: Loss(each, x, 4),
        lambda x: Predict(each, x),
        lambda x: Fit(each, x, PLAN),
        lambda x: Fit(each, x, PLAN, give="rows"),
    ):
        exactly(begun(fleet).ask(make(bad)), begun(calm).ask(make(x)), sick, "not finite")
    gradients = begun(calm).ask(Gradient(each, x, 4)).rows
    gradients[BAD] = 0
    total = begun(fleet).ask(Gradient(each, bad, 4, give="sum", into=torch.tensor([0, 1, 1, 0]), weights=WEIGHTS[:4]))
    w = WEIGHTS[:4, None] * gradients
    torch.testing.assert_close(total.sums, torch.stack([w[0] + w[3], w[1] + w[2]]), rtol=0, atol=1e-12)
    torch.testing.assert_close(total.weight, torch.stack([WEIGHTS[0] + WEIGHTS[3], WEIGHTS[2]]), rtol=0, atol=1e-12)
    gram = begun(fleet).ask(Gradient(each, bad, 4, give="gram", group=torch.zeros(4, dtype=torch.long))).gram[0]
    torch.testing.assert_close(gram, gradients @ gradients.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, optimiser="adam", momentum=0.0)], ids=["sgd", "adam"])
@pytest.mark.parametrize("kind", FLEETS)
def test_training_that_diverges_is_forgotten(kind: type[Fleet], plan: Plan) -> None:
    """The model at the client, buffers, moments and its place in the stream stay as before the round."""
    people = classes(batchnorm)
    fleet, calm = (kind(people, seed=1, dtype=torch.float64) for _ in range(2))
    plan = replace(plan, keep_optimiser=True, sampling="epoch")
    each = torch.arange(4)
    for f in (fleet, calm):
        f.begin(0)
        f.ask(Fit(each, Own(), plan, give="nothing"))
    before = fleet.state()
    x, kept = fleet.initial(), [row.clone() for row in fleet.reveal(Own())]
    bad = x.clone()
    bad[BAD] = float("nan")
    for f, start in ((fleet, bad), (calm, x)):
        f.begin(1)
        answer = f.ask(Fit(each, start, plan, keep="model"))
        assert answer.why[BAD] == ("not finite" if f is fleet else "ok")
        f.ask(Gradient(each, start, 5, sampling="epoch"))
    after, calm_after = fleet.state(), calm.state()
    assert torch.equal(fleet.reveal(Own())[BAD], kept[BAD])
    seen = set()
    for name, value in after.items():
        if name.startswith("ledger/"):
            continue
        if kind is StackedFleet:
            assert torch.equal(value[BAD], before[name][BAD]), name
            assert torch.equal(value[[0, 2, 3]], calm_after[name][[0, 2, 3]]), name
        elif name.startswith(f"{BAD}/"):
            assert torch.equal(value, before[name]), name
        else:
            assert torch.equal(value, calm_after[name]), name
        seen.add(name.split("/")[1])
    assert seen == {"own", "buffers", "optimiser", "place"}


@pytest.mark.parametrize("sketch", [None, 3])
@pytest.mark.parametrize("kind", FLEETS)
def test_a_gradient_whose_square_overflows_leaves_the_inner_products_of_others(
    kind: type[Fleet], sketch: int | None
) -> None:
    """Every number of it is finite, and so are its loss and its sums; its products with others need not be."""
    inputs, targets = torch.ones(4, 4, 5, dtype=torch.float64), torch.ones(4, 4, 1)
    inputs[BAD] = 1e200
    clients = [Client(f"c{i}", (x, y)) for i, (x, y) in enumerate(zip(inputs, targets, strict=True))]
    fleet = kind(population(clients, model=lambda: nn.Linear(5, 1), task="regression"), dtype=torch.float64)
    x = torch.zeros(4, 6, dtype=torch.float64)
    each, group = torch.arange(4), torch.tensor([0, 0, 1, 1])
    assert begun(fleet).ask(Gradient(each, x, 4)).ok.all()
    products = Gradient(each, x, 4, give="gram", group=group, sketch=sketch)
    for asked in (begun(fleet), begun(Faulty(fleet, ()))):
        answer = asked.ask(products)
        assert answer.ok.tolist() == [True, False, True, True]
        assert answer.loss.tolist() == [1, 0, 1, 1]
        assert answer.gram[0, 0, 0] > 0
        assert answer.gram[0].count_nonzero() == 1
        assert answer.gram[1].count_nonzero() == 4
