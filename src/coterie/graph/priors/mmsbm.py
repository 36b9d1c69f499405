"""Mixed-membership block model (SCooL appendix F): a client may be of one community towards some, of another to others.

Every ordered pair has its own memberships, i as the one who listens and j as the one who is listened to:

    φ→_ij ∝ exp(w_ij log B φ←_ij + (1−w_ij) log(1−B) φ←_ij + ψ(γ_i) − ψ(Σγ_i)),   φ←_ij with Bᵀ and γ_j      (76), (77)
    γ_i = α + Σ_j φ→_ij + Σ_j φ←_ji,         w_ij = σ(log P(D_j|θ_i) + φ→_ijᵀ (log B − log(1−B)) φ←_ij)      (74), (72)
    B_gh = Σ w_ij φ→_ij,g φ←_ij,h / Σ φ→_ij,g φ←_ij,h                                                        (81)

All φ→ are independent of each other given the rest, and so are all φ←: each is updated at once, and the ELBO rises.
Sums run over measured pairs of two; α follows its gradient as in the block model. Every start has everyone of one
community towards all, found by such a block model: memberships drawn pair by pair average out, and B with them.

Memberships take 2·n²·M numbers, in an E-step ten to twelve times that: beyond LIMIT bytes the prior refuses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.graph.priors import blocks
from coterie.graph.priors.base import Beliefs, Clients, Evidence, Prior, entropy, keyed_simplex
from coterie.graph.priors.sbm import SBM

LIMIT = 2 << 30  # bytes that memberships may take: 3,660 clients with 10 communities
START = 5  # sweeps of the simple block model for a start


@dataclass(frozen=True)
class MMSBM(Prior):
    """The paper's M is `communities`."""

    communities: int = 2
    sweeps: int = 2
    inside: float = 0.8  # B at the start, within a community
    across: float = 0.2  # and between two
    eta2: float = 1e-3  # η₂: step of α
    learn: bool = True  # whether the M-step fits B and α
    restart: bool = True  # whether each E-step also tries a start from the likelihoods alone

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        blocks.check(self.communities, self.sweeps, self.inside, self.across, self.eta2)

    def init(self, clients: Clients) -> tuple[Tensor, Beliefs]:
        """Everyone begins with the same membership towards all."""
        n, m = clients.n, self.communities
        if (size := 16 * n * n * m) > LIMIT:
            raise SettingError(
                f"mmsbm keeps memberships of every pair: {n} clients with {m} communities take {size / 2**30:.1f} GiB, "
                f"and the limit is {LIMIT / 2**30:.0f}; take fewer communities, or the prior sbm"
            )
        beliefs = blocks.start(n, m, self.inside, self.across)
        beliefs |= _one_each(keyed_simplex(clients, m, "membership"), beliefs["alpha"])
        return torch.zeros(n, n, dtype=torch.float64), beliefs | {"begun": torch.tensor(False)}

    def e_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """From where the last round ended, or from a block model's memberships where those explain more."""
        found = [self.swept(beliefs, evidence)] if beliefs["begun"] else []
        if self.restart or not found:
            simple = SBM(self.communities, START, self.inside, self.across, restart=self.restart)
            omega = simple.e_step(*simple.init(evidence.clients), evidence)[1]["omega"]
            fresh = beliefs
            if self.learn:
                fresh = beliefs | blocks.start(len(omega), self.communities, self.inside, self.across)
            fresh = fresh | _one_each(omega, fresh["alpha"]) | {"begun": torch.tensor(True)}
            found.append(self.swept(fresh, evidence))
        return blocks.best(self, found, evidence)

    def swept(self, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """Links, memberships on both sides, Dirichlets: so often, and links once more."""
        odds, off = blocks.log_rates(beliefs["b"])
        pairs = evidence.others[..., None]
        by, gamma = beliefs["by"], beliefs["gamma"]
        w = self.links(beliefs, evidence)
        for _ in range(self.sweeps):
            usual = blocks.expected_log(gamma)
            to = ((by @ odds.T) * w[..., None] + by @ off.T + usual[:, None]).softmax(-1)
            by = ((to @ odds) * w[..., None] + to @ off + usual[None]).softmax(-1)
            gamma = beliefs["alpha"] + (to * pairs).sum(1) + (by * pairs).sum(0)
            beliefs = beliefs | {"to": to, "by": by, "gamma": gamma}
            w = self.links(beliefs, evidence)
        return w, beliefs

    def links(self, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """(72)."""
        odds, _ = blocks.log_rates(beliefs["b"])
        return torch.sigmoid(evidence.log_p + ((beliefs["to"] @ odds) * beliefs["by"]).sum(-1))

    def elbo(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """Appendix F, over measured pairs."""
        to, by = beliefs["to"], beliefs["by"]
        odds, off = blocks.log_rates(beliefs["b"])
        usual = blocks.expected_log(beliefs["gamma"])
        each = (
            w * (evidence.log_p + ((to @ odds) * by).sum(-1)) + ((to @ off) * by).sum(-1) + entropy(w) + entropy(1 - w)
        )
        each = each + (to * usual[:, None] + by * usual[None] + entropy(to) + entropy(by)).sum(-1)
        return (each * evidence.others).sum() + blocks.dirichlet_terms(beliefs["gamma"], beliefs["alpha"])

    def m_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Beliefs:
        """(81), and α for the clients that are in a measured pair."""
        pairs, m = evidence.others, self.communities
        if not self.learn or not bool(pairs.any()):
            return beliefs
        to, by = beliefs["to"].reshape(-1, m), beliefs["by"].reshape(-1, m)
        weight = torch.stack([w * pairs, pairs.double()]).reshape(2, -1, 1)
        hits, chances = ((to * each).T @ by for each in weight)
        there = pairs.any(1) | pairs.any(0)
        alpha = blocks.fitted_alpha(beliefs["alpha"], beliefs["gamma"][there], self.eta2)
        return beliefs | {"b": blocks.fitted_rates(hits, chances), "alpha": alpha}


def _one_each(omega: Tensor, alpha: Tensor) -> Beliefs:
    """Everyone of the same memberships towards all."""
    n = len(omega)
    gamma = alpha + 2 * (n - 1) * omega
    return {"to": omega[:, None].repeat(1, n, 1), "by": omega[None].repeat(n, 1, 1), "gamma": gamma}
