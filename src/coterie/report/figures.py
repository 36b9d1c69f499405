"""Pictures of the runs of one experiment: curves, learned graphs, who gains, and what it costs."""

import gc
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.data.holdings import COLOURS, bubbles
from coterie.errors import RecordError
from coterie.graph.compare import top_share
from coterie.graph.projections import row_normalised
from coterie.report import reading
from coterie.report.gains import gains
from coterie.report.numbers import human, title, unit
from coterie.report.tables import BOUND, REFERENCE, Comparison, Result, better_off, collect, comparisons
from coterie.runs.files import explained

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # joined to the colours once these run out
MARKERS = "osD^vPX"
INK, FAINT, GRID = "#222222", "#777777", "#E6E6E6"
GAIN, LOSS = COLOURS[0], COLOURS[1]
NAMED = 24  # clients beyond which their names are left out
BUBBLES = 4000  # clients times classes beyond which they are not drawn
PANELS = 4  # learned graphs beside the true one
DECADES = 3  # between the largest and the smallest value of a curve beyond which its axis is logarithmic


@dataclass(frozen=True)
class Look:
    """How one algorithm is drawn, in every figure the same."""

    colour: str
    dash: Any
    marker: str


def draw(out: str | Path) -> list[Path]:
    """Draw the finished runs of an experiment's folder into `figures/` below it."""
    out = Path(out)
    done = [run for run in reading.runs([out]) if reading.about(run)["status"] == "finished"]
    if not done:
        raise RecordError(f"no run in {out} is finished: go on with `coterie resume {out}`")
    found = comparisons(collect(done))
    if len(found) != 1:
        raise RecordError(f"{out} holds {len(found)} experiments: draw the folder of one that `coterie run` wrote")
    compared = found[0]
    looks = _looks([row.name for row in compared.rows])
    folder = out / "figures"
    figures: dict[str, Callable[[], Figure | None]]
    figures = {"curves": partial(_curves, compared, looks), "clients": partial(_clients, compared)}
    figures |= {"cost": partial(_cost, compared, looks), "gains": partial(_gains, compared, looks)}
    figures["collaborators"] = partial(_collaborators, compared, looks)
    picture = _weights if any(r["about"].get("helped") for r in compared.results) else _graphs
    figures |= {f"graph-{row.name}": partial(picture, compared, row.name) for row in compared.rows}
    figures |= {f"clusters-{row.name}": partial(_clusters, compared, row.name) for row in compared.rows}
    figures |= {"architectures": partial(_architectures, compared), "holdings": partial(_holdings, compared)}
    paths = []
    with explained("the figures", folder):
        folder.mkdir(exist_ok=True)
        for name, make in figures.items():  # one at a time, since each takes megabytes
            figure = make()
            if figure is not None:
                paths.append(folder / f"{name}.png")
                canvas: Any = FigureCanvasAgg(figure)
                canvas.print_png(paths[-1])  # savefig would draw twice
                del figure, canvas
                gc.collect()  # a figure and its parts hold each other
    return paths


# ---- curves ----------------------------------------------------------------------------------------------------------


