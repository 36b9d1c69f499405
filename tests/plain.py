"""What tests write by hand: modules one after the other, steps of plain descent, rounds of an algorithm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coterie.algorithm import Info
from coterie.algorithms import make
from coterie.asks import Own
from coterie.data.population import Population
from coterie.fleet.base import Fleet


def modules(fleet: Fleet, shared: bool = True) -> list[nn.Module]:
    """Everyone's initial model."""
    rows = fleet.reveal(Own("model", shared))
    return [fleet.module(i, row).train() for i, row in enumerate(rows)]


def flat(model: nn.Module) -> Tensor:
    """Its parameters as a row."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def descend(model: nn.Module, objective: Callable[[nn.Module], Tensor], steps: int, lr: float) -> None:
    """Plain gradient descent."""
    for _ in range(steps):
        gradient = torch.autograd.grad(objective(model), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradient, strict=True):
                p -= lr * g


def loss(people: Population, i: int, split: str = "train") -> Callable[[nn.Module], Tensor]:
    """The mean cross-entropy of a model on a client's split."""
    held = people.index[split][i]
    return lambda model: nn.functional.cross_entropy(model(people.inputs[held].double()), people.targets[held])


def learn(fleet: Fleet, name: str, rounds: int, **settings: object) -> tuple[list[Tensor], Any, list[Info]]:
    """Everyone's model after some rounds, the state and what the rounds told."""
    algo = make(name, settings, rounds=rounds, groups=fleet.population.groups)
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return [row.clone() for row in fleet.reveal(algo.personal(state))], state, infos
