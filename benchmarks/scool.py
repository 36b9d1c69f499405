"""What SCooL's block models cost: an E-step of n clients in M communities, and the memory it takes.

    python benchmarks/scool.py [--steps 15] [--threads 1] [--json FILE]

Graphs are sampled from the model itself (links at 0.8 inside a community, 0.2 across), likelihoods say with noise which
links there are. `a sweep` is an E-step over its sweeps: links, everyone's memberships one after the other, Dirichlets;
`least` is the quickest, `cpu` what the process itself used (the median), which others on the machine hardly change.
`peak` is what E-steps added at most to the memory of a process of their own (Linux), `kept` what stays between them;
`Rand` is how well communities are recovered (adjusted; 1: exactly).
"""

import argparse
import json
import multiprocessing
import re
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from coterie.data.population import Client, population
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet
from coterie.graph.communities import adjusted_rand
from coterie.graph.priors import MMSBM, SBM, Evidence

CASES = (
    *(("sbm", n, 10) for n in (100, 1000, 2000)),
    ("mmsbm", 200, 5),
    *(("mmsbm", n, 10) for n in (200, 500)),
)
LIMITS = {("sbm", 1000, 10): 50.0, ("mmsbm", 200, 10): 200.0}  # ms a sweep that are promised


def fleet_of(n: int) -> Fleet:
    """Clients that hold next to nothing: priors see their keys only."""
    part = (torch.zeros(1, 1), torch.zeros(1, 1))
    clients = [Client(f"c{i}", part, part) for i in range(n)]
    people = population(clients, model=lambda: nn.Linear(1, 1), task="regression")
    return StackedFleet(people, seed=0)


def sampled(fleet: Fleet, communities: int) -> tuple[Evidence, torch.Tensor]:
    """Likelihoods of a graph drawn from a block model, and who is of which community."""
    g, n = torch.Generator().manual_seed(0), fleet.n
    group = torch.arange(n) % communities
    rate = torch.where(group[:, None] == group, 0.8, 0.2).double()
    linked = torch.rand(n, n, generator=g) < rate
    log_p = 4.0 * (linked.double() - 0.5) + torch.randn(n, n, generator=g, dtype=torch.float64)
    every = torch.ones(n, n, dtype=torch.bool)
    return Evidence(log_p, every, every, 1.0, lambda: fleet.initial(), fleet), group


def memory(what: str) -> float:
    """MB of this process: VmRSS now, or VmHWM, the most since it was last reset."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def measure(case: tuple[str, int, int], steps: int, threads: int) -> dict[str, Any]:
    """One case, in a process of its own."""
    torch.set_num_threads(threads)
    name, n, communities = case
    prior = (SBM if name == "sbm" else MMSBM)(communities)
    fleet = fleet_of(n)
    evidence, group = sampled(fleet, communities)
    w, beliefs = prior.init(fleet)
    Path("/proc/self/clear_refs").write_text("5")
    before, seconds, used = memory("VmRSS"), [], []
    for t in range(steps):
        fleet.begin(t)
        begin, cpu = time.perf_counter(), time.process_time()
        w, beliefs = prior.e_step(w, beliefs, evidence)
        seconds.append(time.perf_counter() - begin)
        used.append(time.process_time() - cpu)
        beliefs = prior.m_step(w, beliefs, evidence)
    member = beliefs["omega"] if name == "sbm" else beliefs["to"].mean(1)
    sweep, cpu_sweep = (
        [1e3 * s / prior.sweeps for s in all_of[1:]] for all_of in (seconds, used)
    )  # the first: a start
    return {
        "prior": name,
        "clients": n,
        "communities": communities,
        "sweeps": prior.sweeps,
        "ms_a_sweep": statistics.median(sweep),
        "ms_a_sweep_least": min(sweep),
        "ms_a_sweep_cpu": statistics.median(cpu_sweep),
        "limit_ms": LIMITS.get(case),
        "peak_mb": memory("VmHWM") - before,
        "kept_mb": sum(t.numel() * t.element_size() for t in (w, *beliefs.values())) / 2**20,
        "adjusted_rand": adjusted_rand(member.argmax(1), group),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="E-steps measured, after which the median is taken")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (case, options.steps, options.threads)) for case in CASES]
    table = Table("prior", "clients", "M", "ms a sweep", "least", "cpu", "promised", "peak MB", "kept MB", "Rand")
    for r in rows:
        keys = ("ms_a_sweep", "ms_a_sweep_least", "ms_a_sweep_cpu", "limit_ms", "peak_mb", "kept_mb")
        shown = ["" if r[k] is None else f"{r[k]:.1f}" for k in keys]
        table.add_row(r["prior"], str(r["clients"]), str(r["communities"]), *shown, f"{r['adjusted_rand']:.3f}")
    Console(width=110).print(table)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "threads": options.threads, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
