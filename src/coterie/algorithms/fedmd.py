"""FedMD (Li and Wang 2019): everyone meets the consensus of raw class scores on public inputs, and goes home again.

FedMD: Heterogenous Federated Learning via Model Distillation, arXiv 1910.03581, Algorithm 1. f_k: client k's class
scores, before any softmax.

    f_k ← trained on the public inputs and their labels, then on the client's own data       (transfer learning, once)
    f̃ = mean_k f_k on the public inputs                                                       (communicate, aggregate)
    f_k ← steps towards f̃ over public batches                                                 (distribute, digest)
    f_k ← steps on the client's own data                                                       (revisit)

The distance to f̃ is the mean absolute one, as in the authors' code; the paper names none. They draw a part of the
public set for each round, here all of it takes part. Transfer learning, and any later round, is one phase: digest,
revisit, tell. Everyone takes part in the paper; here those who are there do, each begins with its transfer learning
whenever it first comes, and the mean is over those who answered.

Labels may be unknown, or foreign to the clients' task: `transfer = { steps = 0 }` then begins with one's own data.

Travels: up m·public, down m·public; phases 1; graphs 3; rows n.
(`public` are public inputs times classes: f̃ goes down, or for whoever is new the labels, one number a class. Models
stay at home, so any mix of architectures can take part. Graphs: transfer learning, digesting, revisiting.)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info, per_client
from coterie.algorithms.dsfl import heard, lesson, mean_of
from coterie.algorithms.fedavg import shares
from coterie.asks import Fit, Own, Plan, Predict
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised


@dataclass(frozen=True)
class FedMDState:
    """The consensus, and who has begun; the models are the clients' own."""

    consensus: Tensor  # 1×P×C: f̃; 0×0×0 before the first answers
    begun: Tensor  # n booleans, on the host: who has been through transfer learning


@dataclass(frozen=True)
class FedMD(Algorithm):
    """Digest the consensus, revisit one's own data, tell one's scores."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))  # of the revisit
    digest: Plan = field(default_factory=lambda: Plan(epochs=1, batch=256))  # on public inputs, towards the consensus
    transfer: Plan = field(default_factory=lambda: Plan(epochs=10))  # on public inputs and labels, once
    first: Plan | None = None  # of the first training on one's own data; default: the plan
    inputs: str = "public"  # which public inputs
    shared: bool = True  # one initial model for all of one architecture, or one each

    mixed = True

    def init(self, fleet: Fleet) -> FedMDState:
        """Nobody has begun."""
        nothing = torch.empty(0, 0, 0, dtype=fleet.dtype, device=fleet.device)
        return FedMDState(nothing, torch.zeros(fleet.n, dtype=torch.bool))

    def round(self, fleet: Fleet, state: FedMDState) -> tuple[FedMDState, Info]:
        """One phase, in which those who are new do other things; asks about nobody keep the others' places."""
        t, own = fleet.t, Own("model", self.shared)
        new, old = (~state.begun).nonzero().flatten(), state.begun.nonzero().flatten()
        taught = new if self.transfer.steps_for(1) else new[:0]
        labels = fleet.labelled(self.inputs)[None] if len(taught) else state.consensus
        asks = (
            lesson(taught, own, self.transfer.at(t), labels, self.inputs),
            lesson(old, own, self.digest.at(t), state.consensus, self.inputs, loss="logits"),
            Fit(new, own, self.first or self.plan.at(t), give="nothing"),
            Fit(old, own, self.plan.at(t), give="nothing"),
            Predict(fleet.everyone, own, self.inputs),
        )
        _, _, alone, revisit, told = answers = fleet.ask(*asks)
        ok = heard(fleet.n, asks, answers)
        p = shares(fleet, ok, weighted=False)
        consensus = mean_of(p, told.outputs)[None] if bool(ok.any()) else state.consensus
        loss = per_client(fleet.n, new, alone.loss) + per_client(fleet.n, old, revisit.loss)
        extra = {"public": torch.tensor(told.outputs[0].numel())}
        return FedMDState(consensus, state.begun | ok), Info(row_normalised(p.expand(fleet.n, -1)), ok, loss, extra)

    def personal(self, state: FedMDState) -> Own:
        """The model at the client."""
        return Own("model", self.shared)
