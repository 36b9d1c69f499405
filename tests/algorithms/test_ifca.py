"""IFCA against a plain loop over modules, one cluster as FedAvg, both starts, and obvious groups."""

import copy

import pytest
import torch
from torch import Tensor, nn

from builders import batchnorm, classes, mlp
from coterie.algorithm import Info
from coterie.algorithms import make
from coterie.algorithms.ifca import IFCAState
from coterie.asks import Answer, Loss
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

PLAN = {"steps": 3, "batch": None, "lr": 0.5}  # whole splits: nothing is drawn
ROUNDS = 6


def module(row: Tensor) -> nn.Module:
    made = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), made.parameters())
    return made


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss(model: nn.Module, i: int, people: Population) -> Tensor:
    held = people.index["train"][i]
    return nn.functional.cross_entropy(model(people.inputs[held].double()), people.targets[held])


def trained(model: nn.Module, i: int, people: Population) -> Tensor:
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        loss(model, i, people).backward()
        optimiser.step()
    return flat(model)


def learn(fleet: Fleet, name: str, rounds: int = ROUNDS, **settings: object) -> tuple[Tensor, IFCAState, list[Info]]:
    algo = make(name, {"plan": PLAN} | settings, groups=fleet.population.groups)
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return torch.stack([row.clone() for row in fleet.reveal(algo.personal(state))]), state, infos


@pytest.mark.parametrize(("weighted", "away"), [(False, None), (True, 2)])
def test_models_and_choices_follow_a_plain_loop(weighted: bool, away: int | None) -> None:
    people = classes(n=6)
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    theta = [module(row) for row in make("ifca", {"clusters": 3}).init(fleet).x]
    rules = [] if away is None else [Stay(((fleet.keys[away], 0, 2),))]
    result, state, infos = learn(Participation(fleet, *rules), "ifca", clusters=3, weighted=weighted)
    choice = [0] * 6
    for t in range(ROUNDS):
        there = [i for i in range(6) if i != away or t < 2]
        for i in there:
            choice[i] = min(range(3), key=lambda j, i=i: float(loss(theta[j], i, people).detach()))
        made = {i: trained(theta[choice[i]], i, people) for i in there}
        for j in range(3):
            members = [i for i in there if choice[i] == j]
            sizes = [float(len(people.index["train"][i])) if weighted else 1.0 for i in members]
            if members:
                theta[j] = module(sum(s * made[i] for s, i in zip(sizes, members, strict=True)) / sum(sizes))
    assert len(set(choice)) > 1
    assert state.group.tolist() == choice
    torch.testing.assert_close(result, torch.stack([flat(theta[j]) for j in choice]), rtol=0, atol=1e-9)
    for i in there:
        heard = infos[-1].graph[i] > 0
        assert heard.tolist() == [j in there and choice[j] == choice[i] for j in range(6)]


def test_one_cluster_is_fedavg() -> None:
    people = classes(n=4)
    common, _, _ = learn(StackedFleet(people, seed=5, dtype=torch.float64), "fedavg")
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    single, _, _ = learn(fleet, "ifca", clusters=1, start="spread", weighted=True)
    torch.testing.assert_close(single, common, rtol=0, atol=1e-9)


def test_the_random_start_is_some_clients_own_initial_models() -> None:
    people = classes(n=6)
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    starts = [make("ifca", {"clusters": 3}).init(f).x for f in (fleet, LoopFleet(people, seed=5, dtype=torch.float64))]
    assert torch.equal(*starts)
    own = fleet.initial(shared=False)
    assert ((own[:, None] == starts[0]).all(2).sum(0) == 1).all()