def _curves(compared: Comparison, looks: dict[str, Look]) -> Figure | None:
    """The main metric and the loss against rounds, a line for each algorithm with a band over its seeds."""
    held = {row.name: [_evaluations(r, compared.judged) for r in _of(compared, row.name)] for row in compared.rows}
    everything = [seed for seeds in held.values() for seed in seeds]
    metrics = [m for m in dict.fromkeys((compared.main, "loss")) if everything and all(m in e for e in everything)]
    if not metrics:
        return None
    figure = _figure(5.2 * len(metrics) + 1.9, 4.1)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    ends: dict[str, float] = {}
    for axes, metric in zip(panels, metrics, strict=True):
        scale = unit(metric)[0]
        for name, seeds in held.items():
            rounds = sorted(set.intersection(*(set(seed[metric]) for seed in seeds)))  # those that every seed reached
            values = scale * np.array([[seed[metric][t] for t in rounds] for seed in seeds])
            look, mean = looks[name], values.mean(0)
            few = "o" if len(rounds) < 2 else None
            axes.plot(rounds, mean, color=look.colour, ls=look.dash, lw=1.8, marker=few, ms=5, zorder=3)
            if len(seeds) > 1:
                std = values.std(0, ddof=1)
                axes.fill_between(rounds, mean - std, mean + std, color=look.colour, alpha=0.13, lw=0, zorder=2)
            if metric == metrics[0] and rounds:
                ends[name] = float(mean[-1])
        drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
        if len(drawn) and 0 < drawn.min() < drawn.max() * (1 if metric == "distance" else 10.0**-DECADES):
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(bottom=drawn.min() / 2)
        axes.set_xlabel("round", fontsize=9.5, color=INK)
        axes.set_title(title(metric).capitalize(), loc="left", fontsize=10, color=INK)
        axes.margins(x=0.02)
        _plain(axes)
    ranked = sorted(ends, key=lambda name: ends[name], reverse=metrics[0] == compared.main and compared.higher)
    panels[-1].legend(  # in the order in which the lines of the first panel end
        handles=[Line2D([], [], color=looks[k].colour, ls=looks[k].dash, lw=1.8, label=k) for k in ranked],
        **_beside("algorithm, best on top"),
    )
    most = max(map(len, held.values()))
    band = f"; bands: ± std over {most} seeds" if most > 1 else ""
    _headline(
        figure,
        f"How well the personal models do: {compared.experiment}",
        f"{compared.judged} data, mean over clients{band}",
        compared,
    )
    return figure


def _evaluations(result: Result, split: str) -> dict[str, dict[int, float]]:
    """metric → round → mean over clients, of the personal models."""
    held: dict[str, dict[int, float]] = {}
    for line in reading.lines(Path(result["run"])):
        if (line.get("kind"), line.get("models"), line.get("split")) == ("evaluation", "personal", split):
            for metric, number in line["mean"].items():
                if number is not None:
                    held.setdefault(metric, {})[line["round"]] = number
    return held


def _collaborators(compared: Comparison, looks: dict[str, Look]) -> Figure | None:
    """To how many clients the algorithms that tell it listen, themselves included; None where no algorithm does."""
    told = {row.name: list(map(_company, _of(compared, row.algorithm))) for row in compared.rows}
    told = {name: seeds for name, seeds in told.items() if all(seeds)}
    if not told:
        return None
    figure = _figure(8.0, 3.4)
    axes = figure.subplots()
    for name, seeds in told.items():
        rounds = sorted(set.intersection(*map(set, seeds)))
        values = np.array([[seed[t] for t in rounds] for seed in seeds])
        look, mean = looks[name], values.mean(0)
        axes.plot(rounds, mean, color=look.colour, ls=look.dash, lw=1.8, zorder=3, label=name)
        if len(seeds) > 1:
            std = values.std(0, ddof=1)
            axes.fill_between(rounds, mean - std, mean + std, color=look.colour, alpha=0.13, lw=0, zorder=2)
    axes.set_ylim(0, compared.clients * 1.04)
    axes.set_xlabel("round", fontsize=9.5, color=INK)
    axes.set_title("collaborators, itself included", loc="left", fontsize=10, color=INK)
    axes.margins(x=0.02)
    _plain(axes)
    axes.legend(**_beside("algorithm"))
    band = "; bands: ± std over seeds" if any(len(seeds) > 1 for seeds in told.values()) else ""
    _headline(figure, f"To how many a client listens: {compared.experiment}", f"mean over clients{band}", compared)
    return figure


