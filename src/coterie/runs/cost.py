"""What an experiment will take, said before it runs."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from coterie.asks import Plan
from coterie.data.population import SPLITS
from coterie.experiments.reader import Experiment
from coterie.fleet.layout import Layout
from coterie.report.numbers import human
from coterie.runs.foresight import foresee

AT_SITES = "known at the sites"


def cost(experiment: Experiment) -> list[str]:
    """Lines about size and work, from the population of the first seed."""
    budget = experiment.budget
    population = experiment.population(budget.seeds[0])
    widths = [Layout.of(population.make(a)).d for a in range(len(population.architectures))]
    sizes = {split: population.sizes(split) for split in SPLITS}
    groups = "none known" if population.groups is None else str(len(set(population.groups)))
    lines = [
        f"clients: {population.n}, true groups: {groups}",
        f"parameters of a model: {', '.join(f'{d:,}' for d in widths)}",
        "samples of a client: "
        + (AT_SITES if experiment.remote else ", ".join(f"{split} {_span(size)}" for split, size in sizes.items())),
        f"runs: {len(experiment.algorithms)} algorithms × {len(budget.seeds)} seeds × {budget.rounds} rounds",
    ]
    itemsize = getattr(torch, budget.dtype).itemsize
    for name in experiment.algorithms:
        algorithm = experiment.algorithm(name, **population.told)
        plan: Any = getattr(algorithm, "plan", None)
        line = f"{name}: {_travels(algorithm)}"
        if isinstance(plan, Plan) and not experiment.remote:
            rows = population.n * (2 + (plan.momentum > 0) + 2 * plan.optimiser.startswith("adam"))
            steps = [plan.steps_for(int(size)) for size in sizes["train"]]
            batch = [int(size) if plan.batch is None else plan.batch for size in sizes["train"]]
            seen = sum(s * b for s, b in zip(steps, batch, strict=True)) * budget.rounds
            line += (
                f"; {seen:,} samples a run, {rows} rows ({rows * max(widths) * itemsize / 1e6:,.1f} MB) while training"
            )
        lines.append(line)
    return lines


def forecast(experiment: Experiment, device: str) -> Iterator[str]:
    """Lines about time and memory, each as soon as it is known."""
    if experiment.remote:
        yield f"time and memory: {AT_SITES}"
        return
    total, most = 0.0, 0
    for found in foresee(experiment, device):
        total, most = total + found.seconds, max(most, found.memory)
        least = "" if found.whole else "at least "
        yield f"{found.algorithm}: {_duration(found.seconds)}, {least}{human(found.memory)}B at the peak"
    yield f"in all: {_duration(total)} on this machine as busy as it is now, {human(most)}B at the peak"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _span(size: torch.Tensor) -> str:
    low, high = int(size.min()), int(size.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _travels(algorithm: Any) -> str:
    """The line of its docstring that says what moves, and in how many phases."""
    text = sys.modules[type(algorithm).__module__].__doc__ or ""
    found = next((line for line in text.splitlines() if line.startswith("Travels:")), "Travels: not said")
    return found.removeprefix("Travels: ").partition(". ")[0].rstrip(".")
