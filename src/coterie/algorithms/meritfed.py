"""MeritFed (Tupitsa, Horváth, Takáč and Gorbunov 2024): weigh gradients by what they do for the target's own loss.

Algorithm 1. Every client sends g_i(x), its stochastic gradient; G holds them as rows:

    w ≈ argmin over the simplex of φ(w) = f(x − γ Gᵀw),   f: the target's loss          (7)
    x ← x − γ Gᵀw

The inner problem is solved by `steps` of mirror descent with the entropy prox (8), from the weights of the last round.
First order: h = ∇f(x − γ Gᵀw) on the target's data, and w_i ∝ w_i exp(α γ ⟨h, g_i⟩), two products with G and one pass
of the target. γ stands in the exponent, as in the authors' code. `mirror_batch` samples give h, or all (MeritFed SMD
and MD). Zeroth order, the paper's protocol for privacy:

    g̃ = n (φ(w + s e) − φ(w − s e)) / 2s · e,   e uniform on the unit sphere,   w_i ∝ w_i exp(−α g̃_i)

There the target is sent points to measure and returns losses, two a step: no gradient but its own, once a round, ever
leaves it, and others' gradients never reach it. (In the first-order protocol here they do not either, but it tells the
server the gradient h in every step.) `average` averages the inner iterates, u being the mirror step from w:
w ← w·t/(t+1) + u/(t+1), t from 0 in every round. After `cool` rounds the exponent is divided by ten. The authors do
both everywhere but in mean estimation: `meritfed-averaged`.

The target's `data` are a held-out `validation` set; its `train` data, epoch by epoch; or `fresh` samples: a new batch
in every step, where training data are made online (elsewhere drawn anew from those it has).

What the paper leaves open:
- `who="all"`: every client is a target with a model and weights of its own, all inner problems are solved as one batch,
  and gradients are taken at every target's model, g_j(x_i). `who="shared"`: the same, but for n gradients instead of
  n², at the mean of all models.
- `optimiser`: what the server does with the direction Gᵀw: SGD, with momentum m ← β m + Gᵀw, or Adam. Merit stays
  that of the plain step (7).
- `local_steps` > 1: g_i = (x − x_i)/γ, x_i being what local steps of rate `local_lr` (default γ) make of x.
- `compress`: gradients travel as their largest entries, in few bits, or as a sketch (coterie.asks.Compress).
- Absent clients keep their weight and the others divide what they have; where the target is absent x moves with the
  weights there are. With everyone a target, the model of one that is absent stays.
- `delta`: each round measures on all of the target's data how well (7) was solved, by the Frank-Wolfe gap
  max_v ⟨∇φ(w), w − v⟩, which is at least φ(w) − min φ where φ is convex. An observer measures: it is not in the ledger.

Theorem 3.4 has the error δ/(γμ) (main text; the appendix' δT/(γμ) in (13) is wrong).

Travels: up m·d + passes·d, down m·d + passes·d; phases 1 + steps; graphs ≤ 4; rows n.
(`passes` are the targets' answers in a round. Zeroth order: up m·d + 2·passes, down m·d + 2·passes·d. With who="all"
m²·d for m·d, and rows 2·n².)
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.pooled import divided, followed, members, present_shares, seats
from coterie.asks import Compress, Fit, Gradient, Loss, Plan, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.settings import real, whole

COOLER = 10.0  # by what the exponent is divided after `cool` rounds


@dataclass(frozen=True)
class MeritFedState:
    """A model for each target, who helps it how much, and the server's optimiser."""

    x: Tensor  # K×d
    w: Tensor  # K×n float64: rows on the simplex, zero outside the pool
    target: Tensor  # K: the number of each target, on the host
    pool: Tensor  # n: whose model each client follows, on the host
    m: Tensor  # K×d: momentum, or Adam's first moment (K×0 without)
    v: Tensor  # K×d: Adam's second moment (K×0 without)
    moved: Tensor  # K: how many steps each model has behind it


