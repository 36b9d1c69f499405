"""KT-pFL (Zhang, Guo, Ma, Wang, Xu and Wu 2021): everyone learns a mixture of beliefs, and who mixes whom is learned.

Parameterized Knowledge Transfer for Personalized Federated Learning, arXiv 2111.02862. s_m: client m's softmax outputs
at temperature T on the public inputs, c an N×N matrix of knowledge coefficients, q_n = Σ_m c_nm s_m, D_n the data of n:

    w_n ← steps on the client's own data                                                             (6)
    c ← c − η₃ (λ Σ_n D_n/D ∇_c KL(q_n ‖ s_n) + 2ρ (c − 1/N))                                       (8)
    w_n ← steps on λ KL(q_n ‖ s_n) over public batches, c and s as they are                           (7)

c begins at 1/N, and ρ pulls it there: without that everyone would learn from nobody but itself. A round of ours begins
with (7), for the s and c of the rounds before: the same steps in the same order in one phase. What we decided: KL is
the mean over public inputs; rows of c stay on the simplex (the paper's q_n must be distributions, and (8) alone does
not keep them so); where some have not spoken yet, the others share their coefficients; who is away leaves its last s
with the server, where its row of c rests. Clients of the paper send models or predictions; here only predictions.

`rule="reference"` is what the authors' code does for (8): of ‖s_n − q_n‖² and ρ ‖c_n − 1/N‖², means both, it takes a
step whose size is brought near 0.01 N by factors of five, and then a softmax of 5 c_n.

Travels: up m·public, down m·public; phases 1; graphs 2; rows n.
(`public` are public inputs times classes. In the first round nothing goes down. Models stay at home, so any mix of
architectures can take part.)
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.dsfl import heard, lesson
from coterie.algorithms.fedavg import shares
from coterie.algorithms.pooled import present_shares
from coterie.asks import Ask, Fit, Own, Plan, Predict
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised, simplex
from coterie.settings import real


@dataclass(frozen=True)
class KTpFLState:
    """What everyone said last, and who learns from whom; the models are the clients' own."""

    c: Tensor  # n×n float64: knowledge coefficients, rows on the simplex
    s: Tensor  # n×P×C: the last beliefs of all; n×0×0 before the first
    known: Tensor  # n booleans: who has said anything


@dataclass(frozen=True)
class KTpFL(Algorithm):
    """Distil towards one's own mixture, train, predict; then a step of the coefficients."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))  # of (6)
    distil: Plan = field(default_factory=lambda: Plan(epochs=1, batch=128))  # of (7), on public inputs
    lam: float = 1.0  # λ
    rho: float = 0.7  # ρ
    c_lr: float = 0.5  # η₃
    temperature: float = 10.0  # T
    rule: Literal["paper", "reference"] = "paper"  # how c moves
    inputs: str = "public"  # which public inputs
    shared: bool = True  # one initial model for all of one architecture, or one each

    mixed = True

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        real("temperature", self.temperature, 0)
        for name in ("lam", "rho", "c_lr"):
            real(name, getattr(self, name), 0, closed=True)

    def init(self, fleet: Fleet) -> KTpFLState:
        """Equal coefficients, and nobody has said anything."""
        n, device = fleet.n, fleet.device
        c = torch.full((n, n), 1 / n, dtype=torch.float64, device=device)
        silence = torch.empty(n, 0, 0, dtype=fleet.dtype, device=device)
        return KTpFLState(c, silence, torch.zeros(n, dtype=torch.bool, device=device))

    def round(self, fleet: Fleet, state: KTpFLState) -> tuple[KTpFLState, Info]:
        """One phase: learn one's mixture, train alone, say what one believes now. Then the coefficients move."""
        t, n, own = fleet.t, fleet.n, Own("model", self.shared)
        asks: list[Ask] = [
            Fit(fleet.everyone, own, self.plan.at(t), give="nothing"),
            Predict(fleet.everyone, own, self.inputs),
        ]
        if state.s.numel():
            q = (present_shares(state.c, state.known).to(state.s) @ state.s.flatten(1)).view_as(state.s)
            to, each, temperature = self.distil.at(t), fleet.everyone, self.temperature
            learn = lesson(each, own, to, q, self.inputs, each, self.lam, temperature=temperature)
            asks = [learn, *asks]
        *_, trained, said = answers = fleet.ask(*asks)
        ok = heard(n, asks, answers).to(fleet.device)
        now = (said.outputs / self.temperature).softmax(-1)
        s = torch.where(ok[:, None, None], now, state.s if state.s.numel() else 0)
        known = state.known | ok
        data = shares(fleet, torch.ones(n), weighted=True).to(s.device)
        c = torch.where(ok[:, None], self.moved(state.c, s.double(), known, data), state.c)
        extra = {"public": torch.tensor(now[0].numel())}
        return KTpFLState(c, s, known), Info(row_normalised(present_shares(c, known)), ok, trained.loss, extra)

    def moved(self, c: Tensor, s: Tensor, known: Tensor, data: Tensor) -> Tensor:
        """The coefficients after a step, of everyone: n×n from n×P×C beliefs and everyone's share of the data."""
        points, flat = s.shape[1], s.flatten(1)
        if self.rule == "reference":
            return self.moved_as_in_the_code(c, flat, known)
        mix = present_shares(c, known)
        there = (c * known).sum(1, keepdim=True)
        a = (logs(mix @ flat) - logs(flat)) @ flat.T / points  # along s_m, of KL(q_n ‖ s_n)
        slope = (a - (mix * a).sum(1, keepdim=True)) / torch.where(there > 0, there, 1) * known
        return simplex(c - self.c_lr * (self.lam * data[:, None] * slope + 2 * self.rho * (c - 1 / len(c))))

    def moved_as_in_the_code(self, c: Tensor, flat: Tensor, known: Tensor) -> Tensor:
        """The same by the authors' code."""
        n, width = flat.shape
        slope = ((c * known) @ flat - flat) @ flat.T * (2 / width) + (c - 1 / n) * (2 * self.rho / n)
        slope = slope * known
        size, rate = slope.abs().mean(1, keepdim=True), torch.ones(n, 1, dtype=c.dtype, device=c.device)
        for _ in range(5):
            down = torch.where(size > 0.01, 5.0, 1.0)
            up = torch.where(size / down < 0.01, 5.0, 1.0)
            size, rate = size / down * up, rate / down * up
        return (5 * (c - rate * slope)).masked_fill(~known, -torch.inf).softmax(1)

    def personal(self, state: KTpFLState) -> Own:
        """The model at the client."""
        return Own("model", self.shared)


def logs(p: Tensor) -> Tensor:
    """log p, finite where p has underflown."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()
