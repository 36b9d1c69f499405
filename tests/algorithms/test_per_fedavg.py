"""Per-FedAvg, its global and its local models, against a plain loop; and as FedAvg where nobody looks ahead."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from builders import classes
from coterie.algorithms import make
from coterie.asks import Fit, Own, Plan, Pull
from coterie.errors import AskError, SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet
from plain import descend, flat, learn, loss, modules

STEPS, BETA, ALPHA, ROUNDS = 3, 0.2, 0.5, 4
PLAN = {"steps": STEPS, "batch": None, "lr": BETA}  # whole splits: nothing is drawn


def fleet(build: Any = StackedFleet) -> Fleet:
    made: Fleet = build(classes(), seed=5, dtype=torch.float64)
    return made


def by_hand() -> tuple[list[nn.Module], nn.Module]:
    """The model that everyone made of what it received last, and the global one."""
    people = classes()
    x = modules(fleet())[0]
    sizes = [float(len(r)) for r in people.index["train"]]
    adapted: list[nn.Module] = []
    for _ in range(ROUNDS):
        made, adapted = [], []
        for i in range(4):
            model, own = copy.deepcopy(x), loss(people, i)
            for _ in range(STEPS):
                near = copy.deepcopy(model)
                descend(near, own, 1, ALPHA)
                slope = torch.autograd.grad(own(near), list(near.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), slope, strict=True):
                        p -= BETA * g
            made.append(flat(model))
            adapted.append(copy.deepcopy(x))
            descend(adapted[-1], own, 2, ALPHA)
        mean = sum(s * row for s, row in zip(sizes, made, strict=True)) / sum(sizes)
        nn.utils.vector_to_parameters(mean, x.parameters())
    return adapted, x


@pytest.mark.parametrize("build", [LoopFleet, StackedFleet], ids=["loop", "stacked"])
def test_both_models_follow_a_plain_loop(build: Any) -> None:
    adapted, x = by_hand()
    whole, _, _ = learn(fleet(build), "per_fedavg_global", ROUNDS, plan=PLAN, alpha=ALPHA)
    for row in whole:
        torch.testing.assert_close(row, flat(x), rtol=0, atol=1e-9)
    rows, state, _ = learn(fleet(build), "per_fedavg", ROUNDS, plan=PLAN, alpha=ALPHA, adapt=2)
    torch.testing.assert_close(state.x, flat(x), rtol=0, atol=1e-9)
    for row, model in zip(rows, adapted, strict=True):
        torch.testing.assert_close(row, flat(model), rtol=0, atol=1e-9)


def test_without_a_look_ahead_it_is_fedavg_to_the_last_bit() -> None:
    plan = {"steps": 4, "batch": 6, "lr": 0.2, "momentum": 0.5}
    for settings in ({"plan": plan}, {"plan": plan, "share": 0.5, "weighted": False}):
        expected, _, told = learn(fleet(), "fedavg", ROUNDS, **settings)
        rows, _, infos = learn(fleet(), "per_fedavg_global", ROUNDS, alpha=0.0, **settings)
        assert torch.equal(torch.stack(rows), torch.stack(expected))
        assert torch.equal(infos[-1].graph, told[-1].graph)
        _, state, _ = learn(fleet(), "per_fedavg", ROUNDS - 1, alpha=0.0, **settings)
        received, _, _ = learn(fleet(), "per_fedavg", ROUNDS, alpha=0.0, adapt=0, **settings)
        assert torch.equal(torch.stack(received), state.x.expand(4, -1))


def test_a_look_ahead_takes_two_batches_and_goes_on_behind_them() -> None:
    plan = Plan(steps=2, batch=5, lr=0.3, ahead=0.2, momentum=0.9, sampling="epoch")
    made = []
    for build in (LoopFleet, StackedFleet):
        one = fleet(build)
        for t in range(3):  # the place in the stream is kept from round to round
            one.begin(t)
            one.ask(Fit(one.everyone, Own(), plan, give="nothing"))
        made.append(torch.stack(one.reveal(Own())))
        places = [v for name, v in one.state().items() if "place" in name]
        assert {int(v) for place in places for v in place.flatten()} == {3 * 2 * 2 * 5}
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-9)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(SettingError, match="alpha must be a number at least 0"):
        make("per_fedavg", {"alpha": -0.1})
    with pytest.raises(SettingError, match="adapt must be a whole number of at least 0, not -1"):
        make("per_fedavg", {"adapt": -1})
    with pytest.raises(SettingError, match="looks ahead has the optimiser sgd, and no weight_decay"):
        make("per_fedavg_global", {"plan": {"steps": 1, "optimiser": "adam"}})
    rows = fleet().initial()
    with pytest.raises(AskError, match="goes without columns, pull, drift and distil"):
        Fit(torch.arange(4), rows, Plan(steps=1, ahead=0.1), pull=Pull(rows))
