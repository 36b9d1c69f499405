"""Stochastic block model (SCooL §4.2, appendix D): clients of one community listen to each other more than others do.

    w_ij = σ(log P(D_j|θ_i) + Ω_iᵀ (log B − log(1−B)) Ω_j),        γ_i = Ω_i + α                              (18), (19)
    Ω_i ∝ exp(Σ_{j≠i} [w_ij log B Ω_j + w_ji log Bᵀ Ω_j + (1−w_ij) log(1−B) Ω_j + (1−w_ji) log(1−B)ᵀ Ω_j]
              + ψ(γ_i) − ψ(Σ_g γ_ig))                                                                          (48)
    B_gh = Σ w_ij Ω_ig Ω_jh / Σ Ω_ig Ω_jh,     α_g ← α_g + η₂ (Σ_i (ψ(γ_ig) − ψ(Σγ_i)) − Kψ(α_g) + Kψ(Σα))    (24), (50)

Ω changes one client after the other, in a random order, and γ_i with it: all at once lowers the ELBO more often than
not. Sums run over the pairs that were measured: a pair without a likelihood says nothing about its ends. w_ii follows
(18) too, though it enters no sum: losses are positive, so log P < 0 and every E-step finds links a little less likely;
w and B shrink from round to round, the own weight has to shrink with them, and a row's proportions stay.

`reference` is the authors' code: two communities, B and α as they start, everything afresh in every round (γ uniform in
(0, 2/M), Ω from Dirichlet(γ)), the temperature under the prior's log-odds too, W from before the last sweep, log P = 0
for the pairs that were cut, and Ω_i = exp(…)/(Σ exp(…) + ε) without a shift by the largest. The exponents sink with the
number of clients until ε outweighs them: all memberships together come to about nine, however many clients there are,
and with a hundred of them W is σ(log P / temperature) but for 0.001 on average.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaincinv, psi
from torch import Tensor

from coterie.graph.priors import blocks
from coterie.graph.priors.base import EPSILON, Beliefs, Clients, Evidence, Prior, entropy, keyed_simplex
from coterie.graph.priors.guess import guessed

BLOCK = 64  # clients whose memberships change within one block


@dataclass(frozen=True)
class SBM(Prior):
    """The paper's M is `communities`."""

    communities: int = 2
    sweeps: int = 2  # over all clients, in one E-step
    inside: float = 0.8  # B at the start, within a community
    across: float = 0.2  # and between two
    eta2: float = 1e-3  # η₂: step of α
    learn: bool = True  # whether the M-step fits B and α
    restart: bool = True  # whether each E-step also tries a start from the likelihoods alone
    reference: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        blocks.check(self.communities, self.sweeps, self.inside, self.across, self.eta2)

    def init(self, clients: Clients) -> tuple[Tensor, Beliefs]:
        """Memberships drawn for each client; no link is known."""
        beliefs = blocks.start(clients.n, self.communities, self.inside, self.across)
        if self.reference:
            beliefs |= _as_the_authors_start(clients, self.communities)
        else:
            omega = keyed_simplex(clients, self.communities, "membership")
            beliefs |= {"omega": omega, "gamma": omega + beliefs["alpha"]}
        return torch.zeros(clients.n, clients.n, dtype=torch.float64), beliefs

    def e_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """From where the last round ended, or from a guess where that explains more."""
        if self.reference:
            return self.swept(w, self.init(evidence.clients)[1], evidence)
        found = [self.swept(w, beliefs, evidence)]
        if self.restart and bool(evidence.others.any()):
            omega = guessed(evidence, self.communities)
            fresh = beliefs
            if self.learn:
                fresh = beliefs | blocks.start(len(omega), self.communities, self.inside, self.across)
            fresh = fresh | {"omega": omega, "gamma": omega + fresh["alpha"]}
            found.append(self.swept(w, fresh, evidence))
        return blocks.best(self, found, evidence)

    def swept(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """Links, then memberships client by client, so often; links once more."""
        for sweep in range(self.sweeps):
            w = self.links(beliefs, evidence)
            order = evidence.clients.uniform(f"order {sweep}", evidence.clients.everyone).argsort()
            beliefs = beliefs | self.memberships(w, beliefs, self.pairs(evidence), order)
        return (w if self.reference else self.links(beliefs, evidence)), beliefs

    def pairs(self, evidence: Evidence) -> Tensor:
        """The pairs that count."""
        every = ~torch.eye(len(evidence.known), dtype=torch.bool)
        return every if self.reference else evidence.others

    def links(self, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """(18)."""
        odds, _ = blocks.log_rates(beliefs["b"])
        prior = beliefs["omega"] @ odds @ beliefs["omega"].T
        if self.reference:
            return torch.sigmoid(evidence.log_p * evidence.mask + prior / evidence.temperature)
        return torch.sigmoid(evidence.log_p + prior)

    def memberships(self, w: Tensor, beliefs: Beliefs, pairs: Tensor, order: Tensor) -> Beliefs:
        """(48) and (19) for one client after the other, in blocks.

        What a client hears from outside its block is one matrix product for the whole block; inside, only the changes
        of those before it are added. In numpy, whose calls cost less than torch's: it takes eight for each client.
        """
        odds, off = (part.numpy() for part in blocks.log_rates(beliefs["b"]))
        rates = np.concatenate([odds.T, odds, off.T, off])
        omega: NDArray[Any] = beliefs["omega"].numpy().copy()
        gamma = beliefs["gamma"].numpy()
        prior = psi(gamma + EPSILON) - psi(gamma.sum(1, keepdims=True) + EPSILON)
        linked, there = w * pairs, pairs.double()
        ends = [part.contiguous().numpy() for part in (linked, linked.T, there, there.T)]  # from i, to i; the pairs
        for block in np.array_split(order.numpy(), -(-len(order) // BLOCK)):
            rows = [end[block] for end in ends]
            within = np.stack([row[:, block] for row in rows], 1)  # b × 4 × b
            before = np.concatenate([row @ omega for row in rows], 1) @ rates + prior[block]
            old, change = omega[block], np.zeros((len(block), omega.shape[1]))
            for i in range(len(block)):
                score = before[i] + (within[i] @ change).ravel() @ rates
                share = np.exp(score - (0 if self.reference else score.max()))
                change[i] = share / (share.sum() + (EPSILON if self.reference else 0)) - old[i]
            omega[block] += change
        members = torch.from_numpy(omega)
        return {"omega": members, "gamma": members + beliefs["alpha"]}

    def elbo(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """(41), over the pairs that count."""
        omega, pairs = beliefs["omega"], self.pairs(evidence)
        odds, off = blocks.log_rates(beliefs["b"])
        each = w * (evidence.log_p + omega @ odds @ omega.T) + omega @ off @ omega.T + entropy(w) + entropy(1 - w)
        members = (omega * blocks.expected_log(beliefs["gamma"])).sum() + entropy(omega).sum()
        return (each * pairs).sum() + members + blocks.dirichlet_terms(beliefs["gamma"], beliefs["alpha"])

    def m_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Beliefs:
        """(24) and (50), for the clients that are in a measured pair."""
        omega, pairs = beliefs["omega"], self.pairs(evidence)
        if not self.learn or not bool(pairs.any()):
            return beliefs
        b = blocks.fitted_rates(omega.T @ (w * pairs) @ omega, omega.T @ pairs.double() @ omega)
        there = pairs.any(1) | pairs.any(0)
        alpha = blocks.fitted_alpha(beliefs["alpha"], beliefs["gamma"][there], self.eta2)
        return beliefs | {"b": b, "alpha": alpha}


def _as_the_authors_start(clients: Clients, communities: int) -> Beliefs:
    """γ uniform in (0, 2/M] and Ω_i from Dirichlet(γ_i), by gamma variates."""
    gamma, quantile = (
        torch.stack([clients.uniform(f"{what} {g}", clients.everyone) for g in range(communities)], 1).numpy()
        for what in ("dirichlet", "membership")
    )
    gamma = 2 / communities * (1 - gamma)
    variate = gammaincinv(gamma, quantile).clip(np.finfo(np.float64).tiny)
    return {"omega": torch.from_numpy(variate / variate.sum(1, keepdims=True)), "gamma": torch.from_numpy(gamma)}
