"""TAWT (Chen, Crammer, He, Roth and Su 2021), as MeritFed's authors run it: weights that follow the target's gradient.

    w_j ← w_j exp(100 γ cos(g_j(x), g_target(x))), then Σ_j w_j = 1     in every second round, from the second
    x ← x − γ Σ_j w_j g_j(x)

Target-Aware Weighted Training's heuristic with cosines in place of hypergradients. The target's cosine with itself is
one, so its weight only ever grows, and soon it is alone. Where the target does not answer weights stay as they are.
Several targets: see coterie.algorithms.pooled.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.pooled import Pooled, PooledState, cosines, divided, present_shares
from coterie.fleet.base import Fleet
from coterie.settings import real, whole


@dataclass(frozen=True)
class TAWT(Pooled):
    """Multiplicative weights by cosines."""

    rate: float = 100.0  # times γ: the step of the weights
    every: int = 2  # rounds from one change of the weights to the next

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        real("rate", self.rate, 0, closed=True)
        whole("every", self.every, 1)

    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """One multiplicative step among those who are there."""
        if (fleet.t + 1) % self.every:
            return state.w
        here = there.gather(1, state.target.to(there.device)[:, None])  # whether the target is there
        step = self.rate * self.lr * cosines(g, state.target, state.pool)
        u = present_shares(present_shares(state.w, there) * torch.exp(torch.where(here, step, 0)), there)
        return divided(state.w, u, there)
