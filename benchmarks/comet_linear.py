"""COMET's Figure 2, held against its closed form (14), and ‖∇Φ_k‖ over rounds (Theorem IV.6), on `comet-linear`.

    python benchmarks/comet_linear.py [--seed 0] [--json FILE] [--figure FILE]

Closed form: everyone trains alone to its minimiser ŵ_k, then one long round towards its centroid. Where that lands is
(14) as corrected, (XᵀX + λPᵀP)⁻¹(XᵀXŵ_k + λPᵀP Σ α_i ŵ_i) in means over samples, with α what the clusters say;
`off` is the distance, in float64. Stationarity: one full-batch step a round from the initial models on (τ = 1); the
gradient of Φ_k at the model before the round, with s̄_k as that round has it. Both with clusters (c = 2) and without.
"""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coterie.algorithms.comet import COMET
from coterie.algorithms.fedavg import FedAvg
from coterie.asks import Plan
from coterie.data.holdings import COLOURS
from coterie.data.population import Population
from coterie.data.synthetic import Linear
from coterie.experiments import reader
from coterie.fleet.stacked import StackedFleet

LAM, RATE, ALONE, STATIONARY = 50.0, 3e-4, 4000, 1200  # λ, the rate, steps alone, rounds of one step
NAMES = {1: "without clusters (c = 1)", 2: "COMET (c = 2)"}


def moments(people: Population) -> tuple[Tensor, Tensor, Tensor]:
    """XᵀX/n of each client, its minimiser ŵ, and PᵀP/|P|."""
    private, found = [], []
    for rows in people.index["train"]:
        x, y = people.inputs[rows].double(), people.targets[rows].double()
        private.append(x.T @ x / len(x))
        found.append(torch.linalg.lstsq(x, y).solution.flatten())
    p = people.public["public"].double()
    return torch.stack(private), torch.stack(found), p.T @ p / len(p)


def closed(people: Population, alpha: Tensor) -> Tensor:
    """(14)."""
    private, found, public = moments(people)
    right = (private @ found[..., None])[..., 0] + LAM * (alpha @ found) @ public
    return torch.linalg.solve(private + LAM * public, right)


def rows_of(fleet: StackedFleet, algorithm: COMET) -> Tensor:
    """Everyone's model."""
    return torch.stack(fleet.reveal(algorithm.model))


def landed(people: Population, c: int, seed: int) -> tuple[Tensor, Tensor]:
    """Where everyone is after training alone and one long round of COMET, and α of that round."""
    fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
    plan = Plan(steps=ALONE, batch=None, lr=RATE)
    algorithm = COMET(plan=plan, c=c, lam=LAM, public_batch=len(people.public["public"]), warmup=1)
    state = algorithm.init(fleet)
    fleet.begin(0)
    state, _ = algorithm.round(fleet, state)
    fleet.begin(1)
    _, info = algorithm.round(fleet, state)
    return rows_of(fleet, algorithm), info.graph


def slopes(people: Population, c: int, seed: int) -> Tensor:
    """‖∇Φ_k‖ by round and client."""
    fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
    plan = Plan(steps=1, batch=None, lr=RATE)
    algorithm = COMET(plan=plan, c=c, lam=LAM, public_batch=len(people.public["public"]))
    private, found, public = moments(people)
    state, norms = algorithm.init(fleet), []
    for t in range(STATIONARY):
        before = rows_of(fleet, algorithm)
        fleet.begin(t)
        state, info = algorithm.round(fleet, state)
        gap = before - info.graph @ before  # everyone answered the round before, at these models
        gradient = 2 * (private @ (before - found)[..., None])[..., 0] + 2 * LAM * gap @ public
        norms.append(gradient.norm(dim=1))
    return torch.stack(norms)


