"""How fast learned graphs come near the true one: L1 distances over rounds, and W as heat maps (SCooL, Figures 4-6).

    python scripts/graph_over_rounds.py runs/scool-sbm-paper --algorithms scool-sbm,scool-attention \\
        --rounds 1,5,10,50,100 --json FILE --figure FILE --heat FILE

Reads the graphs that runs have recorded: which rounds these are, `graphs` and `graphs_first` of the experiment say.
Distances are between rows of sum one, own weights included, mean over clients: 0 the same, 2 nothing in common; mean
and deviation over seeds. Heat maps are of the first seed, clients by their true groups, own weights hidden.
"""

import argparse
import math
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from coterie.errors import CoterieError, RecordError
from coterie.graph.compare import l1_distance, top_share
from coterie.graph.projections import row_normalised
from coterie.report import reading
from coterie.runs import files

Runs = dict[str, list[Path]]


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--algorithms", type=lambda text: text.split(","), help="default: all that were run")
    parser.add_argument("--rounds", type=lambda text: [int(t) for t in text.split(",")], default=[1, 5, 10, 50, 100])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="distances over rounds")
    parser.add_argument("--heat", type=Path, help="W at these rounds")
    return parser.parse_args()


def chosen(folder: Path, wanted: list[str] | None) -> Runs:
    """The folders of each algorithm's runs, by seed."""
    found: Runs = {}
    for run in reading.runs([folder]):
        found.setdefault(reading.about(run)["algorithm"], []).append(run)
    for name in wanted or ():
        if name not in found:
            raise RecordError(f"{folder} has no run of {name}: there are {', '.join(found)}")
    return {name: found[name] for name in wanted or found}


def distances(runs: list[Path]) -> dict[int, dict[str, float]]:
    """By round: the distance to the true graph and the share of right peers, over the seeds that recorded it."""
    seen: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        learned, truth = reading.graphs(run)
        if truth is None:
            raise RecordError(f"{run} knows no true graph: its clients have no groups")
        goal = torch.from_numpy(truth)
        for t, w in learned.items():
            graph = torch.from_numpy(w)
            seen.setdefault(t, []).append((l1_distance(graph, goal), top_share(graph, goal)))
    return {
        t: {
            "l1": statistics.fmean(l1 for l1, _ in values),
            "l1_std": statistics.stdev(l1 for l1, _ in values) if len(values) > 1 else 0.0,
            "right_peers": statistics.fmean(share for _, share in values),
        }
        for t, values in sorted(seen.items())
    }


def draw(table: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """A line for each algorithm: on the left the first 20 rounds, on the right all of them."""
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, last in ((left, 20), (right, max(t for values in table.values() for t in values))):
        for name, values in table.items():
            rounds = [t for t in values if t <= last]
            mean, std = (np.array([values[t][key] for t in rounds]) for key in ("l1", "l1_std"))
            (line,) = axes.plot(rounds, mean, label=name, lw=1.8, marker="o" if last <= 20 else None, ms=3)
            axes.fill_between(rounds, mean - std, mean + std, color=line.get_color(), alpha=0.15, lw=0)
        axes.set_xlabel("round")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("L1 distance to the true graph")
    left.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def heat(runs: Runs, rounds: list[int], path: Path) -> None:
    """A row for each algorithm, a column for each round, and the true graph."""
    columns = len(rounds) + 1
    figure = Figure(figsize=(1.9 * columns, 2.05 * len(runs) + 0.3), layout="constrained")
    panels = figure.subplots(len(runs), columns, squeeze=False)
    for row, (name, folders) in zip(panels, runs.items(), strict=True):
        learned, truth = reading.graphs(folders[0])
        missing = [t for t in rounds if t not in learned]
        if missing or truth is None:
            raise RecordError(f"{folders[0]} holds graphs of rounds {', '.join(map(str, learned))}, not of {missing}")
        goal = row_normalised(torch.from_numpy(truth)).numpy()
        order = np.argsort(truth.argmax(1), kind="stable")
        pictures: dict[str, Any] = {f"round {t}": learned[t] for t in rounds} | {"true": goal}
        most = float(goal[~np.eye(len(goal), dtype=bool)].max()) or None
        for axes, (caption, w) in zip(row, pictures.items(), strict=True):
            shown = np.ma.masked_array(w[np.ix_(order, order)], mask=np.eye(len(w), dtype=bool))
            colours = colormaps["YlGnBu"].with_extremes(bad="#CFCFCF")
            axes.imshow(shown, cmap=colours, vmin=0, vmax=most, interpolation="nearest")
            axes.set_title(caption, fontsize=9)
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(name)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Read, tell, write."""
    options = arguments()
    runs = chosen(options.folder, options.algorithms)
    table = {name: distances(folders) for name, folders in runs.items()}
    for name, values in table.items():
        for t in options.rounds:
            if t in values:
                right = values[t]["right_peers"]
                more = "" if math.isnan(right) else f", right peers {right:.0%}"  # nobody has any
                print(f"{name}, round {t}: L1 {values[t]['l1']:.3f}{more}")
    if options.json:
        files.write_json(options.json, {"command": shlex.join(["python", *sys.argv]), "rounds": table})
    if options.figure:
        draw(table, options.figure)
    if options.heat:
        heat(runs, options.rounds, options.heat)


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"graph_over_rounds: {error}")
