"""How fast a population trains: the stacked fleet, compiled and not, beside the plain loop, in one run.

    python benchmarks/engine.py [--device cpu|cuda] [--json FILE] [--repeats 5] [--cases WORD,WORD]
                                [--threads 1] [--clock process]

Variants of one case are timed in turn, round after round, so that a noisy machine disturbs all of them alike; a table
shows the median of each and the ratio to the loop. Where others use the machine as well, one thread and the processor's
clock come near to what a quiet core would take. Losses of the variants are checked to agree first.

Large images (ResNet-9, SCooL's CNN by the hundred) are for GPUs, and run on a CPU only where `--cases` names them, as
"ResNet" does. They stand beside one model that is trained with everyone's batch at once, in the same precision.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from coterie.asks import Fit, Gradient, Plan
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet
from coterie.models.cnn import CNN, cnn_scool
from coterie.models.lenet import LeNet
from coterie.models.norm import Norm
from coterie.models.resnet9 import ResNet9

Go = Callable[[], torch.Tensor]
LARGE = ", 4 steps"  # what is for GPUs
THOUSAND = "1,000 MLP clients, 20 samples each, one epoch"


def people(
    n: int, samples: int, shape: tuple[int, ...], outputs: int, model: Callable[[], nn.Module], task: str
) -> Population:
    g = torch.Generator().manual_seed(0)

    def one() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(samples, *shape, generator=g)
        if task == "regression":
            return x, torch.randn(samples, outputs, generator=g)
        y = torch.randint(0, outputs, (samples,), generator=g)
        y[:outputs] = torch.arange(outputs)
        return x, y

    return population([Client(f"c{i}", one()) for i in range(n)], model=model, task=task)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def epoch(fleet: Fleet, batch: int = 10) -> Go:
    x = fleet.initial()
    return lambda: opened(fleet).ask(Fit(fleet.everyone, x, Plan(epochs=1, batch=batch, lr=0.05))).loss


def gradient(fleet: Fleet, batch: int) -> Go:
    x = fleet.initial()
    return lambda: opened(fleet).ask(Gradient(fleet.everyone, x, batch)).loss


def opened(fleet: Fleet) -> Fleet:
    """Round 0 again, so that every call draws the same batches."""
    fleet.begin(0)
    return fleet


def bare(fleet: StackedFleet) -> Go:
    """The same epoch as anyone would write it: a module, an optimiser and a loop, for one client after the other."""
    held = fleet.population.index["train"]
    x, y = fleet.population.inputs, fleet.population.targets

    def go() -> torch.Tensor:
        losses = []
        for rows in held:
            module = mlp()
            optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
            for s in range(0, len(rows), 10):
                now = rows[s : s + 10]
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(module(x[now]), y[now])
                loss.backward()
                optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return go


def baddbmm(fleet: StackedFleet) -> Go:
    """The same epoch of the MLP written by hand: what a fleet can hope for."""
    held = torch.stack(list(fleet.population.index["train"]))
    start = fleet.initial()
    batch, rate = 10, 0.05

    def go() -> torch.Tensor:
        w1, b1, w2, b2 = (v.clone() for v in fleet._layouts[0].views(start).values())
        w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
        b1, b2 = b1[:, None], b2[:, None]
        for s in range(0, held.shape[1], batch):
            now = held[:, s : s + batch]
            x, y = fleet.parts.samples.fetch(now, None, None)
            h = torch.baddbmm(b1, x, w1)
            a = h.relu()
            p = torch.baddbmm(b2, a, w2).softmax(-1)
            p.scatter_add_(2, y[..., None], torch.full_like(p[..., :1], -1.0))
            p /= batch
            back = torch.bmm(p, w2.mT) * (h > 0)
            w2.baddbmm_(a.mT, p, alpha=-rate)
            b2 -= rate * p.sum(1, keepdim=True)
            w1.baddbmm_(x.mT, back, alpha=-rate)
            b1 -= rate * back.sum(1, keepdim=True)
        return w1

    return go


def one_model(n: int, batch: int, model: Callable[[], nn.Module], device: str, steps: int) -> Go:
    """What the hardware can do: one compiled model, channels last, with the batches of all clients together."""
    layout = torch.channels_last
    net = model().to(device, memory_format=layout).train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, fused=device == "cuda")
    x = torch.randn(n * batch, 3, 32, 32, device=device).to(memory_format=layout)
    y = torch.randint(0, 10, (n * batch,), device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return nn.functional.cross_entropy(net(x), y)

    value = torch.compile(loss, mode="reduce-overhead") if device == "cuda" else loss

    def go() -> torch.Tensor:
        for _ in range(steps):
            optimiser.zero_grad()
            now = value()
            now.backward()
            optimiser.step()
        return now.detach()[None]

    return go


def timed(go: Go, clock: Callable[[], float] = time.perf_counter, least: float = 0.05) -> float:
    """Milliseconds of one call, repeated until the clock has something to say."""
    calls = 0
    start = clock()
    while True:
        go()
        calls += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        passed = clock() - start
        if passed > least:
            return passed / calls * 1e3


Case = Callable[[], dict[str, Go]]


def cases(device: str) -> dict[str, Case]:
    """What is compared, by name; nothing is made before it is called."""

    def fleets(p: Population) -> dict[str, Fleet]:
        made: dict[str, Fleet] = {
            "loop": LoopFleet(p, device=device),
            "stacked": StackedFleet(p, device=device, compile=False),
            "compiled": StackedFleet(p, device=device, compile=True),
        }
        return made

    def training() -> dict[str, Go]:
        made = fleets(people(20, 500, (784,), 10, mlp, "classification"))
        by_hand = made["stacked"]
        assert isinstance(by_hand, StackedFleet)
        every = {"bare torch loop": bare(by_hand)} | {name: epoch(f) for name, f in made.items()}
        return every | {"baddbmm by hand": baddbmm(by_hand)}

    def linear(batch: int) -> dict[str, Go]:
        made = fleets(people(150, 1000, (10,), 1, lambda: nn.Linear(10, 1, bias=False), "regression"))
        return {name: gradient(f, batch) for name, f in made.items()}

    def images(n: int, shape: tuple[int, ...], model: Callable[[], nn.Module], batch: int = 10) -> dict[str, Go]:
        """Without the compiled one, which takes a minute to compile and is asked for by GPUs only."""
        p = people(n, 5 * batch, shape, 10, model, "classification")
        made = {"loop": LoopFleet(p, device=device), "stacked": StackedFleet(p, device=device, compile=False)}
        if device == "cpu":
            made["all in one chunk"] = StackedFleet(p, compile=False, chunk=n)
        return {name: epoch(f, batch) for name, f in made.items()}

    def large(n: int, model: Callable[[], nn.Module], batch: int, steps: int = 4) -> dict[str, Go]:
        p = people(n, steps * batch, (3, 32, 32), 10, model, "classification")
        low = torch.bfloat16 if device == "cuda" else None
        made: dict[str, Fleet] = {"compiled": StackedFleet(p, device=device, autocast=low, compile=device == "cuda")}
        if n <= 100:
            made["loop"] = LoopFleet(p, device=device)
        every = {name: epoch(f, batch) for name, f in made.items()}
        return every | {"one model": one_model(n, batch, model, device, steps)}

    def resnet(norm: Norm) -> Callable[[], nn.Module]:
        return lambda: ResNet9(norm=norm, dropout=0.0)

    gpu: dict[str, Case] = {
        f"{n} ResNet-9s with {norm} normalisation, batch {b}, 4 steps": partial(large, n, resnet(norm), b)
        for n, b in ([(8, 128), (80, 128)] if device == "cuda" else [(2, 8)])
        for norm in ("batch", "group")
    } | {
        f"{n} of SCooL's CNNs, 32×32, batch 10, 4 steps": partial(large, n, cnn_scool, 10)
        for n in ((100, 1000) if device == "cuda" else (4,))
    }  # fmt: skip
    return {
        "20 clients × 500, MLP 784-100-10, batch 10, one epoch": training,
        "20 small CNNs × 50, 8×8, batch 10, one epoch": lambda: images(20, (1, 8, 8), lambda: CNN(size=8)),
        "20 small CNNs × 50, 28×28, batch 10, one epoch": lambda: images(20, (1, 28, 28), CNN),
        "20 LeNets × 50, 32×32, batch 10, one epoch": lambda: images(20, (3, 32, 32), LeNet),
        "2 LeNets × 50, 32×32, batch 10, one epoch": lambda: images(2, (3, 32, 32), LeNet),
        "8 LeNets × 320, 32×32, batch 64, one epoch": lambda: images(8, (3, 32, 32), LeNet, 64),
        "8 small CNNs × 320, 28×28, batch 64, one epoch": lambda: images(8, (1, 28, 28), CNN, 64),
        "4 of SCooL's CNNs × 50, 32×32, batch 10, one epoch": lambda: images(4, (3, 32, 32), cnn_scool),
        "150 linear clients, d=10, one gradient ask, batch 10": lambda: linear(10),
        "150 linear clients, d=10, one gradient ask, batch 100": lambda: linear(100),
    } | gpu


def thousand(device: str) -> dict[str, float]:
    """1,000 MLP clients: milliseconds of an epoch of 20 samples, and the most memory this process ever held."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fleet = StackedFleet(people(1000, 20, (784,), 10, mlp, "classification"), device=device, compile=False)
    took = timed(epoch(fleet))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ms": took, "peak GB of the process": peak / 2**20, "before GB": before / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--thousand", action="store_true", help="only the memory of 1,000 clients, in a fresh process")
    parser.add_argument("--cases", help="only those whose names hold one of these words")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "process" else time.perf_counter
    words = options.cases.split(",") if options.cases else [""]
    if options.thousand:
        print(json.dumps(thousand(options.device)))
        return
    console = Console()
    report: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/engine.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "clock": options.clock,
        "cases": {},
    }
    for name, case in cases(options.device).items():
        if not any(word in name for word in words) or (LARGE in name and words == [""] and options.device == "cpu"):
            continue
        variants = case()
        losses = {kind: go() for kind, go in variants.items()}
        rounded = (
            {"rtol": 0.1, "atol": 0.0} if LARGE in name and options.device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
        )
        for kind, loss in losses.items():
            if kind not in ("bare torch loop", "baddbmm by hand", "one model") and "loop" in losses:
                torch.testing.assert_close(loss, losses["loop"], **rounded)
        times: dict[str, list[float]] = {kind: [] for kind in variants}
        for _ in range(options.repeats):
            for kind, go in variants.items():
                times[kind].append(timed(go, clock))
        median = {kind: statistics.median(t) for kind, t in times.items()}
        found = {kind: {"ms": ms} for kind, ms in median.items()}
        for other, told in (("loop", "speed-up"), ("one model", "of one model's speed")):
            if other in median:
                found = {kind: {**row, told: median[other] / row["ms"]} for kind, row in found.items()}
        columns = list(dict.fromkeys(key for row in found.values() for key in row))
        table = Table("variant", *columns, title=name)
        for kind, row in found.items():
            table.add_row(kind, *(f"{row[c]:.2f}" if c in row else "–" for c in columns))
        console.print(table)
        report["cases"][name] = found

    if any(word in THOUSAND for word in words):
        done = subprocess.run(
            [sys.executable, __file__, "--thousand", "--device", options.device], capture_output=True, text=True
        )
        report[THOUSAND] = json.loads(done.stdout)
        console.print(f"{THOUSAND}:", report[THOUSAND])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
