"""FedAvg (McMahan et al. 2017): one global model, the average of what everyone made of it.

    x ← x + server_lr · Σ_i p_i (x_i − x),   x_i: the client's training from x,   p_i ∝ n_i over those who answered

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Plan
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised


@dataclass(frozen=True)
class FedAvgState:
    """The global model."""

    x: Tensor  # d


def shares(fleet: Fleet, ok: Tensor, weighted: bool) -> Tensor:
    """p: the weight of each client's update, by its data or equal, over those who answered (zero if nobody did)."""
    size = fleet.sizes("train").double() if weighted else torch.ones(fleet.n, dtype=torch.float64)
    kept = size * ok.cpu()
    return kept / kept.sum().clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Average the updates of local training, weighted by data."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    server_lr: float = 1.0
    weighted: bool = True  # by the clients' amounts of data, as published; else equally

    buffers = "averaged"
    absent_stays = False

    def init(self, fleet: Fleet) -> FedAvgState:
        """The shared initial model."""
        return FedAvgState(fleet.initial()[0])

    def round(self, fleet: Fleet, state: FedAvgState) -> tuple[FedAvgState, Info]:
        """Everyone trains from x; x moves by the average update."""
        answer = fleet.ask(Fit(fleet.everyone, state.x, self.plan.at(fleet.t), give="update"))
        p = shares(fleet, answer.ok, self.weighted)
        x = state.x + self.server_lr * (p.to(answer.rows) @ answer.rows)
        return FedAvgState(x), Info(row_normalised(p.expand(fleet.n, -1)), answer.ok, answer.loss)

    def personal(self, state: FedAvgState) -> Tensor:
        """The global model, for everyone."""
        return state.x
