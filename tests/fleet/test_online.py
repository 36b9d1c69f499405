"""Training data that are made as they are asked for."""

import pytest
import torch
from torch import nn

from coterie.asks import Evaluate, Fit, Gradient, Loss, Own, Plan
from coterie.data.partitions import partition
from coterie.data.population import Population, deal, online
from coterie.data.synthetic import LeastSquares
from coterie.errors import AskError
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

SOURCE = LeastSquares(seed=3, clients=6, dimension=4)


def people() -> Population:
    dataset = SOURCE.dataset(train=10, test=20)
    dealt = deal(
        dataset,
        partition("cluster_split", dataset, seed=0),
        model=lambda: nn.Linear(4, 1, bias=False),
        task="regression",
    )
    return online(dealt, SOURCE)


def asks(fleet: LoopFleet | StackedFleet) -> list[object]:
    x = fleet.initial(shared=False)
    pairs = torch.tensor([0, 3, 5, 0])
    return [
        Gradient(fleet.everyone, x, 3),
        Gradient(fleet.everyone, x, 3, sampling="epoch"),
        Gradient(pairs, x, 2, at=pairs, draw=torch.arange(4), give="sum", into=torch.tensor([0, 1, 1, 0]), track=False),
        Loss(fleet.everyone, x, 4),
        Loss(fleet.everyone, x, split="test"),
        Fit(fleet.everyone, x, Plan(epochs=2, batch=4, lr=0.05)),
        Fit(fleet.everyone, Own("model"), Plan(steps=3, batch=2, lr=0.05, sampling="epoch"), give="nothing"),
        Evaluate(fleet.everyone, x),
    ]


def test_both_fleets_see_the_same_stream() -> None:
    answers = []
    for kind in (LoopFleet, StackedFleet):
        fleet = kind(people(), seed=1, dtype=torch.float64)
        for t in range(3):
            fleet.begin(t)
            told = fleet.ask(*asks(fleet))  # type: ignore[arg-type]
        answers.append(told)
    for a, b in zip(*answers, strict=True):
        for name in ("rows", "sums", "weight", "loss"):
            torch.testing.assert_close(getattr(b, name), getattr(a, name), rtol=0, atol=1e-9)


def test_a_gradient_is_that_of_the_streams_samples() -> None:
    fleet = StackedFleet(people(), seed=1, dtype=torch.float64)
    fleet.begin(0)
    x = fleet.initial(shared=False)
    fleet.ask(Gradient(fleet.everyone, x, 3, sampling="epoch"))  # samples 0, 1, 2 of everyone
    told = fleet.ask(Gradient(fleet.everyone, x, 5, sampling="epoch"))
    for i in range(6):
        inputs, targets = SOURCE.samples(torch.tensor(i), torch.arange(3, 8))
        error = inputs @ x[i] - targets[:, 0]
        torch.testing.assert_close(told.rows[i], 2 * inputs.T @ error / 5, rtol=0, atol=1e-9)


def test_samples_never_run_out_and_clients_may_change_places() -> None:
    order = [4, 1, 0, 5, 2, 3]
    rows = []
    for population in (people(), people().reordered(order)):
        fleet = StackedFleet(population, seed=1, dtype=torch.float64)
        fleet.begin(0)
        rows.append(
            fleet.ask(Fit(fleet.everyone, fleet.initial(), Plan(steps=300, batch=4, lr=0.05), give="rows")).rows
        )
    torch.testing.assert_close(rows[1], rows[0][order], rtol=0, atol=1e-9)
    torch.testing.assert_close(rows[0], SOURCE.truth(), rtol=0, atol=1e-6)  # noiseless: 1,200 samples find it


def test_there_is_no_whole_of_what_has_no_end() -> None:
    fleet = StackedFleet(people(), seed=1)
    fleet.begin(0)
    with pytest.raises(AskError, match="name a batch"):
        fleet.ask(Gradient(fleet.everyone, fleet.initial()))
    with pytest.raises(AskError, match="name a batch"):
        fleet.ask(Fit(fleet.everyone, fleet.initial(), Plan(steps=1, batch=None)))
