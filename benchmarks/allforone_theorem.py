"""Is Theorem 2 of All-for-one true on its least squares? Both sides of the constant-step bound, client by client.

    python benchmarks/allforone_theorem.py [--seeds 200] [--rounds 12] [--json FILE]

    E ε_T ≤ (1 − ημ)^T ε_0 + ηβ/2μ · σ²_suf(ε)      for every ε that no E ε_t with t < T lies below

The population is that of `coterie run afo-synthetic` (and of `afo-spread`): R_i(θ) = ‖θ − θ_i*‖², so μ = β = 2,
b_ik = 2‖θ_i* − θ_k*‖ and c_ik = 0. The weights are Definition 1's with the exact ratios r_ik, and η is the largest
constant that is always allowed: λ/β for the binary criterion, 1/(βN) for the continuous one. Models begin at 0.

No constant bounds the variance of these gradients, since it grows with the distance: σ² is taken as the maximum over
all clients and all models visited on the way to T, 4(d + 1)‖θ − θ_k*‖²/batch. σ_suf is Definition 2's with b², at the
largest ε allowed. The left side is the mean of exact excess losses over the seeds. `worst` is the largest ratio of left
to right over clients, to be at most 1; `descent` is the same for Theorem 1, which has σ_eff at the models themselves.
"""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coterie.algorithms.allforone import AllForOne, AllForOneState, sufficient
from coterie.data.synthetic import LeastSquares
from coterie.experiments.populations import make
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet

MU = BETA = 2.0
BATCH = 2
CRITERIA: dict[str, dict[str, Any]] = {
    "binary, λ = 0.5": {"criterion": "binary", "lam": 0.5, "lr": 0.5 / BETA},
    "binary, λ = 0.1": {"criterion": "binary", "lam": 0.1, "lr": 0.1 / BETA},
    "continuous": {"criterion": "continuous", "lr": 1 / (BETA * LeastSquares.clients)},
}
PEOPLE: dict[str, dict[str, Any]] = {
    "two clusters, d = 2": {"dimension": 2, "centres": 2},
    "two clusters, d = 10": {"dimension": 10, "centres": 2},
    "one centre, v = 0.1, d = 2": {"dimension": 2, "centres": 1, "spread": 0.1},
}
CASES = [
    *(("two clusters, d = 2", criterion) for criterion in CRITERIA),
    ("two clusters, d = 10", "binary, λ = 0.5"),
    *(("one centre, v = 0.1, d = 2", criterion) for criterion in ("binary, λ = 0.5", "continuous")),
]


class Told(AllForOne):
    """All-for-one that knows the ratios instead of estimating them."""

    truth: Tensor

    def measure(self, fleet: Fleet, state: AllForOneState, due: Tensor) -> tuple[AllForOneState, int]:
        """r_ik = (1 − ‖θ_i* − θ_k*‖² / ‖θ_i − θ_i*‖²)_+."""
        own = (state.x - self.truth).square().sum(1, keepdim=True)
        r = torch.where(own > 0, 1 - _squares(self.truth) / own, 0).clamp(min=0)
        return replace(state, r=r.fill_diagonal_(1)), 0


def _squares(points: Tensor) -> Tensor:
    return (points[:, None] - points).square().sum(-1)


def paths(source: LeastSquares, settings: dict[str, Any], seeds: int, rounds: int) -> dict[str, Tensor]:
    """Over seeds: the mean excess loss of every client after each round, σ² so far, and Theorem 1's mean variances."""
    table = {"clients": source.clients, "centres": source.centres, "spread": source.spread}
    people = make({"kind": "synthetic", "name": "least-squares", "dimension": source.dimension, **table}, source.seed)
    algorithm = Told(batch=BATCH, normalised=False, sigma="equal", refresh=1, theory=True, rounds=rounds, **settings)
    object.__setattr__(algorithm, "truth", source.truth())
    excess = torch.zeros(rounds + 1, source.n, dtype=torch.float64)
    effective = torch.zeros(rounds, source.n, dtype=torch.float64)  # Σ over seeds of σ²(θ) · 1/Σψ at the models
    most = torch.zeros(rounds, dtype=torch.float64)
    for seed in range(seeds):
        fleet = StackedFleet(people, seed=seed, dtype=torch.float64)
        state = algorithm.init(fleet)
        state = replace(state, x=torch.zeros_like(state.x))
        excess[0] += source.excess(state.x)
        for t in range(rounds):
            variance = 4 * (source.d + 1) / BATCH * (state.x[:, None] - source.truth()).square().sum(-1)
            most[t] = torch.maximum(most[t], variance.max())
            fleet.begin(t)
            state, info = algorithm.round(fleet, state)
            effective[t] += info.extra["effective_variance"]
            excess[t + 1] += source.excess(state.x)
    return {"excess": excess / seeds, "effective": effective / seeds, "most": most.cummax(0).values}


def sides(name: str, criterion: str, seeds: int, rounds: int) -> dict[str, Any]:
    """Left and right of the bounds for every T up to `rounds`: means over clients, and the largest ratio of any."""
    source, settings = LeastSquares(**PEOPLE[name]), CRITERIA[criterion]
    found = paths(source, settings, seeds, rounds)
    excess, eta = found["excess"], settings["lr"]
    phi = AllForOne(**settings).phi
    b = 2 * _squares(source.truth()).sqrt()
    rows = []
    for horizon in range(1, rounds + 1):
        least = excess[:horizon].min(0).values  # the largest ε
        psi = torch.stack([sufficient(phi, b[i], 0.0, MU, float(least[i])) for i in range(source.n)])
        sigma = found["most"][horizon - 1]
        start = (1 - eta * MU) ** horizon * excess[0]
        right = start + eta * BETA / (2 * MU) * sigma / psi.sum(1)
        fade = (1 - eta * MU) ** torch.arange(horizon - 1, -1, -1, dtype=torch.float64)[:, None]
        descent = start + BETA * eta**2 / 2 * (fade * sigma * found["effective"][:horizon]).sum(0)
        rows.append(
            {
                "T": horizon,
                "left": float(excess[horizon].mean()),
                "right": float(right.mean()),
                "worst": float((excess[horizon] / right).max()),
                "descent": float((excess[horizon] / descent).max()),
                "sufficient_cluster": float((psi > 0).sum(1).double().mean()),
                "sigma_squared": float(sigma),
            }
        )
    return {"population": name, "criterion": criterion, "eta": eta, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [sides(name, criterion, options.seeds, options.rounds) for name, criterion in CASES]
    table = Table("population", "criterion", "η", "T", "left", "right", "worst", "Theorem 1", "sufficient")
    for case in cases:
        for row in [r for r in case["rows"] if r["T"] in (1, 2, 5, options.rounds)]:
            cells = [f"{row[k]:.3g}" for k in ("left", "right", "worst", "descent", "sufficient_cluster")]
            table.add_row(case["population"], case["criterion"], f"{case['eta']:.3g}", str(row["T"]), *cells)
    Console(width=140).print(table)
    worst = max(row[which] for case in cases for row in case["rows"] for which in ("worst", "descent"))
    print(f"largest ratio of all: {worst:.3f}")
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "seeds": options.seeds, "worst": worst, "cases": cases}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
