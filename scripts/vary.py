"""One experiment, one setting after the other: a run for each value, a table, a picture, and the numbers as JSON.

    python scripts/vary.py cobo-cross-silo --scale small --algorithms local,cobo \\
        --vary population.partition.share=0.1,0.2,0.4 --vary population.partition.clusters=2,4 --json FILE --figure FILE

Factors vary one at a time; everything else stays as the experiment has it. What belongs together is one factor:
`--vary cobo.schedule+cobo.c=constant+1,time+100`. Each value is an ordinary experiment in a
folder of its own below --out, so a study that was stopped goes on where it was, and a value that several factors share
runs once. A setting of one algorithm (scool-sbm.budget) changes that one only, so that others but `local` sit it out.
"""

import argparse
import hashlib
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from coterie.errors import CoterieError
from coterie.experiments import reader
from coterie.runs import files
from coterie.runs.study import EXPERIMENT, Study

Result = dict[str, Any]
WIDE = 4  # panels side by side


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--scale")
    parser.add_argument("--algorithms", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")])
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--vary", action="append", required=True, metavar="PATH=V1,V2")
    parser.add_argument("--metric", help="default: the task's main one")
    parser.add_argument("--graph", choices=("l1", "auroc", "inside", "across"), help="draw this of the graphs as well")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="FILE", help="also draw this JSON")
    return parser.parse_args()


def run(options: argparse.Namespace, factor: str, value: str) -> list[Result]:
    """The results with one factor changed, from their folder if they are there."""
    changes = [f"{path}={v}" for path, v in zip(factor.split("+"), value.split("+"), strict=True)]
    owner = factor.partition(".")[0]
    algorithms = options.algorithms
    if owner in (algorithms or ()):
        algorithms = [name for name in algorithms if name in (owner, "local")]
    experiment = reader.read(
        options.experiment,
        scale=options.scale,
        algorithms=algorithms,
        seeds=options.seeds,
        sets=[*options.set, *changes],
        tuned=options.tuned,
    )
    mark = hashlib.sha256(repr(sorted(reader.plain(experiment).items())).encode()).hexdigest()[:10]
    out = options.out / mark
    made = (out / EXPERIMENT).exists()
    study = Study.find(out) if made else Study.begin(experiment, out, device=options.device)
    results = study.go()
    for result in results:
        result["main"] = study.record(result["algorithm"], result["seed"]).about["main"]
    return results


def summary(results: list[Result], metric: str | None) -> dict[str, dict[str, Any]]:
    """For each algorithm: the metric over seeds and of each (of the last round too), what was sent, and its graph."""
    table = {}
    for name in dict.fromkeys(r["algorithm"] for r in results):
        mine = [r for r in results if r["algorithm"] == name]
        values = [r["metrics"][metric or r["main"]] for r in mine]
        ends = [r["last"][metric or r["main"]] for r in mine]
        table[name] = {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "last": statistics.fmean(ends),
            "last_std": statistics.stdev(ends) if len(ends) > 1 else 0.0,
            "each": dict(zip([str(r["seed"]) for r in mine], values, strict=True)),
            "each_last": {str(r["seed"]): r["last"].get(metric or r["main"]) for r in mine},
            "share_improved": _mean([r["metrics"]["share_improved"] for r in mine]),
            "sent": statistics.fmean(sum(r["ledger"]["sent"][way]["numbers"] for way in ("up", "down")) for r in mine),
        }
        for place, when in (("early", 0), ("last", -1)):
            graphs = [list(r["graph"].values())[when] for r in mine if r["graph"]]
            for key in ("l1", "auroc", "inside", "across", "found") if graphs else ():
                table[name][f"graph_{place}_{key}"] = _mean([g[key] for g in graphs])
        if trusted := [list(r["on_attackers"].values())[-1] for r in mine if r["on_attackers"]]:
            table[name]["on_attackers"] = statistics.fmean(trusted)
    return table


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def draw(study: dict[str, dict[str, Any]], metric: str, graph: str | None, path: Path) -> None:
    """A panel for each factor, a line for each algorithm; below it, if asked for, how good the last graphs are."""
    kinds = [("mean", metric)] + ([(f"graph_last_{graph}", f"{graph} of the last graph")] if graph else [])
    wide = min(len(study), WIDE)
    tall = -(-len(study) // wide)
    figure = Figure(figsize=(4.2 * wide, 3.4 * tall * len(kinds)), layout="constrained")
    panels = figure.subplots(tall * len(kinds), wide, squeeze=False, sharey="row" if len(kinds) > 1 else True)
    blocks = panels.reshape(len(kinds), tall * wide)
    for block, (kind, label) in zip(blocks, kinds, strict=True):
        for axes in block[len(study) :]:
            axes.set_visible(False)
        for axes, (factor, values) in zip(block, study.items(), strict=False):
            for name in next(iter(values.values())):
                points = [table[name].get(kind) for table in values.values()]
                if None in points:  # without a graph
                    continue
                std = [table[name]["std"] for table in values.values()] if kind == "mean" else None
                axes.errorbar(range(len(values)), points, yerr=std, label=name, marker="o", capsize=2)
            axes.set_xticks(range(len(values)), list(values))
            owners, _, settings = zip(*(path.rpartition(".") for path in factor.split("+")), strict=True)
            axes.set_xlabel(f"{' + '.join(settings).replace('_', ' ')} ({owners[0]})")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
        for axes in block[::wide]:
            axes.set_ylabel(label.replace("_", " "))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run, tell, write."""
    options = arguments()
    study: dict[str, dict[str, Any]] = {}
    metric = options.metric or ""
    for factor in options.vary:
        path, _, values = factor.partition("=")
        study[path] = {}
        for value in values.split(","):
            results = run(options, path, value)
            metric = metric or results[0]["main"]
            study[path][value] = summary(results, options.metric)
            for name, row in study[path][value].items():
                print(f"{path}={value}  {name}: {metric} {row['mean']:.4f} ± {row['std']:.4f}", flush=True)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "metric": metric, "study": study}
        files.write_json(options.json, told)
    if options.figure:
        for other in reversed(options.beside):
            study = {f"{other.stem}: {k}": v for k, v in files.read_json(other)["study"].items()} | study
        draw(study, metric, options.graph, options.figure)


if __name__ == "__main__":
    try:
        main()
    except CoterieError as error:
        sys.exit(f"vary: {error}")
