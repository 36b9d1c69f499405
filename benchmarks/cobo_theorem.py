"""Is Theorem I of CoBo true on Example 2? Both sides of its bounds, as the paper prints them, over T iterations.

    python benchmarks/cobo_theorem.py [--horizons 100,400,1600] [--seeds 8] [--json FILE]

The population is that of `coterie run cobo-quadratic`; σ, L = max a_i, the largest M_ij of a cluster and ρ = √3 L/c are
known, η is the theorem's bound for each T, and the weights solve (4): γ is so large that w is 1 where two gradients
agree and 0 where they do not. Models begin half-way between the clusters, where ζ_ik² ≥ ‖∇f_i + ∇f_k‖² can hold (it
cannot hold everywhere: the right side of a quadratic has no bound); how often it held on the way is printed. The left
sides are exact gradients at the iterates, means over seeds; `ratio` is left over right, to be at most 1.

The bounds on gradients hold. The one on consensus, as printed, does not: models whose gradients have noise of their own
stay apart by 2 (1 − 1/c) η²σ² / (1 − (1 − ηρc)²) at equal curvatures, whatever M is, and the printed bound is a
multiple of M². `floor` is that distance.
"""

import argparse
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from coterie.algorithms.cobo import CoBo
from coterie.data.synthetic import Quadratics
from coterie.experiments.populations import make
from coterie.fleet.stacked import StackedFleet


def sides(source: Quadratics, horizon: int, seeds: int) -> dict[str, Any]:
    """Both sides of the theorem's bounds for T = horizon, and of its corollary's."""
    a, mu, group = source.curvature(), source.truth(), torch.tensor(source.groups())
    c, n = source.per_cluster, source.n
    smooth, sigma = float(a.max()), source.noise
    start = mu.unique(dim=0).mean(0)
    pair = (a[:, None] + a) / 2  # curvature of f̃_ij
    inside = group[:, None] == group
    gap = float((pair / 2 * (start - mu).square().sum(1)[:, None])[inside].sum()) / source.clusters / c**2
    m = float((((a[:, None] - a) / (a[:, None] + a))[inside]).abs().max())
    rho = math.sqrt(3) * smooth / c
    eta = min(2 / (sigma * math.sqrt(smooth * horizon)) * math.sqrt(gap), 1 / (2 * math.sqrt(3) * smooth))
    rate = math.sqrt(smooth * sigma**2 * gap / horizon)
    table = vars(source) | {"curvatures": list(source.curvatures)}
    total = dict.fromkeys(("consensus", "gradient", "corollary", "condition"), 0.0)
    for seed in range(seeds):
        people = make(
            {"kind": "synthetic", "name": "quadratics", **{k: v for k, v in table.items() if k != "seed"}}, seed
        )
        fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
        algorithm = CoBo(lr=eta, rho=rho, gamma=1e12, batch=1, schedule="all", rounds=horizon)
        state = replace(algorithm.init(fleet), x=start.expand(n, -1).clone())
        for t in range(horizon):
            x = state.x
            z = (x[:, None] + x) / 2
            total["gradient"] += float((pair[..., None] * (z - mu)).square().sum(-1)[inside].sum())
            total["corollary"] += c * float((a[:, None] * (x - mu)).square().sum())  # Σ_ij of the gradient of i
            both = a[:, None, None] * (z - mu[:, None]) + a[:, None] * (z - mu)
            square = a.square()
            zeta = square[:, None] * square / (square[:, None] + square) * (mu[:, None] - mu).square().sum(-1)
            total["condition"] += float((both.square().sum(-1) <= zeta)[~inside].double().mean())
            fleet.begin(t)
            state, _ = algorithm.round(fleet, state)
            apart = (state.x[:, None] - state.x).square().sum(-1)
            total["consensus"] += float(apart[inside].sum())
    each = {k: v / (c**2 * horizon * source.clusters * seeds) for k, v in total.items()}
    bounds = {"consensus": 6 * m**2 / (rho**2 * c**2) * rate, "gradient": 3 * rate, "corollary": 4 * rate}
    return {
        "T": horizon,
        "eta": eta,
        "rho": rho,
        "M": m,
        "condition_held": total["condition"] / (horizon * seeds),
        "floor": 2 * (1 - 1 / c) * (eta * sigma) ** 2 / (1 - (1 - eta * rho * c) ** 2),
        **{k: {"left": each[k], "right": v, "ratio": each[k] / v if v else math.inf} for k, v in bounds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horizons", default="100,400,1600")
    parser.add_argument("--curvatures", default="0.7,1")
    parser.add_argument("--noise", type=float, default=0.1, help="σ")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    low, high = (float(v) for v in options.curvatures.split(","))
    source = Quadratics(curvatures=(low, high), noise=options.noise)
    rows = [sides(source, int(t), options.seeds) for t in options.horizons.split(",")]
    table = Table(
        "T", "η", "ζ held", "floor", *(f"{k}: left, right, ratio" for k in ("consensus", "gradient", "corollary"))
    )
    for row in rows:
        shown = [row[k] for k in ("consensus", "gradient", "corollary")]
        cells = [f"{s['left']:.3g}  {s['right']:.3g}  {s['ratio']:.2f}" for s in shown]
        table.add_row(str(row["T"]), f"{row['eta']:.3g}", f"{row['condition_held']:.3f}", f"{row['floor']:.3g}", *cells)
    Console(width=140).print(table)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "seeds": options.seeds, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
