"""Per-FedAvg's global model (Fallah, Mokhtari and Ozdaglar 2020): FedAvg for a model that adapts well in a step.

Personalized Federated Learning: A Meta-Learning Approach, arXiv 2002.07948. What is minimised is the mean over clients
of F_i after one step of gradient descent, f_i(w − α ∇f_i(w)). A local step, D and D′ two batches:

    w̃ = w − α ∇f_i(w, D),    w ← w − β (I − α ∇²f_i(w, D″)) ∇f_i(w̃, D′),    β: the plan's rate

of which this is their first-order version, Per-FedAvg (FO): without the Hessian. Then the server averages. They weigh
clients equally; here, as in FedAvg, by their data (`weighted = false`: equally). With α = 0 this is FedAvg, to the
last bit. Measured is the global model itself, before anybody adapts it; adapted it is `per_fedavg`.

Travels: up m·d, down m·d; phases 1; graphs 2; rows n.
(With a share, of those drawn only.)
"""

from dataclasses import dataclass, replace

from torch import Tensor

from coterie.algorithms.fedavg import FedAvg
from coterie.asks import Fit, Plan
from coterie.settings import real


@dataclass(frozen=True)
class PerFedAvgGlobal(FedAvg):
    """FedAvg of first-order meta-learning."""

    alpha: float = 0.01  # α

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        real("alpha", self.alpha, 0, closed=True)
        replace(self.plan, ahead=self.alpha)  # a plan checks itself

    def training(self, who: Tensor, x: Tensor, plan: Plan) -> Fit:
        """Every step looks one ahead."""
        return super().training(who, x, replace(plan, ahead=self.alpha))
