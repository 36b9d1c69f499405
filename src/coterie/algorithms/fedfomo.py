"""FedFomo (Zhang, Sapra, Fidler, Yeung and Alvarez 2021): move towards the models that lower my own validation loss.

Personalized Federated Learning with First Order Model Optimization, arXiv 2012.08565. θ_i is client i's model before
the round, θ_n⁺ what client n's local training made of its own, L_i the loss on i's validation data:

    w_in = max(0, L_i(θ_i) − L_i(θ_n⁺)) / ‖θ_n⁺ − θ_i‖,  then Σ_n w_in = 1                                       (5)
    θ_i ← θ_i + Σ_n w_in (θ_n⁺ − θ_i),   n over i itself and the M models it downloads
    p_i ← p_i + w_i                      how much i has liked each of the others so far

Where no model is an improvement θ_i stays as it was, its own training included. Which M it downloads is ε-greedy: with
probability ε, which starts at `epsilon` and falls by `decay` a round, M of the others at random, else those of highest
p (equals in random order). Without `models` everyone downloads from everyone, as in the experiments that compare
themselves with it here. Weights are of whole models, so BatchNorm's buffers stay personal.

Travels: up m·d + pairs, down m·d + pairs·d; phases 2; graphs 1; rows max(2·n, pairs).
(`pairs` are the losses measured: each client's own two and one for each download. The ledger counts all of these
models as sent; a client that keeps its own two saves 2·m·d of them.)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Loss, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import mixed, row_normalised
from coterie.settings import whole


@dataclass(frozen=True)
class FedFomoState:
    """Models, and what everyone thinks of the others'."""

    x: Tensor  # n×d: θ
    p: Tensor  # n×n float64, on the host: the weights so far


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """Local training, then first-order weights from validation losses."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    models: int | None = None  # M: downloads a round; None: all
    epsilon: float = 0.3  # ε of the first round
    decay: float = 0.05  # by which ε falls each round
    batch: int | None = None  # validation samples a client measures with; None: all it has
    shared: bool = True  # one initial model for all, or one each

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.models is not None:
            whole("models", self.models, 1)
        if not (0 <= self.epsilon <= 1 and self.decay >= 0):
            raise SettingError("epsilon is from 0 to 1, decay at least 0")

    def init(self, fleet: Fleet) -> FedFomoState:
        """Initial models; nobody has a favourite yet."""
        if self.models is not None and self.models >= fleet.n:
            raise SettingError(f"fedfomo.models must be below the number of clients, {fleet.n}, not {self.models}")
        return FedFomoState(fleet.initial(self.shared).clone(), torch.zeros(fleet.n, fleet.n, dtype=torch.float64))

    def round(self, fleet: Fleet, state: FedFomoState) -> tuple[FedFomoState, Info]:
        """Train; measure what one downloads; move."""
        n, x = fleet.n, state.x
        fit = fleet.ask(Fit(fleet.everyone, x, self.plan.at(fleet.t), give="rows"))
        trained = torch.where(fit.ok[:, None], fit.rows, x)
        i, j = self.downloads(fleet, state.p).nonzero(as_tuple=True)
        here = fleet.present.nonzero().flatten()
        clients, rows = torch.cat([here, i]), torch.cat([here, n + j])  # everyone's own model before, then those after
        seen = fleet.ask(Loss(clients, torch.cat([x, trained]), self.batch, at=rows, split="validation"))
        before, after = x.new_zeros(n, dtype=torch.float64), x.new_zeros(n, n, dtype=torch.float64)
        measured, ready = after.bool(), before.bool()
        c, a, b = here.to(x.device), i.to(x.device), j.to(x.device)
        before[c], ready[c] = seen.loss[: len(here)].double(), seen.ok[: len(here)]
        after[a, b], measured[a, b] = seen.loss[len(here) :].double(), seen.ok[len(here) :]
        distance = torch.cdist(x.double(), trained.double())
        known = measured & fit.ok & ready[:, None] & (distance > 0)
        gain = (before[:, None] - after).clamp(min=0) / torch.where(distance > 0, distance, 1)
        w = torch.where(known, gain, 0)
        total = w.sum(1, keepdim=True)
        w = w / torch.where(total > 0, total, 1)
        moved = mixed(w, trained, fit.ok) + (1 - w.sum(1, keepdim=True)).to(x.dtype) * x
        x = torch.where((fit.ok & (total[:, 0] > 0))[:, None], moved, x)
        info = Info(row_normalised(w), fit.ok, fit.loss, {"pairs": torch.tensor(len(clients))})
        return FedFomoState(x, state.p + w.cpu()), info

    def downloads(self, fleet: Fleet, p: Tensor) -> Tensor:
        """Whose model each of those present measures: its own and M others'."""
        own, here = torch.eye(fleet.n, dtype=torch.bool), fleet.present
        others = here[:, None] & here & ~own
        if self.models is not None:
            i, j = torch.meshgrid(fleet.everyone, fleet.everyone, indexing="ij")
            chance = fleet.uniform("download", i.flatten(), j.flatten()).view_as(p)
            explore = fleet.uniform("explore", fleet.everyone) < max(0.0, self.epsilon - self.decay * fleet.t)
            liked = torch.where(explore[:, None], 0, p).masked_fill(~others, -1)
            rank = chance.argsort(1, descending=True)  # equals in random order: a stable sort of a shuffled row
            rank = rank.gather(1, liked.gather(1, rank).sort(dim=1, descending=True, stable=True).indices)
            best = torch.zeros_like(others).scatter(1, rank[:, : self.models], True)
            others = others & best
        return others | (own & here)

    def personal(self, state: FedFomoState) -> Tensor:
        """Everyone's own row."""
        return state.x
