"""Federated Clustering against a plain loop over modules and points, its limit, and two obvious groups."""

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithm import Info
from coterie.algorithms import make
from coterie.algorithms.federated_clustering import threshold
from coterie.asks import Gradient
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

ROUNDS = 6


def gradient(row: Tensor, i: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][i]
    loss = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def centre(points: list[Tensor], start: int, worth: int, inner: int) -> tuple[Tensor, list[int]]:
    """Threshold clustering as it is written, one point after the other."""
    z, inside = points[start], []
    for _ in range(inner):
        far = [float((p - z).norm()) for p in points]
        tau = sorted(far)[worth - 1]
        inside = [k for k, distance in enumerate(far) if distance <= tau]
        z = sum(p if k in inside else z for k, p in enumerate(points)) / len(points)
    return z, inside


def learn(fleet: Fleet, name: str = "federated_clustering", rounds: int = ROUNDS, **settings: object) -> tuple[
    Tensor, list[Info]
]:  # fmt: skip
    algo = make(name, settings, groups=fleet.population.groups)
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return torch.stack([row.clone() for row in fleet.reveal(algo.personal(state))]), infos


@pytest.mark.parametrize(("every", "away"), [(1, None), (1, 3), (2, 3)])
def test_models_and_neighbours_follow_a_plain_loop(every: int, away: int | None) -> None:
    groups = (0, 0, 1, 1, 1)
    people = classes(n=5, groups=groups)
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    x = list(fleet.initial())
    rules = [] if away is None else [Stay(((fleet.keys[away], 0, 3),))]
    result, infos = learn(Participation(fleet, *rules), lr=0.5, batch=None, inner=3, every=every, shared=False)
    x = list(fleet.initial(shared=False))
    near = [[i] for i in range(5)]
    for t in range(ROUNDS):
        there = [i for i in range(5) if i != away or t < 3]
        old = list(x)
        for i in there:
            if t % every == 0:
                points = [gradient(old[i], j, people) for j in there]
                worth = max(1, round(groups.count(groups[i]) * len(there) / 5))
                z, inside = centre(points, there.index(i), worth, 3)
                near[i] = [there[k] for k in inside]
            else:
                heard = [j for j in near[i] if j in there] or [i]
                z = sum(gradient(old[i], j, people) for j in heard) / len(heard)
            x[i] = old[i] - 0.5 * z
    torch.testing.assert_close(result, torch.stack(x), rtol=0, atol=1e-9)
    for i in range(5):
        assert infos[-1].graph[i].nonzero().flatten().tolist() == near[i]


def test_a_cluster_of_everyone_is_fedavg_of_gradients() -> None:
    people = classes()
    plan = {"steps": 1, "batch": None, "lr": 0.5}
    common, _ = learn(StackedFleet(people, seed=5, dtype=torch.float64), "fedavg", plan=plan, weighted=False)
    one, infos = learn(StackedFleet(people, seed=5, dtype=torch.float64), lr=0.5, batch=None, size=4)
    torch.testing.assert_close(one, common, rtol=0, atol=1e-9)
    assert torch.equal(infos[-1].graph, torch.full((4, 4), 0.25, dtype=torch.float64))


def test_a_cluster_of_oneself_is_local() -> None:
    people = classes()
    plan = {"steps": 1, "batch": None, "lr": 0.5}
    alone, _ = learn(StackedFleet(people, seed=5, dtype=torch.float64), "local", plan=plan)
    single, _ = learn(StackedFleet(people, seed=5, dtype=torch.float64), lr=0.5, batch=None, size=1)
    torch.testing.assert_close(single, alone, rtol=0, atol=1e-9)


def test_batches_of_an_epoch_are_the_ones_that_were_clustered() -> None:
    fleet = StackedFleet(classes(), seed=5, dtype=torch.float64)
    algo = make("federated_clustering", {"lr": 0.5, "batch": 5, "size": 2, "inner": 4, "sampling": "epoch"})
    state = algo.init(fleet)
    for t in range(4):
        fleet.begin(t)
        i, j = torch.arange(4).repeat_interleave(4), torch.arange(4).repeat(4)
        rows = fleet.watch(Gradient(j, state.x, 5, at=i, sampling="epoch")).rows.view(4, 4, -1)
        expected = torch.stack([state.x[a] - 0.5 * centre(list(rows[a]), a, 2, 4)[0] for a in range(4)])
        state, _ = algo.round(fleet, state)
        torch.testing.assert_close(state.x, expected, rtol=0, atol=1e-9)


def test_thresholds_from_inner_products_are_those_of_the_points() -> None:
    g = torch.Generator().manual_seed(0)
    points = torch.randn(7, 7, 20, generator=g, dtype=torch.float64)
    share = torch.tensor([2, 3, 3, 2, 7, 1, 4]) / 7
    w, within = threshold(points @ points.mT, torch.ones(7, 7, dtype=torch.bool), share, 5)
    for i in range(7):
        z, inside = centre(list(points[i]), i, round(7 * float(share[i])), 5)
        torch.testing.assert_close(w[i] @ points[i], z, rtol=0, atol=1e-12)
        assert within[i].nonzero().flatten().tolist() == inside
    torch.testing.assert_close(w.sum(1), torch.ones(7, dtype=torch.float64))


def test_answers_that_are_missing_are_no_points() -> None:
    points = torch.tensor([0.0, 1.0, 5.0, 6.0], dtype=torch.float64)[:, None]
    gram = (points @ points.T).expand(4, 4, 4)
    ok = torch.ones(4, 4, dtype=torch.bool)
    ok[:, 1] = False
    w, within = threshold(gram, ok, torch.full((4,), 0.5), 3)
    assert within.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert (w[[0, 2, 3], 1] == 0).all()


def signs() -> Population:
    """Two groups of regressions with opposite weights, in turn."""
    g = torch.Generator().manual_seed(0)
    clients = []
    for i in range(6):
        x = torch.randn(48, 4, generator=g)
        y = (1 if i % 2 else -1) * x.sum(1, keepdim=True) + 0.1 * torch.randn(48, 1, generator=g)
        clients.append(Client(f"c{i}", (x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])))
    return population(clients, model=lambda: nn.Linear(4, 1), groups=(0, 1) * 3)


@pytest.mark.parametrize("every", [1, 4])
def test_two_opposite_groups_are_found(every: int) -> None:
    fleet = StackedFleet(signs(), seed=1)
    mine, infos = learn(fleet, rounds=40, batch=12, every=every)
    sign = torch.tensor([-1.0, 1.0] * 3)
    assert (mine[:, :4].mean(1) * sign > 0.8).all()
    early = torch.stack([info.graph for info in infos[:20]])  # once gradients are mostly noise, anybody may be near
    same = sign[:, None] == sign
    assert float(early[:, same].sum()) > 0.9 * 6 * 20


def test_the_size_must_be_known_and_possible() -> None:
    fleet = StackedFleet(classes(n=4))
    with pytest.raises(ValueError, match="must be told `size`, or the true group of each of 4"):
        make("federated_clustering").init(fleet)
    with pytest.raises(ValueError, match="size must be a whole number from 1 to 4"):
        make("federated_clustering", {"size": 5}).init(fleet)
    for bad in ({"lr": float("nan")}, {"rounds": 0}, {"lr_schedule": "sometimes"}):
        with pytest.raises(ValueError, match="federated_clustering"):
            make("federated_clustering", bad)
