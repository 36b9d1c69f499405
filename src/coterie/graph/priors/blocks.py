"""What the two block models share: Dirichlet memberships and the rates B at which communities are linked.

ε is added to α and γ alike wherever they enter a digamma or a log-gamma, which makes it part of the prior's parameter:
γ = Ω + α stays the exact maximiser.

Likelihoods say little in the first rounds, and communities found then are kept by a B that was fitted to them. So each
E-step also tries a start from what the likelihoods now say alone (`restart`, coterie.graph.priors.guess), with B and α
as they were in the beginning, and whichever explains them better is kept: the bound rises all the same.
"""

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.graph.priors.base import EPSILON, Beliefs, Evidence, Prior
from coterie.settings import real, whole


def check(communities: int, sweeps: int, inside: float, across: float, eta2: float) -> None:
    """Refuse settings without meaning."""
    whole("communities", communities, 1)
    whole("sweeps", sweeps, 1)
    real("eta2", eta2, 0, closed=True)
    for name, value in (("inside", inside), ("across", across)):
        real(name, value, 0, 1 - EPSILON)


def start(n: int, communities: int, inside: float, across: float) -> Beliefs:
    """α = 1, and B with one rate inside communities and another across."""
    if communities > n:
        raise SettingError(f"{communities} communities are more than {n} clients: take at most {n}")
    own = torch.eye(communities, dtype=torch.float64)
    return {"b": inside * own + across * (1 - own), "alpha": torch.ones(communities, dtype=torch.float64)}


def best(prior: Prior, found: list[tuple[Tensor, Beliefs]], evidence: Evidence) -> tuple[Tensor, Beliefs]:
    """Of the outcomes of an E-step the one of the highest bound, B and α fitted; the first, if others are no better."""
    if len(found) == 1:
        return found[0]
    fitted = [(w, prior.m_step(w, beliefs, evidence)) for w, beliefs in found]
    bounds = [float(prior.elbo(w, beliefs, evidence)) for w, beliefs in fitted]
    top = max(range(len(bounds)), key=bounds.__getitem__)
    return fitted[top] if bounds[top] > bounds[0] + EPSILON * abs(bounds[0]) else found[0]


def log_rates(b: Tensor) -> tuple[Tensor, Tensor]:
    """log B − log(1 − B), and log(1 − B)."""
    off = torch.log(1 - b + EPSILON)
    return torch.log(b + EPSILON) - off, off


def expected_log(gamma: Tensor) -> Tensor:
    """E log π under Dirichlet(γ): the digamma of each less that of the row's sum."""
    gamma = gamma + EPSILON
    return torch.digamma(gamma) - torch.digamma(gamma.sum(-1, keepdim=True))


def dirichlet_terms(gamma: Tensor, alpha: Tensor) -> Tensor:
    """E log P(π|α) − E log q(π|γ), over all clients."""
    shape = alpha.expand_as(gamma) + EPSILON
    return ((shape - gamma - EPSILON) * expected_log(gamma)).sum() + (
        _normaliser(shape) - _normaliser(gamma + EPSILON)
    ).sum()


def _normaliser(shape: Tensor) -> Tensor:
    return torch.lgamma(shape.sum(-1)) - torch.lgamma(shape).sum(-1)


def fitted_rates(hits: Tensor, chances: Tensor) -> Tensor:
    """(24), (81): B_gh, expected links over expected pairs, kept inside (0, 1)."""
    return (hits / (chances + EPSILON)).clamp(EPSILON, 1 - EPSILON)


def fitted_alpha(alpha: Tensor, gamma: Tensor, eta2: float) -> Tensor:
    """One step up the gradient (50) for the clients whose γ is given; −Kψ(α_g), where the paper sums over g.

    The gradient grows with K and as α falls, so that a fixed step leaves any range: it is halved until the bound rises.
    """
    k, usual = len(gamma), expected_log(gamma).sum(0)
    slope = usual - k * expected_log(alpha)

    def bound(shape: Tensor) -> float:
        return float(k * _normaliser(shape + EPSILON) + (shape * usual).sum())

    while eta2 > EPSILON**2:
        moved = (alpha + eta2 * slope).clamp(min=EPSILON)
        if bound(moved) >= bound(alpha):
            return moved
        eta2 /= 2
    return alpha