def _company(result: Result) -> dict[int, float]:
    """round → how many collaborators the clients that were there had on average; nothing where it is not told."""
    held = {}
    for line in reading.lines(Path(result["run"])):
        if line.get("kind") == "training" and "collaborators" in line["extra"] and any(line["ok"]):
            held[line["round"]] = float(np.mean(np.array(line["extra"]["collaborators"])[np.array(line["ok"])]))
    return held


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _graphs(compared: Comparison, algorithm: str) -> Figure | None:
    """The graph an algorithm learned, at several rounds beside the true one; None where nobody listens to another."""
    result = _of(compared, algorithm)[0]
    if not (Path(result["run"]) / "graphs.safetensors").is_file():
        return None
    learned, truth = reading.graphs(Path(result["run"]))
    off = ~np.eye(compared.clients, dtype=bool)
    if not any(w[off].any() for w in learned.values()):
        return None
    shown = {t: learned[t] for t in _spread(list(learned), PANELS)}
    pictures = dict(_captions(shown, truth))
    stochastic = all(np.allclose(w.sum(1), 1, atol=1e-3) for w in shown.values())
    if truth is not None:  # on the scale of what was learned
        belongs = truth > 0
        pictures["true groups"] = _normalised(belongs) if stochastic else belongs.astype(float)
    most = max(float(w[off].max()) for w in pictures.values())
    keys = result["about"]["keys"]
    groups = np.array(result["about"].get("groups") or [0] * compared.clients)
    order = np.argsort(groups, kind="stable")
    borders = np.flatnonzero(np.diff(groups[order])) + 0.5
    names = compared.clients <= NAMED // 2
    side = 2.3 if names else 2.7
    label = 0.085 * max(map(len, keys)) if names else 0.2
    figure = _figure(side * len(pictures) + label + 1.5, side + 1.15 + label)
    panels = figure.subplots(1, len(pictures), squeeze=False)[0]
    image = None
    colours = colormaps["YlGnBu"].with_extremes(bad="#CFCFCF")
    for place, (axes, (caption, w)) in enumerate(zip(panels, pictures.items(), strict=True)):
        masked = np.ma.masked_array(w[np.ix_(order, order)], mask=~off)
        image = axes.imshow(masked, cmap=colours, vmin=0, vmax=most, interpolation="nearest", zorder=2)
        if names:
            places = np.arange(compared.clients) - 0.5
            axes.bar(places, 1, 1, places, align="edge", fc="none", ec="#8F8F8F", lw=0, hatch="////", zorder=3)
        for border in borders:
            axes.axhline(border, color="#555555", lw=0.4, zorder=4)
            axes.axvline(border, color="#555555", lw=0.4, zorder=4)
        axes.set_title(caption, fontsize=9, color=INK)
        axes.set_facecolor("white")
        axes.tick_params(length=0, labelsize=7.5, colors=INK)
        axes.spines[:].set_color("#BBBBBB")
        ticks = range(compared.clients) if names else []
        axes.set_xticks(ticks, [keys[i] for i in order] if names else [], rotation=90)
        axes.set_yticks(ticks, [keys[i] for i in order] if names and place == 0 else [])
        if place == 0:
            axes.set_ylabel("who listens", fontsize=9)
        axes.set_xlabel("to whom", fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.015, aspect=16)
    bar.set_label("weight of the other's model", fontsize=8.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7.5, length=2)
    note = f"seed {result['seed']}; own weights hidden"
    if truth is not None:
        note += "; right peers: true ones among each client's heaviest"
        note += "; lines: borders of the true groups" if len(borders) else ""
    _headline(figure, f"Who listens to whom under {algorithm}: {compared.experiment}", note, compared)
    return figure


