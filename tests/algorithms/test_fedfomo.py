"""FedFomo against a plain loop over modules, its downloads, and what it refuses."""

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithm import Info
from coterie.algorithms import make
from coterie.algorithms.fedfomo import FedFomo
from coterie.data.population import Client, Population, population
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

PLAN = {"steps": 2, "batch": None, "lr": 0.5}  # whole splits: nothing is drawn


def module(row: Tensor) -> nn.Module:
    made = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), made.parameters())
    return made


def loss(model: nn.Module, i: int, people: Population, split: str) -> Tensor:
    held = people.index[split][i]
    return nn.functional.cross_entropy(model(people.inputs[held].double()), people.targets[held])


def trained(row: Tensor, i: int, people: Population) -> Tensor:
    model = module(row)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        loss(model, i, people, "train").backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def learn(fleet: Fleet, rounds: int, **settings: object) -> tuple[Tensor, list[Info]]:
    algo = make("fedfomo", {"plan": PLAN} | settings)
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state.x, infos


@pytest.mark.parametrize("away", [None, 2])
def test_it_follows_a_plain_loop(away: int | None) -> None:
    people, rounds = classes(), 6
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    rules = [] if away is None else [Stay(((fleet.keys[away], 0, 3),))]
    result, infos = learn(Participation(fleet, *rules), rounds, shared=False)
    theta = list(fleet.initial(shared=False))
    nobody = 0
    for t in range(rounds):
        here = [i for i in range(4) if i != away or t < 3]
        after = {i: trained(theta[i], i, people) for i in here}
        new = list(theta)
        for i in here:
            with torch.no_grad():
                base = float(loss(module(theta[i]), i, people, "validation"))
                w = {
                    k: max(0.0, base - float(loss(module(after[k]), i, people, "validation")))
                    / float((after[k] - theta[i]).norm())
                    for k in here
                }
            total = sum(w.values())
            nobody += total == 0
            if total:
                new[i] = theta[i] + sum(w[k] / total * (after[k] - theta[i]) for k in here)
            expected = [w.get(k, 0.0) / total if total else float(k == i) for k in range(4)]
            torch.testing.assert_close(
                infos[t].graph[i], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9
            )
        theta = new
    torch.testing.assert_close(result, torch.stack(theta), rtol=0, atol=1e-9)


def test_who_finds_no_improvement_stays() -> None:
    """With labels that contradict the training data, validation only ever gets worse."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    people = population(
        [Client(f"c{i}", (x, y), (x, 1 - y), (x, y)) for i in range(2)],
        model=lambda: nn.Linear(6, 2),
        task="classification",
    )
    fleet = StackedFleet(people, seed=0, dtype=torch.float64)
    result, infos = learn(fleet, 3)
    assert torch.equal(result, fleet.initial())
    assert torch.equal(infos[-1].graph, torch.eye(2, dtype=torch.float64))


def test_downloads_are_the_favourites_or_at_random() -> None:
    fleet = StackedFleet(classes(n=6), seed=1)
    p = torch.rand(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    greedy, seen = FedFomo(models=2, epsilon=0.0), torch.zeros(6, 6)
    best = p.clone().fill_diagonal_(-1).argsort(1, descending=True)[:, :2]
    for t in range(40):
        fleet.begin(t)
        chosen = greedy.downloads(fleet, p)
        assert (chosen.sum(1) == 3).all()
        assert chosen.diagonal().all()
        assert chosen.gather(1, best).all()
        drawn = FedFomo(models=2, epsilon=1.0, decay=0.0).downloads(fleet, p)
        assert (drawn.sum(1) == 3).all()
        seen += drawn
    assert (seen > 0).all()  # everyone is met sooner or later
    fleet.begin(100)
    assert torch.equal(FedFomo(models=2, epsilon=0.3, decay=0.05).downloads(fleet, p), chosen)  # ε is used up
    fleet.begin(101)
    fleet.present = torch.tensor([True, True, False, False, True, False])
    few = FedFomo(models=4).downloads(fleet, p)
    assert torch.equal(few, fleet.present[:, None] & fleet.present)


def test_what_it_refuses() -> None:
    for settings, words in ({"models": 0}, "at least 1"), ({"epsilon": 2.0}, "epsilon"), ({"decay": -1.0}, "decay"):
        with pytest.raises(SettingError, match=words):
            make("fedfomo", settings)
    with pytest.raises(SettingError, match="below the number of clients, 4"):
        make("fedfomo", {"models": 4}).init(StackedFleet(classes()))
