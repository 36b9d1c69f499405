"""Dada (Zantedeschi, Bellet and Tommasi 2020): personal models and their graph, learned together in the open.

Fully Decentralized Joint Learning of Personalized Models and Collaboration Graphs, arXiv 1901.08460. With losses L_k,
confidences c_k ∝ samples (at most one), symmetric weights w ≥ 0 and degrees d_k = Σ_l w_kl it minimises

    J(Θ, w) = Σ_k d_k c_k L_k(θ_k) + μ₁/2 Σ_{k<l} w_kl ‖θ_k − θ_l‖² + μ₂ (λ ‖w‖² − Σ_k log(d_k + δ))            (1), (7)

block by block. Models, w fixed: divided by d_k c_k, client k descends L_k(θ) + μ₁/(2 c_k) ‖θ − Σ_l w_kl θ_l / d_k‖²,
whose quadratic part is theirs up to a constant: local training that its neighbours' mean pulls. Graph, models fixed: a
client draws `peers` others, the pairs S drawn by either end are one block, and

    w_kl ← max(0, w_kl − (c_k L_k + c_l L_l + μ₁/2 ‖θ_k − θ_l‖² + μ₂ (2λ w_kl − 1/(d_k+δ) − 1/(d_l+δ))) / Λ)   on S

with Λ = μ₂ (2q/δ² + 2λ), q the most pairs of S at one client: the gradient's Lipschitz constant on the block, so that J
never rises. (Theirs draws one client's block at a time and has Λ = μ₂ ((κ+1)/δ² + 2λ) for its κ pairs; here all clients
draw at once, as rounds have it.) Their models are boosted linear ones, for which (14) is a Frank-Wolfe step; here any
model takes steps of SGD. L_k is the mean training loss of the round. `graph_steps` blocks are drawn after each round
from `start` on; until then everyone listens to all alike.

Absent clients keep their model and their weights.

Travels: up m·d, down 2·m·d; phases 1; graphs 1; rows n.
(The mean of the neighbours' models comes with one's own. In the open each model would go to every neighbour.)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Plan, Pull
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import real, whole

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class DadaState:
    """Everything the next round needs."""

    x: Tensor  # n×d: Θ
    w: Tensor  # n×n float64, on the host: symmetric, diagonal empty
    loss: Tensor  # n float64, on the host: L_k as last seen


@dataclass(frozen=True)
class Dada(Algorithm):
    """The paper's names."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=5))
    mu1: float = 0.1  # μ₁: how hard neighbours pull
    mu2: float = 1.0  # μ₂: of the graph's regulariser
    lam: float = 0.1  # λ: small: few neighbours, large: many alike
    delta: float = 1.0  # δ: keeps the logarithm and the step bounded
    peers: int | None = None  # κ: others each client draws for a block; None: all
    graph_steps: int = 10
    start: int = 1  # rounds before the graph moves
    shared: bool = True  # one initial model for all, or one each

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name in ("mu1", "lam"):
            real(name, getattr(self, name), 0, closed=True)
        for name in ("mu2", "delta"):
            real(name, getattr(self, name), 0)
        whole("graph_steps", self.graph_steps, 0)
        whole("start", self.start, 0)
        if self.peers is not None:
            whole("peers", self.peers, 1)

    def init(self, fleet: Fleet) -> DadaState:
        """Initial models; everyone linked to all, at degree one."""
        w = (1 - torch.eye(fleet.n, dtype=torch.float64)) / max(1, fleet.n - 1)
        return DadaState(fleet.initial(self.shared).clone(), w, torch.zeros(fleet.n, dtype=torch.float64))

    def confidence(self, fleet: Fleet) -> Tensor:
        """c: each client's samples over the most of any."""
        size = fleet.sizes("train").double()
        return size / size.max()

    def round(self, fleet: Fleet, state: DadaState) -> tuple[DadaState, Info]:
        """Models towards their neighbours, then the graph."""
        x, c = state.x, self.confidence(fleet)
        weight = (state.w / state.w.sum(1, keepdim=True).clamp(min=TINY)).to(x)
        strength = torch.where(state.w.sum(1) > 0, self.mu1 / c, 0).to(x)
        pull = Pull(weight @ x, strength)
        fit = fleet.ask(Fit(fleet.everyone, x, self.plan.at(fleet.t), pull=pull, give="update"))
        x, ok = x + fit.rows, fit.ok.cpu()
        loss = torch.where(ok, fit.loss.double().cpu(), state.loss)
        w = state.w
        if fleet.t >= self.start and self.graph_steps:
            gap = squared_distances(x).cpu()
            fixed = c * loss + (c * loss)[:, None] + self.mu1 / 2 * gap
            for step in range(self.graph_steps):
                w = self.towards(w, fixed, self.block(fleet, ok, step))
        links = (w > 0).sum()
        return DadaState(x, w, loss), Info(row_normalised(w), fit.ok, fit.loss, {"links": links})

    def block(self, fleet: Fleet, ok: Tensor, step: int) -> Tensor:
        """The pairs of this block: those that either end has drawn, both here."""
        here = ok & ok[:, None] & ~torch.eye(fleet.n, dtype=torch.bool)
        if self.peers is None:
            return here
        i, j = torch.ones(fleet.n, fleet.n, dtype=torch.bool).nonzero(as_tuple=True)
        mark = fleet.uniform(f"block {step}", i, j).view(fleet.n, fleet.n).masked_fill(~here, torch.inf)
        drawn = (mark.argsort(1).argsort(1) < self.peers) & here
        return drawn | drawn.T

    def towards(self, w: Tensor, fixed: Tensor, block: Tensor) -> Tensor:
        """One projected gradient step of J on a block of pairs."""
        reach = 1 / (w.sum(1) + self.delta)
        slope = fixed + self.mu2 * (2 * self.lam * w - (reach + reach[:, None]))
        bound = self.mu2 * (2 * float(block.sum(1).max()) / self.delta**2 + 2 * self.lam)
        return torch.where(block, (w - slope / max(bound, TINY)).clamp(min=0), w)

    def personal(self, state: DadaState) -> Tensor:
        """Everyone's own row."""
        return state.x


def squared_distances(x: Tensor) -> Tensor:
    """‖x_i − x_j‖² in float64, from inner products; small distances between large rows survive by centring."""
    x = x - x.mean(0)
    gram = (x @ x.T).double()
    gram = (gram + gram.T) / 2
    square = gram.diagonal()
    return (square[:, None] + square - 2 * gram).clamp(min=0)
