"""Fine-tuned FedAvg: FedAvg, then everyone goes on alone from the global model.

Until the last `finetune` share of the rounds this is FedAvg, and the personal model is what the client's local training
made of the global one. From then on everyone trains its own copy.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
(Once fine-tuning has begun nothing travels, but for x down in its first round.)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.fedavg import FedAvgState, shares
from coterie.asks import Fit, Own, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import real


@dataclass(frozen=True)
class FinetunedFedAvg(Algorithm):
    """FedAvg with a last stretch of local training."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    rounds: int = 100  # the run's budget
    finetune: float = 0.1  # share of the rounds spent alone
    server_lr: float = 1.0
    weighted: bool = True

    def __post_init__(self) -> None:
        """A share is a share."""
        if not 0 <= self.finetune <= 1:
            raise SettingError(f"finetune is a share of the rounds, from 0 to 1, not {self.finetune}")
        real("server_lr", self.server_lr, 0, closed=True)

    def init(self, fleet: Fleet) -> FedAvgState:
        """The shared initial model."""
        return FedAvgState(fleet.initial()[0])

    def round(self, fleet: Fleet, state: FedAvgState) -> tuple[FedAvgState, Info]:
        """FedAvg, the first round of fine-tuning from x, or a round alone."""
        plan = self.plan.at(fleet.t)
        switch = self.rounds - round(self.finetune * self.rounds)
        if fleet.t < switch:
            answer = fleet.ask(Fit(fleet.everyone, state.x, plan, give="update", keep="model"))
            p = shares(fleet, answer.ok, self.weighted)
            x = state.x + self.server_lr * (p.to(answer.rows) @ answer.rows)
            return FedAvgState(x), Info(row_normalised(p.expand(fleet.n, -1)), answer.ok, answer.loss)
        start: Tensor | Own = state.x if fleet.t == switch else Own("model")
        answer = fleet.ask(Fit(fleet.everyone, start, plan, give="nothing", keep="model"))
        return state, Info(torch.eye(fleet.n, dtype=torch.float64), answer.ok, answer.loss)

    def personal(self, state: FedAvgState) -> Own:
        """The client's own copy."""
        return Own("model")
