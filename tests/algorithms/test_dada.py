"""Dada: models and weights against plain loops, an objective that graph steps never raise, and groups found."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.algorithms.dada import Dada, squared_distances
from coterie.data.population import Client, Population, population
from coterie.fleet.stacked import StackedFleet
from coterie.graph.communities import adjusted_rand, communities

N, RATE, STEPS = 4, 0.1, 3


def run(fleet: Any, algo: Any, rounds: int) -> tuple[Any, list[Any]]:
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def measured(row: Tensor, client: int, people: Population) -> tuple[float, Tensor]:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    value = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(module.parameters()))])
    return value.item(), slope


@pytest.mark.parametrize("ragged", [0, 6])
def test_rounds_equal_a_plain_loop(ragged: int) -> None:
    people = classes(mlp, n=N, size=24, ragged=ragged)
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    names = {"mu1": 0.7, "mu2": 0.9, "lam": 0.3, "delta": 0.5}
    plan = {"steps": STEPS, "batch": None, "lr": RATE}
    state, infos = run(fleet, make("dada", {"plan": plan, "graph_steps": 2, **names}), 3)
    size = [len(r) for r in people.index["train"]]
    c = [s / max(size) for s in size]
    x = list(fleet.initial())
    w = [[0.0 if k == j else 1 / (N - 1) for j in range(N)] for k in range(N)]
    for t in range(3):
        centre = [sum(w[k][j] * x[j] for j in range(N)) / max(sum(w[k]), 1e-300) for k in range(N)]
        losses = [0.0] * N
        for k in range(N):
            row = x[k]
            for _ in range(STEPS):
                value, slope = measured(row, k, people)
                losses[k] += value / STEPS
                pull = 0.7 / c[k] * (row - centre[k]) if sum(w[k]) > 0 else 0
                row = row - RATE * (slope + pull)
            x[k] = row
        for _ in range(2 if t >= 1 else 0):
            d = [sum(row) for row in w]
            bound = 0.9 * (2 * (N - 1) / 0.25 + 0.6)
            new = [row[:] for row in w]
            for k in range(N):
                for j in range(N):
                    if k == j:
                        continue
                    slope = c[k] * losses[k] + c[j] * losses[j] + 0.35 * float((x[k] - x[j]).pow(2).sum())
                    slope += 0.9 * (0.6 * w[k][j] - 1 / (d[k] + 0.5) - 1 / (d[j] + 0.5))
                    new[k][j] = max(0.0, w[k][j] - slope / bound)
            w = new
    torch.testing.assert_close(state.x, torch.stack(x), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.w, torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-9)
    assert int(infos[-1].extra["links"]) == int((state.w > 0).sum())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(3, 9),
    delta=st.sampled_from([0.05, 1.0]),
    lam=st.sampled_from([0.0, 0.5]),
    peers=st.sampled_from([None, 1, 2]),
)
def test_no_graph_step_raises_the_objective(seed: int, n: int, delta: float, lam: float, peers: int | None) -> None:
    g = torch.Generator().manual_seed(seed)
    fixed = torch.rand(n, n, generator=g, dtype=torch.float64) * 3
    fixed = fixed + fixed.T
    w = torch.rand(n, n, generator=g, dtype=torch.float64)
    w = torch.triu(w, 1) + torch.triu(w, 1).T
    algo = Dada(mu2=0.8, lam=lam, delta=delta, peers=peers)
    fleet = StackedFleet(classes(mlp, n=n), seed=seed)

    def objective(w: Tensor) -> float:
        smooth = 0.8 * (lam * (torch.triu(w, 1) ** 2).sum() - torch.log(w.sum(1) + delta).sum())
        return float((torch.triu(w, 1) * fixed).sum() + smooth)

    for step in range(20):
        block = algo.block(fleet, torch.ones(n, dtype=torch.bool), step)
        assert torch.equal(block, block.T)
        after = algo.towards(w, fixed, block)
        assert torch.equal(after, after.T)
        assert objective(after) <= objective(w) + 1e-10
        w = after


def test_no_pull_is_local_training() -> None:
    people = classes(mlp, n=N)
    plan = {"steps": 4, "batch": 6, "lr": 0.1}
    a, _ = run(StackedFleet(people, seed=1, dtype=torch.float64), make("dada", {"plan": plan, "mu1": 0.0}), 3)
    fleet = StackedFleet(people, seed=1, dtype=torch.float64)
    local = make("local", {"plan": plan})
    state, _ = run(fleet, local, 3)
    torch.testing.assert_close(a.x, torch.stack(fleet.reveal(local.personal(state))), rtol=0, atol=1e-12)


def test_three_kinds_of_clients_are_found() -> None:
    g = torch.Generator().manual_seed(0)
    slopes = 2 * torch.randn(3, 6, 1, generator=g)
    clients = []
    for i in range(9):
        x = torch.randn(40, 6, generator=g)
        clients.append(Client(f"c{i}", (x, x @ slopes[i % 3])))
    people = population(clients, model=lambda: nn.Linear(6, 1), task="regression", groups=[i % 3 for i in range(9)])
    for peers in (None, 3):
        fleet = StackedFleet(people, seed=1)
        plan = {"steps": 10, "batch": 20, "lr": 0.05}
        state, _ = run(fleet, make("dada", {"plan": plan, "mu1": 0.5, "mu2": 1.0, "lam": 0.2, "peers": peers}), 20)
        assert adjusted_rand(communities(state.w, 3), people.groups) == 1  # type: ignore[arg-type]
        assert math.isfinite(float(state.w.sum()))


def test_distances_are_squared_distances() -> None:
    x = 100 + torch.randn(5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(squared_distances(x), torch.cdist(x, x) ** 2, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("bad", [{"mu1": -1.0}, {"mu2": 0.0}, {"delta": 0.0}, {"peers": 0}, {"graph_steps": -1}])
def test_settings_without_meaning_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="dada"):
        make("dada", bad)
