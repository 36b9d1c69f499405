"""Tapped linear layers: which ones are, and that training through them is training."""

import pytest
import torch
from torch import Tensor, nn

from builders import classes
from coterie.asks import Fit, Plan
from coterie.data.population import Population
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

WIDE = 64  # 64 × 64 is the least that is tapped
PLAN = Plan(steps=4, batch=6, lr=0.1)


class Tokens(nn.Module):
    """A layer that every token passes, one that is used twice, one whose weight is also used elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.tied = nn.Linear(6, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.each, self.small = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(x)))[:, None] * torch.linspace(0.5, 1.5, 5, dtype=x.dtype)[:, None]
        h = torch.tanh(self.each(h)).mean(1)
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        h = self.tied(h) @ self.tied.weight
        return self.small(torch.tanh(h))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDE), nn.BatchNorm1d(WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(),
                         nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3))  # fmt: skip


def fitted(fleet: StackedFleet | LoopFleet, plan: Plan) -> Tensor:
    fleet.begin(0)
    return fleet.ask(Fit(fleet.everyone, fleet.initial(), plan)).rows


def tapped(people: Population) -> set[str]:
    fleet = StackedFleet(people, dtype=torch.float64)
    return set(fleet._training.taps(fleet.parts.stacks[0]).layers)


def test_a_layer_is_tapped_where_its_gradient_is_the_product() -> None:
    assert tapped(classes(deep)) == {"3", "5"}
    assert tapped(classes(Tokens)) == {"each"}


@pytest.mark.parametrize(
    "plan",
    [PLAN, Plan(epochs=2, batch=9, lr=0.05, sampling="epoch"), Plan(steps=3, batch=None, lr=0.1)],
    ids=["steps", "epochs of ragged clients", "whole splits"],
)
@pytest.mark.parametrize("model", [deep, Tokens])
def test_training_is_the_plain_loops(model: type[nn.Module], plan: Plan) -> None:
    people = classes(model)
    stacked = fitted(StackedFleet(people, dtype=torch.float64), plan)
    torch.testing.assert_close(stacked, fitted(LoopFleet(people, dtype=torch.float64), plan), rtol=0, atol=1e-11)


def test_the_product_added_in_place_survives_inductor() -> None:
    people = classes(deep)
    ours = fitted(StackedFleet(people, dtype=torch.float64, compile=True), PLAN)
    torch.testing.assert_close(ours, fitted(LoopFleet(people, dtype=torch.float64), PLAN), rtol=0, atol=1e-11)


def test_what_is_more_than_a_gradient_is_not_tapped() -> None:
    """Momentum and decay need the gradient itself: the same layers, trained the plain way."""
    people = classes(deep)
    for plan in (Plan(steps=3, batch=6, momentum=0.9), Plan(steps=3, batch=6, weight_decay=0.1)):
        fleet = StackedFleet(people, dtype=torch.float64)
        rows = fitted(fleet, plan)
        assert not fleet._training._taps
        torch.testing.assert_close(rows, fitted(LoopFleet(people, dtype=torch.float64), plan), rtol=0, atol=1e-11)
