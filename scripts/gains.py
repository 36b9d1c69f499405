"""What each client gains over being alone, with an interval: a table of paired differences over the seeds of a run.

    python scripts/gains.py runs/afo-heart-small [--level 0.95] [--json FILE]

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
from coterie.report.tables import REFERENCE, collect

Gain = dict[str, float]


def gain(differences: list[float], level: float) -> Gain:
    """Mean, and the ends of its interval; where all are equal, or one is alone, that is all there is to say."""
    mean, n = float(np.mean(differences)), len(differences)
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * np.std(differences, ddof=1) / n**0.5) if n > 1 else float("nan")
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": n}


def table(folder: Path, level: float) -> dict[str, Any]:
    """algorithm → client → gain, with everyone's mean as client `mean`."""
    results = collect([folder])
    alone = {r["seed"]: r for r in results if r["algorithm"] == REFERENCE}
    if not alone:
        raise RecordError(f"{folder} has no finished run of {REFERENCE}, over which anyone could gain")
    about = results[0]["about"]
    sign = 1 if about["higher"] else -1
    gains: dict[str, dict[str, Gain]] = {}
    for name in dict.fromkeys(r["algorithm"] for r in results if r["algorithm"] != REFERENCE):
        mine = [r for r in results if r["algorithm"] == name and r["seed"] in alone]
        each = [
            sign * np.subtract(r["clients"][about["main"]], alone[r["seed"]]["clients"][about["main"]], dtype=float)
            for r in mine
        ]
        columns = dict(zip(about["keys"], zip(*each, strict=True), strict=True))
        gains[name] = {key: gain(list(values), level) for key, values in columns.items()}
        gains[name]["mean"] = gain([float(np.mean(values)) for values in each], level)
    local = {
        key: float(np.mean([r["clients"][about["main"]][i] for r in alone.values()]))
        for i, key in enumerate(about["keys"])
    }
    return {"metric": about["main"], "level": level, "local": local, "gains": gains}


def main() -> None:
    """Tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = table(options.folder, options.level)
    shown = Table("algorithm", *found["local"], "mean", title=f"gain in {found['metric']} over {REFERENCE}")
    shown.add_row(
        REFERENCE, *(f"{v:.3f}" for v in found["local"].values()), f"{np.mean([*found['local'].values()]):.3f}"
    )
    for name, row in found["gains"].items():
        shown.add_row(name, *(f"{g['mean']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}]" for g in row.values()))
    Console(width=160).print(shown)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), **found}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"gains: {error}")
