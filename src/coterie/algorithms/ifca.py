"""IFCA (Ghosh, Chung, Yin and Ramchandran 2020): k models, and everyone trains the one that fits it best.

    j_i = argmin_j F_i(θ_j),   θ_j ← θ_j + Σ_i p_i (θ_i − θ_j) over j_i = j,   θ_i: the client's training from θ_{j_i}

Algorithm 1 with model averaging. As in the paper, k is the true number of clusters, F_i the loss on all of the client's
training data (a `batch` is cheaper), the members of a cluster weigh the same (or by data, `weighted`), and a model that
nobody chose stays. A client that is absent keeps its last choice.

`start="random"` begins with k independent models, as in the paper. `start="spread"` spends the first round otherwise:
everyone trains from one shared model, the updates are clustered by k-means (the tightest of several k-means++ starts),
and θ_j is that model plus the mean update of cluster j. One step is too little to tell clients apart by: for that
round `start_epochs` may stand in for the plan's steps. `start="clients"` (see hypcluster): θ_j is what one client,
drawn for it, made of the shared model, and everyone chooses at once.

BatchNorm: models are compared with the client's own buffers, which were made under the model it chose last. With
`statistics="recalibrated"` each is judged with statistics of its own, for a pass over the training data per model.

Travels: up m·d + m·clusters, down m·d + m·clusters·d; phases 2; graphs 1; rows max(n, m·clusters).
(The first round of `spread` is one phase of m·d both ways; of `clients` it is that and a choice.)
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.fedavg import shares
from coterie.asks import Buffers, Fit, Loss, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.settings import whole

TRIES, LLOYD = 8, 10  # of k-means: starts, and iterations of each


@dataclass(frozen=True)
class IFCAState:
    """One model per cluster, and who belongs where."""

    x: Tensor  # clusters × d: θ
    group: Tensor  # n: the last choice of each client, on the host


@dataclass(frozen=True)
class IFCA(Algorithm):
    """Choose, then FedAvg inside each cluster."""

    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    clusters: int | None = None  # k; default: as many as `groups` has
    batch: int | None = None  # training samples a client chooses by; None: all
    weighted: bool = False  # by the clients' amounts of data; else equally, as published
    start: Literal["random", "spread", "clients"] = "random"
    start_epochs: int | None = None  # of the round that makes the centres; default: as the plan has it
    statistics: Buffers = "personal"  # BatchNorm's, when models are compared
    groups: tuple[int, ...] = ()  # the true clusters, for their number only

    absent_stays = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name in ("clusters", "batch", "start_epochs"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, 1)

    def init(self, fleet: Fleet) -> IFCAState:
        """Models of k clients drawn by their keys, each the client's own initial model; or k times the shared one."""
        k = self.clusters or len(set(self.groups))
        if not 1 <= k <= fleet.n:
            raise SettingError(f"there must be `clusters`, from 1 to {fleet.n} models, or the true groups; not {k}")
        group = torch.zeros(fleet.n, dtype=torch.long)
        if self.start != "random":
            return IFCAState(fleet.initial()[0].repeat(k, 1), group)
        drawn = fleet.uniform("centres", fleet.everyone).argsort()[:k]
        return IFCAState(fleet.initial(shared=False)[drawn.to(fleet.device)], group)

    def round(self, fleet: Fleet, state: IFCAState) -> tuple[IFCAState, Info]:
        """Everyone chooses; everyone trains what it chose; each model moves by the average update in its cluster."""
        first = self.start if fleet.t == 0 else "random"
        group = self.choose(fleet, state) if first == "random" else state.group
        plan = self.plan.at(fleet.t)
        if first != "random" and self.start_epochs is not None:
            plan = replace(plan, steps=None, epochs=self.start_epochs)
        answer = fleet.ask(Fit(fleet.everyone, state.x, plan, at=group, give="update"))
        if first == "spread":
            group = self.spread(fleet, answer.rows, answer.ok, len(state.x))
        member = torch.nn.functional.one_hot(group, len(state.x)).T.double()  # clusters × n
        if first == "clients":
            member = self.founders(fleet, answer.ok, len(state.x))
        weight = member * shares(fleet, answer.ok, self.weighted)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        x = state.x + weight.to(answer.rows) @ answer.rows
        if first == "clients":
            group = self.choose(fleet, IFCAState(x, group))
        graph = row_normalised(weight[group])
        return IFCAState(x, group), Info(graph, answer.ok, answer.loss, {"clusters": torch.tensor(len(x))})

    def choose(self, fleet: Fleet, state: IFCAState) -> Tensor:
        """The model of lowest loss for everyone who measured any; asks live on the host, so the choice goes there."""
        n, k = fleet.n, len(state.x)
        clients, models = fleet.everyone.repeat_interleave(k), torch.arange(k).repeat(n)
        seen = fleet.ask(Loss(clients, state.x, self.batch, at=models, buffers=self.statistics))
        loss = seen.loss.masked_fill(~seen.ok, torch.inf).view(n, k)
        found = torch.where(seen.ok.view(n, k).any(1), loss.argmin(1), -1).cpu()
        return torch.where(found < 0, state.group, found)

    def founders(self, fleet: Fleet, ok: Tensor, k: int) -> Tensor:
        """clusters × n: one client for each, drawn among those who answered; none where these are too few."""
        there = ok.cpu()
        order = fleet.uniform("founders", fleet.everyone).masked_fill(~there, torch.inf).argsort()[:k]
        return torch.nn.functional.one_hot(order, fleet.n).double() * there

    def spread(self, fleet: Fleet, rows: Tensor, ok: Tensor, k: int) -> Tensor:
        """k-means on updates by their inner products: the tightest of several k-means++ beginnings."""
        gram = (rows @ rows.T).double().cpu()
        there = ok.cpu()
        square = gram.diagonal()
        between = (square[:, None] + square - 2 * gram).clamp(min=0)
        best, least = torch.zeros(fleet.n, dtype=torch.long), torch.inf
        for trial in range(TRIES):
            gap = there.double()  # squared distance to the nearest centre; at first the same for everyone
            centres = torch.zeros(k, dtype=torch.long)
            for c in range(k):  # k-means++: the earliest of exponential clocks with rates `gap`
                clock = -torch.log1p(-fleet.uniform(f"centre {trial} {c}", fleet.everyone)) / gap
                centres[c] = clock.argmin()
                gap = between[centres[c]] * there if not c else torch.minimum(gap, between[centres[c]])
            distance = between[centres]  # k × n
            for _ in range(LLOYD):
                member = torch.nn.functional.one_hot(distance.argmin(0), k).T * there.double()
                mean = member / member.sum(1, keepdim=True).clamp(min=1)
                cross = mean @ gram
                distance = ((cross * mean).sum(1, keepdim=True) - 2 * cross + square).clamp(min=0)
                distance = distance.masked_fill(member.sum(1, keepdim=True) == 0, torch.inf)
            tightness = float((distance.min(0).values * there).sum())
            if tightness < least:
                best, least = distance.argmin(0), tightness
        return best

    def personal(self, state: IFCAState) -> Tensor:
        """The model of the client's cluster."""
        return state.x[state.group.to(state.x.device)]
