"""WGA-BC (Chayti, Karimireddy, Stich, Flammarion and Jaggi 2021): others' gradients, less their estimated bias.

Linear Speedup in Personalized Collaborative Learning, arXiv 2111.05968. With g_i client i's gradient and ḡ_i the mean
of all others', both at θ_i:

    θ_i ← θ_i − η ((1 − a) g_i + a (ḡ_i − c_i)),    c_i ← (1 − b) c_i + b (ḡ_i − g_i),    c_i = 0 at first

Both lines use the gradients of the same iteration, and the step the correction from before it. With b = 0 there is no
correction: weighted gradient averaging; with a = 0 everyone is alone. The mean is over those who answered; where nobody
else did, a client steps alone and keeps its correction. Momentum and weight decay are torch's, for comparisons in which
the others have them.

Travels: up m²·d, down m²·d; phases 1; graphs ≤ 8; rows max(n, m²).
(A client's own gradient is an ask of its own, on a batch of its own: it alone moves buffers.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.allforone import descend
from coterie.asks import Gradient, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.schedules import rates
from coterie.settings import real, whole


@dataclass(frozen=True)
class WGABCState:
    """Everything the next step needs."""

    x: Tensor  # n×d: the personal models
    c: Tensor  # n×d: estimated bias of the others' gradients
    u: Tensor  # n×d: momentum (n×0 without)


@dataclass(frozen=True)
class WGABC(Algorithm):
    """a and b are the paper's α and β."""

    lr: float = 0.1  # η
    batch: int | None = 16
    a: float = 0.5  # how much of a step is the others'
    b: float = 0.1  # how fast the correction follows
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    sampling: Sampling = "fresh"
    shared: bool = True  # one initial model for all, or one each
    rounds: int = 10_000  # the run's budget, for schedules

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, most in (("lr", float("inf")), ("weight_decay", float("inf")), ("a", 1.0), ("b", 1.0)):
            real(name, getattr(self, name), 0, most, closed=True)
        if self.batch is not None:
            whole("batch", self.batch, 1)
        if not 0 <= self.momentum < 1:
            raise SettingError(f"momentum is at least 0 and below 1, not {self.momentum}")

    def init(self, fleet: Fleet) -> WGABCState:
        """Initial models, no correction."""
        x = fleet.initial(self.shared).clone()
        return WGABCState(x, torch.zeros_like(x), torch.zeros_like(x) if self.momentum else x.new_zeros(fleet.n, 0))

    def round(self, fleet: Fleet, state: WGABCState) -> tuple[WGABCState, Info]:
        """Everyone's gradient at every model, summed where it is asked for."""
        x, batch = state.x, self.batch
        off = ~torch.eye(fleet.n, dtype=torch.bool)
        i, k = (fleet.present[:, None] & fleet.present & off).nonzero(as_tuple=True)
        others, own = fleet.ask(
            Gradient(k, x, batch, at=i, give="sum", into=i, outputs=fleet.n, sampling=self.sampling, track=False),
            Gradient(fleet.everyone, x, batch, sampling=self.sampling),
        )
        helped = (others.weight > 0)[:, None]
        mean = others.sums / others.weight.clamp(min=1)[:, None]
        a = self.a * helped.to(x)
        g = (1 - a) * own.rows + a * (mean - state.c)
        c = torch.where(own.ok[:, None] & helped, (1 - self.b) * state.c + self.b * (mean - own.rows), state.c)
        lr = rates(self.lr_schedule, self.lr, self.rounds)[min(fleet.t, self.rounds - 1)]
        x, u = descend(x, state.u, g, own.ok, lr, self.momentum, self.weight_decay)
        graph = torch.zeros(fleet.n, fleet.n, dtype=torch.float64)
        graph[i, k] = others.ok.cpu().double()
        graph = self.a * graph / graph.sum(1, keepdim=True).clamp(min=1)
        graph = row_normalised(graph + torch.diag(1 - graph.sum(1)))
        return WGABCState(x, c, u), Info(graph.to(x.device), own.ok, own.loss)

    def personal(self, state: WGABCState) -> Tensor:
        """Everyone's own row."""
        return state.x
