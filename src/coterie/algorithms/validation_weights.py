"""Validation-based weights (Wagner, Fan and Jaggi 2024): listen to whoever's model does well on my validation data.

Personalized Collaborative Fine-Tuning for On-Device Large Language Models has three strategies of weighing others'
models; this is the one by validation performance, which CoBo compares itself with:

    x_j ← x_j + the client's local training,   l_ij = client i's validation loss at x_j
    w_ij = exp(−l_ij / temperature) / Σ_k exp(−l_ik / temperature),   x_i ← Σ_j w_ij x_j

Taken from them: train, measure everybody's model on one's own validation data, a softmax by rows with oneself included,
and an average of the trained rows (under LoRA a row is all that training adds). Their published code puts perplexities
into the softmax, which is `score="perplexity"`; it averages after many steps (here those of `plan`), and not before a
hundred iterations (here `warmup`, in rounds). The temperature is ours.

Models are measured with the measuring client's buffers, which stay personal. Only those who trained and answered are
listened to; an absent client's model stays. Experiments choose their best round on the same validation data.

Travels: up m·d + m², down m·d + m²·d; phases 2; graphs 1; rows max(n, m²).
(During the warm-up nobody measures: m·d both ways, one phase.)
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Loss, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import mixed
from coterie.settings import whole


@dataclass(frozen=True)
class ValidationWeightsState:
    """The personal models."""

    x: Tensor  # n×d


@dataclass(frozen=True)
class ValidationWeights(Algorithm):
    """Local training, then an average weighted by validation losses."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    batch: int | None = None  # validation samples a client measures with; None: all it has
    score: Literal["loss", "perplexity"] = "loss"  # perplexity: exp(loss)
    temperature: float = 1.0  # small: the best model only; large: everyone alike
    warmup: int = 0  # rounds alone before the first average
    shared: bool = True  # one initial model for all, or one each

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not self.temperature > 0 or self.warmup < 0:
            raise SettingError("temperature is above 0, warmup at least 0")
        if self.batch is not None:
            whole("batch", self.batch, 1)

    def init(self, fleet: Fleet) -> ValidationWeightsState:
        """Initial models."""
        return ValidationWeightsState(fleet.initial(self.shared).clone())

    def round(self, fleet: Fleet, state: ValidationWeightsState) -> tuple[ValidationWeightsState, Info]:
        """Train; measure; average."""
        fit = fleet.ask(Fit(fleet.everyone, state.x, self.plan.at(fleet.t), give="update"))
        x = state.x + fit.rows
        w = torch.eye(fleet.n, dtype=torch.float64, device=x.device)
        if fleet.t >= self.warmup:
            here = fleet.present.nonzero().flatten()
            i, j = here.repeat_interleave(len(here)), here.repeat(len(here))
            seen = fleet.ask(Loss(i, x, self.batch, at=j, split="validation"))
            loss, ok = torch.zeros_like(w), torch.zeros_like(w, dtype=torch.bool)
            a, b = i.to(x.device), j.to(x.device)
            loss[a, b], ok[a, b] = seen.loss.double(), seen.ok
            w = self.weights(loss, ok & fit.ok & fit.ok[:, None])
            x = torch.where(fit.ok[:, None], mixed(w, x, fit.ok), x)
        return ValidationWeightsState(x), Info(w, fit.ok, fit.loss)

    def weights(self, loss: Tensor, ok: Tensor) -> Tensor:
        """The softmax of each row over those it could measure; who measured nobody listens to itself."""
        score = loss if self.score == "loss" else loss.exp()
        logits = (-score / self.temperature).clamp(min=-1e300).masked_fill(~ok, -torch.inf)
        alone = torch.eye(len(loss), dtype=loss.dtype, device=loss.device)
        return torch.where(ok.any(1, keepdim=True), logits.softmax(1), alone)

    def personal(self, state: ValidationWeightsState) -> Tensor:
        """Everyone's own row."""
        return state.x
