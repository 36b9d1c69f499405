"""WGA-BC against a plain loop, and what its correction is for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.algorithms.wga_bc import WGABC
from coterie.data.population import Client, Population, population
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Schedule
from coterie.fleet.stacked import StackedFleet

N, STEPS = 4, 12


def gradient(row: Tensor, client: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    loss = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def plain(algo: WGABC, start: Tensor, people: Population, present: list[list[int]]) -> tuple[Tensor, Tensor]:
    theta, c, u = ([row.clone() for row in start], [torch.zeros_like(start[0]) for _ in start], [0 * r for r in start])
    for here in present:
        old = [row.clone() for row in theta]
        for i in here:
            g = gradient(old[i], i, people)
            others = [gradient(old[i], k, people) for k in here if k != i]
            step = g
            if others:
                mean = sum(others) / len(others)  # type: ignore[arg-type]
                step = (1 - algo.a) * g + algo.a * (mean - c[i])
                c[i] = (1 - algo.b) * c[i] + algo.b * (mean - g)
            u[i] = algo.momentum * u[i] + step + algo.weight_decay * old[i]
            theta[i] = old[i] - algo.lr * u[i]
    return torch.stack(theta), torch.stack(c)


def run(fleet: Any, algo: WGABC, rounds: int) -> Any:
    state = algo.init(fleet)
    for t in range(rounds):
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
    return state


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01, "a": 0.3}], ids=str)
@pytest.mark.parametrize("fleet_kind", [StackedFleet, LoopFleet])
def test_it_equals_a_plain_loop(settings: Any, fleet_kind: Any) -> None:
    people = classes(mlp, n=N, size=20, ragged=6)
    present = [[0, 1, 2, 3], [1, 3], [2], [0, 2, 3]] * (STEPS // 4)
    rule = Schedule(tuple(tuple(people.keys[i] for i in here) for here in present))
    fleet = Participation(fleet_kind(people, seed=2, dtype=torch.float64), rule)
    algo = WGABC(**({"lr": 0.3, "batch": None, "b": 0.2} | settings))
    state = run(fleet, algo, STEPS)
    theta, c = plain(algo, fleet.initial(), people, present)
    torch.testing.assert_close(state.x, theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(state.c, c, rtol=0, atol=1e-9)


def points() -> Population:
    """R_i(θ) = mean (θ − μ_i)²: the bias of the others' gradients does not depend on θ."""
    g = torch.Generator().manual_seed(0)
    clients = [Client(f"c{i}", (torch.ones(1, 1), 3 * torch.randn(1, 5, generator=g))) for i in range(6)]
    return population(clients, model=lambda: nn.Linear(1, 5, bias=False), task="regression")


def test_the_correction_removes_a_constant_bias_and_without_it_the_bias_stays() -> None:
    people = points()
    fleets = [StackedFleet(people, seed=0, dtype=torch.float64) for _ in range(3)]
    target = people.targets.double()
    plain, corrected, alone = (
        run(fleet, WGABC(lr=0.5, batch=1, a=0.8, b=b) if b is not None else WGABC(lr=0.5, batch=1, a=0.0), 200).x
        for fleet, b in zip(fleets, (0.0, 0.2, None), strict=True)
    )
    torch.testing.assert_close(corrected, target, rtol=0, atol=1e-6)
    torch.testing.assert_close(alone, target, rtol=0, atol=1e-6)
    others = (target.sum(0) - target) / 5
    torch.testing.assert_close(plain, 0.2 * target + 0.8 * others, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [{"a": 1.5}, {"b": -0.1}, {"momentum": 1.0}, {"batch": 0}])
def test_settings_without_meaning_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="wga_bc"):
        make("wga_bc", bad)
