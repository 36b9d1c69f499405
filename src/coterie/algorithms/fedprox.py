"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020): FedAvg whose clients may not go far.

Federated Optimization in Heterogeneous Networks, arXiv 1812.06127. Each client's training lowers

    h_i(w) = F_i(w) + μ/2 ‖w − x‖²,    x: the global model as received

With μ = 0 this is FedAvg, to the last bit. The paper weighs equally and draws clients by their data; here, as in
FedAvg, updates are weighed by data (`weighted = false`: equally). Stragglers are a matter of the fleet.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
(x is where training starts and what pulls: it goes once. With a share, of those drawn only.)
"""

from dataclasses import dataclass, replace

from torch import Tensor

from coterie.algorithms.fedavg import FedAvg
from coterie.asks import Fit, Plan, Pull
from coterie.settings import real


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    mu: float = 0.01  # μ

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        real("mu", self.mu, 0, closed=True)

    def training(self, who: Tensor, x: Tensor, plan: Plan) -> Fit:
        """Pulled towards x."""
        fit = super().training(who, x, plan)
        return replace(fit, pull=Pull(x, self.mu)) if self.mu else fit
