"""All-for-one with adaptive weights (Philippenko, Le Bars, Scaman and Massoulié 2025): others' gradients at my model.

Adaptive collaboration for online personalized distributed learning with heterogeneous clients, arXiv 2507.06844. Every
client asks the others for their gradient at its own model and averages those that look like its own:

    θ_i ← θ_i − η_i Σ_k α_ik g_k(θ_i)                                                                   (All-for-one)
    r_ik = (1 − ‖∇R_k(θ_i) − ∇R_i(θ_i)‖² / ‖∇R_i(θ_i)‖²)_+,    r_ii = 1,    ψ(x) = x φ(x)
    α_ik = φ(r_ik) (σ_iψ / σ_k)²,    σ_iψ² = 1 / Σ_k ψ(r_ik)/σ_k²                                       (Definition 1)

φ is binary (λ·1{x ≥ λ}), continuous (x), or any non-decreasing function with φ(0) = 0 and φ(x) ≤ x. Definition 1's
weights sum to at least 1, which lengthens the step; `normalised` divides by their sum, as the paper's tables do.

Estimation, (1): each refresh takes m batches of b_α samples from every client, independent of each other and of the
steps' batches. With h_k the mean of the m gradients of client k at θ_i, r̂_ik = (1 − ‖h_i − h_k‖²/‖h_i‖²)_+: the same
h_i stands in numerator and denominator, as printed, so both hold its noise, and a client whose gradient drowns in noise
ends alone. A client's m batches are the same for all models it is asked about; h_i = 0 leaves nobody but i. Only inner
products are needed: one phase, n gradients at a time.

A client refreshes when it first comes, and when it has been there for `refresh` rounds since: with partial
participation it neither waits for others nor loses its turn. Whoever is absent keeps the ratio last measured; the sums
of Definition 1 run over those who answered. `peers` lets a client ask and listen to so many others only, half of them
by the ratios it remembers and half at random, which makes a refresh and a step linear in n. σ_k: all equal, σ/√n_k with
n_k the step's batch (Remark 1) or the client's data (the authors' code), given, or estimated online from how the
m ≥ 2 batches differ. Where they do not, since b_α is a multiple of the client's data, the others' mean stands in.

A step is a single gradient per client: of the losses of those who count, weighted. The client's own part is an ask of
its own, on a batch of its own, since it alone moves buffers; each sum still has one independent batch per client.

The rules that are told the truth: `criterion="cluster"` is uniform inside the true cluster; "even" are the weights
that Even, Massoulié and Scaman (2022) prove optimal for a known bound b on the gradients' differences and a final
precision ε, uniform over {k: b_ik² < 2με}: the bias b²/2μ of each stays below ε.

Errata: Definition 2 and Corollary 1 need b_ik² where they print b_ik; Property 1's constant is for ½-quadratics.
Where the authors' code departs from the paper, `allforone-bin-reference` tests r > λ and weighs by data, and
`allforone-cont-reference` ignores n_k.

Travels: up (m+pairs+answers)·d, down (m+pairs+probes)·d; phases 1+refresh; graphs ≤ 8; rows max(n, pairs, answers).
(Between refreshes there are no probes, nor answers, m for each. A sketch answers with k numbers instead of d.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Gradient, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.schedules import rates
from coterie.settings import hint, real, whole

Criterion = Callable[[Tensor], Tensor]
TOLD = ("cluster", "even")  # weights that are known before the run
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class AllForOneState:
    """Everything the next step needs; n×n matrices stay on the host."""

    x: Tensor  # n×d: the personal models
    u: Tensor  # n×d: momentum (n×0 without)
    r: Tensor  # n×n float64: similarity ratios as last measured, 0 where never
    listed: Tensor  # n×n booleans: whom a client listens to at all (fewer than everyone with `peers`)
    spread: Tensor  # n float64: variance of a gradient of one sample, estimated online; 0 where never
    steps: Tensor  # n: how many rounds each client has been there for


@dataclass(frozen=True)
class AllForOne(Algorithm):
    """The paper's names."""

    lr: float = 0.1  # η of a constant or scheduled step
    batch: int | None = 16
    criterion: str | Criterion = "binary"  # φ: binary, continuous, a function; or told: cluster, even
    lam: float = 0.1  # λ of the binary criterion
    strict: bool = False  # r > λ instead of r ≥ λ, as the authors' code has it
    normalised: bool = True  # weights that sum to one; else Definition 1's
    b_alpha: int | None = 512  # samples in a batch of the estimate; None: all the client has
    m: int = 1  # batches averaged by the estimate
    refresh: int | Literal["epoch", "log"] = 50  # steps between refreshes; a mean pass over the data; 0, 1, 2, 4, 8 …
    peers: int | None = None  # most others a client asks in a refresh; None: everyone
    sketch: int | None = None  # numbers that stand for a gradient in a refresh
    sigma: Literal["equal", "batch", "data", "online"] | tuple[float, ...] = "batch"  # σ_k
    decay: float = 0.5  # what a new estimate leaves of the variances estimated before
    step: Literal["schedule", "horizon", "decreasing"] = "schedule"  # Table 1's; constant is a schedule
    lr_schedule: str = "constant"
    mu: float = 1.0  # μ, for `horizon`, `decreasing` and "even"
    beta: float | None = None  # β, for `horizon`; where it is known, steps stay below the theorems' 1/(β Σ_k α_ik)
    excess: float = 1.0  # ε⁰ and σ²_suf, for `horizon`
    sufficient: float = 1.0
    c: float = 2.0  # C > 1 of `decreasing`
    momentum: float = 0.0
    weight_decay: float = 0.0
    sampling: Sampling = "fresh"
    shared: bool = True  # one initial model for all, or one each
    rounds: int = 10_000  # the run's budget, for schedules and the horizon
    b: tuple[tuple[float, ...], ...] | None = None  # bounds b_ik of Assumption 3, for "even" and `theory`
    precision: float = 1e-3  # ε, for the same
    theory: bool = False  # report effective variance, collaborators and (with b) the sufficient cluster
    groups: tuple[int, ...] = ()  # the true clusters; only "cluster" reads them

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, least in (("lr", 0.0), ("weight_decay", 0.0)):
            real(name, getattr(self, name), least, closed=True)
        for name in ("mu", "excess", "sufficient", "precision"):
            real(name, getattr(self, name), 0)
        real("lam", self.lam, 0, 1)
        real("decay", self.decay, 0, 1, closed=True)
        for name in ("m", "batch", "b_alpha", "peers", "sketch"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if isinstance(self.refresh, int):
            whole("refresh", self.refresh, 1)
        if not 0 <= self.momentum < 1:
            raise SettingError(f"momentum is at least 0 and below 1, not {self.momentum}")
        if self.step == "decreasing" and not self.c > 1:
            raise SettingError(f"c is above 1, not {self.c}")
        if self.beta is not None:
            real("beta", self.beta, 0)
        elif self.step == "horizon":
            raise SettingError("the step of a horizon must be told beta")
        if self.sigma == "online" and (self.m < 2 or self.b_alpha is None):
            raise SettingError("sigma online compares batches: m must be at least 2, and b_alpha a number")
        if isinstance(self.sigma, tuple) and not all(0 < s < math.inf for s in self.sigma):
            raise SettingError("every σ_k in sigma must be above 0 and finite")
        if self.b is not None and not all(
            len(row) == len(self.b) and all(0 <= each < math.inf for each in row) for row in self.b
        ):
            raise SettingError("b must have as many columns as rows, of numbers that are at least 0 and finite")
        if self.criterion == "even" and self.b is None:
            raise SettingError("the criterion 'even' must be told b, the bounds on the gradients' differences")
        if self.criterion in TOLD:
            return
        if isinstance(self.criterion, str) and self.criterion not in ("binary", "continuous"):
            known = ("binary", "continuous", *TOLD)
            raise SettingError(f"no criterion is called {self.criterion!r}: {hint(self.criterion, known)}")
        grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
        values = self.phi(grid)
        if values[0] != 0 or not values[-1] > 0 or (values > grid + 1e-12).any() or (values.diff() < 0).any():
            raise SettingError("φ must be non-decreasing with φ(0) = 0, φ(x) ≤ x and φ(1) > 0")

    def init(self, fleet: Fleet) -> AllForOneState:
        """Initial models; nobody has measured anybody."""
        n = fleet.n
        for name, given in (("sigma", self.sigma), ("b", self.b)):
            if isinstance(given, tuple) and len(given) != n:
                raise SettingError(f"allforone must be told {name} for each of {n} clients, not for {len(given)}")
        if self.criterion == "cluster" and len(self.groups) != n:
            raise SettingError(f"allforone must be told the true group of each of {n} clients for 'cluster'")
        x = fleet.initial(self.shared).clone()
        return AllForOneState(
            x,
            torch.zeros_like(x) if self.momentum else x.new_zeros(n, 0),
            torch.eye(n, dtype=torch.float64),
            torch.ones(n, n, dtype=torch.bool),
            torch.zeros(n, dtype=torch.float64),
            torch.zeros(n, dtype=torch.long),
        )

    def round(self, fleet: Fleet, state: AllForOneState) -> tuple[AllForOneState, Info]:
        """Refresh the weights of those whose turn it is; then one step of everyone."""
        state = replace(state, **{name: getattr(state, name).cpu() for name in ("r", "listed", "spread", "steps")})
        due = self.due(fleet, state)
        extra = {"refresh": torch.tensor(int(len(due) > 0)), "probes": torch.tensor(0), "answers": torch.tensor(0)}
        if len(due):
            state, probes = self.measure(fleet, state, due)
            extra |= {"probes": torch.tensor(probes), "answers": torch.tensor(probes * self.m)}
        push, sums = self.weights(fleet, state)
        here = fleet.present[:, None] & fleet.present
        i, k = (here & (push > 0) & ~torch.eye(fleet.n, dtype=torch.bool)).nonzero(as_tuple=True)
        hoped = (sums * here).sum(1)  # what the sums come to if everyone answers; nothing for whoever is absent
        hoped = torch.where(hoped > 0, hoped, 1)
        push = push / hoped[:, None]
        x, batch = state.x, self.batch
        w = push[i, k].to(x.device)
        others, own = fleet.ask(
            Gradient(
                k, x, batch, at=i, give="sum", into=i, weights=w, outputs=fleet.n, sampling=self.sampling, track=False
            ),
            Gradient(fleet.everyone, x, batch, sampling=self.sampling),
        )
        came = torch.diag(own.ok.cpu())
        came[i, k] = others.ok.cpu()
        total = (sums * came).sum(1) / hoped  # less than one where an answer is missing
        share = (push * came).sum(1) / total.clamp(min=TINY)  # Σ_k α_ik
        mine = push.diagonal().to(x)[:, None]
        g = (mine * own.rows + others.sums) / torch.where(total > 0, total, 1).to(x)[:, None]
        lr = self.rate(fleet.t, state.steps, share).to(x)[:, None]
        x, u = descend(x, state.u, g, own.ok, lr, self.momentum, self.weight_decay)
        graph = row_normalised(torch.where(state.listed, push, 0))
        extra["pairs"] = torch.tensor(len(i))
        if self.theory:
            extra |= self.quantities(fleet, state, came)
        state = replace(state, x=x, u=u, steps=state.steps + fleet.present)
        return state, Info(graph.to(x.device), own.ok, own.loss, extra)

    def personal(self, state: AllForOneState) -> Tensor:
        """Everyone's own row."""
        return state.x

    # ---- weights -----------------------------------------------------------------------------------------------------

    def phi(self, ratio: Tensor) -> Tensor:
        """φ, elementwise."""
        if callable(self.criterion):
            return self.criterion(ratio)
        if self.criterion == "binary":
            return self.lam * ((ratio > self.lam) if self.strict else (ratio >= self.lam)).to(ratio)
        return ratio

    def variances(self, fleet: Fleet, state: AllForOneState) -> Tensor:
        """σ_k²; where only their proportions are known, the client with most counts as 1/n_k."""
        if isinstance(self.sigma, tuple):
            return torch.tensor(self.sigma, dtype=torch.float64) ** 2
        size = fleet.sizes("train").double()
        n_k = size if self.batch is None else size.clamp(max=self.batch)
        match self.sigma:
            case "equal":
                return torch.ones(fleet.n, dtype=torch.float64)
            case "data":
                return 1 / size
            case "online":
                known = state.spread > 0
                usual = state.spread[known].mean() if known.any() else torch.tensor(1.0, dtype=torch.float64)
                return torch.where(known, state.spread, usual) / n_k
        return 1 / n_k

    def weights(self, fleet: Fleet, state: AllForOneState) -> tuple[Tensor, Tensor]:
        """φ(r)/σ² and what it is to be divided by the sum of: ψ(r)/σ² in Definition 1, itself where normalised."""
        if self.criterion == "cluster":
            group = torch.tensor(self.groups)
            same = (group[:, None] == group).double()
            return same, same
        if self.criterion == "even":
            near = (torch.tensor(self.b, dtype=torch.float64) ** 2 < 2 * self.mu * self.precision).double()
            near.fill_diagonal_(1)
            return near, near
        r = torch.where(state.listed, state.r, 0)
        push = self.phi(r) / self.variances(fleet, state)
        return push, push if self.normalised else push * r

    def rate(self, t: int, steps: Tensor, share: Tensor) -> Tensor:
        """η_i: Table 1's, never above 1/(β Σ_k α_ik) where β is known."""
        match self.step:
            case "schedule":
                now = rates(self.lr_schedule, self.lr, self.rounds)[min(t, self.rounds - 1)]
                lr = torch.full_like(share, now)
            case "decreasing":
                lr = self.c / (self.mu * (steps + 1).to(share))
            case "horizon":
                assert self.beta is not None
                span = 2 * self.rounds * self.mu**2 * self.excess / (self.beta * self.sufficient)
                lr = torch.full_like(share, min(max(math.log(span), 0.0) / (self.mu * self.rounds), 1 / self.mu))
        return lr if self.beta is None else torch.minimum(lr, 1 / (self.beta * share.clamp(min=TINY)))

    # ---- similarity ratios -------------------------------------------------------------------------------------------

    def due(self, fleet: Fleet, state: AllForOneState) -> Tensor:
        """Those who are there and whose turn it is."""
        if self.criterion in TOLD:
            return torch.empty(0, dtype=torch.long)
        steps = state.steps
        if self.refresh == "log":
            turn = steps & (steps - 1) == 0
        else:
            turn = steps % (self.period(fleet) if self.refresh == "epoch" else self.refresh) == 0
        return (fleet.present & turn).nonzero().flatten()

    def period(self, fleet: Fleet) -> int:
        """Steps in which clients, on average, see their data once."""
        if self.batch is None:
            return 1
        return max(1, int((fleet.sizes("train") / self.batch).ceil().double().mean()))

    def candidates(self, fleet: Fleet, state: AllForOneState, due: Tensor) -> Tensor:
        """For each client due, itself and then the others it asks."""
        here = fleet.present.nonzero().flatten()
        others = here.expand(len(due), -1)
        others = others[others != due[:, None]].view(len(due), len(here) - 1)
        if self.peers is not None and self.peers < others.shape[1]:
            score = state.r[due[:, None], others]
            weight = score + score.sum(1, keepdim=True) / others.shape[1]  # half of the mass is everyone's alike
            weight = torch.where(weight > 0, weight, 1.0)
            u = fleet.uniform("peers", due[:, None].expand_as(others).flatten(), others.flatten()).view_as(weight)
            arrival = -torch.log1p(-u) / weight  # the first of exponential clocks: drawn by weight, without replacement
            others = others.gather(1, arrival.topk(self.peers, dim=1, largest=False).indices)
        return torch.cat([due[:, None], others], 1)

    def measure(self, fleet: Fleet, state: AllForOneState, due: Tensor) -> tuple[AllForOneState, int]:
        """(1): new ratios, and variances, of those due; and how many gradients that took, batches apart."""
        who = self.candidates(fleet, state, due)
        d, q = who.shape
        probe = fleet.ask(
            Gradient(
                who.flatten().repeat_interleave(self.m),
                state.x,
                self.b_alpha,
                at=due.repeat_interleave(q * self.m),
                draw=torch.arange(self.m).repeat(d * q),
                give="gram",
                group=torch.arange(d).repeat_interleave(q * self.m),
                sketch=self.sketch,
                track=False,
            )
        )
        gram = probe.gram.double().cpu().view(d, q, self.m, q, self.m)
        ok = probe.ok.cpu().view(d, q, self.m).all(2)
        ok = ok & ok[:, :1]  # without its own gradient a client has nothing to compare with
        a, b = due[:, None].expand_as(who)[ok], who[ok]
        r = state.r.clone()
        r[a, b] = ratios(gram.mean((2, 4)))[ok]
        listed = state.listed
        if self.peers is not None:
            listed = listed.clone()
            listed[due] = False
            listed[due[:, None], who] = True
        spread = self.spreads(fleet, state.spread, gram, who, ok) if self.sigma == "online" else state.spread
        return replace(state, r=r, listed=listed, spread=spread), d * q

    def spreads(self, fleet: Fleet, before: Tensor, gram: Tensor, who: Tensor, ok: Tensor) -> Tensor:
        """The variance of one sample's gradient at each client: of its m batches at a model, the mean over models.

        A batch is drawn without replacement. Of b samples out of n, b mod n =: l are left to chance, so that the mean
        of a batch has l (1 − l/n)/b² of the variance of one; where l = 0 all batches are alike and tell nothing.
        """
        mine = gram.diagonal(dim1=1, dim2=3)  # models × batches × batches × clients asked
        within = (mine.diagonal(dim1=1, dim2=2).sum(2) - mine.sum((1, 2)) / self.m) / (self.m - 1)
        assert self.b_alpha is not None
        size = fleet.sizes("train").double()
        left = self.b_alpha % size
        chance = torch.full_like(size, self.b_alpha) if fleet.online("train") else left * (1 - left / size)
        ok = ok & (chance > 0)[who]
        a_sample = self.b_alpha**2 * within.clamp(min=0) / chance.clamp(min=TINY)[who]
        count = torch.zeros_like(before).index_add_(0, who[ok], torch.ones(int(ok.sum()), dtype=before.dtype))
        total = torch.zeros_like(before).index_add_(0, who[ok], a_sample[ok])
        now = total / count.clamp(min=1)
        mixed = torch.where(before > 0, self.decay * before + (1 - self.decay) * now, now)
        return torch.where(count > 0, mixed, before)

    # ---- the theory's quantities, on request -------------------------------------------------------------------------

    def quantities(self, fleet: Fleet, state: AllForOneState, came: Tensor) -> dict[str, Any]:
        """σ_eff² = σ_iψ² (Theorem 1), |N_i| and, with b, |N_i*(ε)| (Definition 2), for every client; 0 where absent."""
        push, _ = self.weights(fleet, state)
        told = self.criterion in TOLD
        variance = self.variances(fleet, state)
        if told:  # the variance of the mean that is taken
            alpha = row_normalised(push * came)
            effective = (alpha**2 * variance).sum(1) * came.any(1)
        else:
            precision = (push * torch.where(state.listed, state.r, 0) * came).sum(1)
            effective = torch.where(precision > 0, 1 / precision.clamp(min=TINY), 0)
        found = {"effective_variance": effective, "collaborators": ((push > 0) & came).sum(1)}
        if self.b is not None and not told:
            b = torch.tensor(self.b, dtype=torch.float64)
            found["sufficient_cluster"] = sufficient(self.phi, b, 0.0, self.mu, self.precision).count_nonzero(1)
        return found


def descend(
    x: Tensor, u: Tensor, g: Tensor, ok: Tensor, lr: float | Tensor, momentum: float, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """One step of torch's SGD on those rows that are ok, and their momentum (n×0 where there is none)."""
    if weight_decay:
        g = g + weight_decay * x
    if momentum:
        g = momentum * u + g
        u = torch.where(ok[:, None], g, u)
    return torch.where(ok[:, None], x - lr * g, x), u


def ratios(gram: Tensor) -> Tensor:
    """r from inner products of gradients at one model (… × q × q), whose owner comes first."""
    own = gram[..., 0, 0, None]
    apart = gram.diagonal(dim1=-2, dim2=-1) + own - 2 * gram[..., 0, :]
    r = torch.where(own > 0, 1 - apart / torch.where(own > 0, own, 1), 0).clamp(0, 1)
    r[..., 0] = 1
    return r


def sufficient(phi: Criterion, b: Tensor, c: Tensor | float, mu: float, precision: float) -> Tensor:
    """ψ((1 − b_ik²/(2με) − c_ik)_+) of Definition 2, with the erratum: positive inside the sufficient cluster."""
    x = (1 - b**2 / (2 * mu * precision) - c).clamp(min=0)
    return x * phi(x)
