"""HypCluster: its beginning by hand, and from there on IFCA's rounds, which are tested with IFCA."""

import copy

import torch

from builders import classes
from coterie.algorithms import ALGORITHMS, make
from coterie.fleet.base import Fleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet
from plain import descend, flat, learn, loss, modules

PLAN = {"steps": 3, "batch": None, "lr": 0.5}  # whole splits: nothing is drawn


def begun(fleet: Fleet, clusters: int) -> object:
    _, state, _ = learn(fleet, "hypcluster", 1, plan=PLAN, clusters=clusters)
    return state


def test_hypotheses_begin_with_what_single_clients_made_of_one_model() -> None:
    people = classes(n=6)
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    start, made = modules(fleet)[0], []
    for i in range(6):
        model = copy.deepcopy(start)
        descend(model, loss(people, i), 3, 0.5)
        made.append(model)
    state = begun(fleet, 3)
    rows = torch.stack([flat(m) for m in made])
    near = torch.cdist(state.x, rows)  # type: ignore[attr-defined]
    assert (near.min(1).values < 1e-9).all()
    founders = near.argmin(1).tolist()
    assert len(set(founders)) == 3
    for i in range(6):  # everyone has chosen at once
        losses = [float(loss(people, i)(made[f])) for f in founders]
        assert state.group[i] == losses.index(min(losses))  # type: ignore[attr-defined]


def test_where_too_few_answer_the_other_hypotheses_wait_where_they_were() -> None:
    fleet = StackedFleet(classes(n=4), seed=5, dtype=torch.float64)
    away = Participation(fleet, Stay(tuple((key, 1, None) for key in fleet.keys[1:])))
    state = begun(away, 3)
    moved = (state.x - fleet.initial()[0]).norm(dim=1) > 0  # type: ignore[attr-defined]
    assert moved.tolist() == [True, False, False]


def test_after_the_beginning_its_rounds_are_ifcas_by_data() -> None:
    assert issubclass(ALGORITHMS["hypcluster"], ALGORITHMS["ifca"])
    results = []
    for name in ("hypcluster", "ifca"):
        fleet = StackedFleet(classes(n=6), seed=5, dtype=torch.float64)
        algo = make(name, {"plan": PLAN, "clusters": 2, "start": "random", "weighted": True})
        state = algo.init(fleet)
        for t in range(4):
            fleet.begin(t)
            state, _ = algo.round(fleet, state)
        results.append(state.x)
    assert torch.equal(*results)


def test_obvious_groups_are_found() -> None:
    g = torch.Generator().manual_seed(0)
    from coterie.data.population import Client, population

    clients = []
    for i in range(8):
        x = torch.randn(40, 4, generator=g)
        y = (x.sum(1) * (1 if i < 4 else -1) > 0).long()
        clients.append(Client(f"c{i}", (x[:20], y[:20]), (x[20:30], y[20:30]), (x[30:], y[30:])))
    people = population(clients, model=lambda: torch.nn.Linear(4, 2), groups=(0,) * 4 + (1,) * 4)
    found = []
    for seed in range(6):  # both founders may come from one group: then it depends on what they learned apart
        _, state, _ = learn(StackedFleet(people, seed=seed), "hypcluster", 8, plan={"steps": 10, "lr": 0.5})
        group = state.group.tolist()
        found.append(len(set(group[:4])) == len(set(group[4:])) == 1 and group[0] != group[4])
    assert sum(found) >= 4