def _weights(compared: Comparison, algorithm: str) -> Figure | None:
    """The weights of each who is helped over rounds, a line of pixels for each client that may help, by true group."""
    result = _of(compared, algorithm)[0]
    if not (Path(result["run"]) / "graphs.safetensors").is_file():
        return None
    about, (learned, _) = result["about"], reading.graphs(Path(result["run"]))
    helped, rounds = about["helped"], list(learned)
    over = np.stack(list(learned.values()))  # rounds × helped × clients
    groups, pools = (np.array(about.get(what) or [0] * compared.clients) for what in ("groups", "pools"))
    figure = _figure(3.2 * len(helped) + 1.5, 4.2)
    panels = figure.subplots(1, len(helped), squeeze=False)[0]
    image = None
    for k, (axes, key) in enumerate(zip(panels, helped, strict=True)):
        mine = np.flatnonzero(pools == k)
        order = mine[np.argsort(groups[mine], kind="stable")]
        image = axes.imshow(
            over[:, k, order].T, cmap="YlGnBu", vmin=0, vmax=float(over.max()), aspect="auto", interpolation="nearest"
        )
        for border in np.flatnonzero(np.diff(groups[order])) + 0.5:
            axes.axhline(border, color="#555555", lw=0.5)
        ticks = np.unique(np.linspace(0, len(rounds) - 1, 5).astype(int))
        axes.set_xticks(ticks, [str(rounds[i]) for i in ticks])
        axes.set_title(f"for {key}", fontsize=9, color=INK)
        axes.set_xlabel("round", fontsize=9)
        axes.tick_params(length=0, labelsize=7.5, colors=INK)
    panels[0].set_ylabel("clients, by true group", fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.015, aspect=16)
    bar.set_label("weight", fontsize=8.5)
    bar.outline.set_visible(False)
    note = f"seed {result['seed']}; lines: borders of the true groups"
    _headline(figure, f"Who helps under {algorithm}: {compared.experiment}", note, compared)
    return figure


def _captions(shown: dict[int, NDArray[np.float64]], truth: NDArray[np.float64] | None) -> list[tuple[str, Any]]:
    texts = []
    for t, w in shown.items():
        text = f"after round {t}"
        share = float("nan") if truth is None else top_share(torch.from_numpy(w), torch.from_numpy(truth))
        texts.append((text + (f"\n{100 * share:.0f} % right peers" if np.isfinite(share) else ""), w))
    return texts


