"""What methods for one target share: a model that follows a weighted mean of gradients taken at it.

    x ← x − γ Σ_j w_j g_j(x),   g_j: client j's stochastic gradient, w on the simplex

There may be several targets, each with a model x_k and a pool of clients of its own that may help it, itself among
them: several such problems side by side in one fleet. A pool's clients follow its target's model. `targets` are keys;
without them the target is the client whose key comes first in alphabetical order, and everyone is in its pool.

A client that is absent keeps its weight for later; those who answered divide what they had among themselves.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Gradient, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.settings import hint, whole


@dataclass(frozen=True)
class PooledState:
    """A model for each target, and who helps it how much."""

    x: Tensor  # K×d
    w: Tensor  # K×n float64: rows on the simplex, zero outside the pool
    target: Tensor  # K: the number of each target, on the host
    pool: Tensor  # n: which target each client helps, on the host


@dataclass(frozen=True)
class Pooled(Algorithm):
    """Subclasses say how gradients are weighted."""

    lr: float = 0.01  # γ
    batch: int | None = 100
    sampling: Sampling = "epoch"
    targets: tuple[str, ...] = ()  # keys; default: the first in alphabetical order
    pools: tuple[int, ...] = ()  # which target each client may help; default: the first

    absent_stays = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not 0 < self.lr < float("inf"):
            raise SettingError(f"lr must be above 0 and finite, not {self.lr}")
        if self.batch is not None:
            whole("batch", self.batch, 1)

    def init(self, fleet: Fleet) -> PooledState:
        """The shared initial model for each target; equal weights in every pool."""
        target, pool = seats(fleet, self.targets, self.pools)
        x = fleet.initial()[target.to(fleet.device)].clone()
        return PooledState(x, shared_out(members(pool, len(target)).to(fleet.device)), target, pool)

    def round(self, fleet: Fleet, state: PooledState) -> tuple[PooledState, Info]:
        """Gradients at the pools' models, weights, a step."""
        clients = self.asked(fleet, state)
        x, at = state.x, state.pool[clients]
        answer = fleet.ask(Gradient(clients, x, self.batch, at=at, sampling=self.sampling))
        g, ok, loss = answer.rows, answer.ok, answer.loss
        if len(clients) < fleet.n:
            g, ok, loss = spread(clients, fleet.n, g), spread(clients, fleet.n, ok), spread(clients, fleet.n, loss)
        there = members(state.pool, len(x)).to(x.device) & ok
        w, direction = self.combine(fleet, state, g, there)
        state = replace(state, x=x - self.lr * direction, w=w)
        extra = {"asked": torch.tensor(int(fleet.present[clients].sum()))}
        return state, Info(self.graph(state, there), ok, loss, extra)

    def graph(self, state: PooledState, there: Tensor) -> Tensor:
        """Everyone listens as its target does, which listens to itself where nobody answered."""
        alone = torch.nn.functional.one_hot(state.target, len(state.pool)).to(there.device)
        used = present_shares(state.w, there)
        return followed(torch.where(there.any(1, keepdim=True), used, alone), state.pool)

    def asked(self, fleet: Fleet, state: PooledState) -> Tensor:
        """Whose gradients are asked for."""
        return fleet.everyone

    def combine(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of all (K×n), and the direction of each target (K×d) from those who are there (K×n)."""
        w = self.weights(fleet, state, g, there)
        return w, present_shares(w, there).to(g.dtype) @ g

    @abstractmethod
    def weights(self, fleet: Fleet, state: PooledState, g: Tensor, there: Tensor) -> Tensor:
        """The weights after this round, absent clients' included."""

    def personal(self, state: PooledState) -> Tensor:
        """The model of the client's target."""
        return followed(state.x, state.pool)


def seats(fleet: Fleet, targets: tuple[str, ...], pools: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The number of each target, and which target each client helps."""
    keys = targets or (min(fleet.keys),)
    for key in keys:
        if key not in fleet.keys:
            raise SettingError(f"the target {key!r} is no client: {hint(key, fleet.keys)}")
    if len(set(keys)) != len(keys):
        raise SettingError(f"targets must differ: {', '.join(keys)}")
    target = torch.tensor([fleet.keys.index(key) for key in keys])
    if not pools and len(keys) > 1:
        raise SettingError(f"there are {len(keys)} targets: say with `pools` which of them each client helps")
    pool = torch.tensor(pools) if pools else torch.zeros(fleet.n, dtype=torch.long)
    if len(pool) != fleet.n or int(pool.min()) < 0 or int(pool.max()) >= len(keys):
        raise SettingError(f"pools must give each of {fleet.n} clients the number of a target, 0 to {len(keys) - 1}")
    if not torch.equal(pool[target], torch.arange(len(keys))):
        raise SettingError("every target must be in its own pool")
    return target, pool


def members(pool: Tensor, targets: int) -> Tensor:
    """K×n: who may help whom."""
    return pool == torch.arange(targets)[:, None]


def followed(rows: Tensor, pool: Tensor) -> Tensor:
    """The row of each client's target, without a copy where there is only one."""
    return rows.expand(len(pool), -1) if len(rows) == 1 else rows.index_select(0, pool.to(rows.device))


def shared_out(there: Tensor) -> Tensor:
    """Equal weights for those who are there; rows where nobody is are zero."""
    some = there.double()
    return some / some.sum(-1, keepdim=True).clamp(min=1)


def present_shares(w: Tensor, there: Tensor) -> Tensor:
    """Weights among those who are there; where these have none, equal ones."""
    kept = w * there
    total = kept.sum(-1, keepdim=True)
    return torch.where(total > 0, kept / torch.where(total > 0, total, 1), shared_out(there))


def divided(w: Tensor, u: Tensor, there: Tensor) -> Tensor:
    """Those who are there divide what they had as `u` says; who is not there keeps its weight."""
    return torch.where(there, u * (w * there).sum(-1, keepdim=True), w)


def spread(clients: Tensor, n: int, values: Tensor) -> Tensor:
    """Values of some clients among zeros for the others."""
    full = torch.zeros(n, *values.shape[1:], dtype=values.dtype, device=values.device)
    full[clients.to(values.device)] = values
    return full


def cosines(g: Tensor, target: Tensor, pool: Tensor) -> Tensor:
    """The cosine between each client's gradient and its target's, from −1 to 1; zero where one of them vanishes."""
    wide = g.double()
    aim = wide[target.to(g.device)][pool.to(g.device)]
    size = wide.norm(dim=1) * aim.norm(dim=1)
    return torch.where(size > 0, (wide * aim).sum(1) / torch.where(size > 0, size, 1), 0).clamp(-1, 1)
