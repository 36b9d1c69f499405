"""Who is there, against closed forms; and those who are not stay as they were, bit for bit, in every fleet."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import batchnorm, classes, linear
from coterie.asks import Answer, Fit, Gradient, Loss, Own, Plan, Predict
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.faults import Faulty
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Count, Fraction, Participation, Rule, Schedule, Stay
from coterie.fleet.stacked import StackedFleet

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]
PEOPLE = classes(linear, n=5, ragged=20)  # 20, 40, 60, 80 and 100 samples
KEYS = PEOPLE.keys


def seen(*rules: Rule, rounds: int = 1, seed: int = 0, order: Sequence[int] | None = None) -> Tensor:
    """rounds × n booleans."""
    people = PEOPLE if order is None else PEOPLE.reordered(order)
    fleet = Participation(LoopFleet(people, seed=seed), *rules)
    here = []
    for t in range(rounds):
        fleet.begin(t)
        here.append(fleet.present)
    return torch.stack(here)


def names(*rules: Rule, rounds: int) -> list[set[str]]:
    return [{k for k, h in zip(KEYS, row, strict=True) if h} for row in seen(*rules, rounds=rounds).tolist()]


def close(counts: Tensor, chances: Sequence[float], draws: int) -> None:
    for count, p in zip(counts.tolist(), chances, strict=True):
        assert abs(count - draws * p) < 4 * math.sqrt(draws * p * (1 - p)) + 1


def test_a_fraction_is_drawn_evenly_and_anew() -> None:
    here = seen(Fraction(0.4), rounds=1200)
    assert (here.sum(1) == 2).all()
    close(here.sum(0), [0.4] * 5, 1200)
    pairs = torch.tensor([int((here[:, i] & here[:, j]).sum()) for i, j in itertools.combinations(range(5), 2)])
    close(pairs, [0.1] * 10, 1200)  # every pair as often as any other
    again = int((here[1:] == here[:-1]).all(1).sum())
    close(torch.tensor([again]), [0.1], 1199)  # the next round does not depend on this one
    assert not torch.equal(here, seen(Fraction(0.4), rounds=1200, seed=1))


@pytest.mark.parametrize(("share", "expected"), [(1.0, 5), (0.6, 3), (0.01, 1), (0.3, 2), (0.99, 5)])
def test_a_fraction_is_rounded_and_never_nobody(share: float, expected: int) -> None:
    assert (seen(Fraction(share), rounds=20).sum(1) == expected).all()


def test_a_count_is_exact() -> None:
    for count in range(1, 6):
        here = seen(Count(count), rounds=30)
        assert (here.sum(1) == count).all()
    close(seen(Count(2), rounds=1500).sum(0), [0.4] * 5, 1500)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_counts_by_size_are_successive_draws_without_replacement(count: int) -> None:
    sizes = LoopFleet(PEOPLE).sizes("train").tolist()
    assert sizes == [20, 40, 60, 80, 100]
    chances = [0.0] * 5
    for drawn in itertools.permutations(range(5), count):  # p(first) · p(second | first gone) · …
        chance, left = 1.0, sum(sizes)
        for i in drawn:
            chance *= sizes[i] / left
            left -= sizes[i]
        for i in drawn:
            chances[i] += chance
    assert sum(chances) == pytest.approx(count)
    here = seen(Count(count, by_size=True), rounds=1500)
    assert (here.sum(1) == count).all()
    close(here.sum(0), chances, 1500)


def test_a_schedule_says_who_and_begins_again() -> None:
    rule = Schedule((("site-0", "site-3"), (), ("site-4",)))
    assert names(rule, rounds=5) == [{"site-0", "site-3"}, set(), {"site-4"}, {"site-0", "site-3"}, set()]


def test_spans_begin_and_end() -> None:
    rule = Stay((("site-1", 2, None), ("site-2", 0, 1), ("site-3", 1, 3)))
    gone = [set(KEYS) - here for here in names(rule, rounds=4)]
    assert gone == [{"site-1", "site-3"}, {"site-1", "site-2"}, {"site-2"}, {"site-2", "site-3"}]


def test_all_rules_must_agree() -> None:
    away = Stay((("site-0", 1, None),))
    both = seen(Fraction(0.6), away, rounds=50)
    assert torch.equal(both, seen(Fraction(0.6), rounds=50) & seen(away, rounds=50))
    nested = Participation(Participation(LoopFleet(PEOPLE), Fraction(0.6)), away)
    for t in range(50):
        nested.begin(t)
        assert torch.equal(nested.present, both[t])


@pytest.mark.parametrize("rule", [Fraction(0.4), Count(3), Count(2, by_size=True), Schedule((KEYS[:2], KEYS[1:4]))])
def test_permuting_the_clients_permutes_who_is_there(rule: Rule) -> None:
    order = [3, 0, 4, 2, 1]
    assert torch.equal(seen(rule, rounds=40, order=order), seen(rule, rounds=40)[:, order])


def test_rounds_may_be_skipped_and_retried() -> None:
    here = seen(Fraction(0.4), rounds=9)
    fleet = Participation(StackedFleet(PEOPLE), Fraction(0.4))
    for t in (2, 2, 5, 8, 8):
        fleet.begin(t)
        assert torch.equal(fleet.present, here[t])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fraction(0.0), "above 0 and at most 1, not 0"),
        (lambda: Fraction(1.5), "above 0 and at most 1, not 1.5"),
        (lambda: Fraction(float("nan")), "above 0 and at most 1"),
        (lambda: Count(0), "at least one client"),
        (lambda: Schedule(()), "at least one round"),
        (lambda: seen(Count(6)), "6 clients a round were asked for, and there are 5"),
        (lambda: seen(Schedule((("site-0",), ("sit-1",))), rounds=2), "round 1 of the schedule names 'sit-1'"),
        (lambda: seen(Stay((("sit-1", 0, None),))), "'sit-1' joins or leaves, but is no client"),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: object, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("kind", FLEETS)
def test_every_wrapper_sees_the_same_absences(kind: type[Fleet]) -> None:
    rule = Schedule((("site-0",), ("site-1", "site-2"), KEYS))
    for fleet in (
        Participation(Faulty(kind(PEOPLE), ["site-0"]), rule),
        Faulty(Participation(kind(PEOPLE), rule), ["site-0"]),
        Participation(Participation(kind(PEOPLE), rule)),
    ):
        faulty = isinstance(fleet, Faulty) or isinstance(fleet.inner, Faulty)
        for t, here in enumerate([[0], [1, 2], [0, 1, 2, 3, 4]]):
            fleet.begin(t)
            why = fleet.ask(Gradient(fleet.everyone, fleet.initial(), 4)).why
            expected = ["ok" if c in here else "absent" for c in range(5)]
            if faulty and 0 in here:
                expected[0] = "not finite"
            assert why == expected
            assert fleet.present.tolist() == [c in here for c in range(5)]


# Those who are away

PLANS = {
    "momentum": Plan(steps=3, batch=6, lr=0.1, momentum=0.9, sampling="epoch", keep_optimiser=True),
    "adam": Plan(steps=3, batch=6, lr=0.01, optimiser="adam", sampling="epoch", keep_optimiser=True),
}
AWAY = 2


def round_of(fleet: Fleet, plan: Plan) -> list[Answer]:
    return [
        *fleet.ask(
            Fit(fleet.everyone, Own("a"), plan, give="rows"),
            Gradient(fleet.everyone, fleet.initial(), 5, sampling="epoch"),
            Loss(fleet.everyone, Own("a"), 4, split="validation", sampling="epoch", track=True),
        ),
        fleet.ask(Predict(fleet.everyone, Own("a"))),
    ]


def remembered(fleet: Fleet, client: int) -> dict[str, Tensor]:
    """All that one client keeps: a stacked fleet keeps one tensor for all, a loop names clients."""
    if isinstance(fleet, StackedFleet):
        return {k: v[client] for k, v in fleet.state().items() if not k.startswith("ledger/")}
    return {k: v for k, v in fleet.state().items() if k.startswith(f"{client}/")}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", FLEETS)
def test_an_absent_client_keeps_everything_bit_for_bit(kind: type[Fleet], plan: str) -> None:
    inner = kind(classes(batchnorm), seed=3, dtype=torch.float64)
    fleet = Participation(inner, Stay(((f"site-{AWAY}", 0, 2),)))
    for t in range(2):  # it learns twice, then is away
        fleet.begin(t)
        round_of(fleet, PLANS[plan])
    before = {k: v.clone() for k, v in remembered(inner, AWAY).items()}
    moment = {"momentum": "momentum_buffer", "adam": "exp_avg"}[plan]
    assert any(k.endswith(moment) and v.any() for k, v in before.items())
    assert any("running_mean" in k for k in before)
    assert sorted(int(v) for k, v in before.items() if "/place/" in k) == [8, 10, 36]
    others = {k: v.clone() for k, v in remembered(inner, 0).items()}
    for t in (2, 3, 4):
        fleet.begin(t)
        for answer in round_of(fleet, PLANS[plan]):
            assert answer.why[AWAY] == "absent"
            for values in (answer.rows, answer.loss, answer.outputs):
                if len(values):
                    assert not values[AWAY].any()
                    assert values[0].any()
    after = remembered(inner, AWAY)
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    assert any(not torch.equal(v, others[k]) for k, v in remembered(inner, 0).items())


@pytest.mark.parametrize("plan", PLANS)
def test_a_client_that_comes_and_goes_is_as_if_alone(plan: str) -> None:
    """Alone in the world or among others, there all along or not: the same for the client, and in both fleets."""
    people, ends = classes(batchnorm), {}
    follow = replace(PLANS[plan], steps=None, epochs=1)  # as many steps as a client has data for
    for kind in FLEETS:
        rule = Schedule((("site-0", "site-3"), people.keys, ("site-0", "site-2"), people.keys, ("site-3",)))
        fleet = Participation(kind(people, seed=3, dtype=torch.float64), rule)
        for t in range(5):
            fleet.begin(t)
            round_of(fleet, follow)
        ends[kind] = fleet.reveal(Own("a"))
    for a, b in zip(*ends.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    for kind in FLEETS:
        alone = kind(people.reordered([1]), seed=3, dtype=torch.float64)
        for t in (1, 3):
            alone.begin(t)
            round_of(alone, follow)
        torch.testing.assert_close(alone.reveal(Own("a"))[0], ends[kind][1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", FLEETS)
def test_a_round_with_nobody_answers_zeros_and_moves_nothing(kind: type[Fleet]) -> None:
    fleet = Participation(kind(classes(batchnorm), dtype=torch.float64), Schedule(((), ("site-0",))))
    fleet.begin(0)
    x, zero = fleet.initial(), torch.zeros(4, dtype=torch.long)
    answers = [
        *round_of(fleet, PLANS["adam"]),
        *fleet.ask(
            Gradient(fleet.everyone, x, 5, give="sum", into=zero, outputs=2),
            Gradient(fleet.everyone, x, 5, give="gram", group=zero),
            Gradient(fleet.everyone, x, 5, sketch=7),
        ),
    ]
    assert all(answer.why == ["absent"] * 4 for answer in answers)
    assert list(fleet.state()) == []
    shapes = {name: [tuple(getattr(a, name).shape) for a in answers if getattr(a, name).numel()]
              for name in ("rows", "sums", "weight", "gram", "outputs")}  # fmt: skip
    assert shapes == {
        "rows": [(4, fleet.d), (4, fleet.d), (4, 7)],
        "sums": [(2, fleet.d)],
        "weight": [(2,)],
        "gram": [(1, 4, 4)],
        "outputs": [(4, 13, 3)],
    }
    assert not any(getattr(a, name).any() for a in answers for name in shapes)
