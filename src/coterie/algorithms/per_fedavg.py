"""Per-FedAvg's local models (Fallah, Mokhtari and Ozdaglar 2020): its global model after a few steps at each client.

The global model w is trained as in per_fedavg_global (see there). The personal model is what a client makes of the w it
receives by `adapt` steps of plain SGD at the rate α on its own data: one, as the objective has it, unless said
otherwise. With adapt = 0 it is the w that was received. A client that is absent keeps its own; with a `share` only so
many train w in a round, and everyone adapts it.

Travels: up m·d, down 2·m·d; phases 1; graphs 2; rows n.
(The ledger counts w once for each of the two asks; in one message it could go once.)
"""

from dataclasses import dataclass

from coterie.algorithm import Info, per_client
from coterie.algorithms.fedavg import FedAvgState, drawn, shares
from coterie.algorithms.per_fedavg_global import PerFedAvgGlobal
from coterie.asks import Fit, Own, Plan
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import whole


@dataclass(frozen=True)
class PerFedAvg(PerFedAvgGlobal):
    """First-order meta-learning, and the models adapted from it."""

    adapt: int = 1  # steps of a client's own

    buffers = "personal"  # type: ignore[assignment]  # of the adapted model, not of the global one
    absent_stays = True

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        whole("adapt", self.adapt, 0)

    def round(self, fleet: Fleet, state: FedAvgState) -> tuple[FedAvgState, Info]:
        """Everyone adapts w; those drawn train it, in the same phase."""
        plan = self.plan.at(fleet.t)
        step = Plan(steps=self.adapt, batch=plan.batch, lr=self.alpha)
        mine = Fit(fleet.everyone, state.x, step, give="nothing", keep="model")
        who = drawn(fleet, self.share)
        own, common = fleet.ask(mine, self.training(who, state.x, plan))
        p = shares(fleet, per_client(fleet.n, who, common.ok), self.weighted)
        x = state.x + self.server_lr * (p[who].to(common.rows) @ common.rows)
        failed = per_client(fleet.n, who, ~common.ok)
        return FedAvgState(x), Info(row_normalised(p.expand(fleet.n, -1)), own.ok & ~failed, own.loss)

    def personal(self, state: FedAvgState) -> Own:  # type: ignore[override]
        """The model at the client."""
        return Own("model")
