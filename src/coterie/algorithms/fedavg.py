"""FedAvg (McMahan et al. 2017): one global model, the average of what everyone made of it.

    x ← x + server_lr · Σ_i p_i (x_i − x),   x_i: the client's training from x,   p_i ∝ n_i over those who answered

Their C is `share`: so many of those who are here, at random, take part in a round.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
(With a share, of those drawn only.)
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info, per_client
from coterie.asks import Fit, Plan
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import real


@dataclass(frozen=True)
class FedAvgState:
    """The global model."""

    x: Tensor  # d


def shares(fleet: Fleet, ok: Tensor, weighted: bool) -> Tensor:
    """p: the weight of each client's update, by its data or equal, over those who answered (zero if nobody did)."""
    size = fleet.sizes("train").double() if weighted else torch.ones(fleet.n, dtype=torch.float64)
    kept = size * ok.cpu()
    return kept / kept.sum().clamp(min=torch.finfo(torch.float64).tiny)


def drawn(fleet: Fleet, share: float) -> Tensor:
    """Who takes part in this round: everyone, or that share of those who are here, at least one."""
    if share == 1:
        return fleet.everyone
    here = fleet.present.nonzero().flatten()
    order = fleet.uniform("drawn", here).argsort()
    return here[order[: math.ceil(share * len(here) - 1e-9)]].sort().values


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Average the updates of local training, weighted by data."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    server_lr: float = 1.0
    weighted: bool = True  # by the clients' amounts of data, as published; else equally
    share: float = 1.0  # C: part of the clients that is asked in a round

    buffers = "averaged"
    absent_stays = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        real("share", self.share, 0, 1)
        real("server_lr", self.server_lr, 0, closed=True)

    def init(self, fleet: Fleet) -> FedAvgState:
        """The shared initial model."""
        return FedAvgState(fleet.initial()[0])

    def round(self, fleet: Fleet, state: FedAvgState) -> tuple[FedAvgState, Info]:
        """Those drawn train from x; x moves by the average update."""
        who = drawn(fleet, self.share)
        answer = fleet.ask(self.training(who, state.x, self.plan.at(fleet.t)))
        ok, loss = (per_client(fleet.n, who, told) for told in (answer.ok, answer.loss))
        p = shares(fleet, ok, self.weighted)
        x = state.x + self.server_lr * (p[who].to(answer.rows) @ answer.rows)
        return FedAvgState(x), Info(row_normalised(p.expand(fleet.n, -1)), ok, loss)

    def training(self, who: Tensor, x: Tensor, plan: Plan) -> Fit:
        """What those drawn do with x."""
        return Fit(who, x, plan, give="update")

    def personal(self, state: FedAvgState) -> Tensor:
        """The global model, for everyone."""
        return state.x
