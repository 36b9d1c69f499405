"""D-PSGD against a plain loop, over fixed and changing topologies, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.data.population import Population
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet
from coterie.graph import topologies

RATE = 0.2


def full(n: int = 6) -> Population:
    """Clients whose batches of 24 are all their data: nothing depends on what is drawn."""
    return classes(mlp, n=n, size=24, ragged=0)


def run(fleet: Any, algo: Any, rounds: int) -> tuple[Any, list[Any]]:
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def gradient(row: Tensor, client: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    value = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(module.parameters()))])


@pytest.mark.parametrize(
    "settings",
    [{"topology": "ring"}, {"topology": "random_matching", "options": {"seed": 2}}, {"topology": "complete"}],
)
def test_iterations_equal_a_plain_loop(settings: Any) -> None:
    people = full()
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    algo = make("d_psgd", {"plan": {"steps": 1, "batch": 24, "lr": RATE}, **settings})
    state, infos = run(fleet, algo, 5)
    place = sorted(range(6), key=lambda i: int(fleet.ids[i]))
    schedule = topologies.schedule(settings["topology"], 6, **settings.get("options", {}))
    x = fleet.initial()
    for t in range(5):
        w = torch.zeros(6, 6, dtype=torch.float64)
        for a in range(6):
            for b in range(6):
                w[place[a], place[b]] = schedule(t)[a, b]
        assert torch.equal(infos[t].graph, w)
        x = torch.stack([sum(w[i, j] * x[j] for j in range(6)) - RATE * gradient(x[i], i, people) for i in range(6)])
    torch.testing.assert_close(state.x, x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("topology", ["ring", "random_matching", "one_peer_exponential"])
def test_repeats_are_rounds_within_a_round(topology: str) -> None:
    people = full()
    settings = {"plan": {"steps": 1, "batch": 24, "lr": RATE}, "topology": topology}
    many, each = run(StackedFleet(people, seed=2, dtype=torch.float64), make("d_psgd", settings), 6)
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    few, infos = run(fleet, make("d_psgd", settings | {"repeats": 3}), 2)
    assert fleet.phases == 3
    torch.testing.assert_close(few.x, many.x, rtol=0, atol=1e-12)
    for t, info in enumerate(infos):
        mean = sum(one.graph for one in each[3 * t : 3 * t + 3]) / 3
        torch.testing.assert_close(info.graph, mean, rtol=0, atol=1e-12)
        assert int(info.extra["links"]) == sum(int(one.extra["links"]) for one in each[3 * t : 3 * t + 3])


def test_epochs_and_the_known_graph_of_scool_are_the_same() -> None:
    people = full()
    plan = {"epochs": 2, "batch": 8, "lr": 0.1}
    given = {"topology": "group_ring", "options": {"neighbours": 4}}
    a, _ = run(StackedFleet(people, seed=2, dtype=torch.float64), make("d_psgd-epochs", {"plan": plan, **given}), 3)
    scool = make("scool-dirac", {"plan": plan, "settings": given})
    b, _ = run(StackedFleet(people, seed=2, dtype=torch.float64), scool, 3)
    torch.testing.assert_close(a.x, b.x, rtol=0, atol=1e-12)


def test_the_mean_of_all_models_takes_the_mean_step_and_disagreement_dies_out() -> None:
    people = full()
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    still = make("d_psgd", {"plan": {"steps": 1, "batch": 24, "lr": 0.0}, "shared": False})
    state, _ = run(fleet, still, 200)
    start = fleet.initial(False)
    torch.testing.assert_close(state.x, start.mean(0).expand_as(start), rtol=0, atol=1e-9)


def test_who_is_away_keeps_its_model_and_the_others_keep_its_weight() -> None:
    people = full()
    fleet = Participation(StackedFleet(people, seed=2, dtype=torch.float64), Stay(((people.keys[2], 1, None),)))
    algo = make("d_psgd", {"plan": {"steps": 1, "batch": 24, "lr": 0.0}, "shared": False})
    state, infos = run(fleet, algo, 1)
    start, w = fleet.initial(False), infos[0].graph
    assert torch.equal(state.x[2], start[2])
    neighbour = int((w[2] > 0).nonzero().flatten()[(w[2] > 0).nonzero().flatten() != 2][0])
    expected = sum(w[neighbour, j] * start[j] for j in range(6) if j != 2) + w[neighbour, 2] * start[neighbour]
    torch.testing.assert_close(state.x[neighbour], expected, rtol=0, atol=1e-12)
    assert int(infos[0].extra["links"]) == 12 - 4  # a ring of six, less the four that lead to and from who is away


def test_bad_topologies_are_refused_and_pieces_warned_of() -> None:
    fleet = StackedFleet(full(), seed=0)
    lopsided = torch.eye(6, dtype=torch.float64).roll(1, 0)
    for settings, says in (
        ({"matrix": lopsided}, "symmetric"),
        ({"matrix": torch.eye(6) * 0.5}, "sum to one"),
        ({"topology": "rign"}, "did you mean ring"),
        ({"topology": "group_ring", "options": {"neighbours": 3}}, "even number"),
        ({"repeats": 0}, "repeats"),
    ):
        with pytest.raises(ValueError, match=says):
            make("d_psgd", settings).init(fleet)
    with pytest.warns(UserWarning, match="in 6 pieces"):
        make("d_psgd", {"matrix": torch.eye(6)}).init(fleet)
