"""Every attack on every algorithm: how much of its accuracy the target keeps, and what weight attackers have.

    python benchmarks/attacks.py [--attacks alie,ipm] [--tuned FILE] [--out DIR] [--json FILE]

The experiment is `meritfed-attacks`: one target, who alone is judged, clients near it, strangers, and the last third of
the clients attacking. Each attack is an ordinary study below --out, and one that was stopped goes on where it was.
Accuracy is the target's at its best validation round, mean ± std over seeds; `kept` is its ratio to that without an
attack; weight is what the target gives to attackers in the end, in per cent (a third of the clients
are attackers). The JSON has accuracies after the last round as well, and the weight in every graph kept.
"""

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.errors import CoterieError
from coterie.experiments import reader
from coterie.experiments.reader import Experiment
from coterie.fleet.attacks import KINDS
from coterie.report import reading
from coterie.runs import files
from coterie.runs.listeners import Terminal
from coterie.runs.study import EXPERIMENT, Study

Cell = dict[str, Any]


def read(options: argparse.Namespace, kind: str) -> Experiment:
    """The experiment under an attack."""
    return reader.read(
        "meritfed-attacks",
        scale=options.scale,
        algorithms=options.algorithms,
        seeds=options.seeds,
        sets=["run.keep_models=false", f"attack.kind={kind}", *options.set],
        tuned=options.tuned,
    )


def cells(options: argparse.Namespace, kind: str) -> dict[str, Cell]:
    """For each algorithm the target's accuracy and its weight on attackers, seed by seed."""
    out = options.out / kind
    study = Study.find(out) if (out / EXPERIMENT).exists() else Study.begin(read(options, kind), out)
    found: dict[str, Cell] = {}
    for result in study.go([Terminal(Console(stderr=True))]):
        about = study.record(result["algorithm"], result["seed"]).about
        graphs, _ = reading.graphs(Path(result["run"]))
        attackers = [key in about["attackers"] for key in about["keys"]]
        weight = [float(w[0, attackers].sum() / max(w[0].sum(), 1e-300)) for w in graphs.values()]
        cell = found.setdefault(result["algorithm"], {"accuracy": [], "last": [], "weight": [], "rounds": list(graphs)})
        cell["accuracy"].append(result["clients"]["accuracy"][0])
        cell["last"].append(result["clients_last"]["accuracy"][0])
        cell["weight"].append(weight)
    return found


def table(study: dict[str, dict[str, Cell]]) -> Table:
    """A row for each algorithm, two numbers for each attack."""
    drawn = Table(
        box=None, pad_edge=False, title="accuracy, or per cent of it kept; weight on attackers", title_justify="left"
    )
    for head in ("algorithm", *study):
        drawn.add_column(head, justify="right" if head != "algorithm" else "left", no_wrap=True)
    for name in study["none"]:
        drawn.add_row(name, *[text(study, kind, name) for kind in study])
    return drawn


def text(study: dict[str, dict[str, Cell]], kind: str, name: str) -> str:
    """One cell."""
    cell = study[kind].get(name)
    if cell is None:
        return "–"
    weight = 100 * statistics.fmean(w[-1] for w in cell["weight"])
    if kind == "none":
        std = statistics.stdev(cell["accuracy"]) if len(cell["accuracy"]) > 1 else 0.0
        return f"{100 * statistics.fmean(cell['accuracy']):.1f} ± {100 * std:.1f}; {weight:.1f}"
    return f"{100 * kept(study, kind, name):.1f}; {weight:.1f}"


def kept(study: dict[str, dict[str, Cell]], kind: str, name: str) -> float:
    """The accuracy over that without an attack, both means over the same seeds."""
    under, without = (statistics.fmean(study[k][name]["accuracy"]) for k in (kind, "none"))
    return under / without if without else float("nan")


def main() -> None:
    """Run, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", type=lambda given: given.split(","), default=[k for k in KINDS if k != "none"])
    parser.add_argument("--scale")
    parser.add_argument("--algorithms", type=lambda given: given.split(","))
    parser.add_argument("--seeds", type=lambda given: [int(s) for s in given.split(",")])
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    study = {kind: cells(options, kind) for kind in ["none", *options.attacks]}
    Console(width=200).print(table(study))
    if options.json:
        for kind, found in study.items():
            for name, cell in found.items():
                cell["kept"] = kept(study, kind, name)
        command = shlex.join(["python", *sys.argv])
        files.write_json(
            options.json, {"command": command, "experiment": reader.plain(read(options, "none")), "study": study}
        )


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"attacks: {error}")
