"""D-PSGD (Lian, Zhang, Zhang, Hsieh, Zhang and Liu 2017): average with your neighbours, and step along your gradient.

    x_i ← Σ_j w_ij x_j − γ ∇F_i(x_i; ζ_i),    W symmetric, rows and columns of sum one, from a fixed topology

The gradient is taken where the client was before averaging, so both go on at once. With a plan of more than one step
the client's whole update stands in the place of −γ∇F_i: `d_psgd-epochs` is SCooL's D-PSGD (s = 5 epochs), `d_psgd` with
one step the method as published. `repeats` are iterations in one round, so that rounds of single steps compare with
rounds of epochs. Clients that are not here are not averaged with; their weight stays with oneself.

W: see coterie.graph.topologies; schedules change it from one iteration to the next, and the graph that is told is the
mean over a round's. Who has which place in a topology follows from the clients' keys. Personal models are everyone's
own, not the mean over all that the theory is about.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
(Each, so often as there are repeats: the mixed model down, the update up. Without a middle, `links` copies of a model.)
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Plan
from coterie.fleet.base import Fleet
from coterie.graph import topologies
from coterie.graph.projections import mixed
from coterie.graph.topologies import Schedule
from coterie.settings import whole


@dataclass(frozen=True)
class DPSGDState:
    """The personal models."""

    x: Tensor  # n×d


@dataclass(frozen=True)
class DPSGD(Algorithm):
    """A topology by name with its settings, or W as it is."""

    plan: Plan = field(default_factory=lambda: Plan(steps=1))
    topology: str = "ring"
    options: dict[str, Any] = field(default_factory=dict)  # the topology's settings: neighbours, degree, seed …
    matrix: Tensor | str | None = None  # W itself: a tensor, or the name of a .npy file; by the clients' numbers
    repeats: int = 1
    shared: bool = True  # one initial model for all, or one each

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        whole("repeats", self.repeats, 1)

    def init(self, fleet: Fleet) -> DPSGDState:
        """Initial models; a topology that does not fit is refused, one in pieces warned of."""
        self.schedule(fleet)
        return DPSGDState(fleet.initial(self.shared).clone())

    def schedule(self, fleet: Fleet) -> Schedule:
        """W of every iteration, counted over all rounds."""
        if self.matrix is not None:
            w = topologies.mixing(self.matrix, fleet.n)
            return lambda iteration: w
        return topologies.placed(self.topology, fleet.ids, **self.options)

    def round(self, fleet: Fleet, state: DPSGDState) -> tuple[DPSGDState, Info]:
        """Step and average, so often."""
        x, schedule = state.x, self.schedule(fleet)
        ok, loss = torch.ones(fleet.n, dtype=torch.bool, device=x.device), x.new_zeros(fleet.n)
        graph, links = torch.zeros(fleet.n, fleet.n, dtype=torch.float64), torch.tensor(0)
        for r in range(self.repeats):
            w = schedule(fleet.t * self.repeats + r)
            fit = fleet.ask(Fit(fleet.everyone, x, self.plan.at(fleet.t), give="update"))
            among = topologies.among(w.to(x.device), fit.ok)
            x = torch.where(fit.ok[:, None], mixed(among, x, fit.ok) + fit.rows, x)
            ok, loss = ok & fit.ok, loss + fit.loss / self.repeats
            graph = graph + w / self.repeats
            links = links + ((among > 0).sum() - (among.diagonal() > 0).sum()).cpu()
        return DPSGDState(x), Info(graph, ok, torch.where(ok, loss, 0), {"links": links})

    def personal(self, state: DPSGDState) -> Tensor:
        """Everyone's own row."""
        return state.x