def averaged(people: Population, seed: int) -> Tensor:
    """FedAvg's global model."""
    fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
    algorithm = FedAvg(plan=Plan(steps=50, batch=None, lr=RATE))
    state = algorithm.init(fleet)
    for t in range(ALONE // 50):
        fleet.begin(t)
        state, _ = algorithm.round(fleet, state)
    return state.x


def draw(told: dict[str, Any], path: Path) -> None:
    """True and learned models in the plane, all of them and then each client's own; below, the falling gradients."""
    figure = Figure(figsize=(12.5, 6.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 0.85))
    panels = above.subplots(1, 4)
    true, alone, common = (np.array(told[key]) for key in ("true", "alone", "fedavg"))
    panels[0].scatter(*true.T, marker="*", s=90, c=COLOURS[:3], label="true")
    panels[0].scatter(*common, marker="X", s=60, c="#222222", label="FedAvg")
    panels[0].set_title("true models, and FedAvg's", fontsize=10)
    for k, place in enumerate(true):
        panels[0].annotate(f"  {k}", place, fontsize=9)
    for k, axes in enumerate(panels[1:]):
        marks = {"true": (true[k], "*", "#222222"), "alone": (alone[k], "o", COLOURS[0])}
        for c, colour in ((1, COLOURS[1]), (2, COLOURS[2])):
            marks[NAMES[c]] = (np.array(told[f"c={c}"]["models"])[k], "sD"[c - 1], colour)
        for name, (where, marker, colour) in marks.items():
            axes.scatter(*where, marker=marker, s=110 if marker == "*" else 48, c=colour, label=name, alpha=0.85)
        axes.set_title(f"client {k}, deviation {told['spreads'][k]:g}", fontsize=10)
        axes.margins(0.2)
    panels[1].legend(fontsize=8, frameon=False)
    for axes in panels:
        axes.set_xlabel("$w_1$", fontsize=9)
    panels[0].set_ylabel("$w_2$", fontsize=9)
    panels[0].legend(fontsize=8, frameon=False)
    for axes, c in zip(below.subplots(1, 2, sharey=True), (1, 2), strict=True):
        falling(axes, np.array(told[f"c={c}"]["gradient"]), told["every"], NAMES[c])
    figure.savefig(path, dpi=130)


def falling(axes: Axes, norms: np.ndarray[Any, Any], every: int, title: str) -> None:
    """‖∇Φ_k‖ of each client."""
    for k, line in enumerate(norms.T):
        axes.semilogy(np.arange(len(line)) * every + 1, line, color=COLOURS[k], label=f"client {k}")
    axes.set_title(f"‖∇Φ‖, {title}", fontsize=10)
    axes.set_xlabel("round (one step each)", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def main() -> None:
    """Measure, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    experiment = reader.read("comet-linear")
    given = {k: v for k, v in experiment.given["population"].items() if k in ("spreads", "noise")}
    source = Linear(seed=options.seed, spreads=tuple(given["spreads"]), noise=given["noise"])
    people = experiment.population(options.seed)
    people = replace(people, inputs=people.inputs.double(), targets=people.targets.double())
    people = replace(people, public={"public": people.public["public"].double()})
    true, every = source.truth(), 20
    told: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]), "seed": options.seed, "spreads": given["spreads"], "lam": LAM,
        "true": true.tolist(), "alone": moments(people)[1].tolist(),
        "fedavg": averaged(people, options.seed).tolist(), "every": every,
    }  # fmt: skip
    table = Table("", "off from (14)", *(f"client {k}: from true" for k in range(3)), "‖∇Φ‖ first", "last", box=None)
    for c in (1, 2):
        rows, alpha = landed(people, c, options.seed)
        norms = slopes(people, c, options.seed)
        off = float((rows - closed(people, alpha)).abs().max())
        far = (rows - true).norm(dim=1)
        told[f"c={c}"] = {
            "models": rows.tolist(), "alpha": alpha.tolist(), "off": off, "from_true": far.tolist(),
            "gradient_first": norms[0].tolist(), "gradient_last": norms[-1].tolist(),
            "gradient": norms[::every].tolist(),
        }  # fmt: skip
        first, last = (f"{float(n.max()):.3g}" for n in (norms[0], norms[-1]))
        table.add_row(NAMES[c], f"{off:.1e}", *(f"{float(f):.3g}" for f in far), first, last)
    alone = (torch.tensor(told["alone"]) - true).norm(dim=1)
    common = (torch.tensor(told["fedavg"]) - true).norm(dim=1)
    table.add_row("alone", "", *(f"{float(f):.3g}" for f in alone), "", "")
    table.add_row("FedAvg", "", *(f"{float(f):.3g}" for f in common), "", "")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(told, options.figure)


if __name__ == "__main__":
    main()
