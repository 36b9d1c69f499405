"""Robust aggregation: means of gradients that some attackers cannot take anywhere.

    x ← x − γ · rule(g_1(x), …, g_n(x)),   f = `byzantine`: how many attackers are expected

`krum` (Blanchard et al. 2017): the gradient whose n − f − 2 nearest others are nearest, in squared distances.
`multi_krum`: the mean of the n − f best by that score. `trimmed_mean` (Yin et al. 2018): in each coordinate the mean
without the f largest and f smallest. `median`: in each coordinate. `geometric_median` (Pillutla et al. 2022, RFA): the
point with the least sum of distances, by `iterations` of Weiszfeld's algorithm from the coordinate-wise median,
smoothed by `smooth` times the middle one of the gradients' distances to it. All of n are those who answered. The graph
shows a client's share of the mean; in the coordinate-wise rules, of its coordinates. Several targets: see
coterie.algorithms.pooled.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithms.pooled import Pooled, PooledState
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.settings import real, whole

NEAR = 1e-150  # a distance to divide by where most rows are equal


@dataclass(frozen=True)
class Robust(Pooled):
    """One rule."""

    rule: Literal["krum", "multi_krum", "trimmed_mean", "median", "geometric_median"] = "krum"
    byzantine: int = 1  # f
    iterations: int = 100
    smooth: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        super().__post_init__()
        whole("byzantine", self.byzantine, 0)
        whole("iterations", self.iterations, 1)
        real("smooth", self.smooth, 0)

    def init(self, fleet: Fleet) -> PooledState:
        """As for any pool that is large enough for the rule."""
        state = super().init(fleet)
        n, f = int(state.pool.bincount().min()), self.byzantine
        least = {"krum": f + 3, "multi_krum": f + 3, "trimmed_mean": 2 * f + 1}.get(self.rule, 1)
        if n < least:
            raise SettingError(f"{self.rule} with {f} attackers needs at least {least} clients, and there are {n}")
        return state

    def combine(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """The rule in each pool, a handful."""
        w, direction = torch.zeros_like(state.w), torch.zeros_like(state.x)
        chance = fleet.uniform("tie", fleet.everyone).to(g.device)
        for k in range(len(state.x)):
            some = there[k].nonzero().flatten()
            if len(some):
                w[k, some], direction[k] = self.rule_of(g[some], chance[some])
        return w, direction

    def rule_of(self, g: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and the result for m gradients; `chance` decides between equals."""
        if self.rule in ("trimmed_mean", "median"):
            most = (len(g) - 1) // 2
            return trimmed(g, most if self.rule == "median" else min(self.byzantine, most))
        if self.rule == "geometric_median":
            w = geometric_median(g, self.iterations, self.smooth)
        else:
            w = krum(g, self.byzantine, 1 if self.rule == "krum" else max(1, len(g) - self.byzantine), chance)
        return w, w.to(g.dtype) @ g

    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """See `combine`, which has the result at once."""
        return self.combine(fleet, state, g, there)[0]


def centred_gram(g: Tensor) -> Tensor:
    """Inner products of rows around their coordinate-wise median: around a mean that attackers can move as far as they
    like, the honest would be told apart by rounding."""
    centred = (g - g.median(0).values).double()
    return centred @ centred.T


def gaps(g: Tensor) -> Tensor:
    """Squared distances between rows."""
    gram = centred_gram(g)
    square = gram.diagonal()
    return (square[:, None] + square - 2 * gram).clamp(min=0)


def krum(g: Tensor, f: int, best: int, chance: Tensor) -> Tensor:
    """Equal weights for the `best` rows whose m − f − 2 nearest others are nearest.

    Two rows that are each other's nearest have equal scores, up to rounding; `chance`, from 0 to 1, decides.
    """
    m = len(g)
    near = gaps(g).fill_diagonal_(0).sort(1).values[:, 1 : 1 + max(1, m - f - 2)]
    chosen = (near.sum(1) * (1 + 1e-9 * chance)).argsort()[:best]
    w = torch.zeros(m, dtype=torch.float64, device=g.device)
    w[chosen] = 1 / len(chosen)
    return w


def trimmed(g: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """In each coordinate the mean of all but the f largest and f smallest, and the rows' shares of what is left."""
    m = len(g)
    ordered = g.sort(0)
    kept = ordered.indices[f : m - f].flatten()
    return torch.bincount(kept, minlength=m).double() / len(kept), ordered.values[f : m - f].mean(0)


def geometric_median(g: Tensor, iterations: int, smooth: float) -> Tensor:
    """Weights of Weiszfeld's algorithm, by inner products only: rows are read once."""
    gram = centred_gram(g)
    square = gram.diagonal()
    floor = (smooth * square.median().sqrt()).clamp(min=NEAR)
    to = square.sqrt()  # from each row to the point: at first the coordinate-wise median, then Σ w g
    for _ in range(iterations):
        pull = 1 / torch.maximum(to, floor)
        w = pull / pull.sum()
        along = gram @ w
        to = (square - 2 * along + w @ along).clamp(min=0).sqrt()
    return w
