"""SGD Ideal: parallel SGD on the data of the target's true group only, (6) in MeritFed's paper.

    x ← x − γ/|G| Σ_{j ∈ G} g_j(x),   G: those whose data come from the target's distribution

Nobody knows G; here `groups` tells it. Several targets: see coterie.algorithms.pooled.

Travels: up asked·d, down asked·d; phases 1; graphs 1; rows n.
(`asked` are those of G who are present.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.pooled import Pooled, PooledState, shared_out
from coterie.errors import SettingError
from coterie.fleet.base import Fleet


@dataclass(frozen=True)
class SGDIdeal(Pooled):
    """Equal weights inside the true group."""

    groups: tuple[int, ...] = ()  # the true group of each client

    def init(self, fleet: Fleet) -> PooledState:
        """As for any pool, once the truth is told."""
        if len(self.groups) != fleet.n:
            raise SettingError(
                f"sgd_ideal must be told the true group of each of {fleet.n} clients, not {len(self.groups)}"
            )
        return super().init(fleet)

    def asked(self, fleet: Fleet, state: PooledState) -> Tensor:
        """The targets' true groups."""
        group = torch.tensor(self.groups)
        return (group == group[state.target][state.pool]).nonzero().flatten()

    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """Equal, for those who are there."""
        return shared_out(there)
