"""What each client gains over training alone: the mean over seeds, with an interval of 95 %.

Seeds that divide one table into training and test data anew have much of it in common, so that their gains vary less
than those of new data would: the variance of the mean over J such seeds is s² (1/J + test/train) instead of s²/J
(Nadeau and Bengio, 2003). Where the division is fixed, the interval tells of training's randomness only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from scipy import stats

from coterie.errors import RecordError
from coterie.report.numbers import NOTHING, title, unit
from coterie.report.tables import REFERENCE, Comparison, Result, comparisons, reference
from coterie.settings import hint
from coterie.tasks import LOWER_IS_BETTER

LEVEL = 0.95


@dataclass(frozen=True)
class Gains:
    """Of one algorithm, client by client, in the units in which its metric is shown; above zero is better."""

    mean: NDArray[np.float64]
    half: NDArray[np.float64]  # of the interval; not a number where there is one seed


def gains(compared: Comparison, metric: str = "") -> dict[str, Gains]:
    """Of the main metric or another one, for each algorithm that stands beside a local run."""
    metric, found = _known(compared, metric), {}
    for row in compared.rows:
        pairs = []
        for result in compared.results:
            alone = reference(result, compared.results)
            if result["algorithm"] == row.algorithm != REFERENCE and alone is not None:
                pairs.append((result, alone))
        if pairs:
            found[row.algorithm] = _gains(compared, metric, pairs)
    return found


def _known(compared: Comparison, metric: str) -> str:
    have = compared.results[0]["clients"]
    if metric and metric not in have:
        raise RecordError(f"{compared.experiment} has no {metric!r} of each client: {hint(metric, have)}")
    return metric or compared.main


def _gains(compared: Comparison, metric: str, pairs: Sequence[tuple[Result, Result]]) -> Gains:
    sign = unit(metric)[0] * (-1 if metric in LOWER_IS_BETTER else 1)
    found = sign * np.array([_values(result, metric) - _values(alone, metric) for result, alone in pairs])
    seeds = len(found)
    if seeds < 2:
        return Gains(found.mean(0), np.full(found.shape[1], np.nan))
    told = pairs[0][0]["about"]
    sizes = {split: np.array(told["sizes"][split], dtype=float) for split in ("train", "validation", compared.judged)}
    anew = sizes[compared.judged] / np.maximum(sizes["train"] + sizes["validation"], 1) if told["resplit"] else 0.0
    variance = found.var(0, ddof=1) * (1 / seeds + anew)
    return Gains(found.mean(0), stats.t.ppf((1 + LEVEL) / 2, seeds - 1) * np.sqrt(variance))


def _values(result: Result, metric: str) -> NDArray[np.float64]:
    return np.array([np.nan if v is None else v for v in result["clients"][metric]], dtype=float)


def cells(compared: Comparison, metric: str = "") -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a table; first what clients have alone."""
    metric = _known(compared, metric)
    scale = unit(metric)[0]
    keys = compared.results[0]["about"]["keys"]
    alone = [_values(r, metric) for r in compared.results if r["algorithm"] == REFERENCE]
    if not alone:
        raise RecordError(
            f"{compared.experiment} has no run of {REFERENCE!r} to gain over: run it, with the same seeds"
        )
    lines = [[f"alone: {title(metric)}", *(_number(scale * v) for v in np.mean(alone, 0))]]
    for name, each in gains(compared, metric).items():
        lines.append([name, *(_interval(m, h) for m, h in zip(each.mean, each.half, strict=True))])
    return ["gain over local", *keys], lines


def _number(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else NOTHING


def _interval(mean: float, half: float) -> str:
    if not np.isfinite(mean):
        return NOTHING
    return f"{mean:+.2g}" + (f" ± {half:.2g}" if np.isfinite(half) else "")


def foot(compared: Comparison) -> str:
    """How to read it."""
    how = "for data divided anew" if compared.results[0]["about"]["resplit"] else "of training's randomness only"
    return f"On {compared.judged} data; mean over seeds ± half of a 95 % interval, {how}. Above zero is better."


def table(results: Sequence[Result], metric: str = "") -> Group:
    """For the terminal."""
    made = []
    for each in comparisons(results):
        head, lines = cells(each, metric)
        drawn = Table(title=escape(each.head), caption=foot(each), title_justify="left", box=box.SIMPLE_HEAD)
        for place, column in enumerate(head):
            drawn.add_column(escape(column), justify="right" if place else "left")
        for line in lines:
            drawn.add_row(*map(escape, line))
        made.append(drawn)
    return Group(*made)


def markdown(results: Sequence[Result], metric: str = "") -> str:
    """As Markdown."""
    parts = []
    for each in comparisons(results):
        head, lines = cells(each, metric)
        rows = [head, [":--", *["--:"] * (len(head) - 1)], *lines]
        text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append("\n".join([f"**{each.head}**", "", *text, "", foot(each), ""]))
    return "\n".join(parts)
