"""The pull towards targets on public inputs that rides along with a Fit."""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.asks import Distil, Fit
from coterie.fleet.stacked.outputs import Outputs
from coterie.fleet.stacked.parts import Parts
from coterie.fleet.stacked.stack import Now, Rows, Stack, drawn_by
from coterie.tasks import Task

Batch = tuple[Tensor, Tensor, Tensor]


def nearest(parts: Parts, outputs: Outputs, stack: Stack, ask: Fit, pairs: Tensor, start: Tensor) -> Tensor:
    """Which of its targets is nearest to each pair's outputs before training."""
    assert ask.distil is not None
    at, targets = _targets(ask.distil, pairs, parts.device), ask.distil.targets
    if at.shape[1] == 1:
        return torch.zeros(len(pairs), dtype=torch.long, device=parts.device)
    local = stack.local[ask.clients[pairs]]
    x = parts.samples.public(ask.distil.inputs)
    out = outputs.of(stack, start, parts.memory.buffers(stack, ask.memory, local), x)
    mine = _student(parts.task, ask.distil.loss, ask.distil.temperature, out.flatten(0, 1)).view_as(out)
    gaps = torch.stack([((targets[c].to(mine.dtype) - mine) ** 2).flatten(1).sum(1) for c in at.T], 1)
    return gaps.argmin(1)


def batches(
    parts: Parts, stack: Stack, ask: Fit, pairs: Tensor, choice: Tensor, now: Now, steps: int
) -> Callable[[int, int, int], Batch]:
    """(step, rows from, to) → public inputs, the nearest target of each row on them, and how hard it pulls."""
    assert ask.distil is not None
    distil: Distil = ask.distil
    local = stack.local[ask.clients[pairs]]
    x = parts.samples.public(distil.inputs)
    at = _targets(distil, pairs, parts.device)
    target_of = at.gather(1, choice[pairs.to(parts.device), None]).flatten()
    weight = weights(distil.weight, pairs, parts)
    name = f"public/{distil.inputs}"
    starts = stack.streams.starts(name, local, now.t, now.place, drawn_by(ask, pairs))
    chosen = stack.streams.samples(name, local, starts, steps * distil.batch, True)

    def batch(step: int, a: int, b: int) -> Batch:
        there = chosen[a:b, step * distil.batch : (step + 1) * distil.batch]
        return x[there], distil.targets[target_of[a:b, None], there], weight[a:b]

    return batch


def gradient(parts: Parts, stack: Stack, loss: str, temperature: float) -> Callable[..., tuple[Rows, Tensor]]:
    """(parameters, buffers, dropout keys, x, targets, weights) of many rows → the gradients of their weighted distances
    to the targets, and the distances.
    """  # fmt: skip

    def gap(
        parameters: Rows, buffers: Rows, key: Tensor | None, x: Tensor, target: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, _ = parts.compute.outputs(stack, parameters, buffers, key, x)
        value = _distance(parts.task, loss, temperature, out, target)
        return w * value, value

    return parts.compute.batched(stack, True, torch.func.grad(gap, has_aux=True))


def weights(weight: float | Tensor, pairs: Tensor, parts: Parts) -> Tensor:
    """One weight for each pair."""
    if isinstance(weight, Tensor) and weight.ndim:
        return weight.to(parts.device, parts.dtype)[pairs.to(parts.device)]
    return torch.full((len(pairs),), float(weight), dtype=parts.dtype, device=parts.device)


def _targets(distil: Distil, pairs: Tensor, device: torch.device) -> Tensor:
    """Which targets each pair may take: pairs × q."""
    at = torch.arange(len(distil.targets)).expand(len(pairs), -1) if distil.at is None else distil.at[pairs]
    return at.reshape(len(pairs), -1).to(device)


def _student(task: Task, loss: str, temperature: float, outputs: Tensor) -> Tensor:
    """What is held against the targets."""
    return outputs if loss == "logits" else task.soft(outputs / temperature)


def _distance(task: Task, loss: str, temperature: float, outputs: Tensor, target: Tensor) -> Tensor:
    """The mean distance of the outputs of a batch to their targets."""
    target = target.to(outputs.dtype)
    if loss == "cross_entropy":
        return -(target * (outputs / temperature).log_softmax(-1)).flatten(1).sum(1).mean()
    apart = target - _student(task, loss, temperature, outputs)
    return apart.abs().mean() if loss == "logits" else apart.square().flatten(1).sum(1).mean()
