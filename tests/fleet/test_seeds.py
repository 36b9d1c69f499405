"""Seeds that run as one batch give the numbers of single runs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import builders
from contract import algorithm, rows
from coterie.algorithms import ALGORITHMS
from coterie.asks import Distil, Drift, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict, Pull
from coterie.data.population import Population
from coterie.fleet.base import Fleet
from coterie.fleet.participation import Count, Participation
from coterie.fleet.seeds import batchable, together
from coterie.fleet.stacked import StackedFleet

SEEDS = (4, 5, 6)


def people(seed: int, model: str = "batchnorm") -> Population:
    make, shape = builders.MODELS[model]
    population = builders.classes(make, shape, n=5, seed=seed, groups=(0, 0, 1, 1, 1), size=14 + seed)
    population.public["public"] = torch.linspace(-1, 1, 78).view(13, *shape)
    return population


def drive(fleets: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Each fleet in its own thread, closed when its work ends."""
    results: list[Any] = [None] * len(fleets)

    def go(k: int) -> None:
        try:
            results[k] = work(fleets[k])
        except BaseException as error:
            results[k] = error
        finally:
            if hasattr(fleets[k], "close"):
                fleets[k].close()

    threads = [threading.Thread(target=go, args=(k,)) for k in range(len(fleets))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "somebody waits for ever"
    return results


def alone(model: str = "batchnorm") -> list[StackedFleet]:
    return [StackedFleet(people(s, model), seed=s, dtype=torch.float64) for s in SEEDS]


def batch(model: str = "batchnorm") -> list[Any]:
    populations = [people(s, model) for s in SEEDS]
    assert batchable(populations)
    return together(populations, SEEDS, dtype=torch.float64)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_batch_of_seeds_equals_single_runs(name: str) -> None:
    def work(fleet: Fleet) -> Any:
        party = Participation(fleet, Count(3))
        algo = algorithm(name, fleet.population)
        state = algo.init(party)
        for t in range(4):
            party.begin(t)
            state, info = algo.round(party, state)
        metrics = party.watch(Evaluate(party.everyone, algo.personal(state))).metrics
        return torch.stack(rows(party, algo, state)), info.graph, metrics["loss"], party.ledger.totals()

    for single, batched in zip(drive(alone(), work), drive(batch(), work), strict=True):
        for a, b in zip(single[:3], batched[:3], strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-9)
        assert batched[3] == single[3]


def every_ask(fleet: Fleet) -> list[Any]:
    e, x = fleet.everyone, fleet.initial(shared=False)
    ends, pair = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 0, 1, 1])
    ends = ends[: 2 * (1 + fleet.seed % 2)]  # the number of pairs differs from seed to seed
    pair = pair[: len(ends)]
    targets = torch.ones(2, 13, 3, dtype=torch.float64) / 3
    plan = Plan(steps=2, batch=5, lr=0.1, momentum=0.9, keep_optimiser=True)
    return [
        Gradient(e, x, 5),
        Gradient(ends, x, 5, at=torch.stack([ends, 1 + 0 * ends], 1), give="gram", group=pair, draw=ends, track=False),
        Gradient(ends, x, 5, at=ends, give="sum", into=pair, weights=torch.linspace(0.5, 1, len(ends)), track=False),
        Gradient(e, x, 5, sketch=9),
        Loss(e, x[0], split="validation"),
        Fit(e, x, plan, pull=Pull(x[0], 0.1), drift=Drift(x)),
        Fit(e[:3], Own("mine"), plan, pull=Pull(x, torch.arange(3) / 10, at=torch.tensor([2, 1, 0])), give="nothing"),
        Fit(e, Own("mine"), plan, distil=Distil(targets, "public", 0.5, batch=3)),
        Fit(e, Own("mine"), plan, distil=Distil(targets, "public", 0.5, batch=3, loss="cross_entropy", alone=True)),
        Predict(e, Own("mine")),
        Evaluate(e, x, metrics=("accuracy", "loss")),
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["batchnorm", "dropout"])
def test_every_ask_meets_and_parts(model: str) -> None:
    def work(fleet: Fleet) -> Any:
        answers = []
        for t in range(2):
            fleet.begin(t)
            answers += fleet.ask(*every_ask(fleet))
        return answers, fleet.state()

    for single, batched in zip(drive(alone(model), work), drive(batch(model), work), strict=True):
        for a, b in zip(single[0], batched[0], strict=True):
            assert torch.equal(a.reason, b.reason)
            for field in ("rows", "sums", "weight", "gram", "loss", "outputs"):
                torch.testing.assert_close(getattr(b, field), getattr(a, field), rtol=0, atol=1e-9)
            for name in a.metrics:
                torch.testing.assert_close(b.metrics[name], a.metrics[name], rtol=0, atol=1e-9)
        for name, value in single[1].items():
            torch.testing.assert_close(batched[1][name], value, rtol=0, atol=1e-9)


def test_a_view_that_leaves_or_fails_does_not_hold_the_others() -> None:
    def work(fleet: Fleet) -> int:
        for t in range(2 + fleet.seed):
            fleet.begin(t)
            if fleet.seed == SEEDS[1] and t == 3:
                raise RuntimeError("lost")
            fleet.ask(Fit(fleet.everyone, Own("model"), Plan(steps=1, batch=4), give="nothing"))
        return fleet.t

    first, second, third = drive(batch(), work)
    assert (first, third) == (5, 7)
    assert isinstance(second, RuntimeError)


def test_a_state_of_a_batch_goes_on_in_another_batch() -> None:
    def begin(fleet: Fleet) -> Any:
        for t in range(2):
            fleet.begin(t)
            fleet.ask(*every_ask(fleet))
        return {k: v.clone() for k, v in fleet.state().items()}

    states = drive(batch(), begin)
    kept = dict(zip(SEEDS, states, strict=True))

    def go_on(fleet: Fleet) -> Any:
        fleet.load(kept[fleet.seed])
        fleet.begin(2)
        fleet.ask(*every_ask(fleet))
        return fleet.state()

    def whole(fleet: Fleet) -> Any:
        begin(fleet)
        fleet.begin(2)
        fleet.ask(*every_ask(fleet))
        return fleet.state()

    for a, b in zip(drive(batch(), go_on), drive(batch(), whole), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_error_in_the_joint_answer_reaches_every_seed() -> None:
    def work(fleet: Fleet) -> Any:
        fleet.begin(0)
        return fleet.ask(Gradient(fleet.everyone, torch.zeros(5, 3, dtype=torch.float64), 5))

    for result in drive(batch(), work):
        assert isinstance(result, ValueError)
