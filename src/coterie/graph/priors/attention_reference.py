"""Attention as SCooL's authors have it in their code; `attention` follows their paper.

    f(θ_i, θ_j) = mean over parameter tensors l of ⟨E_l(u_i), E_l(u_j)⟩ / units of l,    u_i = θ⁰ − θ_i at unit norm

Each tensor has an encoder of its own, applied to what leads to each of its output units (the rows of a weight, the
entries of a bias): two tanh layers of 10 and 20 outputs. w_i = softmax_j(log P(D_j|θ_i) + log p_ij) as in (29), but φ
fits p_i to t_i = softmax_j(log P(D_j|θ_i)), not to w_i, and neighbours are kept by t at the cut. Every client takes its
own step of AdamW from the common φ down its own cross-entropy, with its own memory, and φ becomes the mean of them all.

φ has some ten numbers for each input of a unit (32,000 for the paper's CNN), AdamW's memory twice as many for each
client. Left out: 1e-6 to 1e-5 in the denominators of softmaxes, which rows that are normalised anyway cancel.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from coterie.graph.priors.base import Beliefs, Clients, Evidence, Prior, entropy, softmax
from coterie.settings import real

HIDDEN, OUT = 10, 20
BETAS = (0.9, 0.99)
BLOCK = 16  # clients whose slopes are found at once
Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionReference(Prior):
    """AdamW's settings are those of the authors' scripts."""

    lr: float = 0.2
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        real("lr", self.lr, 0, closed=True)
        real("weight_decay", self.weight_decay, 0, closed=True)

    def init(self, clients: Clients) -> tuple[Tensor, Beliefs]:
        """A random encoder: each layer uniform within 1/√inputs."""
        parts = [part for shape in clients.shapes for part in _parts(shape)]
        bounds = torch.cat([torch.full((size,), inputs**-0.5, dtype=torch.float64) for inputs, size in parts])
        drawn = torch.rand(len(bounds), generator=clients.generator("encoder"), dtype=torch.float64)
        memory = torch.zeros(clients.n, len(bounds), dtype=torch.float64)
        beliefs = {"phi": (2 * drawn - 1) * bounds, "exp_avg": memory, "exp_avg_sq": memory.clone()}
        beliefs["step"] = torch.zeros(clients.n, 1, dtype=torch.float64)
        return torch.zeros(clients.n, clients.n, dtype=torch.float64), beliefs

    def e_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """(29)."""
        return softmax(evidence.log_p + self.log_p(beliefs, evidence), _allowed(evidence)), beliefs

    def log_p(self, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """log p_ij."""
        moved = evidence.moved()
        allowed = _allowed(evidence).to(moved.device)
        return log_attention(beliefs["phi"].to(moved), moved, evidence.clients.shapes, allowed).double().cpu()

    def elbo(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """(58): Σ_ij w_ij (log P(D_j|θ_i) + log p_ij − log w_ij)."""
        scores = torch.where(_allowed(evidence), evidence.log_p + self.log_p(beliefs, evidence), 0)
        return (w * scores + entropy(w)).sum()

    def m_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Beliefs:
        """A step of AdamW by every client that listens to anybody; the mean of where they come."""
        allowed = _allowed(evidence)
        there = allowed.any(1)
        slopes = self.slopes(beliefs["phi"], evidence)[there]
        first, second = BETAS
        step = beliefs["step"][there] + 1
        mean = first * beliefs["exp_avg"][there] + (1 - first) * slopes
        square = second * beliefs["exp_avg_sq"][there] + (1 - second) * slopes**2
        spread = (square / (1 - second**step)).sqrt() + 1e-8
        each = (1 - self.lr * self.weight_decay) * beliefs["phi"] - self.lr * mean / (1 - first**step) / spread
        memory = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        kept = {name: beliefs[name].index_put((there,), value) for name, value in memory.items()}
        return beliefs | kept | {"phi": each.mean(0) if len(each) else beliefs["phi"]}

    def slopes(self, phi: Tensor, evidence: Evidence) -> Tensor:
        """The gradient of each client's cross-entropy from t_i to p_i."""
        moved = evidence.moved()
        allowed = _allowed(evidence).to(moved.device)
        target = softmax(evidence.log_p.to(moved), allowed)
        at = phi.to(moved).requires_grad_()
        log_p = log_attention(at, moved, evidence.clients.shapes, allowed)
        losses = -(target * torch.where(allowed, log_p, 0)).sum(1)
        every = torch.eye(len(losses), dtype=losses.dtype, device=losses.device).split(BLOCK)
        found = [torch.autograd.grad(losses, at, part, retain_graph=True, is_grads_batched=True)[0] for part in every]
        return torch.cat(found).double().cpu()

    def rank(self, w: Tensor, evidence: Evidence) -> Tensor:
        """By the likelihoods alone."""
        return softmax(evidence.log_p, _allowed(evidence))


def log_attention(phi: Tensor, moved: Tensor, shapes: tuple[Shape, ...], allowed: Tensor) -> Tensor:
    """log p_ij: the softmax (25) of f over those i may listen to; −∞ elsewhere."""
    moved = -moved / (moved.norm(dim=1, keepdim=True) + 1e-10)
    n, f = len(moved), moved.new_zeros(())
    starts = [0, *torch.tensor([prod(shape) for shape in shapes]).cumsum(0).tolist()]
    weights = iter(phi.split([size for shape in shapes for _, size in _parts(shape)]))
    for shape, (a, b) in zip(shapes, pairwise(starts), strict=True):
        units = shape[0] if shape else 1
        u = moved[:, a:b].view(n, units, -1)
        first, bias, second, last = (next(weights) for _ in range(4))
        hidden = torch.tanh(u @ first.view(-1, HIDDEN) + bias)
        code = torch.tanh(hidden @ second.view(HIDDEN, OUT) + last).flatten(1)
        f = f + code @ code.T / units
    f = (f / len(shapes)).masked_fill(~allowed, -1e30)  # finite, for the slope of a row of nobody
    return torch.where(allowed, f - f.logsumexp(1, keepdim=True), -torch.inf)


def _parts(shape: Shape) -> list[tuple[int, int]]:
    """Inputs and size of the parts of a tensor's encoder: weight and bias, twice."""
    inputs = prod(shape[1:])
    return [(inputs, inputs * HIDDEN), (inputs, HIDDEN), (HIDDEN, HIDDEN * OUT), (HIDDEN, OUT)]


def _allowed(evidence: Evidence) -> Tensor:
    return evidence.known & evidence.mask
