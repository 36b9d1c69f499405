"""What the numbers say, in words for colleagues who did not run them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.report.numbers import unit, value
from coterie.report.tables import BOUND, REFERENCE, Result, comparisons

FEW = 12  # clients up to which each gets a sentence
EVEN = 1.25  # largest weight over smallest, up to which they are called equal


def next_step(results: Sequence[Result]) -> str:
    """One line: how it stands, and what to try next. Of several experiments, it speaks of the first."""
    if not results:
        return "Next: nothing has finished yet; try `coterie run quickstart`."
    compared = comparisons(results)[0]
    others = [
        row
        for row in compared.rows
        if row.algorithm != REFERENCE and not row.algorithm.endswith(BOUND) and np.isfinite(row.mean)
    ]
    alone = next((row for row in compared.rows if row.algorithm == REFERENCE and np.isfinite(row.mean)), None)
    if not others:
        return f"Next: let clients collaborate: `coterie run {compared.experiment} --algorithms local,fedavg`."
    best = (max if compared.higher else min)(others, key=lambda row: row.mean)
    run = next(r["run"] for r in compared.results if r["algorithm"] == best.algorithm)
    shown = f"{value(compared.main, best.mean)} {unit(compared.main)[1]}".strip()
    metric = compared.main.replace("_", " ")
    if alone is not None and not (best.mean > alone.mean if compared.higher else best.mean < alone.mean):
        return (
            f"Next: nothing beats training alone yet ({best.name} comes closest, {metric} {shown}): "
            f"try other settings with `coterie sweep {compared.experiment} --grid plan.lr=0.03,0.1,0.3`."
        )
    gain = "" if best.better is None else f", {100 * best.better:.0f} % of clients better off than alone"
    key = compared.results[0]["about"]["keys"][0]
    return (
        f"Next: {best.name} does best ({metric} {shown}{gain}): "
        f"take a client's model home with `coterie export {run} --client {key}`."
    )


def reading(graph: ArrayLike, keys: Sequence[str]) -> str:
    """A learned graph in one paragraph: who listens to whom."""
    w = np.asarray(graph, dtype=np.float64)
    row = np.delete(w.ravel(), np.s_[:: len(w) + 1])
    if len(keys) > 2 and row.min() > 0 and row.max() <= EVEN * row.min():
        return f"Everyone listens to everyone about equally ({_span(row)} each)."
    if len(keys) <= FEW:
        return " ".join(f"{sentence(w, keys, i)}." for i in range(len(keys)))
    off = np.where(np.eye(len(w), dtype=bool), 0.0, w)
    silent = int((off.sum(1) <= 0).sum())
    ties = np.column_stack(np.unravel_index(np.argsort(-off, axis=None, kind="stable")[:3], off.shape))
    strongest = [f"{keys[i]} to {keys[j]} ({off[i, j]:.2g})" for i, j in ties if off[i, j] > 0]
    heaviest = np.sort(off, axis=1)[:, ::-1].cumsum(1)
    needed = (heaviest < 0.5 * off.sum(1, keepdims=True)).sum(1) + 1
    text = f"Of {len(keys)} clients, {silent or 'none'} listen{'s' if silent in (0, 1) else ''} to nobody else"
    if strongest:
        half = int(np.median(needed[off.sum(1) > 0]))
        text += f"; the others give half of their attention to {half} other client{'s' * (half > 1)} (median)"
        text += f"; most closely listen {', '.join(strongest)}"
    return text + "."


def sentence(w: NDArray[np.float64], keys: Sequence[str], client: int) -> str:
    """Whom one client listens to, without the full stop."""
    row = np.delete(w[client], client)
    names = [key for i, key in enumerate(keys) if i != client]
    total = row.sum()
    if not len(row) or total <= 0:
        return f"{keys[client]} listens to nobody else"
    if len(row) > 1 and row.min() > 0 and row.max() <= EVEN * row.min():
        return f"{keys[client]} listens to everyone about equally ({_span(row)} each)"
    order = np.argsort(-row, kind="stable")
    half = int((row[order].cumsum() < 0.5 * total).sum()) + 1
    named = [f"{names[j]} ({row[j]:.2g})" for j in order[: min(half, 3)]]
    if len(row) == 1 or row[order[0]] == total:
        return f"{keys[client]} listens to {named[0]} only"
    return f"{keys[client]} listens mostly to {_and(named)}"


def _span(row: NDArray[Any]) -> str:
    low, high = f"{row.min():.2g}", f"{row.max():.2g}"
    return low if low == high else f"{low} to {high}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
