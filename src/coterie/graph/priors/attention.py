"""Attention (SCooL §4.3, appendix E): a client listens to those whose models have moved as its own has.

    p_i = softmax_j f(θ_i, θ_j),   f by a learned encoder E(·; φ) of updates: see coterie.graph.encoder    (25), (26)
    w_i = softmax_j(log P(D_j|θ_i) + log p_ij)                                                             (29)
    φ ← φ + η₂ ∇_φ Σ_ij w_ij log p_ij, by Adam                                                             (31)

j = i takes part in both softmaxes. Only measured pairs that are not cut do. `models` adds Σ_ij w_ij ∇_θ log p_ij to the
models as (30) has it, once a round, which the authors' code leaves out (`attention_reference` is that code).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.graph import encoder
from coterie.graph.priors.base import Beliefs, Clients, Evidence, Prior, entropy, softmax
from coterie.settings import real


@dataclass(frozen=True)
class Attention(Prior):
    """Adam's settings are the paper's."""

    lr: float = 0.1  # η₂
    weight_decay: float = 0.01
    models: bool = False  # whether the prior pulls on the models too, the last term of (30)

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        real("lr", self.lr, 0, closed=True)
        real("weight_decay", self.weight_decay, 0, closed=True)

    def init(self, clients: Clients) -> tuple[Tensor, Beliefs]:
        """A random encoder; nobody has moved yet."""
        beliefs = encoder.initial(clients.generator("encoder"))
        beliefs["sketch"] = torch.zeros(clients.n, len(clients.spans), encoder.WIDTH, dtype=torch.float64)
        return torch.zeros(clients.n, clients.n, dtype=torch.float64), beliefs

    def e_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """(29)."""
        beliefs = beliefs | {"sketch": encoder.sketch(evidence.moved(), evidence.clients.spans).cpu()}
        allowed = evidence.known & evidence.mask
        return softmax(evidence.log_p + self.log_p(beliefs, allowed), allowed), beliefs

    def log_p(self, beliefs: Beliefs, allowed: Tensor) -> Tensor:
        """log p_ij."""
        return encoder.log_attention(beliefs["phi"], beliefs["sketch"], allowed)

    def elbo(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """(58): Σ_ij w_ij (log P(D_j|θ_i) + log p_ij − log w_ij)."""
        allowed = evidence.known & evidence.mask
        scores = torch.where(allowed, evidence.log_p + self.log_p(beliefs, allowed), 0)
        return (w * scores + entropy(w)).sum()

    def m_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Beliefs:
        """(31)."""
        allowed = evidence.known & evidence.mask
        phi = beliefs["phi"].clone().requires_grad_()
        log_p = encoder.log_attention(phi, beliefs["sketch"], allowed)
        (slope,) = torch.autograd.grad(-(w[allowed] * log_p[allowed]).sum(), phi)
        return beliefs | encoder.descend(beliefs, slope, self.lr, self.weight_decay)

    def pull(
        self, w: Tensor, beliefs: Beliefs, x: Tensor, rate: float, here: Tensor, evidence: Evidence
    ) -> Tensor | None:
        """rate · Σ_ij w_ij ∇_θ log p_ij, at the trained models."""
        if not self.models:
            return None
        moved = evidence.moved().requires_grad_()
        allowed = (evidence.known & evidence.mask & here & here[:, None]).to(x.device)
        sketched = encoder.sketch(moved, evidence.clients.spans)
        log_p = encoder.log_attention(beliefs["phi"].to(x.device), sketched, allowed)
        (slope,) = torch.autograd.grad((w.to(x.device)[allowed] * log_p[allowed]).sum(), moved)
        return rate * slope
