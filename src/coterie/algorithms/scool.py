"""SCooL (Li, Zhou, Tian and Tao 2023): structured cooperative learning, one EM with a prior that is swapped.

A graphical model says who may learn from whom, Y, and the data say how well each one's model does on each other's
data. EM alternates between the two; of one round:

    θ_i' = the client's training from θ_i,  Δ_i = θ_i − θ_i',  log P(D_j|θ_i) = (baseline − L(D_j; θ_i')) / temperature
    E:  W ← the prior's q(Y) given these likelihoods and its own beliefs                                         (8)
    M:  θ_i ← θ_i − Σ_j w_ij Δ_j + what the prior itself adds,     then the prior's own parameters              (10)

Priors are in coterie.graph.priors: `sbm` (§4.2), `attention` (§4.3), `mmsbm` (F), `dirac` (§4.1; it gives D-PSGD), or
one of your own (docs/priors.md). The likelihood is of everyone's own data (case 1.1, nothing is measured and W mixes no
updates; dirac's) or of those that Y names too (case 1.2, the others'). Δ_j stands for ∇L(D_j; θ_i), to first order
(C.1). With cross_gradients="exact" local training serves the E-step only, and the M-step is Algorithm 1 as printed:
`plan.steps` times θ_i ← θ_i − η Σ_j w_ij ∇L(D_j; θ_i), a phase each.

W's rows are normalised with i itself among them, as in the authors' runs (`normalised`); `printed` is (22) to the
letter, own weight one and the others' as they are. Of every prior w_ii comes from the E-step like any w_ij.

After `warmup` rounds each client keeps the share `budget` of the others that weigh most with it, for good, and is
measured on their data and takes their updates only. Before the cut, `peers` = k measures k random others a round in
place of all; what was measured earlier stays valid until it is measured anew. Absent clients are neither measured nor
listened to. `own`, such as "head", names a part of the model that is not mixed (it travels, to be measured).

Updates are mixed, not models: equal rows of W keep the models of a community together. From the cut on rows differ, and
updates made elsewhere correct nobody's own model: along eigenvectors of W whose eigenvalue has a negative real part
models are pushed apart. Exact cross-gradients pull everyone back. (For its groups of 20 the authors' script keeps 20 of
100 clients, oneself among them, and rows stay equal; their paper says that 90 % are cut.)

The paper has no `baseline`: there D_j counts for nothing where Y_ij = 0, and since P(D_j|θ_i) < 1 the most likely graph
is the empty one. Block models that fit B (the authors' do not) approach it from round to round, and communities fade.
With the baseline Y_ij = 0 means that D_j is as likely as under a model of that loss, such as log(classes) for one that
guesses. It changes nothing where rows are softmaxes.

The authors' weight decay is the plan's; `lam` is (17)'s λ beside it: a step of rate η in every round, or, with exact
cross-gradients, in every step of the M-step. What a prior adds to the models comes once a round.

Travels: up m·d + pairs, down m·d + pairs·d; phases 2; graphs 1; rows max(n, m²).
(A round measures m² pairs, after the cut m·(1 + neighbours), always oneself among them. Δ_j goes up once and θ_i down
once, mixed. `links` says how many copies of Δ_j that are not one's own a network without a middle would carry; there a
model that is measured on one's own data would not travel. `dirac` measures nothing: m·d both ways, one phase.)
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Gradient, Loss, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.priors import PRIORS, Beliefs, Evidence, Prior
from coterie.graph.projections import heaviest, row_normalised
from coterie.settings import build, hint, real, whole


@dataclass(frozen=True)
class SCooLState:
    """Everything the next round needs; what is n×n lives on the host."""

    x: Tensor  # n×d: the personal models θ
    w: Tensor  # n×n float64: q(Y), as the last E-step left it
    loss: Tensor  # n×n float64: client j's loss of i's model, as last measured
    known: Tensor  # n×n booleans: whether it ever was
    mask: Tensor  # n×n booleans: to whom i still listens
    beliefs: Beliefs  # the prior's


@dataclass(frozen=True)
class SCooL(Algorithm):
    """The paper's names; `settings` are the prior's."""

    prior: str = "sbm"
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan(epochs=5))
    batch: int | None = 50  # samples a likelihood is measured on; None: all
    temperature: float = 1.0
    baseline: float = 0.0  # the loss at which a link gains nothing and costs nothing
    m_step: Literal["normalised", "printed"] = "normalised"
    cross_gradients: Literal["first-order", "exact"] = "first-order"
    likelihood: Literal["own", "cross"] | None = None  # case 1.1 or 1.2; default: the prior's
    warmup: int = 10  # rounds before the cut
    budget: float | None = 0.1  # share of the others kept, at least one; None: no cut
    peers: int | None = None  # how many others are measured a round before the cut; None: all
    lam: float = 0.0  # λ of the models' Gaussian prior
    own: str | None = None  # a part of the model that stays one's own
    shared: bool = True  # one initial model for all, or one each

    def __post_init__(self) -> None:
        """Refuse what has no meaning; settings are completed by the prior's defaults."""
        if self.prior not in PRIORS:
            raise SettingError(f"no prior is called {self.prior!r}: {hint(self.prior, PRIORS)}")
        object.__setattr__(self, "settings", asdict(self._prior))  # type: ignore[call-overload]
        real("temperature", self.temperature, 0)
        if not math.isfinite(self.baseline):
            raise SettingError(f"baseline is a loss, a finite number, not {self.baseline}")
        real("lam", self.lam, 0, closed=True)
        whole("warmup", self.warmup, 1)
        if self.budget is not None and not 0 < self.budget <= 1:
            raise SettingError(
                f"budget is the share of the others one listens to, above 0 and at most 1, not {self.budget}"
            )
        if self.peers is not None:
            whole("peers", self.peers, 1)
        if self.cross_gradients == "exact" and (
            self.plan.steps is None or self.plan.optimiser != "sgd" or self.plan.momentum
        ):
            raise SettingError("exact cross-gradients take plain SGD and plan.steps, the number of phases")

    @cached_property
    def _prior(self) -> Prior:
        return build(PRIORS[self.prior], self.settings, "settings")

    @property
    def cross(self) -> bool:
        """Whether Y has a say in whose data a model answers for (case 1.2)."""
        return (self.likelihood or self._prior.likelihood) == "cross"

    def init(self, fleet: Fleet) -> SCooLState:
        """Initial models; nothing is measured, nobody is cut off; what does not fit these clients is refused."""
        n = fleet.n
        w, beliefs = self._prior.init(fleet)
        if self.peers is not None:
            whole("peers", self.peers, 1, n - 1)
        if self.own is not None:
            fleet.columns(self.own)
        nothing = torch.zeros(n, n, dtype=torch.bool)
        x = fleet.initial(self.shared).clone()
        return SCooLState(x, w, torch.zeros(n, n, dtype=torch.float64), nothing, ~nothing, beliefs)

    def round(self, fleet: Fleet, state: SCooLState) -> tuple[SCooLState, Info]:
        """Train and measure; E; M; after the warm-up, the cut."""
        x, exact = state.x, self.cross_gradients == "exact"
        fit = fleet.ask(Fit(fleet.everyone, x, self.plan.at(fleet.t), give="update", track=not exact))
        ok, trained = fit.ok.cpu(), x + fit.rows
        loss, known, pairs = self.measure(fleet, state, trained, ok)
        evidence = Evidence(
            torch.where(known, (self.baseline - loss) / self.temperature, 0),
            known,
            state.mask,
            self.temperature,
            lambda: trained - fleet.initial(self.shared),
            fleet,
        )
        w, beliefs = self._prior.e_step(state.w, state.beliefs, evidence)
        elbo = self._prior.elbo(w, beliefs, evidence)
        heard = state.mask & known if self.cross else state.mask
        graph = row_normalised(torch.where(heard, w, 0))
        if exact:
            x, stayed = self.descend(fleet, x, w, heard & ok)
            ok = ok & stayed
        else:
            x = self.mix(fleet, x, fit.rows, w, heard & ok)
        x = self.settle(fleet, state.x, x, w, beliefs, ok, evidence)
        beliefs = self._prior.m_step(w, beliefs, evidence)
        mask = state.mask
        if self.cross and fleet.t + 1 >= self.warmup and bool(mask.all()):  # once
            mask = self.cut(fleet, self._prior.rank(w, evidence), heard)
        links = (heard & (w > 0) & ok & ok[:, None]).sum() - (heard.diagonal() & (w.diagonal() > 0) & ok).sum()
        extra = {"pairs": torch.tensor(pairs), "links": links, "elbo": elbo}
        info = Info(graph, ok.to(x.device), fit.loss * ok.to(x.device), extra)
        return SCooLState(x, w, loss, known, mask, beliefs), info

    # ---- likelihood --------------------------------------------------------------------------------------------------

    def measure(self, fleet: Fleet, state: SCooLState, models: Tensor, ok: Tensor) -> tuple[Tensor, Tensor, int]:
        """Losses of i's model on j's data, of the pairs due this round, among those measured before; how many."""
        if not self.cross:
            return state.loss, state.known, 0
        i, j = self.due(fleet, state.mask).nonzero(as_tuple=True)
        seen = fleet.ask(Loss(j, models, self.batch, at=i))
        good = seen.ok.cpu() & ok[i] & ok[j]
        loss, known = state.loss.clone(), state.known.clone()
        loss[i[good], j[good]] = seen.loss.double().cpu()[good]
        known[i[good], j[good]] = True
        return loss, known, len(i)

    def due(self, fleet: Fleet, mask: Tensor) -> Tensor:
        """Which pairs are measured this round."""
        here = fleet.present & fleet.present[:, None]
        if self.peers is None or (self.budget is not None and fleet.t >= self.warmup):
            return here & mask
        i, j = here.nonzero(as_tuple=True)
        mark = torch.full(here.shape, torch.inf, dtype=torch.float64)
        mark[i, j] = fleet.uniform("peers", i, j)
        mark.fill_diagonal_(-1)
        rank = mark.argsort(1).argsort(1)
        return here & mask & (rank <= self.peers)

    def cut(self, fleet: Fleet, rank: Tensor, heard: Tensor) -> Tensor:
        """Each row's first others and itself; a keyed draw between equals."""
        if self.budget is None:
            return torch.ones_like(heard)
        n = fleet.n
        i, j = torch.ones_like(heard).nonzero(as_tuple=True)
        ties = fleet.uniform("cut", i, j).view(n, n)
        return heaviest(torch.where(heard, rank, -1), math.ceil(self.budget * (n - 1) - 1e-9), ties)

    # ---- M-step ------------------------------------------------------------------------------------------------------

    def weights(self, w: Tensor, heard: Tensor) -> Tensor:
        """How much of each update goes into each model."""
        own = torch.eye(len(w), dtype=w.dtype)
        if not self.cross:
            return own
        w = torch.where(heard, w, 0)
        return row_normalised(w) if self.m_step == "normalised" else w - torch.diag(w.diagonal()) + own

    def mix(self, fleet: Fleet, x: Tensor, updates: Tensor, w: Tensor, heard: Tensor) -> Tensor:
        """θ_i − Σ_j w_ij Δ_j over those who answered; a part that stays one's own moves by its own update."""
        mixed = self.weights(w, heard).to(updates) @ updates
        if self.own is not None:
            columns = fleet.columns(self.own).to(x.device)
            mixed[:, columns] = updates[:, columns]
        return x + mixed

    def descend(self, fleet: Fleet, x: Tensor, w: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
        """The M-step with cross-gradients at θ_i itself, step by step, and who answered every time."""
        plan = self.plan.at(fleet.t)
        weight = self.weights(w, heard).to(x)
        away = fleet.present & fleet.present[:, None] & ~torch.eye(fleet.n, dtype=torch.bool)
        i, j = (away & (weight != 0).cpu()).nonzero(as_tuple=True)
        share = weight[i.to(x.device), j.to(x.device)]
        own, total = weight.diagonal(), weight.sum(1)
        columns = None if self.own is None else fleet.columns(self.own).to(x.device)
        decay = plan.weight_decay + self.lam
        ok = torch.ones(fleet.n, dtype=torch.bool, device=x.device)
        for _ in range(plan.steps or 0):
            others, mine = fleet.ask(
                Gradient(j, x, plan.batch, at=i, give="sum", into=i, weights=share, outputs=fleet.n, track=False),
                Gradient(fleet.everyone, x, plan.batch, sampling=plan.sampling),
            )
            slope = own[:, None] * mine.rows + others.sums
            if self.m_step == "normalised":  # what did not arrive is made up for by what did
                slope = slope * (total / (own + others.weight).clamp(min=torch.finfo(x.dtype).tiny))[:, None]
            if columns is not None:
                slope[:, columns] = mine.rows[:, columns]
            x = torch.where(mine.ok[:, None], x - plan.lr * (slope + decay * x), x)
            ok = ok & mine.ok
        return x, ok.cpu()

    def settle(
        self, fleet: Fleet, x: Tensor, moved: Tensor, w: Tensor, beliefs: Beliefs, ok: Tensor, evidence: Evidence
    ) -> Tensor:
        """The models with what the priors of θ add; those who did not answer stay as they were."""
        rate = self.plan.at(fleet.t).lr
        pull = self._prior.pull(w, beliefs, x, rate, ok, evidence)
        if pull is not None:
            if self.own is not None:
                pull[:, fleet.columns(self.own).to(x.device)] = 0
            moved = moved + pull
        if self.lam and self.cross_gradients == "first-order":
            moved = moved - rate * self.lam * x
        return torch.where(ok.to(x.device)[:, None], moved, x)

    def personal(self, state: SCooLState) -> Tensor:
        """Everyone's own row."""
        return state.x
