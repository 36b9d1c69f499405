"""Ditto (Li, Hu, Beirami and Smith 2021): a personal model beside the global one, pulled towards it.

    w ← w + Σ_i p_i (w_i − w),    w_i: the client's training from w on F_i, as in FedAvg               (global)
    v_i ← v_i − η (∇F_i(v_i) + λ (v_i − w)),    w as received in this round                          (personal)

The global model follows gradients taken at itself: without the pull this is FedAvg and Local side by side. v_i starts
as the shared initial model, lives at the client and never travels; a client that is absent keeps it. The two models
have buffers, momentum and places in the stream of their own. One plan serves both parts, but for the rate η and the
steps of the personal one, where they are given. With a `share` only so many, drawn each round, train the global model;
everyone trains its own.

Travels: up m·d, down 2·m·d; phases 1; graphs 2; rows n.
(The ledger counts w once for each of the two asks; in one message it could go once.)
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from coterie.algorithm import Algorithm, Info, per_client
from coterie.algorithms.fedavg import drawn, shares
from coterie.asks import Fit, Own, Plan, Pull
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import real


@dataclass(frozen=True)
class DittoState:
    """The global model; the personal ones are the clients' own."""

    w: Tensor  # d


@dataclass(frozen=True)
class Ditto(Algorithm):
    """FedAvg, and local training with a proximal term towards its model."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))  # of the global part
    lam: float = 1.0  # λ: how hard the global model pulls
    personal_lr: float | None = None  # η; default: the plan's
    personal_steps: int | None = None  # default: the plan's
    weighted: bool = True  # the global model by the clients' amounts of data, else equally
    share: float = 1.0  # part of the clients that trains the global model in a round

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not 0 <= self.lam < float("inf"):
            raise SettingError(f"lam is at least 0 and finite, not {self.lam}")
        real("share", self.share, 0, 1)
        self.personal_plan(0)  # a plan checks itself

    def init(self, fleet: Fleet) -> DittoState:
        """The shared initial model."""
        return DittoState(fleet.initial()[0])

    def round(self, fleet: Fleet, state: DittoState) -> tuple[DittoState, Info]:
        """Both models train in one phase, from the same w."""
        mine = Fit(
            fleet.everyone,
            Own("personal"),
            self.personal_plan(fleet.t),
            give="nothing",
            pull=Pull(state.w, self.lam),
        )
        who = drawn(fleet, self.share)
        personal, common = fleet.ask(mine, Fit(who, state.w, self.plan.at(fleet.t), give="update"))
        p = shares(fleet, per_client(fleet.n, who, common.ok), self.weighted)
        w = state.w + p[who].to(common.rows) @ common.rows
        graph = row_normalised(p.expand(fleet.n, -1))
        failed = per_client(fleet.n, who, ~common.ok)
        return DittoState(w), Info(graph, personal.ok & ~failed, personal.loss)

    def personal_plan(self, t: int) -> Plan:
        """The plan of the personal part in round t."""
        plan = self.plan
        if self.personal_lr is not None:
            plan = replace(plan, lr=self.personal_lr)
        if self.personal_steps is not None:
            plan = replace(plan, steps=self.personal_steps, epochs=None)
        return plan.at(t)

    def personal(self, state: DittoState) -> Own:
        """The model at the client."""
        return Own("personal")
