"""All-for-one's synthetic figures: excess loss over the steps (Figure 2), and the sufficient cluster's size (Figure 1).

    python benchmarks/allforone_synthetic.py [--experiments NAME,NAME] [--json FILE] [--figures FOLDER]

Runs the packaged experiments as they are, at the paper's step sizes and seeds, and looks at exact excess losses
R_i(θ_i) − R_i* = ‖θ_i − θ_i*‖² of the personal models, means over clients and seeds, where a record has test losses.

What to expect is known. With x ~ N(0, I), batch b from c clients alike and step η, one step multiplies the expected
excess by 1 − 4η + 4η²(1 + (d + 1)/(bc)) (`factor`). The noise of a step falls with the cluster's size c; its progress
1 − 4η + 4η² does not, so that Local is not c times slower but ln factor(c) / ln factor(1) times (`expected`), and is c
times behind after the steps that `behind` counts. FedAvg's common model ends at the distance of the centres.

Figure 1 has b_ik of Property 1, √2 ‖A (θ_i* − θ_k*)‖ with A = 2I the curvature of R, in Definition 2 (with b²), for the
binary criterion with λ = 0.1. (As the curvatures are equal, the bound holds without the √2: ε would be half as large.)
"""

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coterie.algorithms.allforone import AllForOne, sufficient
from coterie.asks import Own
from coterie.data.synthetic import LeastSquares
from coterie.experiments import reader
from coterie.experiments.reader import Experiment
from coterie.fleet.stacked import StackedFleet

SPREADS = (0.001, 0.01, 0.1, 1.0)
REACHED = 1e-3  # of the excess loss at the start


def excesses(experiment: Experiment, name: str) -> Tensor:
    """Of one algorithm: seeds × rounds × clients, the start included."""
    found = []
    for seed in experiment.budget.seeds:
        people = experiment.population(seed)
        source: Any = people.stream
        fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
        algorithm = experiment.algorithm(name, **people.told)
        state, path = algorithm.init(fleet), []
        for t in range(experiment.budget.rounds + 1):
            models = algorithm.personal(state)
            rows = torch.stack(fleet.reveal(models)) if isinstance(models, Own) else models.expand(fleet.n, -1)
            path.append(source.excess(rows))
            if t < experiment.budget.rounds:
                fleet.begin(t)
                state, _ = algorithm.round(fleet, state)
        found.append(torch.stack(path))
    return torch.stack(found)


def factor(eta: float, d: int, samples: int) -> float:
    """What one step of so many samples leaves of the expected excess loss."""
    return 1 - 4 * eta + 4 * eta**2 * (1 + (d + 1) / samples)


def first(curve: Tensor, level: float) -> int | None:
    """The first round at which a curve is below a level."""
    below = (curve <= level).nonzero()
    return int(below[0]) if len(below) else None


def study(which: str) -> dict[str, Any]:
    """All algorithms of one experiment."""
    experiment = reader.read(which)
    plan: Any = experiment.given["plan"]
    source: Any = experiment.population(experiment.budget.seeds[0]).stream
    size = source.clients // source.centres
    rows: dict[str, dict[str, Any]] = {}
    local: Tensor | None = None
    for name in experiment.algorithms:
        curve = excesses(experiment, name).mean((0, 2))
        local = curve if name == "local" else local
        assert local is not None
        ahead = local / curve.clamp(min=1e-300)
        rows[name] = {
            "curve": curve.tolist(),
            "reached": first(curve, REACHED * float(curve[0])),
            "behind": first(1 / ahead, 1 / size),  # when Local's excess is the cluster's size times as large
            "ahead_early": {str(t): float(ahead[t]) for t in (1, 2, 3, 5, 10)},
            "last": float(curve[-1] / curve[0]),
        }
        print(which, name, {k: v for k, v in rows[name].items() if k != "curve"}, flush=True)
    alone, together = (factor(plan["lr"], source.d, plan["batch"] * c) for c in (1, size))
    return {
        "cluster": size,
        "seeds": list(experiment.budget.seeds),
        "factor": {"local": alone, "cluster": together},
        "expected": math.log(together) / math.log(alone),
        "algorithms": rows,
    }


def clusters(points: int = 121) -> dict[str, Any]:
    """Figure 1: the mean size of the sufficient cluster for each ε and each spread v."""
    epsilon = torch.logspace(-8, 2, points, dtype=torch.float64)
    phi = AllForOne(criterion="binary", lam=0.1).phi
    sizes: dict[str, list[float]] = {}
    for v in SPREADS:
        truth = LeastSquares(centres=1, spread=v).truth()
        b = math.sqrt(2) * 2 * (truth[:, None] - truth).norm(dim=-1)
        sizes[str(v)] = [float((sufficient(phi, b, 0.0, 2.0, float(e)) > 0).sum(1).double().mean()) for e in epsilon]
    return {"epsilon": epsilon.tolist(), "size": sizes}


def draw(studies: dict[str, dict[str, Any]], figure_1: dict[str, Any], folder: Path) -> None:
    """Both figures."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(4.6 * len(studies) + 1.6, 3.6), layout="constrained")
    for place, (which, found) in enumerate(studies.items()):
        axes = figure.add_subplot(1, len(studies), place + 1)
        for name, row in found["algorithms"].items():
            axes.semilogy(row["curve"], label=name, lw=1.5, ls="--" if name.endswith("oracle") else "-")
        axes.set(title=which, xlabel="step", ylabel="excess loss" * (not place))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(folder / "allforone-synthetic.png", dpi=130)
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for v, size in figure_1["size"].items():
        axes.semilogx(figure_1["epsilon"], size, label=f"v = {v}", lw=1.6)
    axes.set(xlabel="precision ε", ylabel="clients in the sufficient cluster", ylim=(0, 21))
    axes.invert_xaxis()  # as training goes
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "allforone-sufficient.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", default="afo-synthetic,afo-synthetic-10")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    studies = {which: study(which) for which in options.experiments.split(",")}
    figure_1 = clusters()
    for which, found in studies.items():
        title = f"{which}: Local is expected to need {found['expected']:.2f} times the steps of a cluster's"
        table = Table(
            "algorithm", "steps to 1e-3", "Local 10 × behind", "ahead at 3", "at 10", "last / start", title=title
        )
        for name, row in found["algorithms"].items():
            early = [f"{row['ahead_early'][t]:.2f}" for t in ("3", "10")]
            table.add_row(name, str(row["reached"]), str(row["behind"]), *early, f"{row['last']:.2g}")
        Console(width=110).print(table)
    if options.figures:
        draw(studies, figure_1, options.figures)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "studies": studies, "figure_1": figure_1}
        options.json.write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
