"""All-for-one's synthetic figures: excess loss over the steps (Figure 2), and the sufficient cluster's size (Figure 1).

    python benchmarks/allforone_synthetic.py [--experiments A,B] [--algorithms A,B] [--set PATH=VALUE]… [--json FILE]
        [--figures FOLDER]

Runs the packaged experiments as they are, at the paper's step sizes and seeds, and looks at exact excess losses
R_i(θ_i) − R_i* = ‖θ_i − θ_i*‖² of the personal models, means over clients and seeds, where a record has test losses;
below them, at how many clients each listens to.

What to expect is known. With x ~ N(0, I), batch b from c clients alike and step η, one step multiplies the expected
excess by 1 − 4η + 4η²(1 + (d + 1)/(bc)) (`factor`). The noise of a step falls with the cluster's size c; its progress
1 − 4η + 4η² does not, so that Local is not c times slower but ln factor(c) / ln factor(1) times (`expected`), and is c
times behind after the steps that `behind` counts. FedAvg's common model ends at the distance of the centres.

Ratios are estimated from 64 samples, not from the one of Table S1 (`--set algorithms.allforone-bin.b_alpha=1`).

Around a common centre (`afo-spread`) stand also the weights that Even et al. prove optimal when the bounds b_ik =
2 ‖θ_i* − θ_k*‖ are known, for several precisions ε: a bias below ε remains, and the noise of those listened to.

Figure 1 has b_ik of Property 1, √2 ‖A (θ_i* − θ_k*)‖ with A = 2I the curvature of R, in Definition 2 (with b²), for the
binary criterion with λ = 0.1. (As the curvatures are equal, the bound holds without the √2: ε would be half as large.)
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coterie.algorithm import Algorithm
from coterie.algorithms import make
from coterie.algorithms.allforone import AllForOne, sufficient
from coterie.asks import Own
from coterie.data.population import Population
from coterie.data.synthetic import LeastSquares
from coterie.experiments import reader
from coterie.experiments.reader import Experiment
from coterie.fleet.stacked import StackedFleet

SPREADS = (0.001, 0.01, 0.1, 1.0)
PRECISIONS = (0.1, 0.01, 0.001)  # ε of those that know b
MU = 2.0  # R(θ) = ‖θ − θ*‖²
REACHED = 1e-3  # of the excess loss at the start


def told(experiment: Experiment, source: LeastSquares, precision: float) -> Algorithm:
    """All-for-one with Even et al.'s weights for this ε."""
    plan: Any = experiment.given["plan"]
    known = {"criterion": "even", "b": bounds(source, 1.0).tolist(), "mu": MU, "precision": precision, "theory": True}
    return make("allforone", known | {"lr": plan["lr"], "batch": plan["batch"]}, rounds=experiment.budget.rounds)


def bounds(source: LeastSquares, constant: float) -> Tensor:
    """b_ik: the distance of the gradients, 2 ‖θ_i* − θ_k*‖, times a constant."""
    truth = source.truth()
    return (truth[:, None] - truth).norm(dim=-1).mul(constant * MU)


def paths(experiment: Experiment, made: Callable[[Population], Algorithm]) -> tuple[Tensor, list[float]]:
    """Of one algorithm: excess losses, seeds × rounds × clients with the start, and how many collaborate on average."""
    found, company = [], []
    for seed in experiment.budget.seeds:
        people = experiment.population(seed)
        source: Any = people.stream
        fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
        algorithm = made(people)
        state, path, others = algorithm.init(fleet), [], []
        for t in range(experiment.budget.rounds + 1):
            models = algorithm.personal(state)
            rows = torch.stack(fleet.reveal(models)) if isinstance(models, Own) else models.expand(fleet.n, -1)
            path.append(source.excess(rows))
            if t < experiment.budget.rounds:
                fleet.begin(t)
                state, info = algorithm.round(fleet, state)
                if "collaborators" in info.extra:
                    others.append(info.extra["collaborators"].double().mean())
        found.append(torch.stack(path))
        company.append(torch.stack(others) if others else torch.empty(0))
    return torch.stack(found), torch.stack(company).mean(0).tolist()


