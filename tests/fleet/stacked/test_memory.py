"""What happens when a chunk does not fit."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coterie.asks import Fit, Gradient, Plan
from coterie.data.population import Client, Population, population
from coterie.errors import DeviceError
from coterie.fleet.stacked import StackedFleet
from coterie.fleet.stacked.batches import Batches

CLIENTS, SAMPLES, WIDE = 24, 512, 2048


def people() -> Population:
    g = torch.Generator().manual_seed(0)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(SAMPLES, 4, generator=g), torch.randint(0, 2, (SAMPLES,), generator=g)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, WIDE), nn.ReLU(), nn.Linear(WIDE, 2))

    return population([Client(f"c{i}", data()) for i in range(CLIENTS)], model=model, task="classification")


def answers(fleet: StackedFleet) -> list[torch.Tensor]:
    fleet.begin(0)
    x = fleet.initial()
    rows = fleet.ask(Gradient(fleet.everyone, x, SAMPLES)).rows
    trained = fleet.ask(Fit(fleet.everyone, x, Plan(steps=2, batch=SAMPLES), give="rows")).rows
    return [rows, trained]


def short_of_memory() -> None:
    """In a process of its own: with room for a few models, not for all."""
    import resource

    people_here = people()
    right = answers(StackedFleet(people_here, chunk=1))
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 160 * 2**20, resource.RLIM_INFINITY))
    fleet = StackedFleet(people_here, chunk=CLIENTS)  # a forward pass of all: 100 MB a layer, several at once
    found = answers(fleet)
    assert fleet.parts.chunks.most is not None
    assert 1 <= fleet.parts.chunks.most < CLIENTS
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
    print("halved to", fleet.parts.chunks.most)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are Linux's")
def test_a_chunk_that_does_not_fit_is_halved_until_it_does() -> None:
    here = "from fleet.stacked.test_memory import short_of_memory; short_of_memory()"
    code = f"import torch; torch.set_num_threads(1); {here}"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "halved to" in done.stdout
    assert "out of memory with 24 models at once" in done.stderr


def test_large_batches_come_in_smaller_chunks() -> None:
    """What a batch leaves behind for the backward pass counts: a chunk of wide layers stays below a gigabyte."""
    fleet = StackedFleet(people())
    (stack,) = fleet.parts.stacks
    left = 4 * 2 * (2 * WIDE)  # bytes for each sample: two layers of this width in float32, their gradients beside them
    rows = [fleet.parts.chunks.at_once(stack, samples) for samples in (16, 512, 5120)]
    assert rows == sorted(rows, reverse=True)
    assert rows[2] >= 1
    assert rows[1] * 512 * left <= 2**30
    assert rows[2] * 5120 * left <= 2**30


def test_where_not_even_one_model_fits_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(*args: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor anything")

    monkeypatch.setattr(Batches, "gradients", tight)
    fleet = StackedFleet(people())
    with pytest.warns(UserWarning, match="going on with 1"), pytest.raises(DeviceError, match="not even one"):
        answers(fleet)


@pytest.mark.parametrize("said", ["CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"])
def test_a_sum_whose_samples_do_not_fit_at_once_is_added_up(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """There is room for three pairs' samples, as a GPU, its libraries or a compiler would say it.

    One gradient of all pairs' losses is the fast way; apart they take less memory at once.
    """
    people_here = people()
    fleets = [StackedFleet(people_here), StackedFleet(people_here)]
    roomy = Batches.step

    def step(self: Batches, *args: Any) -> Callable[..., Any]:
        inner = roomy(self, *args)

        def tight(rows: torch.Tensor, buffers: Any, key: Any, samples: torch.Tensor, *rest: Any) -> Any:
            if samples.numel() > 3 * 4:
                raise RuntimeError(said)
            return inner(rows, buffers, key, samples, *rest)

        return tight

    sums = []
    for fleet in fleets:
        fleet.begin(0)
        if fleet is fleets[1]:
            monkeypatch.setattr(Batches, "step", step)
        into = torch.zeros(CLIENTS, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sums.append(fleet.ask(Gradient(fleet.everyone, fleet.initial()[0], 4, give="sum", into=into)).sums)
    assert fleets[1].parts.chunks.most == 3
    torch.testing.assert_close(*sums)


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Batches, "gradients", broken)
    with pytest.raises(RuntimeError, match="something else"):
        answers(StackedFleet(people()))
