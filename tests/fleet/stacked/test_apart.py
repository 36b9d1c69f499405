"""On a CPU, rows with much to convolve train one after the other: which ones do, and that it changes no number."""

import pytest
import torch

from builders import classes, conv_batchnorm, mlp
from coterie.asks import Fit, Gradient, Own, Plan
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet, chunks
from coterie.fleet.stacked.training import Training
from coterie.models.lenet import LeNet

IMAGE = (2, 4, 4)
KEPT = {"momentum": 0.9, "keep_optimiser": True, "sampling": "epoch"}


def lenets(n: int) -> StackedFleet:
    return StackedFleet(classes(lambda: LeNet(classes=3), (3, 32, 32), n=n, ragged=0))


def test_products_are_those_of_the_convolutions() -> None:
    """Of each number a convolution gives, as many as its kernel has weights: LeNet's 28² × 6 × 75 + 10² × 16 × 150."""
    fleet = lenets(1)
    assert fleet.parts.chunks.cost(fleet.parts.stacks[0])[1] == 28**2 * 6 * 75 + 10**2 * 16 * 150
    plain = StackedFleet(classes(mlp))
    assert plain.parts.chunks.cost(plain.parts.stacks[0])[1] == 0


@pytest.mark.parametrize(("n", "batch", "rows"), [(12, 10, 12), (2, 10, 1), (12, 64, 1)])
def test_few_rows_and_large_batches_of_images_go_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, n: int, batch: int, rows: int
) -> None:
    """As measured: benchmarks/engine.py."""
    fleet, met = lenets(n), set()
    train = Training.train
    monkeypatch.setattr(Training, "train", lambda self, *a: met.add(len(a[2])) or train(self, *a))
    fleet.ask(Fit(fleet.everyone, fleet.initial(), Plan(steps=0, batch=batch)))
    assert met == {rows}


ASKS = {
    "an own model's update": lambda f: Fit(
        f.everyone, Own("mine"), Plan(steps=2, batch=5, lr=0.1, **KEPT), give="update"
    ),
    "epochs of ragged clients": lambda f: Fit(f.everyone, f.initial(), Plan(epochs=1, batch=8, lr=0.1), keep="copy"),
    "gradients": lambda f: Gradient(f.everyone, f.initial(False), 5, sampling="epoch"),
    "a sum": lambda f: Gradient(
        f.everyone, f.initial(False), 5, give="sum", into=torch.tensor([0, 1, 0, 1]), track=False
    ),
}


def test_apart_or_not_the_numbers_are_the_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What clients remember is copied once for an ask, which adds to the copy; what was there before stays."""
    monkeypatch.setattr(chunks, "CONVOLVED", 1)
    people = classes(conv_batchnorm, IMAGE)
    fleets: list[Fleet] = [F(people, dtype=torch.float64) for F in (LoopFleet, StackedFleet)]
    for t in range(3):
        for fleet in fleets:
            fleet.begin(t)
        before = {name: value.clone() for name, value in fleets[1].state().items()}
        for again in range(2):  # the same round asked twice trains nothing twice
            for fleet in fleets:
                fleet.begin(t)
            for name, make in ASKS.items():
                answers = [fleet.ask(make(fleet)) for fleet in fleets]
                for part in ("rows", "sums", "loss"):
                    ours, theirs = getattr(answers[1], part), getattr(answers[0], part)
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=f"{name}, {part}, round {t}")
            if not again:
                fleets[1].begin(t)
                assert all(torch.equal(value, before[name]) for name, value in fleets[1].state().items())
    for client in range(4):
        mine, theirs = (fleet.buffers_of(client, "model") for fleet in fleets)
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9)
    a, b = (torch.stack(fleet.reveal(Own("mine"))) for fleet in fleets)
    torch.testing.assert_close(b, a, rtol=0, atol=1e-9)
