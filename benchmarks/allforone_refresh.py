"""What a refresh of All-for-one's weights costs: the most memory of a process in which n clients compare gradients.

    python benchmarks/allforone_refresh.py [--clients 100] [--cases 16:100,512:2] [--json FILE]

A refresh takes the gradient of everyone at every model, n² rows of d numbers, of which only inner products are wanted:
with 100 clients and LeNet (62,006 parameters) all rows together would be 2.5 GB in float32. The fleet streams them.
A case is `b_α : how many clients refresh`; each is measured in a process of its own, on generated images (what is in
them costs nothing). Memory grows with n, not with how many refresh, and time is proportional to that; b_α adds at most
what a chunk may take (`fleet.stacked.chunks.ROOM`).
"""

import argparse
import json
import multiprocessing
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from coterie.algorithms.allforone import AllForOne
from coterie.data.population import Client, population
from coterie.fleet.stacked import StackedFleet
from coterie.models.lenet import LeNet


def peak() -> float:
    """MB this process had resident at most."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def measure(n: int, batch: int, due: int) -> dict[str, Any]:
    """One refresh of so many of n clients."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    clients = [
        Client(f"c{i:03d}", (torch.randn(40, 3, 32, 32, generator=g), torch.randint(10, (40,), generator=g)))
        for i in range(n)
    ]
    fleet = StackedFleet(population(clients, model=LeNet, task="classification"), seed=0)
    algorithm = AllForOne(criterion="continuous", b_alpha=batch)
    state = algorithm.init(fleet)
    fleet.begin(0)
    before, begin, cpu = peak(), time.perf_counter(), time.process_time()
    _, probes = algorithm.measure(fleet, state, fleet.everyone[:due])
    return {
        "clients": n,
        "parameters": fleet.d,
        "b_alpha": batch,
        "refreshed": due,
        "gradients": probes,
        "peak_mb": peak(),
        "peak_mb_before": before,
        "rows_mb": probes * fleet.d * 4 / 2**20,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cases", default="16:100,512:2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [tuple(int(v) for v in case.split(":")) for case in options.cases.split(",")]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (options.clients, batch, due)) for batch, due in cases]
    table = Table("clients", "d", "b_α", "refreshed", "gradients", "peak MB", "before", "all rows MB", "seconds", "cpu")
    for row in rows:
        table.add_row(*(str(v) if isinstance(v, int) else f"{v:.0f}" for v in row.values()))
    Console(width=110).print(table)
    if options.json:
        told = {"command": shlex.join(["python", *sys.argv]), "threads": 1, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
