"""SGD Full: parallel SGD on everyone's data, (5) in MeritFed's paper. What collaboration with all and any costs.

    x ← x − γ/n Σ_j g_j(x)

The mean is over those who answered. Several targets: see coterie.algorithms.pooled.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
"""

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.pooled import Pooled, PooledState, shared_out
from coterie.fleet.base import Fleet


@dataclass(frozen=True)
class SGDFull(Pooled):
    """Equal weights."""

    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """Equal, for those who are there."""
        return shared_out(there)
