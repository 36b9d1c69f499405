"""meta-L2C (Li, Zhou, Tian and Tao 2022): learn whose updates to take from what they do on one's validation data.

Learning to Collaborate in Decentralized Learning of Personalized Models. Everyone trains, and takes the others' updates
with weights that an encoder shared by all makes of how alike their models have moved:

    Δ_j = θ_j − its local training,    w_i = softmax_j ⟨E(u_i; φ), E(u_j; φ)⟩,    θ_i ← θ_i − Σ_j w_ij Δ_j
    φ ← φ − η₂ ∇_φ Σ_i L_i(θ_i − Σ_j w_ij(φ) Δ_j),    L_i on i's validation data

Only first derivatives are needed: ∂L_i/∂w_ij = −⟨∇L_i(θ_i − Σ w Δ), Δ_j⟩, so a client sends one gradient, and the rest
is the encoder's own. A round takes `updates` steps of φ by Adam, a phase each, then mixes with the last weights.
After `warmup` rounds everyone keeps the share `budget` of the others that weigh most, and takes from those only.

E and u are those of SCooL's attention prior: see coterie.graph.encoder. (Theirs has one for each layer; L2C without
"meta" learns the weights themselves.) Experiments choose their best round on the same validation data.

Travels: up 2·m·d, down 2·m·d; phases 2; graphs 2; rows max(n, 16).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Gradient, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph import encoder
from coterie.graph.projections import heaviest
from coterie.settings import real, whole


@dataclass(frozen=True)
class MetaL2CState:
    """Everything the next round needs."""

    x: Tensor  # n×d: the personal models θ
    mask: Tensor  # n×n booleans, on the host: from whom i still takes
    encoder: dict[str, Tensor]  # φ and Adam's memory, on the host


@dataclass(frozen=True)
class MetaL2C(Algorithm):
    """Weights from an encoder that validation losses train."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=5))
    batch: int | None = None  # validation samples of a gradient; None: all
    lr: float = 0.01  # η₂
    weight_decay: float = 0.01
    updates: int = 1  # of φ in a round
    warmup: int = 10  # rounds before the cut
    budget: float | None = 0.1  # share of the others kept, at least one; None: no cut
    shared: bool = True  # one initial model for all, or one each

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        real("lr", self.lr, 0, closed=True)
        real("weight_decay", self.weight_decay, 0, closed=True)
        whole("updates", self.updates, 1)
        whole("warmup", self.warmup, 1)
        if self.budget is not None and not 0 < self.budget <= 1:
            raise SettingError(
                f"budget is the share of the others taken from, above 0 and at most 1, not {self.budget}"
            )

    def init(self, fleet: Fleet) -> MetaL2CState:
        """Initial models and a random encoder."""
        mask = torch.ones(fleet.n, fleet.n, dtype=torch.bool)
        return MetaL2CState(fleet.initial(self.shared).clone(), mask, encoder.initial(fleet.generator("encoder")))

    def round(self, fleet: Fleet, state: MetaL2CState) -> tuple[MetaL2CState, Info]:
        """Train; learn the weights; mix."""
        x, net = state.x, state.encoder
        fit = fleet.ask(Fit(fleet.everyone, x, self.plan.at(fleet.t), give="update"))
        ok = fit.ok.cpu()
        moved = (x + fit.rows - fleet.initial(self.shared)).masked_fill(~fit.ok[:, None], 0)
        alike = encoder.sketch(moved, fleet.spans).cpu()
        allowed = state.mask & ok & ok[:, None]
        for _ in range(self.updates):
            w = attention(net["phi"], alike, allowed)
            tried = x + w.to(x) @ fit.rows
            seen = fleet.ask(Gradient(fleet.everyone, tried, self.batch, split="validation", track=False))
            slope = (seen.rows @ fit.rows.T).double().cpu() * seen.ok.cpu()[:, None]  # updates are −Δ
            net = net | encoder.descend(net, slope_of(net["phi"], alike, allowed, slope), self.lr, self.weight_decay)
        w = attention(net["phi"], alike, allowed)
        mask = state.mask
        if self.budget is not None and fleet.t + 1 >= self.warmup and bool(mask.all()):  # once
            mask = heaviest(w, math.ceil(self.budget * (fleet.n - 1) - 1e-9), self.ties(fleet))
        x = torch.where(fit.ok[:, None], x + w.to(x) @ fit.rows, x)
        graph = w + torch.diag((w.sum(1) == 0).double())  # who has no weights keeps to itself
        links = (w > 0).sum() - (w.diagonal() > 0).sum()
        return MetaL2CState(x, mask, net), Info(graph, fit.ok, fit.loss, {"links": links})

    def ties(self, fleet: Fleet) -> Tensor:
        """A draw per pair, for equals."""
        i, j = torch.ones(fleet.n, fleet.n, dtype=torch.bool).nonzero(as_tuple=True)
        return fleet.uniform("cut", i, j).view(fleet.n, fleet.n)

    def personal(self, state: MetaL2CState) -> Tensor:
        """Everyone's own row."""
        return state.x


def attention(phi: Tensor, alike: Tensor, allowed: Tensor) -> Tensor:
    """w."""
    return encoder.log_attention(phi, alike, allowed).exp()


def slope_of(phi: Tensor, alike: Tensor, allowed: Tensor, slope: Tensor) -> Tensor:
    """The gradient of Σ slope_ij w_ij(φ)."""
    phi = phi.clone().requires_grad_()
    w = attention(phi, alike, allowed)
    (found,) = torch.autograd.grad((w[allowed] * slope[allowed]).sum(), phi)
    return found
