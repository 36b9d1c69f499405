"""APFL against a plain loop, and at its two ends."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.algorithms.apfl import APFL
from coterie.data.population import Population
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Schedule
from coterie.fleet.stacked import StackedFleet

N, STEPS = 4, 24


def gradient(row: Tensor, client: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    loss = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def plain(algo: APFL, start: Tensor, people: Population, present: list[list[int]]) -> tuple[Tensor, list[float]]:
    """Algorithm 1, a client after the other."""
    w, v = [start.clone() for _ in range(N)], [start.clone() for _ in range(N)]
    u = [[torch.zeros_like(start) for _ in range(N)] for _ in range(2)]
    alpha, server = [algo.alpha] * N, start.clone()
    for t, here in enumerate(present):
        for i in here:
            if t % algo.every == 0:
                w[i] = server.clone()
            mixed = alpha[i] * v[i] + (1 - alpha[i]) * w[i]
            through, common = gradient(mixed, i, people), gradient(w[i], i, people)
            new = alpha[i]
            if t % algo.every == 0:
                rate = algo.lr if algo.alpha_lr is None else algo.alpha_lr
                new = min(1.0, max(0.0, alpha[i] - rate * float((v[i] - w[i]) @ through)))
            for which, model, g in ((0, w, common), (1, v, alpha[i] * through)):
                u[which][i] = algo.momentum * u[which][i] + g + algo.weight_decay * model[i]
                model[i] = model[i] - algo.lr * u[which][i]
            alpha[i] = new
        if (t + 1) % algo.every == 0:
            server = sum(w[i] for i in here) / len(here)  # type: ignore[assignment]
    return torch.stack([a * y + (1 - a) * x for a, x, y in zip(alpha, w, v, strict=True)]), alpha


def run(fleet: Any, algo: APFL, rounds: int) -> Any:
    state = algo.init(fleet)
    for t in range(rounds):
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
    return state


@pytest.mark.parametrize(
    "settings", [{}, {"every": 3}, {"every": 2, "momentum": 0.9, "weight_decay": 0.01, "alpha_lr": 2.0}], ids=str
)
@pytest.mark.parametrize("fleet_kind", [StackedFleet, LoopFleet])
def test_it_equals_a_plain_loop(settings: Any, fleet_kind: Any) -> None:
    people = classes(mlp, n=N, size=20, ragged=6)
    present = [here for here in ([0, 1, 2, 3], [1, 3], [2, 0], [0, 2, 3]) for _ in range(STEPS // 4)]
    rule = Schedule(tuple(tuple(people.keys[i] for i in here) for here in present))
    fleet = Participation(fleet_kind(people, seed=2, dtype=torch.float64), rule)
    algo = APFL(**({"lr": 0.3, "batch": None} | settings))
    state = run(fleet, algo, STEPS)
    mixed, alpha = plain(algo, fleet.initial()[0], people, present)
    torch.testing.assert_close(algo.personal(state), mixed, rtol=0, atol=1e-9)
    torch.testing.assert_close(state.alpha, torch.tensor(alpha, dtype=torch.float64), rtol=0, atol=1e-9)
    assert len(set(alpha)) > 1  # the mixtures moved, and apart


def test_at_its_ends_it_is_local_and_fedavg() -> None:
    people = classes(mlp, n=N, size=20, ragged=6)
    plan = {"steps": 1, "batch": None, "lr": 0.3}
    for alpha, name in ((1.0, "local"), (0.0, "fedavg")):
        ends = []
        for algo in (
            make("apfl", {"alpha": alpha, "alpha_lr": 0.0, "lr": 0.3, "batch": None, "weighted": True}),
            make(name, {"plan": plan}),
        ):
            fleet = StackedFleet(people, seed=2, dtype=torch.float64)
            ends.append(torch.stack(fleet.reveal(algo.personal(run(fleet, algo, 8)))))  # type: ignore[arg-type]
        if name == "fedavg":  # whose models are measured after the average: the next round's start
            fleet = StackedFleet(people, seed=2, dtype=torch.float64)
            algo = make("apfl", {"alpha": alpha, "alpha_lr": 0.0, "lr": 0.3, "batch": None, "weighted": True})
            ends[0] = run(fleet, algo, 8).server.expand(N, -1)  # type: ignore[arg-type]
        torch.testing.assert_close(*ends, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [{"alpha": 1.5}, {"alpha_lr": -0.1}, {"every": 0}, {"momentum": 1.0}])
def test_settings_without_meaning_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="apfl"):
        make("apfl", bad)
