"""A graph that is known beforehand (SCooL §4.1): with it, and the likelihood of everyone's own data, SCooL is D-PSGD.

    θ_i ← θ_i − α∇L(D_i; θ_i) − αλ Σ_j (w_ij + w_ji)(θ_i − θ_j)                                               (15)

is the step of (16), θ_i ← Σ_j w_ij θ_j − α∇L(D_i; θ_i), for a symmetric W with rows of sum one at λ = 1/(2α) (the paper
drops a factor of two there). Who is not here is not averaged with: its weight stays with oneself.

W comes from a topology or schedule of coterie.graph.topologies with Metropolis weights, whose places are taken by the
clients in an order that follows from their keys (populations often list those that belong together side by side); or it
is given as it is, by the clients' numbers.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.graph import topologies
from coterie.graph.priors.base import Beliefs, Clients, Evidence, Prior


@dataclass(frozen=True)
class Dirac(Prior):
    """A topology by name, with its settings, or a matrix."""

    topology: str = "ring"
    options: dict[str, Any] = field(default_factory=dict)  # the topology's settings: neighbours, degree, seed …
    matrix: Tensor | str | None = None  # W itself: a tensor, or the name of a .npy file

    likelihood: ClassVar[Literal["own", "cross"]] = "own"

    def init(self, clients: Clients) -> tuple[Tensor, Beliefs]:
        """Refuses a W that is asymmetric or whose rows do not sum to one; warns of one in pieces."""
        return self.weights(clients), {}

    def weights(self, clients: Clients) -> Tensor:
        """W of this round."""
        if self.matrix is not None:
            return topologies.mixing(self.matrix, clients.n)
        w = topologies.placed(self.topology, clients.ids, **self.options)(clients.t)
        if not torch.equal(w, w.T):
            raise SettingError(f"the prior dirac takes symmetric weights, and {self.topology}'s are not: d_psgd has it")
        return w

    def e_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """Y is given."""
        return self.weights(evidence.clients), beliefs

    def elbo(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """Nothing that an E-step could change."""
        return torch.zeros((), dtype=torch.float64)

    def pull(
        self, w: Tensor, beliefs: Beliefs, x: Tensor, rate: float, here: Tensor, evidence: Evidence
    ) -> Tensor | None:
        """(15)'s last term at λ = 1/(2α), whatever α."""
        return topologies.among(w, here).to(x) @ x - x
