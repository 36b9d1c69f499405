"""How many rows are computed at once: what fits, what a CPU's caches hold, and sizes that are few."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from coterie.data.population import SPLITS
from coterie.fleet.stacked.samples import Samples
from coterie.fleet.stacked.stack import Stack
from coterie.tasks import logits_of

CONVOLVED, CONVOLVED_EACH = 12e6, 1.6e6  # products in a batch's convolutions: see docs/performance.md
CACHED = 20 << 20  # bytes of parameters side by side on a CPU: more fall out of its caches between two steps
ROOM = 1 << 30  # bytes that a chunk may take on a CPU, which more would not make faster


class Chunks:
    """`rows` at once is what should fit unless told otherwise; `most` pairs is what did not run out of memory."""

    def __init__(self, samples: Samples, compiled: bool, rows: int | None) -> None:
        self.samples, self.compiled, self.rows = samples, compiled, rows
        self.device, self.dtype = samples.device, samples.dtype
        self.tried = 1  # pairs at once, in the chunk that was begun last
        self.most: int | None = None  # pairs at once since memory ran out
        self._costs: dict[int, tuple[int, int]] = {}

    def at_once(self, stack: Stack, samples: int, pairs: int = 1, trained: int | None = None) -> int:
        """How many rows are computed at once: what should fit, and never more than what did not fit before allows.

        Where a row stands for several pairs, whose samples are `samples` together, that may be none. `trained` says how
        many rows there are of which a gradient is wanted.
        """
        if self.rows is not None:
            rows = self.rows
        elif trained is not None and self._apart(stack, samples, trained):
            rows = 1
        else:
            rows = self._should_fit(stack, samples)
        if self.most is not None:
            rows = min(rows, self.most // pairs)
        self.tried = rows * pairs
        return rows

    def split(self, stack: Stack, pairs: Tensor, most: int, pad: bool = True) -> Iterator[tuple[Tensor, int]]:
        """Pairs in chunks of no more than `most`, and how many of each chunk are real.

        A step is compiled for every size it meets, and compiling is slow, so there are few: as many rows as the stack
        has clients (its own gradients have been compiled anyway), a quarter of that, a sixteenth … A rest that fills
        more than half of a size is padded to it with its last pair.
        """
        for chunk in pairs.split(most):
            if not (self.compiled and pad):
                yield chunk, len(chunk)
                continue
            size = min(stack.n, most)
            while len(chunk):
                while 2 * len(chunk) <= size and size > 2:
                    size = max(2, size // 4)
                real = min(size, len(chunk))
                yield torch.cat([chunk[:real], chunk[real - 1 : real].expand(size - real)]), real
                chunk = chunk[real:]

    def longest(self, stack: Stack, split: str, sizes: Tensor) -> int:
        """How many samples whole splits of these sizes are padded to; a compiled step meets few such numbers."""
        longest = int(sizes.max())
        if not self.compiled or stack.fresh:  # batch statistics must not see padding
            return longest
        return rounded(longest, stack.held[split].shape[1])

    def cost(self, stack: Stack) -> tuple[int, int]:
        """Numbers a sample leaves behind in a forward pass, and products in its convolutions; counted once by hooks."""
        if stack.number not in self._costs:
            total, products = [int(self.samples.inputs[0].numel())], [0]

            def count(layer: nn.Module, _given: Any, out: Any) -> None:
                size = logits_of(out).numel()
                total.append(2 * size)
                if isinstance(layer, nn.modules.conv._ConvNd):
                    products.append(size * layer.weight[0].numel())

            hooks = [m.register_forward_hook(count) for m in stack.module.modules() if not list(m.children())]
            try:
                index = self.samples.population.index
                first = next(int(r[0]) for split in SPLITS for r in index[split] if len(r))
                with torch.no_grad():
                    x, _ = self.samples.fetch(torch.tensor([[first]], device=self.device), None, None)
                    stack.module.eval()(x[0])
            finally:
                for hook in hooks:
                    hook.remove()
            self._costs[stack.number] = sum(total), sum(products)
        return self._costs[stack.number]

    def _should_fit(self, stack: Stack, samples: int) -> int:
        """How many rows fit: parameters, gradients, moments, and what a batch leaves behind for the backward pass.

        The machine's whole memory counts, not what is free just now: equal chunks round equally.
        """
        bytes_each = self.dtype.itemsize * (6 * stack.layout.d + samples * self.cost(stack)[0])
        if self.device.type == "cuda":
            room = torch.cuda.get_device_properties(self.device).total_memory * 0.5
        else:
            room = min(ROOM, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.2)
        fit = max(1, int(room // max(1, bytes_each)))
        if self.device.type == "cpu" and not self.compiled:
            fit = min(fit, max(8, CACHED // (self.dtype.itemsize * stack.layout.d)))
        return fit

    def _apart(self, stack: Stack, samples: int, rows: int) -> bool:
        """Whether rows train faster one after the other: on a CPU, a convolution with a kernel per client is slower.

        What a stack saves is the cost of calls, which few rows, or much to compute in each, do not make up for. This is
        a rule and no measurement, since equal chunks round equally: a run that is resumed must pick as it did before.
        """
        if self.device.type != "cpu" or self.compiled:
            return False
        products = self.cost(stack)[1] * samples
        return products > CONVOLVED or products > CONVOLVED_EACH * rows


def powers(count: int) -> Iterator[tuple[int, int]]:
    """The spans of powers of two that a count is made of, largest first."""
    start = 0
    while start < count:
        size = 1 << ((count - start).bit_length() - 1)
        yield start, start + size
        start += size


def rounded(count: int, whole: int) -> int:
    """The least that is no less than a count, of: the whole, its double, half, quarter … (rounded up)."""
    size = max(1, whole)
    while size < count:
        size *= 2
    while size > 1 and -(-size // 2) >= count:
        size = -(-size // 2)
    return size


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it was memory: a CPU's allocator has no error of its own, nor have libraries and compilers."""
    signs = ("can't allocate memory", "out of memory", "OutOfMemoryError", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)