@dataclass(frozen=True)
class MeritFed(Algorithm):
    """The paper's γ, α and T; the other names are ours."""

    lr: float = 0.01  # γ
    batch: int | None = 100  # of the clients' gradients
    sampling: Sampling = "epoch"
    steps: int = 10  # T of mirror descent
    alpha: float | tuple[float, ...] = 0.1  # α: one for all targets, or one each
    order: Literal["first", "zeroth"] = "first"
    data: Literal["validation", "train", "fresh"] = "validation"
    mirror_batch: int | None = None  # the target's samples in a mirror step; None: all it has
    width: float = 0.1  # s: half the distance between the two points of a difference
    average: bool = False
    cool: int | None = None
    who: Literal["target", "all", "shared"] = "target"
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0  # β
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    local_steps: int = 1
    local_lr: float | None = None
    compress: Compress = field(default_factory=Compress)
    start: tuple[float, ...] = ()  # weights to begin with; default: equal
    delta: bool = False
    targets: tuple[str, ...] = ()  # keys; default: the first in alphabetical order
    pools: tuple[int, ...] = ()  # which target each client may help; default: the first

    absent_stays = False  # but it does with who="all" and who="shared"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, value in (("lr", self.lr), ("width", self.width), ("eps", self.eps)):
            real(name, value, 0)
        for alpha in self.alphas:
            real("alpha", alpha, 0, closed=True)
        if self.local_lr is not None:
            real("local_lr", self.local_lr, 0)
        for name, count, least in (
            ("batch", self.batch, 1), ("steps", self.steps, 0), ("mirror_batch", self.mirror_batch, 1),
            ("cool", self.cool, 0), ("local_steps", self.local_steps, 1),
        ):  # fmt: skip
            if count is not None:
                whole(name, count, least)
        if not (0 <= self.momentum < 1 and all(0 <= beta < 1 for beta in self.betas)):
            raise SettingError("momentum and betas are at least 0 and below 1")
        if self.momentum and self.optimiser == "adam":
            raise SettingError("momentum goes with sgd: Adam's is betas")
        if self.data == "fresh" and self.mirror_batch is None:
            raise SettingError("fresh samples have no end: say with mirror_batch how many a step takes")
        if self.start and not (min(self.start) >= 0 and abs(sum(self.start) - 1) < 1e-6):
            raise SettingError("start must be on the simplex: weights of at least 0 that sum to 1")

    @property
    def alphas(self) -> tuple[float, ...]:
        """α of each target, or the one for all."""
        return self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)

    # ---- the start ---------------------------------------------------------------------------------------------------

    def init(self, fleet: Fleet) -> MeritFedState:
        """The shared initial model for each target; equal weights in every pool, or those given."""
        if self.who == "target":
            target, pool = seats(fleet, self.targets, self.pools)
            there = members(pool, len(target))
        else:
            target = pool = fleet.everyone
            there = torch.ones(fleet.n, fleet.n, dtype=torch.bool)
        if len(self.alphas) not in (1, len(target)):
            raise SettingError(f"alpha has {len(self.alphas)} values for {len(target)} targets: give one, or one each")
        split = "validation" if self.data == "validation" else "train"
        for k in (fleet.sizes(split)[target] == 0).nonzero().flatten().tolist():
            key = fleet.keys[int(target[k])]
            raise SettingError(f"the target {key!r} has no {split} data to judge gradients with: set data to another")
        start = torch.ones(fleet.n, dtype=torch.float64)
        if self.start:
            if len(self.start) != fleet.n:
                raise SettingError(f"start gives {len(self.start)} weights for {fleet.n} clients")
            start = torch.tensor(self.start, dtype=torch.float64)
        w = present_shares(start.expand(there.shape), there).to(fleet.device)
        x = fleet.initial()[target.to(fleet.device)].clone()
        none = x.new_zeros(len(x), 0)
        m = torch.zeros_like(x) if self.momentum or self.optimiser == "adam" else none
        v = torch.zeros_like(x) if self.optimiser == "adam" else none
        return MeritFedState(x, w, target, pool, m, v, torch.zeros(len(x), dtype=torch.long, device=x.device))

    # ---- a round -----------------------------------------------------------------------------------------------------

    def round(self, fleet: Fleet, state: MeritFedState) -> tuple[MeritFedState, Info]:
        """Everyone's gradients; mirror descent on the weights; a step of the server."""
        g, there, ok, loss = self.gradients(fleet, state)
        w, extra = self.judge(fleet, state, g, there)
        used = present_shares(w, there)
        moves = there.any(1)
        if self.who != "target":
            moves = moves & ok[state.target.to(ok.device)]
        moved = self.descend(state, mixed(used, g), moves)
        w = torch.where(moves[:, None], divided(state.w, used, there), state.w)
        state = MeritFedState(moved.x, w, state.target, state.pool, moved.m, moved.v, moved.moved)
        alone = torch.nn.functional.one_hot(state.target, fleet.n).to(w.device)
        graph = followed(torch.where(moves[:, None], used, alone), state.pool)
        return state, Info(graph, ok, loss, extra)

    def gradients(self, fleet: Fleet, state: MeritFedState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """G: n×d, or K×n×d where each target has its own; who counts for whom (K×n); whose answer came; its loss."""
        x, n = state.x, fleet.n
        if self.who == "all":
            here = fleet.present.nonzero().flatten()
            i, j = here.repeat_interleave(len(here)), here.repeat(len(here))
            i, j = i[i != j], j[i != j]
            # the untracked ones first: read on from the same place, they get the batch of the client's own gradient
            others, own = fleet.ask(self.ask(j, x, i, track=False), self.ask(fleet.everyone, x, fleet.everyone))
            g = x.new_zeros(n, n, x.shape[1])
            there = torch.zeros(n, n, dtype=torch.bool, device=x.device)
            a, b, c = i.to(x.device), j.to(x.device), fleet.everyone.to(x.device)
            g[a, b], there[a, b] = self.as_gradient(others.rows), others.ok
            g[c, c], there[c, c] = self.as_gradient(own.rows), own.ok
            return g, there & own.ok, own.ok, own.loss
        at, models = (state.pool, x) if self.who == "target" else (torch.zeros(n, dtype=torch.long), x.mean(0)[None])
        answer = fleet.ask(self.ask(fleet.everyone, models, at))
        there = members(state.pool, len(x)).to(x.device) if self.who == "target" else answer.ok.new_ones(n, n)
        return self.as_gradient(answer.rows), there & answer.ok, answer.ok, answer.loss

    def ask(self, clients: Tensor, models: Tensor, at: Tensor, track: bool = True) -> Gradient | Fit:
        """For stochastic gradients, or for what local steps make of a model."""
        how = self.compress if self.compress.kind != "none" else None
        if self.local_steps == 1:
            return Gradient(clients, models, self.batch, at=at, sampling=self.sampling, track=track, compress=how)
        rate = self.lr if self.local_lr is None else self.local_lr
        plan = Plan(steps=self.local_steps, batch=self.batch, lr=rate, sampling=self.sampling)
        return Fit(clients, models, plan, at=at, give="update", track=track, compress=how)

    def as_gradient(self, rows: Tensor) -> Tensor:
        """A gradient, or the pseudo-gradient that an update stands for."""
        return rows if self.local_steps == 1 else -rows / self.lr

    # ---- the inner problem -------------------------------------------------------------------------------------------

    def judge(self, fleet: Fleet, state: MeritFedState, g: Tensor, there: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights among those who are there, after mirror descent where the target is present; what it took."""
        w = present_shares(state.w, there)
        here = fleet.present[state.target].nonzero().flatten()  # the targets that can judge
        k = here.to(w.device)
        x, client, some = state.x[k], state.target[here], there[k]
        rows = g if g.ndim == 2 else g[k]
        alpha = torch.tensor(self.alphas, dtype=torch.float64, device=w.device).expand(len(state.x))[k, None]
        if self.cool is not None and fleet.t > self.cool:  # rounds count from 0, and the authors' code has > too
            alpha = alpha / COOLER
        u = w[k]
        steps = self.steps if len(here) else 0
        for t in range(steps):
            if self.order == "first":
                answer = fleet.ask(self.probe(client, x - self.lr * mixed(u, rows)))
                exponent = alpha * self.lr * products(answer.rows, rows)
                ok = answer.ok
            else:
                exponent, ok = self.difference(fleet, client, x, u, rows, some, t)
                exponent = alpha * exponent
            new = torch.where(ok[:, None], mirrored(u, exponent, some), u)
            u = (u * t + new) / (t + 1) if self.average else new
        extra = {"steps": torch.tensor(steps), "passes": torch.tensor(steps * len(here))}
        if self.delta and len(here):
            y = x - self.lr * mixed(u, rows)
            full = self.mirror_batch if self.data == "fresh" else None
            h = fleet.watch(Gradient(client, y, full, split=self.split, memory="mirror"))
            slope = (-self.lr * products(h.rows, rows)).masked_fill(~some, torch.inf)
            gap = (torch.where(some, slope, 0) * u).sum(1) - slope.amin(1)
            extra["delta"] = torch.full((len(state.x),), torch.nan, dtype=torch.float64, device=w.device)
            extra["delta"][k] = torch.where(h.ok & some.any(1), gap, torch.nan)
        full_w = w.clone()
        full_w[k] = u
        return full_w, extra

    @property
    def split(self) -> str:
        """Where the target's data are."""
        return "validation" if self.data == "validation" else "train"

    def probe(self, client: Tensor, y: Tensor) -> Gradient:
        """∇f at the points: on all data, on the next batch of an epoch, or on fresh samples.

        The place in the epoch and the buffers of these passes are kept apart from those of training.
        """
        epoch = self.mirror_batch is not None and self.data != "fresh"
        return Gradient(
            client,
            y,
            self.mirror_batch,
            split=self.split,
            sampling="epoch" if epoch else "fresh",
            memory="mirror",
            track=epoch,
        )

    def difference(
        self, fleet: Fleet, client: Tensor, x: Tensor, u: Tensor, g: Tensor, some: Tensor, t: int
    ) -> tuple[Tensor, Tensor]:
        """−g̃ from two losses on the same batch, and which targets gave both."""
        normal = torch.special.ndtri(fleet.uniform(f"direction {t}", fleet.everyone) + 2.0**-54).to(u.device)
        e = normal * some
        e = e / e.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        points = torch.cat([x - self.lr * mixed(u + s * self.width * e, g) for s in (1, -1)])
        seen = fleet.ask(Loss(torch.cat([client, client]), points, self.mirror_batch, split=self.split))
        ahead, behind = seen.loss.double().view(2, -1)
        slope = some.sum(1) * (ahead - behind) / (2 * self.width)
        return -slope[:, None] * e, seen.ok.view(2, -1).all(0)

    # ---- the server's step -------------------------------------------------------------------------------------------

    def descend(self, state: MeritFedState, direction: Tensor, moves: Tensor) -> MeritFedState:
        """SGD, with momentum, or Adam, for the models that move."""
        x, m, v, there = state.x, state.m, state.v, moves[:, None]
        moved = state.moved + moves
        step = direction
        if self.optimiser == "adam":
            b1, b2 = self.betas
            m = torch.where(there, b1 * m + (1 - b1) * direction, m)
            v = torch.where(there, b2 * v + (1 - b2) * direction.square(), v)
            t = moved.clamp(min=1).to(x.dtype)[:, None]
            step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.eps)
        elif self.momentum:
            m = torch.where(there, self.momentum * m + direction, m)
            step = m
        x = torch.where(there, x - self.lr * step, x)
        return MeritFedState(x, state.w, state.target, state.pool, m, v, moved)

    def personal(self, state: MeritFedState) -> Tensor:
        """The model of the client's target; its own where everyone is one."""
        return followed(state.x, state.pool)


def mixed(w: Tensor, g: Tensor) -> Tensor:
    """Gᵀw of every target: K×d."""
    w = w.to(g.dtype)
    return w @ g if g.ndim == 2 else torch.einsum("kn,knd->kd", w, g)


def products(h: Tensor, g: Tensor) -> Tensor:
    """⟨h_k, g_i⟩ of every target and client: K×n float64."""
    return (h @ g.T if g.ndim == 2 else torch.einsum("kd,knd->kn", h, g)).double()


def mirrored(w: Tensor, exponent: Tensor, some: Tensor) -> Tensor:
    """The mirror step: w exp(exponent), normalised over those who are there."""
    heavy = exponent.masked_fill(~some | (w <= 0), -torch.inf)
    top = heavy.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    return present_shares(w * torch.exp((exponent - top).clamp(max=0)), some)
