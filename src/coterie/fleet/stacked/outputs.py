"""Predict and Evaluate: what models give for public inputs and whole splits, with which buffers."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import vmap

from coterie.asks import NONFINITE, OK, Answer, Evaluate, Loss, Predict
from coterie.fleet.base import RECALIBRATION
from coterie.fleet.compress import coarsened
from coterie.fleet.reduce import finite, zeroed
from coterie.fleet.stacked.parts import Parts
from coterie.fleet.stacked.stack import Rows, Stack

BLOCK, LEAST, MOST = 256, 64, 1024  # samples at once: of public inputs; of a split, no fewer and no more


class Outputs:
    """Answers Predict and Evaluate."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def predict(self, ask: Predict) -> Answer:
        """Outputs of each pair on public inputs."""
        parts, device = self.parts, self.parts.device
        x = parts.samples.public(ask.inputs)
        found: list[tuple[Tensor, Tensor]] = []
        for stack, pairs in parts.by_stack(ask):
            for part in pairs.split(parts.chunks.at_once(stack, BLOCK)):
                rows = parts.memory.models(stack, ask, part)
                buffers = self.buffers(stack, ask, stack.local[ask.clients[part]], rows)
                found.append((part, self.of(stack, rows, buffers, x)))
        if not found:
            return Answer(torch.zeros(0, dtype=torch.int8, device=device))
        outputs = torch.empty(ask.m, *found[0][1].shape[1:], dtype=found[0][1].dtype, device=device)
        for part, out in found:
            outputs[part.to(device)] = out
        if ask.soft:
            outputs = parts.task.soft(outputs.flatten(0, 1)).view_as(outputs)
        good = finite(outputs.flatten(1))
        outputs = zeroed(coarsened(outputs, ask.coarse), good)
        return Answer(torch.where(good, OK, NONFINITE).to(torch.int8), outputs=outputs)

    def of(self, stack: Stack, rows: Tensor, buffers: Rows, x: Tensor) -> Tensor:
        """What some rows give for the same inputs: m×P×…."""
        forward = self.parts.compute.forward(stack)
        parameters = stack.layout.views(rows)
        with torch.no_grad():
            blocks = [forward(parameters, buffers, b.expand(len(rows), *b.shape)) for b in x.split(BLOCK)]
        return torch.cat(blocks, 1)

    def evaluate(self, ask: Evaluate) -> Answer:
        """The task's metrics of each pair on a whole split."""
        parts, device, chunks = self.parts, self.parts.device, self.parts.chunks
        names = ask.metrics or parts.task.metrics
        values = {name: torch.full((ask.m,), torch.nan, dtype=torch.float64, device=device) for name in names}
        for stack, pairs in parts.by_stack(ask):
            forward = parts.compute.forward(stack)
            sizes = stack.sizes[ask.split][stack.local[ask.clients[pairs]]]
            pairs = pairs[torch.argsort(sizes, stable=True)]  # equal sizes together: little padding
            for part in pairs.split(min(len(pairs), chunks.at_once(stack, LEAST))):
                local = stack.local[ask.clients[part]]
                mine = stack.sizes[ask.split][local]
                longest = int(mine.max())
                if not longest:
                    continue
                rows = parts.memory.models(stack, ask, part)
                buffers = self.buffers(stack, ask, local, rows)
                parameters = stack.layout.views(rows)
                there, clients = local.to(device), ask.clients[part].to(device)
                room = LEAST if chunks.rows is not None else max(LEAST, chunks.at_once(stack, 1) // (4 * len(part)))
                room = min(room, MOST)
                summaries = []
                with torch.no_grad():
                    for start in range(0, longest, room):
                        samples = stack.held[ask.split][there, start : min(start + room, longest)]
                        x, y = parts.samples.fetch(samples, clients[:, None], None)
                        summaries.append(vmap(parts.task.summary)(forward(parameters, buffers, x), y))
                valid = torch.arange(longest) < mine[:, None]
                measured = parts.task.measure(torch.cat(summaries, 1), valid.to(device), names)
                for name in names:
                    values[name][part.to(device)] = measured[name].double()
        return Answer(torch.zeros(ask.m, dtype=torch.int8, device=device), metrics=values)

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def buffers(self, stack: Stack, ask: Loss | Predict | Evaluate, local: Tensor, rows: Tensor) -> Rows:
        """The buffers that models are looked at with, by the ask's policy."""
        memory = self.parts.memory
        mine = memory.buffers(stack, ask.memory, local)
        if ask.buffers == "personal" or not mine:
            return mine
        if ask.buffers == "averaged":
            everyone = memory.buffers(
                stack, ask.memory, stack.local[stack.clients[stack.clients < self.parts.population.n]]
            )
            return {k: v.double().mean(0).to(v.dtype).expand(len(local), *v.shape[1:]) for k, v in everyone.items()}
        return self._recalibrated(stack, local, rows)

    def _recalibrated(self, stack: Stack, local: Tensor, rows: Tensor) -> Rows:
        """Buffers after one pass over each client's training data."""
        sizes = stack.sizes["train"][local]
        parameters = stack.layout.views(rows)
        result = {k: v.expand(len(local), *v.shape).clone() for k, v in stack.fresh.items()}
        for size in sizes.unique().tolist():
            these = (sizes == size).nonzero().flatten()
            there = these.to(self.parts.device)
            part = {name: p[there] for name, p in parameters.items()}
            made = self.parts.compute.statistics(stack, part, self._batches(stack, local[these], size))
            for name, value in made.items():
                result[name][there] = value
        return result

    def _batches(self, stack: Stack, local: Tensor, size: int) -> Iterator[Tensor]:
        """One pass over the training data of clients who hold equally much."""
        batch = min(RECALIBRATION, size)
        for start in range(0, size - batch + 1, batch):
            samples = stack.held["train"][local.to(self.parts.device), start : start + batch]
            yield self.parts.samples.fetch(samples, None, None)[0]