def _normalised(w: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(row_normalised(torch.from_numpy(w.astype(np.float64))).numpy())


def _spread(rounds: Sequence[int], most: int) -> list[int]:
    """The last round and at most `most` − 1 before it, early ones closer together since most is learned early."""
    if len(rounds) <= most:
        return list(rounds)
    first, last = max(rounds[0], 1), rounds[-1]
    wished = np.geomspace(first, last, most)
    picked = sorted({min(rounds, key=lambda t: abs(np.log(max(t, 0.5) / wish))) for wish in wished} | {last})
    return picked[-most:]


# ---- who holds what, clusters and architectures ----------------------------------------------------------------------


def _holdings(compared: Comparison) -> Figure | None:
    """Training samples by client and class; None where samples have no class, or there are too many to see."""
    told = compared.results[0]["about"]
    counts = np.array(told.get("labels") or [])
    if not counts.size or counts.size > BUBBLES:
        return None
    groups, relabel = (np.array(told[what]) if told.get(what) else None for what in ("groups", "relabel"))
    name = f"{told['facts'].get('data', compared.experiment)}, seed {told['seed']}"
    return bubbles(counts, name, groups=groups, relabel=relabel)


def _clusters(compared: Comparison, algorithm: str) -> Figure | None:
    """Which cluster every client took in each round, by colour; None where no round told."""
    result = _of(compared, algorithm)[0]
    told = {
        line["round"]: line["extra"]["cluster"]
        for line in reading.lines(Path(result["run"]))
        if line.get("kind") == "training" and "cluster" in line.get("extra", {})
    }
    member = np.array([told[t] for t in sorted(told)]).T  # clients × rounds
    if not member.size or member.max() < 1:
        return None
    n, keys = compared.clients, result["about"]["keys"]
    groups = np.array(result["about"].get("groups") or [0] * n)
    order = np.argsort(groups, kind="stable")
    shown = np.ma.masked_less(_steady(member)[order], 0)
    names = n <= NAMED
    figure = _figure(max(6.4, 1.6 + 0.09 * member.shape[1]), max(1.2, n * (0.19 if names else 0.06)) + 1.4)
    axes = figure.subplots()
    palette = ListedColormap([*COLOURS, *colormaps["tab20b"].colors]).with_extremes(bad="#EEEEEE")  # type: ignore[attr-defined]
    extent = (min(told) - 0.5, max(told) + 0.5, n - 0.5, -0.5)
    axes.imshow(shown, cmap=palette, vmin=0, vmax=palette.N, aspect="auto", interpolation="nearest", extent=extent)
    for border in np.flatnonzero(np.diff(groups[order])) + 0.5:
        axes.axhline(border, color=INK, lw=0.8)
    axes.set_yticks(range(n) if names else [], [keys[i] for i in order] if names else [])
    axes.tick_params(length=0, labelsize=7.5, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("round", fontsize=9.5, color=INK)
    note = f"seed {result['seed']}; a colour is a cluster, from one round to the next the one with most of the same"
    note += " members; grey: took none" + ("; lines: borders of the true groups" if len(np.unique(groups)) > 1 else "")
    _headline(figure, f"Who is in which cluster under {algorithm}: {compared.experiment}", note, compared)
    return figure


def _steady(member: NDArray[np.int64]) -> NDArray[np.int64]:
    """Clusters renamed round by round after the clusters that most of their members were in last; −1: in none."""
    k = int(member.max()) + 1
    steady, last = np.full_like(member, -1), np.full(len(member), -1)
    for t, now in enumerate(member.T):
        both = (now >= 0) & (last >= 0)
        overlap = np.zeros((k, k))
        np.add.at(overlap, (now[both], last[both]), 1)
        name = linear_sum_assignment(-overlap)[1]
        steady[now >= 0, t] = name[now[now >= 0]]
        last = np.where(now >= 0, steady[:, t], last)
    return steady


def _architectures(compared: Comparison) -> Figure | None:
    """How much data the clients of each architecture have; None where all have the same, or none is told."""
    told = compared.results[0]["about"]
    widths = np.array(told.get("parameters") or [0])
    kinds = np.unique(widths)
    if len(kinds) < 2:
        return None
    sizes = np.array(told["sizes"]["train"])
    figure = _figure(6.8, 0.5 * len(kinds) + 1.6)
    axes = figure.subplots()
    for place, kind in enumerate(kinds):
        mine = np.sort(sizes[widths == kind])
        axes.scatter(mine, np.full(len(mine), place), s=42, color=COLOURS[place % len(COLOURS)], alpha=0.5, lw=0)
        axes.plot(np.median(mine), place, marker="|", ms=18, mew=2, color=INK)
    axes.set_yticks(range(len(kinds)), [f"{human(float(k))} parameters ({(widths == k).sum()})" for k in kinds])
    axes.set_ylim(-0.6, len(kinds) - 0.4)
    _decades(axes)
    axes.set_xlabel("training samples of a client", fontsize=9.5, color=INK)
    _plain(axes)
    note = f"seed {told['seed']}; in brackets: clients; stroke: median"
    _headline(figure, f"Who has which architecture: {compared.experiment}", note, compared)
    return figure


# ---- clients ---------------------------------------------------------------------------------------------------------


def _clients(compared: Comparison) -> Figure:
    """Every client's value, and what it would have alone, in a panel for each algorithm."""
    seed = min(result["seed"] for result in compared.results)
    chosen = [result for result in compared.results if result["seed"] == seed]
    alone = next((r for r in chosen if r["algorithm"] == REFERENCE), None)
    chosen = [r for r in chosen if r is not alone] or chosen
    scale, main = unit(compared.main)[0], compared.main
    base = None if alone is None else scale * _floats(alone["clients"][main])
    first = _floats(chosen[0]["clients"][main])
    there = np.flatnonzero(np.isfinite(first))
    n = len(there)
    order = there[np.argsort((scale * first if base is None else base)[there], kind="stable")]
    wide = min(len(chosen), 5)
    tall = -(-len(chosen) // wide)
    names = n <= NAMED
    height = max(1.7, n * (0.2 if names else 0.042))
    figure = _figure(max(2.0 * wide + 1.6, 6.4), tall * (height + 0.45) + 1.5)
    grid = figure.subplots(tall, wide, squeeze=False, sharex=True, sharey=True)
    size = 26 if names else 7
    at = np.arange(n)
    for axes, result in zip(grid.flat, chosen, strict=False):
        own = scale * _floats(result["clients"][main])[order]
        caption = result["algorithm"]
        if base is None or alone is None:
            axes.scatter(own, at, s=size, color=GAIN, lw=0, zorder=3)
        else:
            start = base[order]
            gains = (own > start) if compared.higher else (own < start)
            colours = np.where(own == start, FAINT, np.where(gains, GAIN, LOSS))
            axes.hlines(at, start, own, colors=colours, lw=1.6 if names else 0.8, alpha=0.55, zorder=2)
            axes.scatter(start, at, s=size, marker="|", color=INK, lw=1.2 if names else 0.7, zorder=3)
            axes.scatter(own, at, s=size, c=colours, lw=0, zorder=4)
            share = better_off(result, compared.results)
            caption += f"\n{'–' if share is None else f'{100 * share:.0f} %'} better off"
        axes.set_title(caption, fontsize=9, color=INK)
        axes.set_ylim(-0.8, n - 0.2)
        keys = [chosen[0]["about"]["keys"][i] for i in order]
        axes.set_yticks(at if names else [], keys if names else [])
        axes.margins(x=0.06)
        _plain(axes)
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(chosen))
        axes.tick_params(labelbottom=place + wide >= len(chosen))  # the lowest of each column
    figure.supxlabel(title(main), fontsize=9.5, color=INK)
    figure.supylabel(f"{n} clients, by their value alone" if base is not None and not names else "", fontsize=9.5)
    note = f"{compared.judged} data, seed {seed}, each client's best validation round"
    legend = [("alone (local)", INK, "|"), ("better off", GAIN, "o"), ("worse off", LOSS, "o")]
    marks = [Line2D([], [], color=c, marker=m, ls="", ms=6, label=text) for text, c, m in legend if base is not None]
    _headline(figure, f"Who gains from collaborating: {compared.experiment}", note, compared, marks)
    return figure


def _gains(compared: Comparison, looks: dict[str, Look]) -> Figure | None:
    """Every client's mean gain over training alone, with its interval; None for one seed, or where clients are many."""
    found = {name: each for name, each in gains(compared).items() if np.isfinite(each.half).any()}
    if not found or compared.clients > NAMED:
        return None
    n = compared.clients
    figure = _figure(8.0, 1.5 + max(2.2, 0.16 * n * (len(found) + 1)))
    axes = figure.subplots()
    axes.axvline(0, color=INK, lw=0.9, zorder=2)
    for place, (name, each) in enumerate(found.items()):
        at = np.arange(n) + 0.8 * ((place + 0.5) / len(found) - 0.5)
        look = looks[name]
        axes.errorbar(
            each.mean,
            at,
            xerr=each.half,
            color=look.colour,
            marker=look.marker,
            ms=5,
            ls="",
            elinewidth=1.4,
            label=name,
        )
    axes.set_yticks(range(n), compared.results[0]["about"]["keys"])
    axes.set_ylim(n - 0.4, -0.6)
    axes.set_xlabel(f"gain over local: {title(compared.main)}", fontsize=9.5, color=INK)
    _plain(axes)
    axes.legend(**_beside("algorithm"))
    note = f"{compared.judged} data, mean over seeds and 95 % interval"
    _headline(figure, f"What each client gains: {compared.experiment}", note, compared)
    return figure


# ---- cost ------------------------------------------------------------------------------------------------------------


def _cost(compared: Comparison, looks: dict[str, Look]) -> Figure | None:
    """The main metric against the numbers sent; None where all send the same."""
    sent = [row.sent for row in compared.rows if row.sent > 0]
    if len(set(sent)) < 2:
        return None
    scale = unit(compared.main)[0]
    figure = _figure(8.0, 4.1)
    axes = figure.subplots()
    for row in compared.rows:
        look, mean = looks[row.name], scale * row.mean
        std = scale * float(np.std(row.best, ddof=1)) if len(row.best) > 1 else 0.0
        if row.sent > 0:
            axes.errorbar(
                row.sent, mean, std, color=look.colour, marker=look.marker, ms=9, lw=1.4, mec="white", mew=0.6, zorder=3
            )
        else:
            axes.axhline(mean, color=look.colour, ls=look.dash, lw=1.4, zorder=2)
    _decades(axes)
    axes.set_xlim(min(sent) / 2, max(sent) * 2)  # what hardly differs should not look far apart
    axes.set_xlabel("numbers sent, up and down, over the whole run", fontsize=9.5, color=INK)
    axes.set_title(title(compared.main).capitalize(), loc="left", fontsize=10, color=INK)
    axes.margins(y=0.1)
    _plain(axes)
    ranked = sorted(compared.rows, key=lambda row: row.mean, reverse=compared.higher)
    handles = []
    for row in ranked:
        look = looks[row.name]
        style: dict[str, Any] = (
            {"ls": look.dash} if row.sent == 0 else {"ls": "", "marker": look.marker, "mec": "white", "mew": 0.6}
        )
        handles.append(
            Line2D([], [], color=look.colour, ms=9, label=row.name + " (sends none)" * (row.sent == 0), **style)
        )
    axes.legend(handles=handles, **_beside("algorithm, best on top"))
    bars = "; bars: ± std over seeds" if any(len(row.best) > 1 for row in compared.rows) else ""
    note = f"{compared.judged} data at each client's best validation round, mean over clients{bars}"
    _headline(figure, f"What the result costs: {compared.experiment}", note, compared)
    return figure


# ---- what they share -------------------------------------------------------------------------------------------------


def _looks(names: Sequence[str]) -> dict[str, Look]:
    """Colours first, then dashes; training alone and knowing the truth, between which the others lie, stay grey."""
    looks, place = {}, 0
    for name in names:
        if name == REFERENCE:
            looks[name] = Look(INK, (0, (2, 1.2)), "p")
        elif name == BOUND:
            looks[name] = Look(FAINT, (0, (6, 1.5, 1, 1.5)), "*")
        else:
            ring, step = divmod(place, len(COLOURS))
            looks[name] = Look(COLOURS[step], DASHES[ring % len(DASHES)], MARKERS[place % len(MARKERS)])
            place += 1
    return looks


def _of(compared: Comparison, algorithm: str) -> list[Result]:
    return sorted((r for r in compared.results if r["algorithm"] == algorithm), key=lambda r: r["seed"])


def _floats(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([np.nan if each is None else each for each in values], dtype=np.float64)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _plain(axes: Axes) -> None:
    axes.grid(color=GRID, lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")


def _decades(axes: Axes) -> None:
    """A logarithmic axis of numbers as people write them."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda number, _: human(number))


def _beside(heading: str) -> dict[str, Any]:
    return {
        "title": heading,
        "loc": "upper left",
        "bbox_to_anchor": (1.01, 1.02),
        "frameon": False,
        "fontsize": 8.5,
        "title_fontsize": 8.5,
        "alignment": "left",
        "handlelength": 2.6,
    }


def _headline(figure: Figure, text: str, note: str, compared: Comparison, marks: Sequence[Line2D] = ()) -> None:
    """What one sees, in bold, below it of what, and a legend; the rest of the figure stays clear of them."""
    wide, high = figure.get_size_inches()
    lines = textwrap.wrap(f"{compared.people}, scale {compared.scale}; {note}", int((wide - 0.2) / 0.061))
    figure.text(0.1 / wide, 1 - 0.19 / high, text, fontsize=12, fontweight="bold", color=INK, va="center")
    figure.text(0.1 / wide, 1 - 0.34 / high, "\n".join(lines), fontsize=8.5, color="#555555", va="top")
    head = 0.36 + 0.15 * len(lines)
    if marks:
        corner: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 1 - head / high), "borderaxespad": 0.1}
        space: dict[str, Any] = {"handletextpad": 0.2, "columnspacing": 1.4}
        figure.legend(handles=list(marks), ncols=len(marks), frameon=False, fontsize=8.5, **corner, **space)
        head += 0.23
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - (head + 0.1) / high))
