"""What the runner itself costs a round, with a fleet and an algorithm that do nothing. Writes results/runner.json.

Run: python benchmarks/runner.py
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from coterie.algorithm import Algorithm, Info
from coterie.asks import Answer, Evaluate
from coterie.data.population import Client, population
from coterie.experiments.budget import Budget
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet
from coterie.runs.listeners import Terminal
from coterie.runs.record import Record
from coterie.runs.runner import drive

N, ROUNDS = 20, 2000


class Idle(StackedFleet):
    """Answers evaluations at once."""

    def _evaluate(self, ask: Evaluate) -> Answer:
        zeros = torch.zeros(ask.m, dtype=torch.float64)
        return Answer(torch.zeros(ask.m, dtype=torch.int8), metrics=dict.fromkeys(ask.metrics or (), zeros))


@dataclass(frozen=True)
class Nothing(Algorithm):
    """A round that makes three tensors."""

    def init(self, fleet: Fleet) -> Tensor:
        return fleet.initial()

    def round(self, fleet: Fleet, state: Tensor) -> tuple[Tensor, Info]:
        return state, Info(torch.eye(fleet.n, dtype=torch.float64), torch.ones(fleet.n).bool(), torch.zeros(fleet.n))

    def personal(self, state: Tensor) -> Tensor:
        return state


def alone() -> float:
    """Milliseconds of the bare loop: what a round costs without any runner."""
    fleet, algorithm = fresh(), Nothing()
    state = algorithm.init(fleet)
    start = time.perf_counter()
    for t in range(ROUNDS):
        fleet.begin(t)
        state, _ = algorithm.round(fleet, state)
    return (time.perf_counter() - start) * 1e3 / ROUNDS


def fresh() -> Idle:
    draw = torch.Generator().manual_seed(0)
    part = (torch.randn(4, 8, generator=draw), torch.tensor([0, 1, 2, 1]))
    clients = [Client(f"c{i}", part, part, part) for i in range(N)]
    return Idle(population(clients, model=lambda: nn.Linear(8, 3)))


def driven(evaluate: int, checkpoint: int) -> float:
    """Milliseconds a round of a recorded run with the terminal listener."""
    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder) / "run")
        record.begin({}, None)
        budget = Budget(rounds=ROUNDS, evaluate_every=evaluate, checkpoint_every=checkpoint)
        fleet = fresh()
        screen = Console(file=StringIO(), force_terminal=True)
        start = time.perf_counter()
        drive(fleet, Nothing(), budget, record=record, listeners=[Terminal(screen)])
        return (time.perf_counter() - start) * 1e3 / ROUNDS


def main() -> None:
    cases = {
        "rounds alone": (ROUNDS, ROUNDS),
        "measuring every 10 rounds": (10, ROUNDS),
        "and a checkpoint every 10 rounds": (10, 10),
    }
    bare = statistics.median(alone() for _ in range(3))
    table = Table("what", "ms a round", title=f"The runner's own time, {N} clients, {ROUNDS} rounds")
    found = {}
    for name, case in cases.items():
        found[name] = statistics.median(driven(*case) for _ in range(3)) - bare
        table.add_row(name, f"{found[name]:.3f}")
    Console().print(table)
    told = {"command": "python benchmarks/runner.py", "clients": N, "rounds": ROUNDS, "ms_a_round": found}
    Path("results/runner.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
