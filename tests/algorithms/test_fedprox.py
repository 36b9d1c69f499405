"""FedProx against a plain loop, and as FedAvg where nothing pulls."""

import copy

import pytest
import torch

from builders import classes
from coterie.algorithms import make
from coterie.fleet.stacked import StackedFleet
from plain import descend, flat, learn, loss, modules

PLAN = {"steps": 3, "batch": None, "lr": 0.2}  # whole splits: nothing is drawn


def fleet() -> StackedFleet:
    return StackedFleet(classes(), seed=5, dtype=torch.float64)


def test_it_follows_a_plain_loop() -> None:
    people, mu = classes(), 0.8
    rows, _, _ = learn(fleet(), "fedprox", 4, plan=PLAN, mu=mu)
    x = modules(fleet())[0]
    sizes = [float(len(r)) for r in people.index["train"]]
    for _ in range(4):
        start, made = flat(x), []
        for i in range(4):
            model, own = copy.deepcopy(x), loss(people, i)

            def pulled(m: torch.nn.Module, own=own, start=start) -> torch.Tensor:  # type: ignore[no-untyped-def]
                there = torch.nn.utils.parameters_to_vector(m.parameters())
                return own(m) + mu / 2 * (there - start).square().sum()

            descend(model, pulled, 3, 0.2)
            made.append(flat(model))
        mean = sum(s * row for s, row in zip(sizes, made, strict=True)) / sum(sizes)
        torch.nn.utils.vector_to_parameters(mean, x.parameters())
    torch.testing.assert_close(rows[0], flat(x), rtol=0, atol=1e-9)


def test_without_the_pull_it_is_fedavg_to_the_last_bit() -> None:
    plan = {"steps": 4, "batch": 6, "lr": 0.2, "momentum": 0.5}
    for settings in ({"plan": plan}, {"plan": plan, "share": 0.5, "weighted": False}):
        a, _, told = learn(fleet(), "fedprox", 4, mu=0.0, **settings)
        b, _, expected = learn(fleet(), "fedavg", 4, **settings)
        assert torch.equal(torch.stack(a), torch.stack(b))
        assert torch.equal(told[-1].graph, expected[-1].graph)


def test_a_hard_pull_keeps_everyone_near_what_was_received() -> None:
    start = fleet().initial()[0]
    free, _, _ = learn(fleet(), "fedprox", 1, plan=PLAN | {"lr": 0.01, "steps": 200}, mu=0.0)
    held, _, _ = learn(fleet(), "fedprox", 1, plan=PLAN | {"lr": 0.01, "steps": 200}, mu=10.0)
    assert (held[0] - start).norm() < 0.2 * (free[0] - start).norm()


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="mu must be a number at least 0"):
        make("fedprox", {"mu": -0.1})
