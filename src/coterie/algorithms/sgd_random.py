"""SGD with K random clients a round: the FedAvg that MeritFed's authors compare themselves with.

    x ← x − γ/K Σ_{j ∈ S} g_j(x),   S: K clients drawn anew each round

The mean is over those drawn who answered. Several targets, each with K of its pool: see coterie.algorithms.pooled.

Travels: up asked·d, down asked·d; phases 1; graphs ≤ 3; rows n.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.pooled import Pooled, PooledState, members, shared_out
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.settings import whole


@dataclass(frozen=True)
class SGDRandom(Pooled):
    """Equal weights for a few."""

    clients: int = 5  # K; 10 in the authors' runs

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        whole("clients", self.clients, 1)

    def init(self, fleet: Fleet) -> PooledState:
        """As for any pool that has K clients."""
        state = super().init(fleet)
        if self.clients > (least := int(state.pool.bincount().min())):
            raise SettingError(f"{self.clients} clients a round were asked for, and there are {least}")
        return state

    def asked(self, fleet: Fleet, state: PooledState) -> Tensor:
        """In each pool the clients with the lowest draws."""
        marks = fleet.uniform("clients", fleet.everyone)
        rows = torch.where(members(state.pool, len(state.target)), marks, torch.inf)
        lowest: Tensor = rows.sort(dim=1, stable=True).indices[:, : self.clients].flatten()
        return lowest.sort().values

    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """Equal, for those drawn who are there."""
        return shared_out(there)