def factor(eta: float, d: int, samples: int) -> float:
    """What one step of so many samples leaves of the expected excess loss."""
    return 1 - 4 * eta + 4 * eta**2 * (1 + (d + 1) / samples)


def rounded(values: list[float]) -> list[float]:
    """To six digits, as they are written down."""
    return [float(f"{v:.6g}") for v in values]


def first(curve: Tensor, level: float) -> int | None:
    """The first round at which a curve is below a level."""
    below = (curve <= level).nonzero()
    return int(below[0]) if len(below) else None


def study(which: str, algorithms: list[str] | None, sets: list[str]) -> dict[str, Any]:
    """All algorithms of one experiment, or those named."""
    experiment = reader.read(which, algorithms=algorithms, sets=sets)
    plan: Any = experiment.given["plan"]
    source: Any = experiment.population(experiment.budget.seeds[0]).stream
    size = source.clients // source.centres
    rows: dict[str, dict[str, Any]] = {}
    local: Tensor | None = None
    made: dict[str, Callable[[Population], Algorithm]] = {
        name: lambda people, name=name: experiment.algorithm(name, **people.told)  # type: ignore[misc]
        for name in experiment.algorithms
    }
    if source.spread and algorithms is None:
        made |= {f"even, ε = {e:g}": lambda _, e=e: told(experiment, source, e) for e in PRECISIONS}  # type: ignore[misc]
    for name, one in made.items():
        excess, company = paths(experiment, one)
        curve = excess.mean((0, 2))
        local = curve if name == "local" else local
        assert local is not None
        ahead = local / curve.clamp(min=1e-300)
        rows[name] = {
            "curve": rounded(curve.tolist()),
            "collaborators": rounded(company),
            "reached": first(curve, REACHED * float(curve[0])),
            "behind": first(1 / ahead, 1 / size),  # when Local's excess is the cluster's size times as large
            "ahead_early": {str(t): float(ahead[t]) for t in (1, 2, 3, 5, 10)},
            "last": float(curve[-1] / curve[0]),
        }
        print(which, name, {k: v for k, v in rows[name].items() if k not in ("curve", "collaborators")}, flush=True)
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
        b = bounds(LeastSquares(centres=1, spread=v), math.sqrt(2))
        sizes[str(v)] = [float((sufficient(phi, b, 0.0, MU, float(e)) > 0).sum(1).double().mean()) for e in epsilon]
    return {"epsilon": rounded(epsilon.tolist()), "size": sizes}


def draw(studies: dict[str, dict[str, Any]], figure_1: dict[str, Any], folder: Path) -> None:
    """Both figures."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(4.6 * len(studies) + 1.6, 5.8), layout="constrained")
    grid = figure.subplots(2, len(studies), squeeze=False, sharex="col", height_ratios=[2, 1])
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    names = list(dict.fromkeys(name for found in studies.values() for name in found["algorithms"]))
    for place, (which, found) in enumerate(studies.items()):
        loss, company = grid[:, place]
        for name, row in found["algorithms"].items():
            is_told = name.endswith("oracle") or name.startswith("even")
            look = {"color": colours[names.index(name)], "lw": 1.5, "ls": "--" if is_told else "-"}
            loss.semilogy(row["curve"], label=name, **look)
            if row["collaborators"]:
                company.plot(range(1, len(row["collaborators"]) + 1), row["collaborators"], **look)
        loss.set(title=which, ylabel="excess loss" * (not place))
        company.set(xlabel="step", ylabel="collaborators" * (not place), ylim=(0, None))
        for axes in (loss, company):
            axes.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for axes in grid[0] for line in axes.lines}
    grid[0, -1].legend(lines.values(), lines, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
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
    parser.add_argument("--experiments", default="afo-synthetic,afo-synthetic-10,afo-spread")
    parser.add_argument("--algorithms", help="only these, local among them")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="sets")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    names = options.algorithms.split(",") if options.algorithms else None
    studies = {which: study(which, names, options.sets) for which in options.experiments.split(",")}
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
        held = {"command": shlex.join(["python", *sys.argv]), "studies": studies, "figure_1": figure_1}
        options.json.write_text(json.dumps(held) + "\n")


if __name__ == "__main__":
    main()