def signs(n: int = 6) -> Population:
    """Two groups of regressions with opposite weights, in turn."""
    g = torch.Generator().manual_seed(0)
    clients = []
    for i in range(n):
        x = torch.randn(48, 4, generator=g)
        y = (1 if i % 2 else -1) * x.sum(1, keepdim=True) + 0.1 * torch.randn(48, 1, generator=g)
        clients.append(Client(f"c{i}", (x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])))
    return population(clients, model=lambda: nn.Linear(4, 1), groups=[i % 2 for i in range(n)])


@pytest.mark.parametrize(("start", "batch"), [("random", None), ("spread", 8)])
def test_two_opposite_groups_are_found(start: str, batch: int | None) -> None:
    fleet = StackedFleet(signs(), seed=1)
    mine, state, _ = learn(fleet, "ifca", 10, plan={"steps": 5, "batch": 8, "lr": 0.1}, start=start, batch=batch)
    assert len(state.x) == 2  # as many as the true groups
    sign = torch.tensor([-1.0, 1.0] * 3)
    assert (mine[:, :4].mean(1) * sign > 0.9).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_spread_start_finds_the_groups_in_one_round_in_any_order(seed: int) -> None:
    people = signs(8)
    order = [3, 0, 6, 1, 7, 4, 2, 5]
    plan = {"steps": 2, "batch": 8, "lr": 0.05}
    rows = []
    for which in (people, people.reordered(order)):
        fleet = StackedFleet(which, seed=seed, dtype=torch.float64)
        result, _, infos = learn(fleet, "ifca", 1, plan=plan, start="spread")
        rows.append(result)
        true = torch.tensor(which.groups)
        assert torch.equal(infos[0].graph > 0, true[:, None] == true)
    torch.testing.assert_close(rows[1], rows[0][order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", ["spread", "clients"])
def test_the_round_that_makes_the_centres_may_be_longer(start: str) -> None:
    people = classes(n=4)
    batches = {"batch": 5, "lr": 0.2}
    made = []
    for plan, more in (({"epochs": 3}, {}), ({"steps": 1}, {"start_epochs": 3})):
        fleet = StackedFleet(people, seed=5, dtype=torch.float64)
        result, _, _ = learn(fleet, "ifca", 1, clusters=2, start=start, plan=plan | batches, **more)
        made.append(result)
    assert torch.equal(*made)
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    short, _, _ = learn(fleet, "ifca", 1, clusters=2, start=start, plan={"steps": 1} | batches)
    assert not torch.equal(short, made[0])


def test_with_fewer_clients_than_models_the_spread_start_leaves_models_as_they_were() -> None:
    people = signs()
    fleet = Participation(StackedFleet(people, seed=1), *[Stay(((key, 1, None),)) for key in people.keys[1:]])
    _, state, _ = learn(fleet, "ifca", 1, start="spread")
    assert torch.isfinite(state.x).all()
    moved = (state.x != fleet.initial()[0]).any(1)
    assert moved.sum() == 1


def test_models_are_compared_with_the_statistics_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[str] = []
    answer = StackedFleet._loss

    def spy(fleet: StackedFleet, ask: Loss, place: int) -> Answer:
        policies.append(ask.buffers)
        return answer(fleet, ask, place)

    monkeypatch.setattr(StackedFleet, "_loss", spy)
    for statistics in ("personal", "recalibrated"):
        fleet = StackedFleet(classes(batchnorm, n=4), seed=5, dtype=torch.float64)
        learn(fleet, "ifca", 2, clusters=2, statistics=statistics)
    assert policies == ["personal"] * 2 + ["recalibrated"] * 2


def test_the_number_of_models_must_be_known_and_possible() -> None:
    people = classes(n=4)
    for settings in ({}, {"clusters": 5}):
        with pytest.raises(ValueError, match="there must be `clusters`, from 1 to 4"):
            make("ifca", settings).init(StackedFleet(people))
    with pytest.raises(ValueError, match="clusters must be a whole number"):
        make("ifca", {"clusters": 0})
    with pytest.raises(ValueError, match="batch must be a whole number"):
        make("ifca", {"batch": 0})
