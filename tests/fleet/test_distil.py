"""Learning from targets: one step of a linear model against the gradient written down, and what is left alone."""

import pytest
import torch
from torch import Tensor

from builders import batchnorm, classes, linear
from coterie.asks import Distil, Fit, Own, Plan
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

FLEETS = [LoopFleet, StackedFleet]
TARGET = torch.randn(13, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LR, WEIGHT, T = 0.1, 0.7, 2.5


def slope(loss: str, z: Tensor) -> Tensor:
    """d distance / d outputs, of the mean over 13 public inputs."""
    if loss == "logits":
        return torch.sign(z - TARGET) / (13 * 3)
    t, p = TARGET.softmax(-1), (z / T).softmax(-1)
    if loss == "cross_entropy":
        return (p - t) / (T * 13)
    apart = 2 * (p - t)
    return p * (apart - (apart * p).sum(-1, keepdim=True)) / (T * 13)


@pytest.mark.parametrize("kind", FLEETS)
@pytest.mark.parametrize("loss", ["squares", "cross_entropy", "logits"])
def test_one_step_alone_follows_the_gradient_of_the_distance(loss: str, kind: type[Fleet]) -> None:
    fleet = kind(classes(linear), seed=0, dtype=torch.float64)  # type: ignore[call-arg]
    start = fleet.initial(shared=False)
    target = TARGET if loss == "logits" else TARGET.softmax(-1)
    rider = Distil(target[None], "public", WEIGHT, 13, loss=loss, temperature=T, alone=True)  # type: ignore[arg-type]
    fleet.begin(0)
    answer = fleet.ask(Fit(fleet.everyone, start, Plan(epochs=1, lr=LR), distil=rider))
    x = fleet.population.public["public"].double()
    for c in range(4):
        weight, bias = start[c, :18].view(3, 6), start[c, 18:]
        by_output = slope(loss, x @ weight.T + bias)
        expected = -LR * WEIGHT * torch.cat([(by_output.T @ x).flatten(), by_output.sum(0)])
        torch.testing.assert_close(answer.rows[c], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
def test_nothing_private_is_touched_by_learning_targets_alone(kind: type[Fleet]) -> None:
    fleet = kind(classes(batchnorm), seed=0, dtype=torch.float64)  # type: ignore[call-arg]
    fleet.begin(0)
    rider = Distil(TARGET.softmax(-1)[None], "public", loss="cross_entropy", batch=5, alone=True)
    first = fleet.ask(Fit(fleet.everyone, Own(), Plan(epochs=30, sampling="epoch"), give="nothing", distil=rider))
    kept = {name for name in fleet.state() if not name.startswith("ledger/")}
    assert not any("place" in name for name in kept)
    for name, value in fleet.buffers_of(0, "model").items():
        assert torch.equal(value, dict(fleet.module(0, fleet.initial()[0]).named_buffers())[name])
    fleet.begin(1)
    later = fleet.ask(Fit(fleet.everyone, Own(), Plan(epochs=30, sampling="epoch"), give="nothing", distil=rider))
    entropy = -(TARGET.softmax(-1) * TARGET.log_softmax(-1)).sum(-1).mean()
    assert (later.loss < first.loss).all()
    assert (later.loss > entropy).all()  # a cross-entropy is never below the entropy of its targets
