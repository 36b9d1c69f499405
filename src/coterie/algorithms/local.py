"""Local training: everyone alone. The baseline that collaboration must beat.

Travels: up 0, down 0; phases 1; graphs 1; rows n.
The models live at the clients, so any mix of architectures can take part.
"""

from dataclasses import dataclass, field

import torch

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Own, Plan
from coterie.fleet.base import Fleet


@dataclass(frozen=True)
class LocalState:
    """Nothing: the models are the clients' own."""


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client follows the plan on its own data each round."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    shared: bool = True  # one initial model for all, or one each

    mixed = True

    def init(self, fleet: Fleet) -> LocalState:
        """Nothing to prepare."""
        return LocalState()

    def round(self, fleet: Fleet, state: LocalState) -> tuple[LocalState, Info]:
        """One Fit of the own model."""
        answer = fleet.ask(Fit(fleet.everyone, Own("model", self.shared), self.plan.at(fleet.t), give="nothing"))
        return state, Info(torch.eye(fleet.n, dtype=torch.float64), answer.ok, answer.loss)

    def personal(self, state: LocalState) -> Own:
        """The model at the client."""
        return Own("model", self.shared)
