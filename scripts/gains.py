"""What each client gains over being alone, with an interval: a table of paired differences over the seeds of a run.

    python scripts/gains.py runs/afo-heart-small [--metrics accuracy,auroc] [--json FILE]

For every algorithm and client, the mean over seeds of its value minus that of `local` with the same seed, both on test
data at the client's best validation round, and Student's interval for that mean. Where every seed deals the same people
anew, the interval is about how they are dealt and trained, not about other people. With many clients and algorithms
some intervals lie beside zero by chance: `--level 0.95` is for one of them.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from coterie.errors import CoterieError, RecordError
from coterie.report.tables import REFERENCE, collect, comparisons

Gain = dict[str, float]
LOWER = ("loss", "perplexity")  # is better


def gain(differences: list[float], level: float) -> Gain:
    """Mean, and the ends of its interval; where all are equal, or one is alone, that is all there is to say."""
    mean, n = float(np.mean(differences)), len(differences)
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * np.std(differences, ddof=1) / n**0.5) if n > 1 else float("nan")
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": n}


def table(results: list[dict[str, Any]], metric: str, level: float) -> dict[str, Any]:
    """algorithm → client → gain, with everyone's mean as client `mean`."""
    alone = {r["seed"]: r for r in results if r["algorithm"] == REFERENCE}
    if not alone:
        raise RecordError(f"there is no finished run of {REFERENCE}, over which anyone could gain")
    if any(metric not in r["clients"] for r in results):
        raise RecordError(f"{metric} was not measured: there are {', '.join(results[0]['clients'])}")
    keys = results[0]["about"]["keys"]
    sign = -1 if metric in LOWER else 1
    gains: dict[str, dict[str, Gain]] = {}
    for name in dict.fromkeys(r["algorithm"] for r in results if r["algorithm"] != REFERENCE):
        mine = [r for r in results if r["algorithm"] == name and r["seed"] in alone]
        each = [
            sign * np.subtract(r["clients"][metric], alone[r["seed"]]["clients"][metric], dtype=float) for r in mine
        ]
        columns = dict(zip(keys, zip(*each, strict=True), strict=True))
        gains[name] = {key: gain(list(values), level) for key, values in columns.items()}
        gains[name]["mean"] = gain([float(np.mean(values)) for values in each], level)
    local = {key: float(np.mean([r["clients"][metric][i] for r in alone.values()])) for i, key in enumerate(keys)}
    return {"local": local, "gains": gains}


def main() -> None:
    """Tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--metrics", type=lambda text: text.split(","), help="default: the task's main one")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = collect([options.folder])
    if not results:
        raise RecordError(f"no run in {options.folder} is finished")
    metrics = options.metrics or [results[0]["about"]["main"]]
    found = {metric: table(results, metric, options.level) for metric in metrics}
    for metric, part in found.items():
        shown = Table("algorithm", *part["local"], "mean", title=f"gain in {metric} over {REFERENCE}")
        shown.caption = f"Split: {comparisons(results)[0].split}."
        values = [*part["local"].values()]
        shown.add_row(REFERENCE, *(f"{v:.3f}" for v in [*values, np.mean(values)]))
        for name, row in part["gains"].items():
            shown.add_row(name, *(f"{g['mean']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}]" for g in row.values()))
        Console(width=160).print(shown)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "level": options.level, **found}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"gains: {error}")
