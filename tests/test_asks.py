"""Asks refuse what does not fit together, and a part of an ask is answered as that part of the whole."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import classes, linear
from coterie.asks import (
    REASONS,
    Answer,
    Ask,
    Distil,
    Drift,
    Evaluate,
    Fit,
    Gradient,
    Loss,
    Own,
    Plan,
    Predict,
    Pull,
)
from coterie.errors import AskError, SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

X = torch.zeros(3, 5)
P = Plan(steps=1)


# Refusals


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Loss([0.0, 1.0], X), "clients must be whole numbers, not torch.float32"),
    (lambda: Loss([True, False, True], X), "clients must be whole numbers, not torch.bool"),
    (lambda: Loss([0, 1], X), "2 pairs but 3 rows: say with `at`"),
    (lambda: Loss([0], torch.zeros(1, 2, 2)), "models must be one row or a matrix of rows"),
    (lambda: Loss([0], Own(), at=[0]), "an Own model is the client's own"),
    (lambda: Loss([0, 1], X, at=[0]), "`at` must have 2 entries"),
    (lambda: Loss([0, 1], X, at=torch.zeros(2, 1, 1, dtype=torch.long)), "`at` must have 2 entries"),
    (lambda: Loss([0, 1], X, at=[0, 3]), "`at` must name rows 0 to 2, not 0 to 3"),
    (lambda: Loss([0, 1], X, at=[[0, 1], [-1, 2]]), "`at` must name rows 0 to 2, not -1 to 2"),
    (lambda: Loss([0, 1], X, at=[0.0, 1.0]), "at must be whole numbers"),
    (lambda: Loss([0, 1, 2], X, 0), "a batch has at least one sample, not 0"),
    (lambda: Loss([0, 1, 2], X, sampling="epochs"), "sampling is 'fresh' or 'epoch', not 'epochs'"),
    (lambda: Loss([0, 1, 2], X, draw=[1, 2]), "draw must have 3 entries"),
    (lambda: Loss([0, 1, 2], X, draw=[1.0, 2.0, 3.0]), "draw must be whole numbers"),
    (lambda: Gradient([0, 1, 2], X, give="mean"), "'rows', 'sum' or 'gram', not 'mean'"),
    (lambda: Gradient([0, 1, 2], X, give="sum"), "give='sum' goes with `into`"),
    (lambda: Gradient([0, 1, 2], X, into=[0, 0, 0]), "give='sum' goes with `into`"),
    (lambda: Gradient([0, 1, 2], X, give="gram"), "give='gram' goes with `group`"),
    (lambda: Gradient([0, 1, 2], X, group=[0, 0, 0]), "give='gram' goes with `group`"),
    (lambda: Gradient([0, 1, 2], X, weights=torch.ones(3)), "go with give='sum'"),
    (lambda: Gradient([0, 1, 2], X, outputs=3), "go with give='sum'"),
    (lambda: Gradient([0, 1, 2], X, give="sum", into=[0, 4, 0], outputs=4), "`into` names output row 4 of 4"),
    (lambda: Gradient([0, 1, 2], X, give="sum", into=[0, -1, 0]), "output rows are numbered from 0"),
    (lambda: Gradient([0, 1, 2], X, give="sum", into=[0, 1]), "into must have 3 entries"),
    (lambda: Gradient([0, 1, 2], X, give="sum", into=[0, 1, 0], weights=torch.ones(2)), "weights must have 3 entries"),
    (lambda: Gradient([0, 1, 2], X, give="gram", group=[0, -1, 0]), "groups are numbered from 0"),
    (lambda: Gradient([0, 1, 2], X, give="gram", group=[0, 0]), "group must have 3 entries"),
    (lambda: Gradient([0, 1, 2], X, sketch=0), "a sketch has at least one number"),
    (lambda: Gradient([0, 1, 2], X, give="sum", into=[0, 0, 0], sketch=3), "given as rows or gram"),
    (lambda: Fit([0, 1, 2], X, P, give="models"), "'rows', 'update' or 'nothing', not 'models'"),
    (lambda: Fit([0], Own("a"), P, keep="b"), "stays in its own slot"),
    (lambda: Fit([0, 1, 2], X, P, draw=[1]), "draw must have 3 entries"),
    (lambda: Fit([0, 1, 2], X, P, columns=[0.5]), "columns must be whole numbers"),
    (lambda: Fit([0, 1, 2], X, P, pull=Pull(torch.zeros(2, 5))), "pull has 2 rows for 3 pairs"),
    (lambda: Fit([0, 1, 2], X, P, drift=Drift(torch.zeros(4, 5))), "drift has 4 rows for 3 pairs"),
    (lambda: Fit([0, 1, 2], X, P, pull=Pull(X, at=[0, 1])), r"`pull\.at` must have 3 entries"),
    (lambda: Fit([0, 1, 2], X, P, drift=Drift(X, at=[0, 1, 3])), r"`drift\.at` must name rows 0 to 2, not 0 to 3"),
    (lambda: Fit([0, 1, 2], X, P, pull=Pull(X, torch.ones(2))), r"pull\.weight must have 3 entries"),
    (
        lambda: Fit([0, 1, 2], X, P, distil=Distil(torch.zeros(2, 4, 3), "public", at=[[0, 1], [1, 2], [0, 0]])),
        r"`distil\.at` must name rows 0 to 1, not 0 to 2",
    ),
    (lambda: Distil(X, "public", loss="kl"), "one of squares, cross_entropy, logits, not 'kl'"),  # type: ignore[arg-type]
    (lambda: Distil(X, "public", temperature=0.0), "a temperature is above 0 and finite, not 0.0"),
    (lambda: Distil(X, "public", batch=0), "a public batch has at least one input, not 0"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_an_ask_that_makes_no_sense_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(AskError) as caught:
        make()
    assert says.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({}, "either steps or epochs"),
        ({"steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"steps": -1}, "at least 0"),
        ({"epochs": -1}, "at least 0"),
        ({"steps": 1, "batch": 0}, "batch at least 1"),
        ({"steps": 1, "optimiser": "adm"}, "no optimiser 'adm': there are sgd, adam, adamw"),
        ({"steps": 1, "lr": -0.1}, "at least 0 and finite"),
        ({"steps": 1, "lr": float("nan")}, "at least 0 and finite"),
        ({"steps": 1, "lr": float("inf")}, "at least 0 and finite"),
        ({"steps": 1, "momentum": -0.1}, "momentum and weight_decay"),
        ({"steps": 1, "weight_decay": float("nan")}, "momentum and weight_decay"),
        ({"steps": 1, "nesterov": True}, "needs momentum"),
        ({"steps": 1, "clip": 0.0}, "clip"),
        ({"steps": 1, "betas": (0.9, 1.0)}, "betas"),
        ({"steps": 1, "eps": -1e-8}, "eps"),
        ({"steps": 1, "rounds": 0}, "at least one round"),
        ({"steps": 1, "sampling": "fresch"}, "'fresh' or 'epoch'"),
    ],
)
def test_a_plan_that_nobody_could_follow_is_refused(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Plan(**plan)


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 3))
def test_an_epoch_is_as_many_full_batches_as_cover_the_data(batch: int, samples: int, epochs: int) -> None:
    steps = Plan(epochs=epochs, batch=batch).steps_for(samples)
    once = steps // epochs if epochs else 0
    assert steps == once * epochs
    assert epochs == 0 or (once - 1) * batch < samples <= once * batch
    assert Plan(epochs=epochs, batch=None).steps_for(samples) == epochs
    assert Plan(steps=7, batch=batch).steps_for(samples) == 7


# What an ask fills in


def test_one_row_stands_for_all_pairs_and_indices_come_to_the_host_as_int64() -> None:
    ask = Loss(torch.tensor([2, 0], dtype=torch.int32), torch.arange(5.0), draw=3)
    assert ask.models.shape == (1, 5)
    assert ask.at.tolist() == [0, 0]
    assert ask.clients.dtype == ask.draw.dtype == torch.int64
    assert ask.draw.tolist() == [3, 3]
    assert ask.m == 2
    assert Loss([], torch.zeros(0, 5)).m == 0
    assert Loss(1, torch.zeros(1, 5)).clients.tolist() == [1]


def test_memory_is_named_after_the_own_slot() -> None:
    assert Loss([0], Own("local")).memory == "local"
    assert Loss([0], torch.zeros(1, 5)).memory == "model"
    assert Loss([0], Own("local"), memory="shared").memory == "shared"


def test_a_tracked_fit_of_an_own_model_moves_it_and_a_probe_does_not() -> None:
    assert Fit([0], Own("a"), P).keep == "a"
    assert Fit([0], Own("a"), P, track=False).keep is None
    assert Fit([0], torch.zeros(1, 5), P).keep is None


def test_answers_say_why() -> None:
    answer = Answer(torch.arange(6, dtype=torch.int8))
    assert answer.why == list(REASONS)
    assert answer.ok.tolist() == [True] + [False] * 5


@given(st.lists(st.integers(0, 4), max_size=12))
def test_places_in_groups_are_those_of_a_plain_count(group: list[int]) -> None:
    ask = Gradient(torch.zeros(len(group), dtype=torch.long), torch.zeros(5), give="gram", group=group)
    seen: dict[int, int] = {}
    for name, slot in zip(group, ask.slot.tolist(), strict=True):
        assert slot == seen.get(name, 0)
        seen[name] = slot + 1
    assert ask.gram_shape == ((max(group) + 1, max(seen.values())) if group else (0, 0))


# Taking a part


PEOPLE = classes(linear, n=4)
CLIENTS = [3, 0, 1, 1, 2, 0]
AT = [2, 1, 0, 3, 3, 1]
MIDPOINTS = [[0, 1], [2, 3], [1, 1], [3, 0], [2, 2], [0, 3]]


def rows(fleet: Fleet, r: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(r, fleet.d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets() -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(3, 13, 3, generator=g, dtype=torch.float64).softmax(-1)


WEIGHT = torch.linspace(0.1, 1.0, 6, dtype=torch.float64)
DRAW = torch.arange(6) * 7
QUICK = Plan(steps=2, batch=4, lr=0.1)
FREE = {"track": False, "draw": DRAW}
PARTS: dict[str, Callable[[Fleet], Ask]] = {
    "gradient": lambda f: Gradient(CLIENTS, rows(f), 4, at=AT, **FREE),
    "gradient, a row each": lambda f: Gradient(CLIENTS, rows(f, 6), 4, **FREE),
    "gradient at midpoints": lambda f: Gradient(CLIENTS, rows(f), 4, at=MIDPOINTS, sketch=5, **FREE),
    "loss": lambda f: Loss(CLIENTS, rows(f)[0], 4, draw=DRAW),
    "fit with riders of a row each": lambda f: Fit(
        CLIENTS, rows(f), QUICK, at=AT, pull=Pull(rows(f, 6, 2), WEIGHT), drift=Drift(rows(f, 6, 3)), **FREE
    ),
    "fit with riders by at": lambda f: Fit(
        CLIENTS, rows(f, 6), QUICK, pull=Pull(rows(f, 4, 2), 0.5, at=AT), drift=Drift(rows(f, 4, 3), MIDPOINTS), **FREE
    ),
    "fit with one rider for all": lambda f: Fit(CLIENTS, rows(f)[1], QUICK, pull=Pull(rows(f)[0], WEIGHT), **FREE),
    "distil": lambda f: Fit(
        CLIENTS,
        rows(f, 6),
        QUICK,
        distil=Distil(targets(), "public", WEIGHT, 3, at=[[0, 1], [1, 2], [2, 2], [0, 0], [1, 0], [2, 1]]),
        **FREE,
    ),
    "distil to all": lambda f: Fit(CLIENTS, rows(f, 6), QUICK, distil=Distil(targets(), "public", batch=3), **FREE),
    "predict": lambda f: Predict(CLIENTS, rows(f), at=MIDPOINTS),
    "evaluate": lambda f: Evaluate(CLIENTS, rows(f), at=AT),
}
FLEETS = {
    "stacked": StackedFleet(PEOPLE, seed=1, dtype=torch.float64),
    "loop": LoopFleet(PEOPLE, seed=1, dtype=torch.float64),
}


def answered(fleet: Fleet, ask: Ask) -> Answer:
    fleet.begin(0)
    return fleet.ask(ask)


PICK = torch.tensor([4, 1, 1, 3])
PICKS = [PICK, torch.tensor([5]), torch.tensor([2, 0])]


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)
@pytest.mark.parametrize("name", PARTS)
def test_a_taken_ask_is_answered_as_those_rows_of_the_whole(name: str, fleet: Fleet) -> None:
    ask = PARTS[name](fleet)
    whole = answered(fleet, ask)
    seen = 0
    for pick in PICKS:
        part = answered(fleet, ask.take(pick))
        for field in ("reason", "rows", "loss", "outputs"):
            value, expected = getattr(part, field), getattr(whole, field)
            if expected.numel():
                torch.testing.assert_close(value, expected[pick], rtol=0, atol=1e-12)
                seen += 1
        for metric, values in whole.metrics.items():
            torch.testing.assert_close(part.metrics[metric], values[pick], rtol=0, atol=1e-12, equal_nan=True)
            seen += 1
    assert seen >= 6


def test_taking_twice_is_taking_the_pick_of_the_pick() -> None:
    fleet = FLEETS["loop"]
    for name in PARTS:
        ask = PARTS[name](fleet)
        order, again = torch.tensor([5, 3, 0, 1]), torch.tensor([2, 0])
        once, twice = ask.take(order[again]), ask.take(order).take(again)
        for f in fields(once):
            a, b = getattr(once, f.name), getattr(twice, f.name)
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b)


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)
def test_sums_keep_their_output_rows_when_pairs_are_taken(fleet: Fleet) -> None:
    into = [1, 4, 1, 0, 3, 1]
    shared = {"at": AT, "track": False, "draw": DRAW}
    each = answered(fleet, Gradient(CLIENTS, rows(fleet), 4, **shared))
    ask = Gradient(CLIENTS, rows(fleet), 4, give="sum", into=into, weights=WEIGHT, **shared)
    assert ask.outputs == 5
    for pick in (torch.arange(6), torch.tensor([5, 2, 3]), torch.tensor([3])):
        answer = answered(fleet, ask.take(pick))
        sums, weight = torch.zeros(5, fleet.d, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        for p in pick.tolist():
            sums[into[p]] += WEIGHT[p] * each.rows[p]
            weight[into[p]] += WEIGHT[p]
        torch.testing.assert_close(answer.sums, sums, rtol=0, atol=1e-12)
        torch.testing.assert_close(answer.weight, weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)
def test_grams_keep_the_places_of_pairs_that_are_not_taken(fleet: Fleet) -> None:
    group = [2, 0, 2, 0, 2, 0]
    shared = {"at": AT, "track": False, "draw": DRAW}
    each = answered(fleet, Gradient(CLIENTS, rows(fleet), 4, **shared)).rows
    ask = Gradient(CLIENTS, rows(fleet), 4, give="gram", group=group, **shared)
    for pick in (torch.arange(6), torch.tensor([1, 2, 4, 5]), torch.tensor([4])):
        gram = torch.zeros(3, 3, 3, dtype=torch.float64)
        for p in pick.tolist():
            for q in pick.tolist():
                if group[p] == group[q]:
                    gram[group[p], p // 2, q // 2] = each[p] @ each[q]
        torch.testing.assert_close(answered(fleet, ask.take(pick)).gram, gram, rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_taking_keeps_pairs_together(data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 6))
    numbers = st.lists(st.integers(0, 3), min_size=m, max_size=m)
    clients, into, draw = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    ask = Gradient(clients, torch.zeros(m, 2), give="sum", into=into, draw=draw, weights=torch.arange(m) / 7)
    pick = data.draw(st.lists(st.integers(0, m - 1), max_size=8))
    part = ask.take(torch.tensor(pick, dtype=torch.long))
    assert part.clients.tolist() == [clients[p] for p in pick]
    assert part.into.tolist() == [into[p] for p in pick]
    assert part.draw.tolist() == [draw[p] for p in pick]
    assert part.at.tolist() == pick
    assert part.weights.tolist() == [ask.weights[p] for p in pick]
    assert part.outputs == max(into) + 1
    assert part.models is ask.models
