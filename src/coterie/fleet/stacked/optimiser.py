"""torch's own optimisers on stacked parameters: one row per client, its state its own."""

import itertools

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from coterie.asks import Plan
from coterie.fleet.layout import Layout


def descend(
    plan: Plan, parameters: list[Tensor], grads: list[Tensor], moments: list[Tensor] | None, rate: float | Tensor
) -> None:
    """One step of torch's SGD on every row, in place. A rate in a tensor does not recompile when it changes."""
    sgd(
        parameters,
        grads,
        [None] * len(grads) if moments is None else list(moments),
        foreach=isinstance(rate, Tensor),
        weight_decay=plan.weight_decay,
        momentum=plan.momentum,
        lr=rate,  # type: ignore[arg-type]
        dampening=0.0,
        nesterov=plan.nesterov,
        maximize=False,
    )


def hold(parameters: list[Tensor], before: list[Tensor], still: list[Tensor]) -> None:
    """Put back the entries that must not move."""
    for p, old, mask in zip(parameters, before, still, strict=True):
        p.copy_(torch.where(mask, old, p))


class RowOptimiser:
    """Moments and step counts per row; rows that are not stepped stay still, moments and all.

    SGD's buffers may start at zero: m·0 + g is torch's first step. Adam's correction needs the count of steps, so rows
    are taken in blocks of equal counts.
    """

    def __init__(self, plan: Plan, parameters: list[Tensor], kept: dict[str, list[Tensor]], behind: Tensor) -> None:
        self.plan, self.parameters, self.behind = plan, parameters, behind
        names = {"sgd": ("momentum_buffer",) if plan.momentum else ()}.get(plan.optimiser, ("exp_avg", "exp_avg_sq"))
        self.moments = {n: kept.get(n) or [torch.zeros_like(p) for p in parameters] for n in names}
        self.taken = behind.clone()

    def slices(self, a: int, b: int) -> list[Tensor] | None:
        """SGD's buffers of some rows."""
        buffers = self.moments.get("momentum_buffer")
        return None if buffers is None else [m[a:b] for m in buffers]

    def step(self, grads: list[Tensor], a: int, b: int, still: list[Tensor] | None) -> None:
        """One step of Adam on the rows from a to b, in place."""
        before = [] if still is None else [p[a:b].clone() for p in self.parameters]
        counts = self.taken[a:b].tolist()
        edges = [0, *(i for i in range(1, b - a) if counts[i] != counts[i - 1]), b - a]
        for first, last in itertools.pairwise(edges):
            rows = slice(a + first, a + last)
            adam(
                [p[rows] for p in self.parameters],
                [g[first:last] for g in grads],
                [m[rows] for m in self.moments["exp_avg"]],
                [m[rows] for m in self.moments["exp_avg_sq"]],
                [],
                [torch.tensor(float(counts[first])) for _ in grads],
                foreach=False,
                decoupled_weight_decay=self.plan.optimiser == "adamw",
                amsgrad=False,
                beta1=self.plan.betas[0],
                beta2=self.plan.betas[1],
                lr=self.plan.lr,
                weight_decay=self.plan.weight_decay,
                eps=self.plan.eps,
                maximize=False,
            )
        self.taken[a:b] += 1
        if still is not None:
            hold([p[a:b] for p in self.parameters], before, still)

    def state(self, layout: Layout) -> dict[str, Tensor]:
        """Moments as rows, and the number of steps behind each row (which only Adam asks for)."""
        rows = {n: layout.flatten(dict(zip(layout.names, m, strict=True))) for n, m in self.moments.items()}
        return rows | ({} if self.plan.optimiser == "sgd" else {"step": self.taken})
