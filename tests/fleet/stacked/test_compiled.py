"""Compiled steps: few of them whoever is there, chunks padded to their sizes, and the same answers as without.

The backend is torch's "eager": it traces and guards as the others do, and costs no time to compile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import batchnorm, classes, mlp
from coterie.asks import Ask, Distil, Fit, Gradient, Plan, Pull
from coterie.errors import ModelError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet
from coterie.fleet.stacked.chunks import rounded

N = 12
STEPS = Plan(steps=2, batch=4, lr=0.1)
Make = Callable[[Fleet, Tensor], Ask]


def zeros(clients: Tensor) -> Tensor:
    return torch.zeros(len(clients), dtype=torch.long)


def pulled(fleet: Fleet, **settings: Any) -> Distil:
    """Towards the nearest of two targets on 13 public inputs."""
    far = torch.randn(2, 13, 3, generator=torch.Generator().manual_seed(2)).softmax(-1)
    return Distil(far.to(fleet.dtype), "public", weight=0.5, batch=5, **settings)


ASKS: dict[str, Make] = {
    "gradients": lambda f, c: Gradient(c, f.initial(False)[c], 4),
    "whole splits": lambda f, c: Gradient(c, f.initial(False)[c]),
    "one sum": lambda f, c: Gradient(c, f.initial()[0], 4, give="sum", into=zeros(c)),
    "steps": lambda f, c: Fit(c, f.initial(False)[c], STEPS),
    "steps on whole splits": lambda f, c: Fit(c, f.initial(False)[c], Plan(steps=2, batch=None, lr=0.1)),
    "targets": lambda f, c: Fit(c, f.initial(False)[c], STEPS, distil=pulled(f)),
    "targets alone": lambda f, c: Fit(c, f.initial(False)[c], STEPS, distil=pulled(f, alone=True)),
    "epochs": lambda f, c: Fit(c, f.initial(False)[c], Plan(epochs=1, batch=8, lr=0.1)),
}


def graphs(fleet: Fleet, ask: Make, counts: Sequence[int], t: int) -> int:
    """How many graphs there are after an ask to so many clients each."""
    for i, m in enumerate(counts):
        fleet.begin(t + i)
        fleet.ask(ask(fleet, torch.arange(N)[-m:]))
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", ASKS)
def test_other_numbers_of_clients_compile_nothing_new(name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fleet = StackedFleet(classes(mlp, n=N), compile="eager")
    few = graphs(fleet, ASKS[name], (12, 11), 0)
    assert 0 < few <= 4
    assert graphs(fleet, ASKS[name], (10, 9, 8, 7), 2) == few


@pytest.mark.parametrize(
    "ask",
    [
        lambda f, c: Fit(
            c, f.initial(False)[c], Plan(steps=3, batch=4, momentum=0.9, sampling="epoch", keep_optimiser=True),
            pull=Pull(f.initial(False)[c], 0.3), give="update",
        ),
        lambda f, c: Fit(c, f.initial(False)[c], Plan(steps=2, batch=4, optimiser="adam", keep_optimiser=True)),
        lambda f, c: Fit(c, f.initial(False)[c], STEPS, distil=pulled(f)),
        lambda f, c: Fit(c, f.initial(False)[c], STEPS, distil=pulled(f, alone=True, loss="cross_entropy")),
    ],
    ids=["momentum, epochs of the stream, a pull", "Adam", "targets", "targets alone"],
)  # fmt: skip
def test_padding_leaves_no_trace(ask: Make) -> None:
    """Seven of eight clients fill a chunk of eight: the eighth row is one of theirs again."""
    people = classes(batchnorm, n=8)
    fleets = [
        LoopFleet(people, dtype=torch.float64),
        StackedFleet(people, dtype=torch.float64, compile="eager"),
    ]
    there = torch.tensor([6, 0, 3, 2, 5, 1, 4])
    for t in range(2):
        answers = []
        for fleet in fleets:
            fleet.begin(t)
            answers.append(fleet.ask(ask(fleet, there)))
        torch.testing.assert_close(answers[1].rows, answers[0].rows, rtol=0, atol=1e-9)
        torch.testing.assert_close(answers[1].loss, answers[0].loss, rtol=0, atol=1e-9)
    for client in range(8):
        mine, theirs = (fleet.buffers_of(client, "model") for fleet in fleets)
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9)


def test_sizes_are_the_whole_or_parts_of_it() -> None:
    assert [rounded(count, 20) for count in (1, 2, 3, 4, 5, 6, 10, 11, 20, 21, 41)] == [
        1, 2, 3, 5, 5, 10, 10, 20, 20, 40, 80,
    ]  # fmt: skip
    for whole in range(1, 40):
        for count in range(1, 100):
            size = rounded(count, whole)
            assert count <= size < 2 * max(count, whole)
            assert rounded(size, whole) == size


class Noisy(torch.nn.Module):
    """Draws numbers that cannot be keyed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.rand_like(x))


@pytest.mark.parametrize("chunk", [None, 1])
def test_a_lone_client_is_refused_what_many_are(chunk: int | None) -> None:
    """One row needs no vmap; that its module could not run under it is seen all the same."""
    for n in (1, 2):
        fleet = StackedFleet(classes(Noisy, n=n), chunk=chunk)
        with pytest.raises(ModelError, match="cannot be keyed"):
            fleet.ask(Gradient(fleet.everyone, fleet.initial(), 4))


class Unused(torch.nn.Module):
    """A parameter that its output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head = torch.nn.Linear(6, 2), torch.nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_a_lone_clients_idle_parameters_have_no_gradient() -> None:
    people = classes(Unused, n=1)
    fleets = [F(people, dtype=torch.float64) for F in (LoopFleet, StackedFleet)]
    answers = [fleet.ask(Gradient(fleet.everyone, fleet.initial(), 4)).rows for fleet in fleets]
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-12)
    assert not answers[1][:, :14].any()
