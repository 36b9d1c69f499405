"""How close a learned graph is to the true one, which has 1 inside groups and 0 elsewhere; and whom it trusts."""

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from coterie.errors import DataError
from coterie.graph.communities import communities, exact
from coterie.graph.projections import row_normalised


def _pair(w: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both graphs in float64, and which entries are not on the diagonal."""
    w, truth = torch.as_tensor(w, dtype=torch.float64).cpu(), torch.as_tensor(truth, dtype=torch.float64).cpu()
    if w.ndim != 2 or w.shape[0] != w.shape[1] or w.shape != truth.shape:
        raise DataError(f"a graph of shape {tuple(w.shape)} cannot be compared with a true one of {tuple(truth.shape)}")
    return w, truth, ~torch.eye(len(w), dtype=torch.bool)


def l1_distance(w: Tensor, truth: Tensor, *, diagonal: bool = True) -> float:
    """Σ_j |w_ij − w*_ij| with both rows summing to one, mean over i: 0 the same, 2 nothing in common (SCooL, Fig. 6).

    `diagonal=False` leaves own weights out, for graphs in which they mean nothing.
    """
    w, truth, off = _pair(w, truth)
    if not diagonal:
        w, truth = torch.where(off, w, 0), torch.where(off, truth, 0)
    return float((row_normalised(w) - row_normalised(truth)).abs().sum(1).mean())


def auroc(w: Tensor, truth: Tensor) -> float:
    """Chance that a true link off the diagonal weighs more than a false one; NaN if there are only one kind."""
    w, truth, off = _pair(w, truth)
    edges = truth[off] > 0
    if bool(edges.all()) or not bool(edges.any()):
        return float("nan")
    return float(roc_auc_score(edges.numpy(), w[off].numpy()))


def inside_across(w: Tensor, truth: Tensor) -> tuple[float, float]:
    """Mean weight between clients that belong together, and between those that do not; NaN where there are none."""
    w, truth, off = _pair(w, truth)
    return float(w[off & (truth > 0)].mean()), float(w[off & (truth == 0)].mean())


def top_share(w: Tensor, truth: Tensor, k: int | None = None) -> float:
    """Share of true ones among each client's k heaviest others (as many as are true, by default), mean over clients.

    Equal weights count as ranked at random, in expectation. Clients alone in their cluster are left out.
    """
    w, truth, off = _pair(w, truth)
    true = off & (truth > 0)
    rows = true.any(1)
    if not bool(rows.any()):
        return float("nan")
    if k is not None and not 1 <= k < len(w):
        raise DataError(f"k must lie in 1 to {len(w) - 1}, the number of other clients, not {k}")
    wanted = true.sum(1) if k is None else torch.full((len(w),), k)
    w = torch.where(off, w, -torch.inf)
    edge = w.sort(1, descending=True).values.gather(1, (wanted - 1).clamp_min(0)[:, None])  # the k-th weight
    above, tied = w > edge, w == edge
    chance = (true & tied).sum(1) / tied.sum(1)
    hits = (true & above).sum(1) + (wanted - above.sum(1)) * chance
    return float((hits[rows] / wanted[rows]).mean())


def found(w: Tensor, truth: Tensor) -> bool:
    """Whether the strong links join exactly the true groups."""
    w, truth, _ = _pair(w, truth)
    known = bool(torch.isfinite(w).all()) and bool((w >= 0).all())
    return known and exact(communities(w), communities(truth))


def compare(w: Tensor, truth: Tensor) -> dict[str, float]:
    """All of it, for a record."""
    inside, across = inside_across(w, truth)
    return {
        "found": float(found(w, truth)),
        "l1": l1_distance(w, truth),
        "auroc": auroc(w, truth),
        "inside": inside,
        "across": across,
        "top_share": top_share(w, truth),
    }


def given_to(rows: Tensor, some: Tensor) -> Tensor:
    """Which share of its weight each row of a graph gives to some clients (n booleans)."""
    total = rows.sum(1)
    return rows[:, some.to(rows.device)].sum(1) / torch.where(total > 0, total, 1)
