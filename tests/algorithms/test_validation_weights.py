"""Weights by validation losses against a plain loop over modules, its two limits, and two obvious groups."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithm import Info
from coterie.algorithms import make
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

PLAN = {"steps": 3, "batch": None, "lr": 0.5}  # whole splits: nothing is drawn
ROUNDS = 5


def module(row: Tensor) -> nn.Module:
    made = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), made.parameters())
    return made


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss(model: nn.Module, i: int, people: Population, split: str) -> Tensor:
    held = people.index[split][i]
    return nn.functional.cross_entropy(model(people.inputs[held].double()), people.targets[held])


def train(model: nn.Module, i: int, people: Population) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        loss(model, i, people, "train").backward()
        optimiser.step()


def learn(fleet: Fleet, name: str, rounds: int = ROUNDS, **settings: object) -> tuple[Tensor, Info]:
    algo = make(name, {"plan": PLAN} | settings)
    state = algo.init(fleet)
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
    return torch.stack([row.clone() for row in fleet.reveal(algo.personal(state))]), info


@pytest.mark.parametrize(("score", "away"), [("loss", None), ("perplexity", 2)])
def test_models_and_weights_follow_a_plain_loop(score: str, away: int | None) -> None:
    people = classes()
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    rules = [] if away is None else [Stay(((fleet.keys[away], 0, 2),))]
    result, info = learn(Participation(fleet, *rules), "validation_weights", score=score, temperature=0.3, warmup=1)
    x = [module(row) for row in fleet.initial()]
    for t in range(ROUNDS):
        there = [i for i in range(4) if i != away or t < 2]
        for i in there:
            train(x[i], i, people)
        w = [[float(i == j) for j in range(4)] for i in range(4)]
        if t >= 1:
            for i in there:
                measured = {j: float(loss(x[j], i, people, "validation").detach()) for j in there}
                worth = {j: math.exp(-(math.exp(v) if score == "perplexity" else v) / 0.3) for j, v in measured.items()}
                w[i] = [worth.get(j, 0.0) / sum(worth.values()) for j in range(4)]
        old = [flat(m) for m in x]
        x = [module(sum(a * b for a, b in zip(row, old, strict=True))) for row in w]
    torch.testing.assert_close(result, torch.stack([flat(m) for m in x]), rtol=0, atol=1e-9)
    torch.testing.assert_close(info.graph, torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-9)


def test_hot_weights_are_equal_and_give_fedavg() -> None:
    common, _ = learn(StackedFleet(classes(), seed=5, dtype=torch.float64), "fedavg", weighted=False)
    hot, _ = learn(StackedFleet(classes(), seed=5, dtype=torch.float64), "validation_weights", temperature=1e15)
    torch.testing.assert_close(hot, common, rtol=0, atol=1e-9)


def test_cold_weights_take_the_best_model() -> None:
    people = classes()
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    result, info = learn(fleet, "validation_weights", 1, temperature=1e-9)
    trained = [module(row) for row in fleet.initial()]
    for i, model in enumerate(trained):
        train(model, i, people)
    best = [
        min(range(4), key=lambda j, i=i: float(loss(trained[j], i, people, "validation").detach())) for i in range(4)
    ]
    torch.testing.assert_close(result, torch.stack([flat(copy.deepcopy(trained[j])) for j in best]))
    assert info.graph.argmax(1).tolist() == best


def test_a_model_that_is_off_the_scale_is_not_listened_to() -> None:
    algo = make("validation_weights", {"score": "perplexity"})
    measured = torch.tensor([[0.1, 900.0], [900.0, 900.0]], dtype=torch.float64)
    w = algo.weights(measured, torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(w, torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64))
    w = algo.weights(measured, torch.tensor([[True, False], [False, False]]))
    assert torch.equal(w, torch.eye(2, dtype=torch.float64))


def signs() -> Population:
    """Two groups of regressions with opposite weights."""
    g = torch.Generator().manual_seed(0)
    clients = []
    for i in range(6):
        x = torch.randn(48, 4, generator=g)
        y = (1 if i % 2 else -1) * x.sum(1, keepdim=True) + 0.1 * torch.randn(48, 1, generator=g)
        clients.append(Client(f"c{i}", (x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])))
    return population(clients, model=lambda: nn.Linear(4, 1), groups=(0, 1) * 3)


def test_two_opposite_groups_are_found() -> None:
    fleet = StackedFleet(signs(), seed=1)
    plan = {"steps": 10, "batch": 8, "lr": 0.05}
    mine, info = learn(fleet, "validation_weights", 10, plan=plan, batch=8)
    sign = torch.tensor([-1.0, 1.0] * 3)
    assert (mine[:, :4].mean(1) * sign > 0.8).all()
    same = sign[:, None] == sign
    assert float(info.graph[~same].max()) < 0.02
    assert float(info.graph[same].min()) > 0.2


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is above 0"):
        make("validation_weights", {"temperature": 0.0})
    with pytest.raises(ValueError, match="batch must be a whole number"):
        make("validation_weights", {"batch": 0})
