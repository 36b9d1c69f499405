"""CoBo (Hashemi, He and Jaggi 2024): collaborative learning by bilevel optimisation.

Everyone keeps a personal model; a weight per pair says whether two clients still help each other at the midpoint of
their models. One iteration of Algorithm 1, all from the same models X:

    z_ij = (x_i + x_j)/2,   w_ij = w_ji ← Proj(w_ij + γ ⟨∇f_i(z_ij), ∇f_j(z_ij)⟩)   for the pairs drawn          (4)
    x_i ← x_i − η (u_i + ρ Σ_k w_ik (x_i − x_k)),   in matrix form X ← X − η (U + ρ (diag(W1) − W) X)            (3)

u_i is the client's stochastic gradient, or its moving average with `momentum`. Pairs are unordered, each drawn with
the probability of `schedule`; each end takes the gradient on its own data and a fresh batch, with its own buffers,
which the probe never changes. In the box [0, 1] the diagonal of W plays no part; on the simplex it is scored like any
pair, by two batches at x_i itself, and rows become asymmetric. From Python `domain` may be the projection onto any
other convex set, which is treated like the simplex; W begins at the projection of all ones (in the box all pull all
then, and models come nearer each other only while ηρn < 2). Only clients that are present are paired, and only those
that answer pull and are pulled: a newcomer enters with weight 1 to all (1/n on the simplex), one that left pulls
nobody.

`local_steps` is for use across a network: the client takes so many steps of (3) by itself, towards its neighbours'
models of the round's start and with the weights before this round's selection, so that both still are one phase. Its
steps are plain ones: `momentum` averages one gradient a round.

Where the authors' code departs from the paper we follow the paper. `cobo-reference` follows the code: independent
starts, selection after the step, an average that starts at the third step, 2/n pairs, and 1/√t after 800 iterations
(`power`: t is counted from 0, and 800 is the last at 2/n). Erratum: Example 2's ζ_ij² has the denominator a_i² + a_j²,
not its square, and it is a lower bound.

Travels: up m·d + 2·pairs·d, down m·d + 2·pairs·d; phases 1; graphs ≤ 8; rows max(n, 2·pairs).
(A sketch sends k numbers up per end instead of d.)
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Fit, Gradient, Plan, Pull, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import Projection, box, mixed, simplex
from coterie.schedules import rates
from coterie.settings import hint, real, whole

DOMAINS: dict[str, Projection] = {"box": box, "simplex": simplex}


@dataclass(frozen=True)
class CoBoState:
    """Everything the next iteration needs."""

    x: Tensor  # n×d: the personal models
    w: Tensor  # n×n float64: who listens to whom
    m: Tensor  # n×d: moving averages of gradients (n×0 without momentum)
    seen: Tensor  # n: how many gradients each client's average has seen


@dataclass(frozen=True)
class CoBo(Algorithm):
    """The paper's names; `rounds` is the run's budget, which `mixed` and decaying rates refer to."""

    lr: float = 0.01  # η
    rho: float = 0.05  # ρ: how hard collaborators pull
    gamma: float = 0.01  # γ: step of the weights
    batch: int = 128
    schedule: Literal["constant", "time", "mixed", "all", "power"] = "mixed"  # of the pairs' probability p_t
    c: float = 1.0  # constant: p = c/n; time: p = min(1, c/t)
    switch: int = 800  # power: c/n up to this t, from 0; then t to the power −exponent
    exponent: float = 0.5
    domain: Literal["box", "simplex"] | Projection = "box"
    momentum: float = 0.0  # 0.9 in the authors' runs: m ← momentum·m + (1 − momentum)·g
    warmup: int = 1  # gradients that replace the average before averaging starts
    lr_schedule: str = "constant"
    shared: bool = True  # one initial model for all, or one each
    select_first: bool = True  # weights before models, as in the paper; else a second phase at the new models
    local_steps: int = 1
    sketch: int | None = None
    sampling: Sampling = "fresh"
    rounds: int = 40_000
    theory: bool = False  # measure the theory's quantities, inside and across the true groups
    groups: tuple[int, ...] = ()  # for `theory` only; the algorithm never reads them

    stochastic = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name in ("lr", "rho", "gamma", "c", "exponent"):
            real(name, getattr(self, name), 0, closed=True)
        for name, least in (("batch", 1), ("local_steps", 1), ("rounds", 1), ("switch", 0), ("warmup", 0)):
            whole(name, getattr(self, name), least)
        if self.sketch is not None:
            whole("sketch", self.sketch, 1)
        rates(self.lr_schedule, self.lr, 1)  # a schedule checks itself
        if not 0 <= self.momentum < 1:
            raise SettingError(f"momentum is at least 0 and below 1, not {self.momentum}")
        if not callable(self.domain) and self.domain not in DOMAINS:
            raise SettingError(f"no domain is called {self.domain!r}: {hint(self.domain, DOMAINS)}")
        if self.local_steps > 1 and not self.select_first:
            raise SettingError("local_steps goes out with the selection: leave select_first as it is")
        if self.local_steps > 1 and self.momentum:
            raise SettingError("local_steps are plain steps at the client: leave momentum at 0")

    def init(self, fleet: Fleet) -> CoBoState:
        """Initial models, and the largest weights there are."""
        if self.theory and len(self.groups) != fleet.n:
            raise SettingError(f"cobo must be told the true group of each of {fleet.n} clients for `theory`")
        x = fleet.initial(self.shared).clone()
        w = self.project(torch.ones(fleet.n, fleet.n, dtype=torch.float64, device=fleet.device))
        m = torch.zeros_like(x) if self.momentum else x.new_zeros(fleet.n, 0)
        return CoBoState(x, w, m, torch.zeros(fleet.n, dtype=torch.long, device=fleet.device))

    def round(self, fleet: Fleet, state: CoBoState) -> tuple[CoBoState, Info]:
        """One iteration: select, then train, from the same models."""
        i, j = self.pairs(fleet)
        lr = rates(self.lr_schedule, self.lr, self.rounds)[min(fleet.t, self.rounds - 1)]
        x = state.x
        if self.local_steps > 1:
            mean, strength = self.neighbours(state, fleet.present.to(x.device))
            plan = Plan(steps=self.local_steps, batch=self.batch, lr=lr, sampling=self.sampling)
            own, probe = fleet.ask(Fit(fleet.everyone, x, plan, pull=Pull(mean, strength)), self.probe(fleet, x, i, j))
            w, extra = self.select(state.w, i, j, probe.gram, probe.ok)
            state = CoBoState(x + own.rows, w, state.m, state.seen)
        elif self.select_first:
            gradient = Gradient(fleet.everyone, x, self.batch, sampling=self.sampling)
            own, probe = fleet.ask(gradient, self.probe(fleet, x, i, j))
            w, extra = self.select(state.w, i, j, probe.gram, probe.ok)
            state = self.train(CoBoState(x, w, state.m, state.seen), own.rows, own.ok, lr)
        else:
            own = fleet.ask(Gradient(fleet.everyone, x, self.batch, sampling=self.sampling))
            state = self.train(state, own.rows, own.ok, lr)
            probe = fleet.ask(self.probe(fleet, state.x, i, j))
            w, extra = self.select(state.w, i, j, probe.gram, probe.ok)
            state = CoBoState(state.x, w, state.m, state.seen)
        if self.theory:
            extra |= self.consensus(state.x)
        return state, Info(state.w, own.ok, own.loss, extra)

    def chance(self, t: int, n: int) -> float:
        """p_t: the probability of a pair in iteration t (from 0)."""
        steady, fading = min(1.0, self.c / n), min(1.0, self.c / (t + 1))
        match self.schedule:
            case "constant":
                return steady
            case "time":
                return fading
            case "mixed":
                return steady if t < 0.002 * self.rounds else fading
            case "power":
                return steady if t <= self.switch else float(t**-self.exponent)
            case "all":
                return 1.0

    def pairs(self, fleet: Fleet) -> tuple[Tensor, Tensor]:
        """The pairs of this iteration among those present, by a draw per pair; on the simplex also i with itself."""
        here = fleet.present.nonzero().flatten()
        a, b = torch.triu_indices(len(here), len(here), 1 if self.domain == "box" else 0)
        i, j = here[a], here[b]
        drawn = fleet.uniform("pairs", i, j) < self.chance(fleet.t, fleet.n)
        return i[drawn], j[drawn]

    def probe(self, fleet: Fleet, x: Tensor, i: Tensor, j: Tensor) -> Gradient:
        """Both ends' gradients at the midpoint, each on a batch of its own, given as inner products."""
        ends, others = torch.stack([i, j], 1).flatten(), torch.stack([j, i], 1).flatten()
        second = (torch.arange(len(ends)) % 2) * (ends == others)  # the other batch of a client paired with itself
        return Gradient(
            ends,
            x,
            self.batch,
            at=torch.stack([ends, others], 1),
            draw=fleet.ids[others] + second,
            give="gram",
            group=torch.arange(len(i)).repeat_interleave(2),
            sketch=self.sketch,
            track=False,
        )

    def select(self, w: Tensor, i: Tensor, j: Tensor, gram: Tensor, ok: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(4): move the weights of the pairs whose both ends answered, and project."""
        extra = {"pairs": torch.tensor(len(i))}
        if not len(i):
            return w, extra
        gram = gram.double()
        both = ok.view(-1, 2).all(1)
        step = torch.where(both, self.gamma * gram[:, 0, 1], 0)
        a, b = i.to(w.device), j.to(w.device)
        moved = w.clone()
        moved[a, b] += step
        moved[b, a] = torch.where(a == b, moved[b, a], w[b, a] + step)
        if self.theory:
            extra |= self.collaborativeness(i, j, gram, both)
        return self.project(moved), extra

    def project(self, w: Tensor) -> Tensor:
        """The nearest weights of the domain."""
        return (self.domain if callable(self.domain) else DOMAINS[self.domain])(w)

    def neighbours(self, state: CoBoState, here: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted mean of those who pull each client, and ρ times their weights' sum: a pull of several steps."""
        w, total = pulling(state.w, here)
        mean = w / total.clamp(min=torch.finfo(w.dtype).tiny)[:, None]
        return mixed(mean, state.x, here), (self.rho * total).to(state.x.dtype)

    def train(self, state: CoBoState, g: Tensor, ok: Tensor, lr: float) -> CoBoState:
        """(3), for those who answered."""
        x, m, seen = state.x, state.m, state.seen + ok
        if self.momentum:
            mixed = torch.where((seen <= self.warmup)[:, None], g, self.momentum * m + (1 - self.momentum) * g)
            m = torch.where(ok[:, None], mixed, m)
            g = m
        w, total = pulling(state.w, ok)
        laplacian = ((torch.diag(total) - w) * ok[:, None]).to(x.dtype)
        there = x.masked_fill(~ok[:, None], 0)  # a model that has overflown is nobody's, and 0·inf is not 0
        x = torch.addcmul(x, g, ok[:, None].to(x.dtype) * -lr).addmm_(laplacian, there, alpha=-lr * self.rho)
        return CoBoState(x, state.w, m, seen)

    def personal(self, state: CoBoState) -> Tensor:
        """Everyone's own row."""
        return state.x

    # ---- the theory's quantities, on request -------------------------------------------------------------------------

    def collaborativeness(self, i: Tensor, j: Tensor, gram: Tensor, both: Tensor) -> dict[str, Tensor]:
        """Of the pairs drawn whose both ends answered: the mean of ‖∇f̃_ij(z)‖² inside, f̃ = (f_i + f_j)/2, and bounds.

        (5) and (6) hold at every point with the largest M_ij² inside and the smallest ζ_ij² across: these are the two
        at the midpoints of this iteration, and a run's are the extremes over its iterations. They are of one batch an
        end, so noise raises both.
        """
        group = torch.tensor(self.groups)
        inside, across = ((near.to(gram.device) & both) for near in (group[i] == group[j], group[i] != group[j]))
        squares, cross = gram[:, 0, 0] + gram[:, 1, 1], 2 * gram[:, 0, 1]
        tiny = torch.finfo(torch.float64).tiny
        return {
            "midpoint_gradient": torch.where(inside, squares + cross, 0).sum() / 4 / inside.sum(),
            "m_squared": _largest((squares - cross) / (squares + cross).clamp(min=tiny), inside),
            "zeta_squared": -_largest(-squares, across),
        }

    def consensus(self, x: Tensor) -> dict[str, Tensor]:
        """The mean of ‖x_i − x_j‖² over pairs in a true cluster."""
        group = torch.tensor(self.groups, device=x.device)
        same = (group[:, None] == group).double()
        wide = x.double()
        centre = (same / same.sum(1, keepdim=True)) @ wide
        return {"consensus": 2 * ((wide - centre) ** 2).sum(1).mean()}


def pulling(w: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Weights without the diagonal and those who are not here, and the sum of each row."""
    w = w * here
    w = w - torch.diag(w.diagonal())
    return w, w.sum(1)


def _largest(values: Tensor, chosen: Tensor) -> Tensor:
    """The largest of some values; NaN where there is none."""
    return torch.where(chosen.any(), values.masked_fill(~chosen, -torch.inf).max(), torch.nan)
