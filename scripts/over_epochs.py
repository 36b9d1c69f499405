"""Test accuracy and training loss against local epochs, a line for each algorithm (SCooL, Figure 3).

    python scripts/over_epochs.py runs/scool-noniid-paper --metric own_classes_accuracy --figure FILE [--json FILE]

Reads what finished runs have recorded. A round counts as many epochs as plans say; algorithms that count in steps are
taken to train as long. Losses are means over those who trained, lines means over seeds, bands their deviation.
"""

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coterie.errors import CoterieError, RecordError
from coterie.report import reading
from coterie.runs import files

Curve = dict[int, dict[str, float]]  # epoch → mean and deviation over seeds


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--algorithms", type=lambda text: text.split(","), help="default: all that were run")
    parser.add_argument("--metric", help="default: the task's main one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    return parser.parse_args()


def curves(run: Path, metric: str) -> dict[str, dict[int, float]]:
    """By round: the metric of the personal models on test data, and the training loss."""
    found: dict[str, dict[int, float]] = {metric: {}, "training loss": {}}
    for line in reading.lines(run):
        if line["kind"] == "training":
            known = [loss for loss, ok in zip(line.get("loss") or (), line["ok"], strict=False) if ok]
            if known:
                found["training loss"][line["round"]] = statistics.fmean(known)
        elif line["kind"] == "evaluation" and (line["models"], line["split"]) == ("personal", "test"):
            if metric not in line["mean"]:
                raise RecordError(f"{run} has no {metric}: there are {', '.join(line['mean'])}")
            found[metric][line["round"]] = line["mean"][metric]
    return found


def over_seeds(runs: list[dict[int, float]], epochs: int) -> Curve:
    """Means at the rounds that all of them have."""
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    values = {t: [run[t] for run in runs] for t in shared}
    return {
        epochs * t: {"mean": statistics.fmean(v), "std": statistics.stdev(v) if len(v) > 1 else 0.0}
        for t, v in values.items()
    }


def draw(table: dict[str, dict[str, Curve]], path: Path) -> None:
    """A panel for each quantity."""
    names = list(next(iter(table.values())))
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    panels = figure.subplots(1, len(names))
    for axes, what in zip(panels, names, strict=True):
        for place, (algorithm, found) in enumerate(table.items()):
            at = list(found[what])
            mean, std = (np.array([found[what][t][key] for t in at]) for key in ("mean", "std"))
            dash = ("-", "--", ":")[place // 10]
            (line,) = axes.plot(at, mean, label=algorithm, lw=1.6, ls=dash)
            axes.fill_between(at, mean - std, mean + std, color=line.get_color(), alpha=0.15, lw=0)
        axes.set_xlabel("local epochs")
        axes.set_title(what.replace("_", " "), loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Read, tell, write."""
    options = arguments()
    runs: dict[str, list[Path]] = {}
    told: list[dict[str, Any]] = []
    for run in reading.runs([options.folder]):
        told.append(reading.finished(run)["about"])
        runs.setdefault(told[-1]["algorithm"], []).append(run)
    for name in options.algorithms or ():
        if name not in runs:
            raise RecordError(f"{options.folder} has no run of {name}: there are {', '.join(runs)}")
    metric = options.metric or told[0]["main"]
    counted = {about["settings"].get("plan", {}).get("epochs") for about in told} - {None}
    if len(counted) != 1:
        raise RecordError(f"{options.folder} has rounds of {sorted(counted) or 'no'} epochs, not of one number")
    epochs = counted.pop()
    table = {}
    for name in options.algorithms or runs:
        each = [curves(run, metric) for run in runs[name]]
        table[name] = {what: over_seeds([curve[what] for curve in each], epochs) for what in each[0]}
        last = {what: next(reversed(curve.values()), {}).get("mean") for what, curve in table[name].items()}
        print(f"{name}: " + ", ".join(f"{what} {value:.4f}" for what, value in last.items() if value is not None))
    if options.json:
        files.write_json(options.json, {"command": shlex.join(["python", *sys.argv]), "epochs": table})
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"over_epochs: {error}")
