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
    assert fleet._most is not None
    assert 1 <= fleet._most < CLIENTS
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
    print("halved to", fleet._most)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are Linux's")
def test_a_chunk_that_does_not_fit_is_halved_until_it_does() -> None:
    code = "import torch; torch.set_num_threads(1); from fleet.test_memory import short_of_memory; short_of_memory()"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "halved to" in done.stdout
    assert "out of memory with 24 models at once" in done.stderr


def test_large_batches_come_in_smaller_chunks() -> None:
    """What a batch leaves behind for the backward pass counts: a chunk of wide layers stays below a gigabyte."""
    fleet = StackedFleet(people())
    (stack,) = fleet._stacks
    left = 4 * 2 * (2 * WIDE)  # bytes for each sample: two layers of this width in float32, their gradients beside them
    rows = [fleet._rows_at_once(stack, samples) for samples in (16, 512, 5120)]
    assert rows == sorted(rows, reverse=True)
    assert rows[2] >= 1
    assert rows[1] * 512 * left <= 2**30
    assert rows[2] * 5120 * left <= 2**30


class Tight(StackedFleet):
    """Nothing ever fits."""

    def _gradients(self, *args: object) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        raise torch.OutOfMemoryError("no room\nfor anything")


def test_where_not_even_one_model_fits_it_is_said() -> None:
    fleet = Tight(people())
    with pytest.warns(UserWarning, match="going on with 1"), pytest.raises(DeviceError, match="not even one"):
        answers(fleet)


class Roomy(StackedFleet):
    """There is room for the samples of three pairs, as a GPU, its libraries or a compiler would say it."""

    said = "CUDA out of memory"

    def _gradient_step(self, *args: object) -> Callable[..., Any]:
        step = super()._gradient_step(*args)  # type: ignore[arg-type]

        def tight(rows: torch.Tensor, buffers: Any, key: Any, samples: torch.Tensor, *rest: Any) -> Any:
            if samples.numel() > 3 * 4:
                raise RuntimeError(self.said)
            return step(rows, buffers, key, samples, *rest)

        return tight


@pytest.mark.parametrize("said", ["CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"])
def test_a_sum_whose_samples_do_not_fit_at_once_is_added_up(said: str) -> None:
    """One gradient of all pairs' losses is the fast way; apart they take less memory at once."""
    people_here = people()
    fleets = [StackedFleet(people_here), Roomy(people_here)]
    fleets[1].said = said  # type: ignore[attr-defined]
    sums = []
    for fleet in fleets:
        fleet.begin(0)
        into = torch.zeros(CLIENTS, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sums.append(fleet.ask(Gradient(fleet.everyone, fleet.initial()[0], 4, give="sum", into=into)).sums)
    assert fleets[1]._most == 3
    torch.testing.assert_close(*sums)


def test_other_errors_are_not_taken_for_it() -> None:
    class Broken(StackedFleet):
        def _gradients(self, *args: object) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        answers(Broken(people()))
