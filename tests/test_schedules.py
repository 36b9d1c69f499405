"""Rates over a run against torch's schedulers stepped by hand and against closed forms."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from coterie.asks import Plan
from coterie.errors import SettingError
from coterie.schedules import SCHEDULES, rates

ROUNDS, LR = 12, 0.3


def stepped(make: Callable[[SGD], lr_scheduler.LRScheduler]) -> list[float]:
    optimiser = SGD([torch.zeros(1)], lr=LR)
    scheduler = make(optimiser)
    seen = []
    for _ in range(ROUNDS):
        seen.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return seen


def warm_linear(t: int, warm: int) -> float:
    if t < warm:
        return LR * (1 / (warm + 1) + (1 - 1 / (warm + 1)) * t / warm)
    return LR * (1 - (t - warm) / max(1, ROUNDS - warm))


BY_HAND = {
    "constant": [LR] * ROUNDS,
    "linear": [LR * (1 - t / ROUNDS) for t in range(ROUNDS)],
    "cosine": [LR * (1 + math.cos(math.pi * t / ROUNDS)) / 2 for t in range(ROUNDS)],
    "step": [LR if t < 6 else LR / 10 for t in range(ROUNDS)],
    "step:5": [LR * 0.1 ** (t // 5) for t in range(ROUNDS)],
    "step:4:0.5": [LR * 0.5 ** (t // 4) for t in range(ROUNDS)],
    "warm-linear": [warm_linear(t, 1) for t in range(ROUNDS)],
    "warm-linear:4": [warm_linear(t, 4) for t in range(ROUNDS)],
}


def test_every_schedule_is_tested() -> None:
    assert {name.split(":")[0] for name in BY_HAND} == set(SCHEDULES)


@pytest.mark.parametrize("schedule", BY_HAND)
def test_rates_are_the_closed_form(schedule: str) -> None:
    assert rates(schedule, LR, ROUNDS) == pytest.approx(BY_HAND[schedule], abs=1e-12)


def test_rates_are_torchs_own() -> None:
    assert rates("cosine", LR, ROUNDS) == pytest.approx(
        stepped(lambda o: lr_scheduler.CosineAnnealingLR(o, ROUNDS)), abs=0
    )
    assert rates("step:5:0.3", LR, ROUNDS) == pytest.approx(stepped(lambda o: lr_scheduler.StepLR(o, 5, 0.3)), abs=0)
    assert rates("linear", LR, ROUNDS) == pytest.approx(
        stepped(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, ROUNDS)), abs=0
    )


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_short_runs_have_a_rate_for_every_round(schedule: str, rounds: int) -> None:
    given = rates(schedule, LR, rounds)
    assert len(given) == rounds
    assert all(0 < rate <= LR for rate in given)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step:5", "warm-linear:4"])
def test_the_plan_of_a_round_has_its_rate_and_nothing_else_changed(schedule: str) -> None:
    plan = Plan(steps=3, batch=7, lr=LR, momentum=0.5, schedule=schedule, rounds=ROUNDS)
    for t in range(ROUNDS):
        now = plan.at(t)
        assert now.lr == pytest.approx(BY_HAND[schedule][t], abs=1e-12)
        assert (now.steps, now.batch, now.momentum) == (3, 7, 0.5)
        assert now.at(t) == now  # the rate is settled
    assert plan.at(ROUNDS + 5) == plan.at(ROUNDS - 1)  # a run that goes on longer keeps the last rate


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("cosin", "no schedule 'cosin': there are constant"),
        ("step:x", "step:x"),
        ("step:0", "at least one"),
        ("step:-3", "at least one"),
        ("step:2:-1", "at least 0"),
        ("step:2:nan", "finite"),
        ("linear:4", "linear:4"),
        ("warm-linear:0", "at least one"),
        ("warm-linear:-1", "at least one"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(schedule: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        rates(schedule, LR, 4)


def test_a_schedule_must_know_its_length() -> None:
    with pytest.raises(SettingError, match=r"set plan\.rounds"):
        Plan(steps=1, schedule="cosine").at(0)
    assert Plan(steps=1, lr=LR).at(100).lr == LR
