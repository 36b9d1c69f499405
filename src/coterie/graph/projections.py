"""Projections of a graph's weights onto a convex domain: any callable on a matrix will do."""

from typing import Protocol

import torch
from torch import Tensor

from coterie.errors import DataError


class Projection(Protocol):
    """Maps a matrix of weights to the nearest one of its domain."""

    def __call__(self, w: Tensor, /) -> Tensor:
        """The nearest matrix of the domain."""
        ...


def box(w: Tensor, lo: float = 0.0, hi: float = 1.0) -> Tensor:
    """Every entry into [lo, hi], on its own."""
    return w.clamp(lo, hi)


def simplex(w: Tensor) -> Tensor:
    """Every row onto the probability simplex, exactly, by sorting (Held, Wolfe and Crowder, 1974)."""
    top = w.sort(dim=-1, descending=True).values
    excess = (top.cumsum(-1) - 1) / torch.arange(1, w.shape[-1] + 1, dtype=w.dtype, device=w.device)
    support = (top > excess).sum(-1, keepdim=True)  # the first entries of the sorted row, at least one
    return (w - excess.gather(-1, support - 1)).clamp_min(0)


def heaviest(w: Tensor, others: int, ties: Tensor) -> Tensor:
    """Of each row the diagonal and so many heaviest others, as booleans; among equals the lower of `ties`."""
    order = ties.argsort(1)
    weight = w.clone().fill_diagonal_(torch.inf).gather(1, order)
    rank = weight.argsort(dim=1, descending=True, stable=True)
    top = order.gather(1, rank[:, : others + 1])
    return torch.zeros_like(w, dtype=torch.bool).scatter_(1, top, True)


def mixed(w: Tensor, x: Tensor, ok: Tensor) -> Tensor:
    """W X with the rows of those who are ok: another's model may have overflown, and 0·inf is no zero."""
    return w.to(x.dtype) @ x.masked_fill(~ok[:, None], 0)


def row_normalised(w: Tensor) -> Tensor:
    """Every row of an n×n graph to sum one; a client that listens to nobody listens to itself."""
    if w.shape[-1] != w.shape[-2]:
        raise DataError(f"a graph must be square to be normalised by rows, not {tuple(w.shape)}")
    total = w.sum(-1, keepdim=True)
    own = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return torch.where(total > 0, w / torch.where(total > 0, total, 1), own)
