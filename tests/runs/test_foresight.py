"""What an experiment will take: reckoned from parts whose cost is known here, on a clock that only they move."""

import itertools
from typing import Any

import pytest
import torch

from builders import classes
from coterie.asks import Evaluate, Fit, Gradient, Plan
from coterie.experiments import reader
from coterie.fleet.stacked import StackedFleet
from coterie.fleet.wrapper import Wrapper
from coterie.runs import foresight
from coterie.runs.foresight import Hurried, Pace, foresee


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly(Wrapper):
    """Every step of a pair, and every other answer, takes a second; every ask a quarter more."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(StackedFleet(classes(n=20, ragged=0)))
        self.clock = clock

    def _spend(self, ask: Any) -> None:
        self.clock.now += 0.25 + ask.m * (ask.plan.steps_for(20) if isinstance(ask, Fit) else 1)

    def ask(self, *asks: Any) -> Any:
        for ask in asks:
            self._spend(ask)
        return self.inner.ask(*asks)

    def watch(self, ask: Any) -> Any:
        self._spend(ask)
        return self.inner.watch(ask)


@pytest.mark.parametrize(
    ("ask", "true"),
    [
        (lambda f: Fit(f.everyone, f.initial(), Plan(steps=100)), 20 * 100),
        (lambda f: Fit(f.everyone, f.initial(), Plan(epochs=10, batch=1)), 20 * 200),
        (lambda f: Fit(f.everyone, f.initial(), Plan(steps=3)), 20 * 3),
        (lambda f: Gradient(f.everyone.repeat(20), f.initial().repeat(20, 1), 4, track=False), 400),
        (lambda f: Evaluate(f.everyone, f.initial()), 20),
        (lambda f: Gradient(torch.arange(4), f.initial()[:4], 4), 4),
    ],
    ids=["steps", "epochs", "few steps", "many pairs", "metrics", "few pairs"],
)
def test_a_part_of_an_ask_stands_for_all_of_it(monkeypatch: pytest.MonkeyPatch, ask: Any, true: float) -> None:
    clock = Clock()
    monkeypatch.setattr(foresight.time, "perf_counter", clock)
    fleet = Hurried(Costly(clock), Pace(100))
    fleet.begin(0)
    question = ask(fleet)
    answer = fleet.ask(question)
    assert clock.now + fleet.owed == pytest.approx(true, rel=0.13)
    assert answer.reason.shape == (question.m,)
    if true > 100:
        assert clock.now < true / 2


def test_a_first_ask_that_was_slow_does_not_make_the_rest_take_less_than_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(foresight.time, "perf_counter", clock)
    fleet, begun = Hurried(Costly(clock), Pace(100)), Costly.watch

    def cold(self: Costly, ask: Any) -> Any:
        clock.now += 500
        return begun(self, ask)

    monkeypatch.setattr(Costly, "watch", cold)
    fleet.begin(0)
    fleet.ask(Fit(fleet.everyone, fleet.initial(), Plan(steps=100)))
    assert clock.now + fleet.owed == pytest.approx(20 * 100, rel=0.2)


def test_what_was_reckoned_is_the_sum_of_its_parts() -> None:
    first, alone, measured, saved = 3.0, 0.5, 0.2, 0.05
    spent = [first] + [
        alone + measured * (i % 4 == 0) + saved * (i % 8 == 0) for i in range(2, 26)
    ]  # rounds are counted from 1
    found = foresight._reckoned(spent, rounds=100, evaluate_every=10, checkpoint_every=25)
    assert found == pytest.approx(first + 99 * alone + 10 * measured + 4 * saved)


def test_rounds_that_are_dear_in_the_beginning_count_for_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of a hundred rounds take three times as long; every fourth one tried is measured, every eighth saved."""
    clock = Clock()
    monkeypatch.setattr(foresight.time, "perf_counter", clock)
    cost = [0.6 if t < 10 else 0.2 for t in range(100)]
    pace, spent = Pace(100), []
    while pace.tried is None or len(spent) < pace.tried:
        t = pace.round(len(spent))
        number = len(spent) + 1
        spent.append(cost[t] + 0.1 * (number % 4 == 0) + 0.03 * (number % 8 == 0))
        clock.now += spent[-1]
    found = foresight._reckoned(spent, rounds=100, evaluate_every=10, checkpoint_every=50)
    assert found == pytest.approx(sum(cost) + 10 * 0.1 + 2 * 0.03, rel=0.2)


@pytest.mark.parametrize(("rounds", "each"), [(40_000, 0.5), (40_000, 1e-4), (7, 0.5), (60, 0.01), (3, 1.0)])
def test_the_rounds_tried_lie_all_over_the_run(monkeypatch: pytest.MonkeyPatch, rounds: int, each: float) -> None:
    clock = Clock()
    monkeypatch.setattr(foresight.time, "perf_counter", clock)
    pace, found = Pace(rounds), []
    while pace.tried is None or len(found) < pace.tried:
        if len(found) == rounds:
            break
        found.append(pace.round(len(found)))
        clock.now += each
    assert found[:3] == [0, 1, 2]
    assert all(a < b for a, b in itertools.pairwise(found))
    assert found[-1] < rounds
    assert len(found) <= foresight.MOST
    if rounds > 100:
        assert found[-1] > 0.8 * rounds


def test_every_algorithm_of_an_experiment_is_foreseen() -> None:
    experiment = reader.read("quickstart", scale="smoke", seeds=[0, 1])
    found = list(foresee(experiment, "cpu"))
    assert [one.algorithm for one in found] == experiment.algorithms
    assert all(one.seconds > 0 and one.whole and one.memory > 1e8 for one in found)
