"""FedMD against a plain loop over modules of two architectures, its beginning, and what it asks of public data."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from builders import classes, linear, mlp
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet
from plain import descend, flat, learn, loss, modules

PLAN = {"steps": 3, "batch": None, "lr": 0.2}  # whole splits: nothing is drawn
SETTINGS = {
    "plan": PLAN,
    "digest": {"epochs": 2, "batch": None, "lr": 0.3},
    "transfer": {"steps": 4, "batch": None, "lr": 0.5},
    "first": {"steps": 5, "batch": None, "lr": 0.1},
}


@pytest.mark.parametrize("late", [None, 2])
def test_it_follows_a_plain_loop(late: int | None) -> None:
    people, rounds = classes([mlp, linear]), 5
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    rules = [] if late is None else [Stay(((fleet.keys[late], 2, None),))]
    everyone, begun = modules(fleet), set()
    rows, state, infos = learn(Participation(fleet, *rules), "fedmd", rounds, **SETTINGS)
    x, y = people.public["public"].double(), people.public_labels["public"]
    consensus = torch.empty(0)
    for t in range(rounds):
        there = [i for i in range(4) if i != late or t >= 2]
        for i in there:
            if i not in begun:
                descend(everyone[i], lambda m: nn.functional.cross_entropy(m(x), y), 4, 0.5)
                descend(everyone[i], loss(people, i), 5, 0.1)
            else:
                descend(everyone[i], lambda m, c=consensus: (m(x) - c).abs().mean(), 2, 0.3)
                descend(everyone[i], loss(people, i), 3, 0.2)
            begun.add(i)
        consensus = torch.stack([everyone[i](x).detach() for i in there]).mean(0)
        assert infos[t].ok.tolist() == [i in there for i in range(4)]
    for row, model in zip(rows, everyone, strict=True):
        torch.testing.assert_close(row, flat(model), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.consensus[0], consensus, rtol=0, atol=1e-9)


def test_without_labels_it_must_be_told_to_begin_without_transfer() -> None:
    bare = replace(classes(), public_labels={})
    with pytest.raises(ValueError, match="no classes are known of public inputs 'public'"):
        learn(StackedFleet(bare, seed=0), "fedmd", 1)
    rows, _, _ = learn(StackedFleet(bare, seed=0), "fedmd", 1, plan=PLAN, transfer={"steps": 0})
    alone, _, _ = learn(StackedFleet(bare, seed=0), "local", 1, plan=PLAN)
    for a, b in zip(rows, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_the_mean_of_scores_brings_everyone_nearer_to_it() -> None:
    fleet = StackedFleet(classes(), seed=5, dtype=torch.float64)
    still, far = {"steps": 0}, {"steps": 100, "batch": None, "lr": 1.0}
    x = fleet.population.public["public"].double()

    def spread(rounds: int) -> float:
        fleet.reset()
        rows, _, _ = learn(
            fleet, "fedmd", rounds, plan=still, transfer=still, first=far, digest={"steps": 50, "lr": 0.1}
        )
        scores = torch.stack([fleet.module(i, row)(x).detach() for i, row in enumerate(rows)])
        return float((scores - scores.mean(0)).abs().mean())

    assert spread(6) < 0.5 * spread(1)
