"""torch's own optimisers on stacked parameters: one row per client, its state its own."""

import itertools

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from coterie.asks import Plan
from coterie.fleet.layout import Layout


class RowOptimiser:
    """Moments and step counts per row; rows past k stay still, moments and all.

    SGD's buffers may start at zero: m·0 + g is torch's first step. Adam's correction needs the count of steps, so rows
    are taken in blocks of equal counts.
    """

    def __init__(self, plan: Plan, parameters: list[Tensor], kept: dict[str, list[Tensor]], behind: Tensor) -> None:
        self.plan, self.parameters, self.behind = plan, parameters, behind
        names = {"sgd": ("momentum_buffer",) if plan.momentum else ()}.get(plan.optimiser, ("exp_avg", "exp_avg_sq"))
        self.moments = {n: kept.get(n) or [torch.zeros_like(p) for p in parameters] for n in names}
        edges = [0, *(i for i in range(1, len(behind)) if behind[i] != behind[i - 1]), len(behind)]
        self.blocks = list(itertools.pairwise(edges))
        self.counts = [[torch.tensor(float(behind[a])) for _ in parameters] for a, b in self.blocks if b > a]

    def step(self, grads: list[Tensor], k: int) -> None:
        """One step of the first k rows, in place."""
        plan = self.plan
        if plan.optimiser == "sgd":
            moments = self.moments.get("momentum_buffer")
            sgd(
                [p[:k] for p in self.parameters],
                grads,
                [None] * len(grads) if moments is None else [m[:k] for m in moments],
                foreach=False,
                weight_decay=plan.weight_decay,
                momentum=plan.momentum,
                lr=plan.lr,
                dampening=0.0,
                nesterov=plan.nesterov,
                maximize=False,
            )
            return
        for (a, b), counts in zip(self.blocks, self.counts, strict=True):
            b = min(b, k)
            if a >= b:
                break
            adam(
                [p[a:b] for p in self.parameters],
                [g[a:b] for g in grads],
                [m[a:b] for m in self.moments["exp_avg"]],
                [m[a:b] for m in self.moments["exp_avg_sq"]],
                [],
                counts,
                foreach=False,
                decoupled_weight_decay=plan.optimiser == "adamw",
                amsgrad=False,
                beta1=plan.betas[0],
                beta2=plan.betas[1],
                lr=plan.lr,
                weight_decay=plan.weight_decay,
                eps=plan.eps,
                maximize=False,
            )

    def state(self, layout: Layout, steps: Tensor) -> dict[str, Tensor]:
        """Moments as rows, and the number of steps behind each row."""
        rows = {n: layout.flatten(dict(zip(layout.names, m, strict=True))) for n, m in self.moments.items()}
        return rows | {"step": self.behind + steps}
