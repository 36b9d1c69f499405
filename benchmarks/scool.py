"""What SCooL's block models cost: a sweep and an E-step of n clients in M communities, and the memory it takes.

    python benchmarks/scool.py [--steps 15] [--threads 1] [--json FILE]

Graphs are sampled from the model itself (links at 0.8 inside a community, 0.2 across), likelihoods say with noise which
links there are. A sweep is links, everyone's memberships one after the other, Dirichlets; an E-step is `sweeps` of them
from where the last round ended, as many from a new start, and the choice between the two. `least` is the quickest,
`cpu` what the process itself used (the medians), which others on the machine change less. `peak` is what E-steps added
at most to the memory of a process of their own (Linux), `kept` what stays between them; `Rand` is how well communities
are recovered (adjusted; 1: exactly).
"""

import argparse
import json
import multiprocessing
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
    alone = replace(prior, restart=False)  # its E-steps are sweeps and nothing else
    w, beliefs = prior.init(fleet)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    e_steps, sweeps = [], []  # (wall, process) seconds
    for t in range(steps + 1):
        fleet.begin(t)
        (w, beliefs), took = timed(prior.e_step, w, beliefs, evidence)
        _, swept = timed(alone.e_step, w, beliefs, evidence)
        e_steps.append(took)
        sweeps.append([seconds / prior.sweeps for seconds in swept])
        beliefs = prior.m_step(w, beliefs, evidence)
    member = beliefs["omega"] if name == "sbm" else beliefs["to"].mean(1)
    (wall, cpu), (wall_e, cpu_e) = (zip(*found[1:], strict=True) for found in (sweeps, e_steps))  # the first: a start
    return {
        "prior": name,
        "clients": n,
        "communities": communities,
        "ms_a_sweep": 1e3 * statistics.median(wall),
        "ms_a_sweep_least": 1e3 * min(wall),
        "ms_a_sweep_cpu": 1e3 * statistics.median(cpu),
        "limit_ms": LIMITS.get(case),
        "sweeps": prior.sweeps,
        "ms_an_e_step": 1e3 * statistics.median(wall_e),
        "ms_an_e_step_cpu": 1e3 * statistics.median(cpu_e),
        "peak_mb": memory("VmHWM") - before,
        "kept_mb": sum(t.numel() * t.element_size() for t in (w, *beliefs.values())) / 2**20,
        "adjusted_rand": adjusted_rand(member.argmax(1), group),
    }


def timed(work: Callable[..., Any], *given: Any) -> tuple[Any, list[float]]:
    """What it gives, and the seconds it took: by the clock, and of this process."""
    begin, cpu = time.perf_counter(), time.process_time()
    found = work(*given)
    return found, [time.perf_counter() - begin, time.process_time() - cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="E-steps measured, after which the median is taken")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (case, options.steps, options.threads)) for case in CASES]
    head = ("ms a sweep", "least", "cpu", "promised", "ms an E-step", "cpu", "peak MB", "kept MB", "Rand")
    table = Table("prior", "clients", "M", *head)
    for r in rows:
        keys = ("ms_a_sweep", "ms_a_sweep_least", "ms_a_sweep_cpu", "limit_ms")
        keys += ("ms_an_e_step", "ms_an_e_step_cpu", "peak_mb", "kept_mb")
        shown = ["" if r[k] is None else f"{r[k]:.1f}" for k in keys]
        table.add_row(r["prior"], str(r["clients"]), str(r["communities"]), *shown, f"{r['adjusted_rand']:.3f}")
    Console(width=130).print(table)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "threads": options.threads, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
