"""What the asks of a simulator are answered with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.asks import Ask, Fit, Gradient
from coterie.data.population import Population
from coterie.fleet.compress import squeezed
from coterie.fleet.stacked.chunks import Chunks
from coterie.fleet.stacked.compute import Compute
from coterie.fleet.stacked.memory import Memory
from coterie.fleet.stacked.samples import Samples
from coterie.fleet.stacked.stack import Now, Stack, drawn_by
from coterie.tasks import Task


@dataclass(frozen=True)
class Parts:
    """The pieces of one simulator, which whoever answers an ask puts together."""

    population: Population
    device: torch.device
    dtype: torch.dtype
    architectures: Tensor  # of each client, on the host
    stacks: list[Stack]
    memory: Memory
    samples: Samples
    chunks: Chunks
    compute: Compute

    @property
    def task(self) -> Task:
        """What is learned."""
        return self.population.task

    def by_stack(self, ask: Ask) -> Iterator[tuple[Stack, Tensor]]:
        """The pairs of each architecture."""
        if len(self.stacks) == 1:
            if ask.m:
                yield self.stacks[0], torch.arange(ask.m)
            return
        which = self.architectures[ask.clients]
        for stack in self.stacks:
            pairs = (which == stack.number).nonzero().flatten()
            if len(pairs):
                yield stack, pairs

    def squeezed(self, stack: Stack, ask: Gradient | Fit, pairs: Tensor, rows: Tensor, now: Now) -> Tensor:
        """Rows as they arrive."""
        if ask.compress is None:
            return rows
        keys = stack.row_keys(stack.local[ask.clients[pairs]], now, drawn_by(ask, pairs), "compress")
        return squeezed(rows, ask.compress, keys)
