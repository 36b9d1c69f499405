"""APFL (Deng, Kamani and Mahdavi 2020): a personal model mixed with the global one, and the mixture learned.

Adaptive Personalized Federated Learning, arXiv 2003.13461, Algorithm 1. Client i has its copy w_i of the global model
and a personal v_i, and uses v̄_i = α_i v_i + (1 − α_i) w_i. One iteration, v_i and α_i descending through the mixture:

    w_i ← w_i − η ∇f_i(w_i),    v_i ← v_i − η α_i ∇f_i(v̄_i),    α_i ← [α_i − η_α ⟨v_i − w_i, ∇f_i(v̄_i)⟩] in [0, 1]

all right sides as they were before. Every `every` iterations the server averages the copies of those who are there, and
whoever is there at the next one starts from its average; α moves in the first iteration of each such period, once
between two averages, as the authors do it. With α fixed at 1 this is Local; with α fixed at 0 and every = 1, FedAvg by
one step. The two gradients are taken on a batch each (the paper draws one for both: the same in expectation), and the
two models have buffers of their own. Momentum and weight decay are torch's.

Travels: up 2·m·d, down 2·m·d; phases 1; graphs ≤ 2; rows n.
(Models are kept with the algorithm and asked about at every iteration. Between sites that keep them, d both ways per
period would do.)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.allforone import descend
from coterie.algorithms.fedavg import shares
from coterie.asks import Gradient, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.schedules import rates
from coterie.settings import real, whole


@dataclass(frozen=True)
class APFLState:
    """Everything the next iteration needs."""

    server: Tensor  # d: the last average
    w: Tensor  # n×d: everyone's copy of the global model
    v: Tensor  # n×d: the personal parts
    alpha: Tensor  # n float64: how much of each mixture is personal
    u_w: Tensor  # n×d: momentum of w and v (n×0 without)
    u_v: Tensor


@dataclass(frozen=True)
class APFL(Algorithm):
    """The paper's names."""

    lr: float = 0.1  # η
    batch: int | None = 16
    alpha: float = 0.5  # α at first
    alpha_lr: float | None = None  # η_α; None: η; 0: α stays
    every: int = 1  # τ: iterations from one average to the next
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    sampling: Sampling = "fresh"
    weighted: bool = False  # the average by the clients' amounts of data; the paper's is plain
    rounds: int = 10_000  # the run's budget, for schedules

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, most in (("lr", float("inf")), ("weight_decay", float("inf")), ("alpha", 1.0)):
            real(name, getattr(self, name), 0, most, closed=True)
        if self.alpha_lr is not None:
            real("alpha_lr", self.alpha_lr, 0, closed=True)
        whole("every", self.every, 1)
        if self.batch is not None:
            whole("batch", self.batch, 1)
        if not 0 <= self.momentum < 1:
            raise SettingError(f"momentum is at least 0 and below 1, not {self.momentum}")

    def init(self, fleet: Fleet) -> APFLState:
        """One initial model, everywhere."""
        x = fleet.initial()
        u = torch.zeros_like(x) if self.momentum else x.new_zeros(fleet.n, 0)
        alpha = torch.full((fleet.n,), self.alpha, dtype=torch.float64, device=x.device)
        return APFLState(x[0], x.clone(), x.clone(), alpha, u, u)

    def round(self, fleet: Fleet, state: APFLState) -> tuple[APFLState, Info]:
        """One iteration at everyone; an average where a period ends."""
        first, last = fleet.t % self.every == 0, (fleet.t + 1) % self.every == 0
        if first:
            here = fleet.present.to(state.w.device)[:, None]
            state = replace(state, w=torch.where(here, state.server, state.w))
        w, v, batch = state.w, state.v, self.batch
        common, own = fleet.ask(
            Gradient(fleet.everyone, w, batch, sampling=self.sampling, memory="global"),
            Gradient(fleet.everyone, self.personal(state), batch, sampling=self.sampling),
        )
        ok = common.ok & own.ok
        lr = rates(self.lr_schedule, self.lr, self.rounds)[min(fleet.t, self.rounds - 1)]
        mix = state.alpha.to(v)[:, None]
        new_w, u_w = descend(w, state.u_w, common.rows, ok, lr, self.momentum, self.weight_decay)
        new_v, u_v = descend(v, state.u_v, mix * own.rows, ok, lr, self.momentum, self.weight_decay)
        alpha = state.alpha
        if first:
            slope = ((v - w).double() * own.rows.double()).sum(1)
            rate = lr if self.alpha_lr is None else self.alpha_lr
            alpha = torch.where(ok, (alpha - rate * slope).clamp(0, 1), alpha)
        p = shares(fleet, ok, self.weighted)
        server = p.to(new_w) @ new_w if last and bool(ok.any()) else state.server
        p = p.to(alpha)
        graph = torch.diag(alpha + (1 - alpha) * (1 - p.sum())) + (1 - alpha)[:, None] * p
        return APFLState(server, new_w, new_v, alpha, u_w, u_v), Info(graph, ok, own.loss)

    def personal(self, state: APFLState) -> Tensor:
        """v̄: everyone's mixture."""
        mix = state.alpha.to(state.v)[:, None]
        return mix * state.v + (1 - mix) * state.w
