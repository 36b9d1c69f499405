"""FedAdp (Wu and Wang 2021), as MeritFed's authors run it: weights from the angle to the target's gradient.

    θ_j: the angle between g_j(x) and the target's own g(x)
    w = softmax(5 (1 − exp(−exp(−5 (θ_j − 1))))),   x ← x − γ Σ_j w_j g_j(x)

A Gompertz function turns the angle into a score, `steepness` 5 of it twice. The published method smooths angles over
rounds and measures them to the mean gradient; the target's gradient in its place, of this round alone, is MeritFed's.
Where the target does not answer, everyone weighs the same. Several targets: see coterie.algorithms.pooled.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.pooled import Pooled, PooledState, cosines
from coterie.fleet.base import Fleet
from coterie.settings import real


@dataclass(frozen=True)
class FedAdp(Pooled):
    """Weights from angles."""

    steepness: float = 5.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        real("steepness", self.steepness, 0, closed=True)

    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """The softmax over those who are there."""
        angle = torch.arccos(cosines(g, state.target, state.pool))
        score = self.steepness * (1 - torch.exp(-torch.exp(-self.steepness * (angle - 1))))
        here = there.gather(1, state.target.to(there.device)[:, None])  # whether the target is there
        logits = torch.where(here, score, 0).masked_fill(~there, -torch.inf)
        return torch.where(there.any(1, keepdim=True), logits.softmax(1), 0).nan_to_num(0)
