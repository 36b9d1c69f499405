"""DS-FL (Itahara, Nishio, Koda, Morikura and Yamamoto 2021): learn what all believe of public inputs, made surer.

Distillation-Based Semi-Supervised Federated Learning, arXiv 2008.06180. F_k: client k's softmax outputs on the public
inputs, which have no labels.

    w_k ← steps on the cross-entropy of F_k to t̂ over public batches      (distillation)
    w_k ← steps on the client's own data                                    (update)
    t̂ = softmax(mean_k F_k / T)                                            (entropy reduction)

T = 0.1 makes t̂ surer than the mean; `temperature = "none"` takes the mean itself, their simple aggregation. Their round
ends with the distillation, ours begins with it, on t̂ of the round before: the same steps in the same order, in one
phase, and a personal model is measured after the update on its own data. Their server also distils a global model of
its own for new clients; nothing here depends on one. The mean is over those who answered; who was away learns the
latest t̂ when it returns.

Travels: up m·public, down m·public; phases 1; graphs 2; rows n.
(`public` are public inputs times classes. In the first round nothing goes down. Models stay at home, so any mix of
architectures can take part.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.fedavg import shares
from coterie.asks import Answer, Ask, Distil, Fit, Own, Plan, Predict
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import real


def lesson(
    who: Tensor,
    own: Own,
    plan: Plan,
    targets: Tensor,
    inputs: str,
    at: Tensor | None = None,
    weight: float = 1.0,
    loss: Literal["cross_entropy", "logits"] = "cross_entropy",
    temperature: float = 1.0,
) -> Fit:
    """Training of clients' own models on targets alone: the only ones (1×P×C), or each the ones `at` says."""
    if not len(who):
        return Fit(who, own, plan, give="nothing")
    at = torch.zeros(len(who), dtype=torch.long) if at is None else at
    points = targets.shape[1]
    rider = Distil(targets, inputs, weight, min(plan.batch or points, points), at[:, None], loss, temperature, True)
    return Fit(who, own, plan, give="nothing", distil=rider)


def heard(n: int, asks: Sequence[Ask], answers: Sequence[Answer]) -> Tensor:
    """Who answered everything it was asked, on the host."""
    ok = torch.ones(n, dtype=torch.bool)
    for ask, answer in zip(asks, answers, strict=True):
        ok[ask.clients] &= answer.ok.cpu()
    return ok


def mean_of(p: Tensor, outputs: Tensor) -> Tensor:
    """Σ p_k outputs_k."""
    return torch.einsum("k,k...->...", p.to(outputs), outputs)


@dataclass(frozen=True)
class DSFLState:
    """What all believe; the models are the clients' own."""

    target: Tensor  # P×C: t̂; nothing before the first answers


@dataclass(frozen=True)
class DSFL(Algorithm):
    """Distil towards the last round's aggregate, train, predict."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))  # of the update
    distil: Plan = field(default_factory=lambda: Plan(epochs=1, batch=100))  # of the distillation, on public inputs
    temperature: float | None = 0.1  # T of the entropy reduction; None: the plain mean
    inputs: str = "public"  # which public inputs
    shared: bool = True  # one initial model for all of one architecture, or one each

    mixed = True

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.temperature is not None:
            real("temperature", self.temperature, 0)

    def init(self, fleet: Fleet) -> DSFLState:
        """Nobody has said anything yet."""
        return DSFLState(torch.empty(0, 0, dtype=fleet.dtype, device=fleet.device))

    def round(self, fleet: Fleet, state: DSFLState) -> tuple[DSFLState, Info]:
        """One phase: learn what all believed, train alone, say what one believes now."""
        t, own = fleet.t, Own("model", self.shared)
        asks: list[Ask] = [
            Fit(fleet.everyone, own, self.plan.at(t), give="nothing"),
            Predict(fleet.everyone, own, self.inputs),
        ]
        if state.target.numel():
            asks = [lesson(fleet.everyone, own, self.distil.at(t), state.target[None], self.inputs), *asks]
        *_, trained, said = answers = fleet.ask(*asks)
        ok = heard(fleet.n, asks, answers)
        p = shares(fleet, ok, weighted=False)
        target = state.target
        if bool(ok.any()):
            target = mean_of(p, said.outputs.softmax(-1))
            target = target if self.temperature is None else (target / self.temperature).softmax(-1)
        extra = {"public": torch.tensor(said.outputs[0].numel())}
        return DSFLState(target), Info(row_normalised(p.expand(fleet.n, -1)), ok, trained.loss, extra)

    def personal(self, state: DSFLState) -> Own:
        """The model at the client."""
        return Own("model", self.shared)
