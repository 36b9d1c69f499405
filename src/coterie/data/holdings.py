"""A picture of who holds what: a bubble for each client and class, its area the number of training samples."""

from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from coterie.data.dataset import Dataset
from coterie.data.partitions import Partition

# Okabe and Ito's colours, told apart with every kind of colour vision; black and yellow are left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NAMED = 30  # classes beyond which axis names become numbers


def _thousands(number: int) -> str:
    return f"{number:,}"


def _cell(many: int) -> float:
    """Inches along an axis that each of so many clients, or classes, gets."""
    return 0.34 if many <= NAMED else 0.14


def plot_holdings(dataset: Dataset, partition: Partition, path: str | Path) -> None:
    """Draw a partition into an image file whose kind follows from the suffix of `path`."""
    counts, relabel = partition.counts(dataset), partition.relabel
    figure = bubbles(counts, dataset.name, groups=partition.groups, relabel=relabel, classes=dataset.classes)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)


def bubbles(
    counts: NDArray[np.int64],
    name: str,
    *,
    groups: NDArray[np.int64] | None = None,
    relabel: NDArray[np.int64] | None = None,
    classes: Sequence[str] = (),
) -> Figure:
    """Clients × classes as bubbles; in the colours of the true groups, with the images' own classes if relabelled."""
    n, c = counts.shape
    most = int(counts.max())
    width, height = max(4.6, n * _cell(n)), max(2.4, c * _cell(c))
    figure = Figure(figsize=(width + 2.6, height + 1.7), layout="constrained")
    axes = figure.add_subplot()
    # The largest radius at which no two neighbours touch, of half a cell where all cells are full.
    root = np.pad(np.sqrt(counts / most), 1)
    beside, below = (root[1:] + root[:-1]).max(), (root[:, 1:] + root[:, :-1]).max()
    largest = (144 * 0.96 * min(width / n / beside, height / c / below, 0.25)) ** 2  # of a bubble, points²

    def area(count: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(np.maximum(largest * np.asarray(count, float) / most, 2))  # a single image is still a dot

    client, label = np.nonzero(counts)
    order = np.argsort(-counts[client, label], kind="stable")  # small bubbles over large ones
    client, label = client[order], label[order]
    truth = np.zeros(n, int) if groups is None else groups
    groups = np.unique(truth, return_inverse=True)[1].reshape(-1)
    ordered = bool(np.all(np.diff(groups) >= 0))
    known = groups.max() > 0 and (ordered or groups.max() < len(COLOURS))  # else colours would mislead
    groups = groups if known else np.zeros_like(groups)
    colours = np.array(COLOURS)[groups % len(COLOURS)]
    axes.scatter(client, label, s=area(counts[client, label]), c=colours[client], linewidths=0, zorder=2)

    if ordered:
        for border in np.flatnonzero(np.diff(groups)):
            axes.axvline(border + 0.5, color="#999999", linewidth=0.7, zorder=1)
    numbered = relabel is not None and max(n, c) <= NAMED
    if relabel is not None and numbered:
        style: dict[str, Any] = {"color": "white", "fontsize": 8, "ha": "center", "va": "center"}
        for i, own in np.argwhere(counts[np.arange(n)[:, None], relabel] > 0.2 * most):
            axes.text(i, relabel[i, own], str(own), **style)
    axes.set(xlim=(-0.7, n - 0.3), ylim=(c - 0.4, -0.6), xlabel="client", ylabel="class, as the client sees it")
    if relabel is None:
        axes.set_ylabel("class")
    if c <= NAMED:
        numbers = numbered or not classes
        labels = [f"{k if numbers else ''} {label}".strip() for k, label in enumerate(classes or [""] * c)]
        axes.set_yticks(range(c), labels)
    if n <= NAMED:
        axes.set_xticks(range(n))
    axes.grid(color="#EEEEEE", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)

    sizes = counts.sum(1)
    span = " to ".join(_thousands(int(size)) for size in np.unique([sizes.min(), sizes.max()]))
    about = f"{n} clients, {span} training samples each"
    if known:
        about += f"\ncolour: true cluster ({groups.max() + 1})"
        about += "; in a bubble: the class of the images" if numbered else ""
    axes.set_title(f"Who holds what: {name}", loc="left", fontsize=12, fontweight="bold", pad=28 if known else 17)
    axes.text(0, 1, about, transform=axes.transAxes, fontsize=9, color="#444444", va="bottom")

    least = floor(log10(counts[counts > 0].min()))
    decades = [10**k for k in range(least, ceil(log10(most)) + 1) if 10**k < 0.7 * most] + [most]
    keys = [
        axes.scatter([], [], s=float(area(count)), color="#777777", linewidths=0, label=_thousands(count))
        for count in decades
    ]
    axes.legend(
        handles=keys,
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        labelspacing=max(0.6, largest**0.5 / 16),
        alignment="left",
    )
    return figure
