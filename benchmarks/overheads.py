"""What a round costs beside its gradients, and how near matrix work comes to what the machine can do.

    python benchmarks/overheads.py [--device cpu|cuda] [--json FILE] [--repeats 5] [--threads 1] [--clock process]

A round is timed as a whole, and again with a clock around the steps that compute gradients; the rest is sampling,
checks, counting, and the algorithm's own arithmetic. Fetching and augmenting samples is part of the rest too, but for
a GPU, where it is compiled into the step. Matrix work is held against the time of a copy of the
bytes it must move, or of a square product of as many operations, whichever is longer: both measured here. On a GPU the
synchronisations of a round are counted as well.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from coterie.algorithms.cobo import CoBo, CoBoState
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.asks import Gradient, Plan
from coterie.data.augment import Augment
from coterie.data.population import Client, Population, population
from coterie.fleet.reduce import inner_products
from coterie.fleet.stacked import StackedFleet
from coterie.models.cnn import CNN
from coterie.models.resnet9 import ResNet9
from coterie.runs.allocator import keep_freed_memory

Clock = Callable[[], float]


def settled(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(go: Callable[[], object], device: str, clock: Clock, least: float = 0.2) -> float:
    """Milliseconds of one call."""
    go()
    settled(device)
    calls, start = 0, clock()
    while clock() - start < least:
        go()
        settled(device)
        calls += 1
    return (clock() - start) / calls * 1e3


# ---- rounds --------------------------------------------------------------------------------------------------------


def people(n: int, samples: int, model: Callable[[], nn.Module], size: int, channels: int) -> Population:
    g = torch.Generator().manual_seed(0)
    clients = [
        Client(f"c{i}", (torch.rand(samples, channels, size, size, generator=g), torch.arange(samples) % 10))
        for i in range(n)
    ]
    return population(
        clients,
        model=model,
        task="classification",
        groups=[i // 2 for i in range(n)],
        transform=Augment(crop=4, flip=True),
    )


def round_cases(device: str) -> dict[str, tuple[Population, Any]]:
    big = device == "cuda"
    model = (lambda: ResNet9()) if big else (lambda: CNN(channels=3, size=16))
    eight = people(8, 512, model, 32 if big else 16, 3)
    batch = 128 if big else 16
    return {
        "CoBo, 8 clients, 28 pairs": (eight, CoBo(lr=0.01, batch=batch, schedule="all")),
        "CoBo, 8 clients, few pairs": (eight, CoBo(lr=0.01, batch=batch, schedule="constant")),
        "FedAvg, 8 clients, 4 steps": (eight, FedAvg(Plan(steps=4, batch=batch, lr=0.01))),
        "Local, 8 clients, 4 steps": (eight, Local(Plan(steps=4, batch=batch, lr=0.01))),
    }


def watched(fleet: StackedFleet, clock: Clock, device: str) -> dict[str, float]:
    """A clock around every step that computes gradients, less what is fetched in it."""
    spent = {"ms": 0.0}

    def clocked(go: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def went(*given: Any) -> Any:
            settled(device)
            start = clock()
            out = go(*given)
            settled(device)
            spent["ms"] += sign * (clock() - start) * 1e3
            return out

        return went

    if not fleet.parts.compute.compiled:
        fleet.parts.samples.fetch = clocked(fleet.parts.samples.fetch, -1)  # type: ignore[method-assign]
    for asked, name in ((fleet._batches, "step"), (fleet._training, "_step")):
        make = getattr(asked, name)
        setattr(asked, name, lambda *args, make=make: clocked(make(*args), 1))
    return spent


def rounds(p: Population, algorithm: Any, device: str, clock: Clock, count: int) -> tuple[float, float, int]:
    """Milliseconds of a round, of its gradients, and how often the host waited for the device."""
    autocast = torch.bfloat16 if device == "cuda" else None

    def driven(fleet: StackedFleet, before: Callable[[], None] = lambda: None) -> float:
        state = algorithm.init(fleet)
        for t in range(4 + count):
            if t == 4:
                settled(device)
                before()
                start = clock()
            fleet.begin(t)
            state, _ = algorithm.round(fleet, state)
        settled(device)
        return (clock() - start) / count * 1e3

    whole = driven(StackedFleet(p, device=device, autocast=autocast))
    fleet = StackedFleet(p, device=device, autocast=autocast)
    spent = watched(fleet, clock, device)
    driven(fleet, lambda: spent.update(ms=0.0))
    waits = 0
    if device == "cuda":
        fleet = StackedFleet(p, device=device, autocast=autocast)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            driven(fleet, lambda: torch.cuda.set_sync_debug_mode("warn"))
            torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchroniz" in str(w.message) for w in seen)
    return whole, spent["ms"] / count, -(-waits // count)


# ---- matrices ------------------------------------------------------------------------------------------------------


def matrix_cases(n: int, d: int, device: str) -> dict[str, tuple[Callable[[], object], float, float]]:
    """What algorithms do with models, and the bytes and operations that it takes at least."""
    g = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(n, d, generator=g).to(device) for _ in range(2))
    w = torch.rand(n, n, generator=g).double().to(device)
    algorithm = CoBo()
    state = CoBoState(x, w, x.new_zeros(n, 0), torch.zeros(n, dtype=torch.long, device=device))
    ok = torch.ones(n, dtype=torch.bool, device=device)
    one = torch.zeros(1, d - 1), torch.zeros(1, 1)
    p = population([Client(f"c{i}", one) for i in range(n)], model=lambda: nn.Linear(d - 1, 1), task="regression")
    fleet = StackedFleet(p, device=device, compile=False)
    i = torch.arange(n)
    midpoints = Gradient(i, x, 1, at=torch.stack([i, (i + 1) % n], 1))
    row, square = 4.0 * n * d, 2.0 * n * n * d
    return {
        "W X": (lambda: w.to(x.dtype) @ x, 2 * row, square),
        "CoBo's step: X − η (G + ρ (diag(W1) − W) X)": (
            lambda: algorithm.train(state, gradient, ok, 0.01), 3 * row, square
        ),
        "X Xᵀ": (lambda: inner_products(x[None]), row, square),
        "n midpoints": (lambda: fleet.parts.memory.models(fleet.parts.stacks[0], midpoints, i), 3 * row, 0.0),
    }  # fmt: skip


def ceilings(device: str, clock: Clock) -> tuple[float, float]:
    """Bytes a millisecond of a copy (read and written), and operations a millisecond of a square product."""
    a = torch.empty(2**28 if device == "cuda" else 2**25, device=device)
    b = torch.empty_like(a)
    moved = 2 * 4 * a.numel() / timed(lambda: b.copy_(a), device, clock)
    size = 8192 if device == "cuda" else 1024
    c = torch.randn(size, size, device=device)
    return moved, 2 * size**3 / timed(lambda: c @ c, device, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    options = parser.parse_args()
    keep_freed_memory()  # as the command line does
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "process" else time.perf_counter
    device, console = options.device, Console()
    report: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/overheads.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "rounds": {},
        "matrices": {},
    }
    if device == "cuda":
        report["machine"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    table = Table("round", "ms", "gradients", "above them", "waits", title="What a round costs beside its gradients")
    for name, (p, algorithm) in round_cases(device).items():
        found = [rounds(p, algorithm, device, clock, options.rounds) for _ in range(options.repeats)]
        whole, inside = statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)
        above = statistics.median(f[0] / f[1] - 1 for f in found)
        table.add_row(name, f"{whole:.2f}", f"{inside:.2f}", f"{above:.1%}", str(found[0][2]))
        report["rounds"][name] = {"ms": whole, "gradients ms": inside, "above": above, "waits": found[0][2]}
    console.print(table)

    n, d = (100, 878_538) if device == "cuda" else (100, 62_006)
    table = Table("work", "ms", "least ms", "of the ceiling", title=f"{n} models of {d:,} numbers")
    shares: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.repeats):
        moved, products = ceilings(device, clock)
        for name, (go, size, operations) in matrix_cases(n, d, device).items():
            least = max(size / moved, operations / products)
            shares.setdefault(name, []).append((timed(go, device, clock), least))
    for name, pairs in shares.items():
        ms, least = (statistics.median(p[k] for p in pairs) for k in range(2))
        share = statistics.median(p[1] / p[0] for p in pairs)
        table.add_row(name, f"{ms:.2f}", f"{least:.2f}", f"{share:.0%}")
        report["matrices"][name] = {"ms": ms, "least ms": least, "share": share}
    console.print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
