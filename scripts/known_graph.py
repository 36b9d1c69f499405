"""Is it the graph, or how it comes about? CoBo that is told the true graph, at once or later, beside CoBo and Oracle.

    python scripts/known_graph.py EXPERIMENT [--scale small] [--tuned FILE] [--seeds 0,1,2] [--after 0,0.125]
                                  [--json FILE]

Until `after` of the rounds everyone pulls everyone, from then on the true neighbours do, and nothing is learned of W.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from coterie.algorithm import Info
from coterie.algorithms.cobo import CoBo, CoBoState
from coterie.experiments.reader import read
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet
from coterie.runs.allocator import keep_freed_memory
from coterie.training import train


@dataclass(frozen=True)
class Told(CoBo):
    """CoBo that samples no pairs."""

    after: int = 0  # rounds in which everyone pulls everyone
    c: float = 0.0
    schedule: Literal["constant"] = "constant"

    def round(self, fleet: Fleet, state: CoBoState) -> tuple[CoBoState, Info]:
        """An iteration with the weights it is told."""
        group = torch.tensor(self.groups)
        told = (group[:, None] == group) | (fleet.t < self.after)
        return super().round(fleet, replace(state, w=told.to(state.w)))


def main() -> None:
    """A table: every variant and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment")
    parser.add_argument("--scale", default="small")
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--after", default="0,0.125")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    experiment = read(options.experiment, scale=options.scale, tuned=options.tuned)
    rounds, every = experiment.budget.rounds, experiment.budget.evaluate_every
    found: dict[str, list[dict[str, float]]] = {}
    for seed in (int(s) for s in options.seeds.split(",")):
        people = experiment.population(seed)
        fleet = StackedFleet(people, seed=seed)
        cobo = experiment.algorithm("cobo", **people.told)
        assert isinstance(cobo, CoBo)
        settings = {f.name: getattr(cobo, f.name) for f in fields(cobo) if f.name not in ("c", "schedule")}
        variants = {"oracle": experiment.algorithm("oracle", **people.told), "cobo": cobo}
        for after in (float(a) for a in options.after.split(",")):
            start = math.ceil(after * rounds)
            variants[f"cobo, told after {after:g}"] = Told(**(settings | {"after": start, "groups": people.groups}))
        for name, algorithm in variants.items():
            done = train(algorithm, fleet, rounds, evaluate_every=every)
            found.setdefault(name, []).append({"seed": seed, **done.metrics})
    table = Table("variant", "accuracy", *(f"seed {s}" for s in options.seeds.split(",")))
    for name, rows in found.items():
        each = [100 * row["accuracy"] for row in rows]
        spread = f" ± {statistics.stdev(each):.1f}" if len(each) > 1 else ""
        table.add_row(name, f"{statistics.fmean(each):.1f}{spread}", *(f"{value:.1f}" for value in each))
    Console().print(table)
    if options.json:
        report = {"command": shlex.join(["python", "scripts/known_graph.py", *sys.argv[1:]]), "results": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
