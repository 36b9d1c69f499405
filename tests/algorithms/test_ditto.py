"""Ditto against a plain loop over modules, and what is left of it without the pull."""

import copy

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

PLAN = {"steps": 3, "batch": None, "lr": 0.2}  # whole splits: nothing is drawn
ROUNDS = 5


def module(row: Tensor) -> nn.Module:
    made = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), made.parameters())
    return made


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def step(model: nn.Module, i: int, people: Population, lr: float, lam: float = 0.0, to: Tensor | None = None) -> None:
    held = people.index["train"][i]
    loss = nn.functional.cross_entropy(model(people.inputs[held].double()), people.targets[held])
    if to is not None:
        loss = loss + lam / 2 * (nn.utils.parameters_to_vector(model.parameters()) - to).square().sum()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad


def learn(fleet: Fleet, name: str, rounds: int = ROUNDS, **settings: object) -> tuple[Tensor, object]:
    algo = make(name, {"plan": PLAN} | settings)
    state = algo.init(fleet)
    for t in range(rounds):
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
    return torch.stack([row.clone() for row in fleet.reveal(algo.personal(state))]), state


@pytest.mark.parametrize("away", [None, 2])
def test_both_models_follow_a_plain_loop(away: int | None) -> None:
    people = classes()
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    rules = [] if away is None else [Stay(((fleet.keys[away], 0, 2),))]
    result, state = learn(
        Participation(fleet, *rules), "ditto", lam=0.7, personal_lr=0.1, personal_steps=4, weighted=False
    )
    w = module(fleet.initial()[0])
    mine = [copy.deepcopy(w) for _ in range(4)]
    for t in range(ROUNDS):
        there = [i for i in range(4) if i != away or t < 2]
        received, made = flat(w), []
        for i in there:
            for _ in range(4):
                step(mine[i], i, people, 0.1, 0.7, received)
            trained = copy.deepcopy(w)
            for _ in range(3):
                step(trained, i, people, 0.2)
            made.append(flat(trained))
        w = module(torch.stack(made).mean(0))
    torch.testing.assert_close(result, torch.stack([flat(v) for v in mine]), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.w, flat(w), rtol=0, atol=1e-9)


def test_without_the_pull_it_is_local_and_fedavg_side_by_side() -> None:
    def fleet() -> StackedFleet:
        return StackedFleet(classes(), seed=5, dtype=torch.float64)

    batches = {"plan": PLAN | {"batch": 6, "momentum": 0.5, "keep_optimiser": True}}
    alone, _ = learn(fleet(), "local", **batches)
    apart, _ = learn(fleet(), "ditto", lam=0.0, **batches)
    torch.testing.assert_close(apart, alone, rtol=0, atol=1e-12)
    common, _ = learn(fleet(), "fedavg")
    _, state = learn(fleet(), "ditto")
    torch.testing.assert_close(state.w, common[0], rtol=0, atol=1e-12)


def test_a_schedule_follows_the_rounds_in_both_parts() -> None:
    plan = PLAN | {"schedule": "linear", "rounds": 4}
    algo = make("ditto", {"plan": plan, "personal_lr": 0.4})
    assert algo.plan.at(2).lr == pytest.approx(0.1)
    assert algo.personal_plan(2).lr == pytest.approx(0.2)


def signs() -> Population:
    """Two groups of noisy regressions with opposite weights, and little data each."""
    g = torch.Generator().manual_seed(0)
    clients = []
    for i in range(6):
        x = torch.randn(48, 4, generator=g)
        y = (1 if i < 3 else -1) * x.sum(1, keepdim=True) + 0.1 * torch.randn(48, 1, generator=g)
        clients.append(Client(f"c{i}", (x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])))
    return population(clients, model=lambda: nn.Linear(4, 1), groups=(0, 0, 0, 1, 1, 1))


def test_two_opposite_groups_keep_apart_where_one_model_cannot() -> None:
    fleet = StackedFleet(signs(), seed=1)
    plan = {"steps": 10, "batch": None, "lr": 0.05}
    mine, state = learn(fleet, "ditto", 15, plan=plan, lam=0.1)
    slopes = mine[:, :4].mean(1)
    assert (slopes[:3] > 0.6).all()
    assert (slopes[3:] < -0.6).all()
    assert abs(float(state.w[:4].mean())) < 0.4


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="lam is at least 0"):
        make("ditto", {"lam": -1.0})


def test_a_share_trains_the_global_model_and_everyone_its_own() -> None:
    ditto, fedavg, local = (StackedFleet(classes(), seed=5, dtype=torch.float64) for _ in range(3))
    mine, state = learn(ditto, "ditto", lam=0.0, share=0.5)
    common, _ = learn(fedavg, "fedavg", share=0.5)
    alone, _ = learn(local, "local")
    torch.testing.assert_close(state.w, common[0], rtol=0, atol=1e-12)  # type: ignore[attr-defined]
    torch.testing.assert_close(mine, alone, rtol=0, atol=1e-12)
    assert ditto.ledger.totals()["sent"]["up"]["numbers"] == fedavg.ledger.totals()["sent"]["up"]["numbers"]
