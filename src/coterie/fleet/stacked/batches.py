"""Gradient and Loss: what is asked about batches of a client's own data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import NONFINITE, OK, Answer, Gradient, Loss
from coterie.fleet.reduce import Sink, finite
from coterie.fleet.stacked.chunks import rounded
from coterie.fleet.stacked.memory import run_of
from coterie.fleet.stacked.outputs import Outputs
from coterie.fleet.stacked.parts import Parts
from coterie.fleet.stacked.samples import shades
from coterie.fleet.stacked.stack import Now, Rows, Stack, drawn_by

Step = Callable[..., tuple[Tensor, Tensor, Tensor, Rows]]


class Batches:
    """Answers Gradient and Loss."""

    def __init__(self, parts: Parts, outputs: Outputs) -> None:
        self.parts, self.outputs = parts, outputs
        self._steps: dict[tuple[int, bool], Step] = {}

    # ---- Gradient ----------------------------------------------------------------------------------------------------

    def gradient(self, ask: Gradient, width: int, now: Now) -> Answer:
        """Rows, sums or inner products of one gradient per pair."""
        parts, device = self.parts, self.parts.device
        sink = Sink(ask, width, parts.dtype, device, draws.fold_int(draws.name("sketch"), now.seed, now.t, now.place))
        reason = torch.zeros(ask.m, dtype=torch.int8, device=device)
        losses = torch.zeros(ask.m, dtype=parts.dtype, device=device)
        for stack, pairs in parts.by_stack(ask):
            fused = _fusable(stack, ask) and self._fused_sum(stack, ask, pairs, now, sink, reason, losses)
            for part, real, samples, weights in () if fused else self._chunks(stack, ask, pairs, now):
                grads, loss, after = self.gradients(stack, ask, part, samples, weights, now)
                if real < len(part):
                    part, grads, loss = part[:real], grads[:real], loss[:real]
                    after = {name: b[:real] for name, b in after.items()}
                good = finite(grads) & torch.isfinite(loss)
                there = part.to(device)
                reason[there] = torch.where(good, OK, NONFINITE).to(torch.int8)
                losses[there] = torch.where(good, loss, 0).to(parts.dtype)
                sink.take(part, parts.squeezed(stack, ask, part, grads, now), good)
                if ask.track:
                    parts.memory.keep_buffers(stack, ask.memory, stack.local[ask.clients[part]], after, good)
            if ask.track and ask.sampling == "epoch" and ask.batch is not None:
                parts.memory.move_on(stack, ask, pairs, torch.full((len(pairs),), ask.batch), reason)
        return sink.answer(reason, losses)

    def gradients(
        self, stack: Stack, ask: Gradient, part: Tensor, samples: Tensor, weights: Tensor | None, now: Now
    ) -> tuple[Tensor, Tensor, Rows]:
        """One gradient per pair, as rows; the losses; and the buffers afterwards."""
        parts, clients = self.parts, ask.clients[part]
        here, draw = stack.local[clients], drawn_by(ask, part)
        key = stack.dropout_keys(here, now, draw)
        key = None if key is None else draws.fold(key, 0)
        shade = shades(parts.samples.keys(stack, here, now, draw), 0, samples.shape[1])
        rows, buffers = parts.memory.models(stack, ask, part), parts.memory.buffers(stack, ask.memory, here)
        step = self.step(stack, parts.population.online(ask.split))
        grads, loss, _, after = step(rows, buffers, key, samples, clients.to(parts.device)[:, None], shade, weights)
        return grads, loss, after

    def step(self, stack: Stack, online: bool) -> Step:
        """(rows, buffers, dropout keys, samples, clients, shades, weights) → gradients, losses, each one, buffers."""
        mark = (stack.number, online)
        if mark not in self._steps:
            compute, fetch = self.parts.compute, self.parts.samples.fetch
            one = compute.differentiated(stack, compute.value(stack))

            def step(rows: Tensor, buffers: Rows, key: Tensor | None, samples: Tensor, clients: Tensor,
                     shade: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Rows]:  # fmt: skip
                x, y = fetch(samples, clients, shade, online)
                grads, (loss, (each, after)) = one(stack.layout.views(rows), buffers, key, x, y, weights)
                return stack.layout.flatten(grads), loss, each, after

            self._steps[mark] = compute.compiled_step(step)
        return self._steps[mark]

    def _fused_sum(
        self, stack: Stack, ask: Gradient, pairs: Tensor, now: Now, sink: Sink, reason: Tensor, losses: Tensor
    ) -> bool:
        """Σ weight · gradient as one gradient per sum.

        False, and nothing done, where any number is not finite, or where not even one sum's samples fit in memory.
        """
        assert ask.into is not None
        assert ask.batch is not None
        assert isinstance(ask.models, Tensor)
        parts, device, chunks = self.parts, self.parts.device, self.parts.chunks
        outputs, slot, counts = torch.unique(ask.into[pairs], return_inverse=True, return_counts=True)
        order = torch.argsort(slot, stable=True)
        rank = torch.empty_like(slot)
        rank[order] = torch.arange(len(pairs)) - (torch.cumsum(counts, 0) - counts)[slot[order]]
        q = int(counts.max())
        if chunks.compiled:
            q = rounded(q, stack.n)
        most = chunks.at_once(stack, ask.batch * q, q, trained=len(outputs))
        if not most:
            return False
        table = torch.full((len(outputs), q), -1)
        table[slot, rank] = torch.arange(len(pairs))
        weight = torch.ones(len(pairs), dtype=parts.dtype, device=device)
        if ask.weights is not None:
            weight = ask.weights.to(device, parts.dtype)[pairs.to(device)]
        step = self.step(stack, parts.population.online(ask.split))
        done: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for part, real in chunks.split(stack, torch.arange(len(outputs)), most):
            which = table[part]
            missing = which < 0
            chosen = pairs[which.clamp(min=0)]
            flat = chosen.flatten()
            clients = ask.clients[flat]
            samples = parts.samples.drawn(stack, ask, flat, now)
            o, b = len(part), ask.batch
            shade = shades(parts.samples.keys(stack, stack.local[clients], now, drawn_by(ask, flat)), 0, b)
            shade = None if shade is None else shade.view(o, q * b)
            w = weight[which.clamp(min=0).to(device)].masked_fill(missing.to(device), 0)
            spread = (w / b).repeat_interleave(b, 1)
            at = chosen[:, 0] if ask.at is None else ask.at[chosen[:, 0]]
            owner = clients.to(device).view(o, q).repeat_interleave(b, 1)
            grads, _, each, _ = step(run_of(ask.models, at), {}, None, samples.view(o, q * b), owner, shade, spread)
            part, missing, chosen, grads, w = part[:real], missing[:real], chosen[:real], grads[:real], w[:real]
            mean = each.view(o, q, b).mean(2)[:real]
            if not bool(finite(grads).all() & torch.isfinite(mean).all()):
                return False
            done.append((outputs[part].to(device), grads, w, mean))
            losses[chosen[~missing].to(device)] = mean[~missing.to(device)].to(parts.dtype)
        for rows, grads, w, _ in done:
            sink.sums[rows] = sink.sums[rows] + grads
            sink.weight[rows] = sink.weight[rows] + w.sum(1)
        return True

    def _chunks(
        self, stack: Stack, ask: Gradient | Loss, pairs: Tensor, now: Now
    ) -> Iterator[tuple[Tensor, int, Tensor, Tensor | None]]:
        """Chunks of pairs, how many of them are real and not padding, their samples, and the samples' weights.

        Weights are there where clients of different sizes give their whole split: shorter ones are padded.
        """
        chunks, samples = self.parts.chunks, self.parts.samples
        if isinstance(ask, Gradient) and ask.group is not None:
            pairs = pairs[torch.argsort(ask.group[pairs], stable=True)]
        trained = len(pairs) if isinstance(ask, Gradient) else None
        if ask.batch is None:
            sizes = stack.sizes[ask.split][stack.local[ask.clients[pairs]]]
            separate = bool(stack.fresh) and isinstance(ask, Gradient)  # batch statistics must not see padding
            for kind in [pairs[sizes == size] for size in sizes.unique()] if separate else [pairs]:
                at_once = chunks.at_once(stack, chunks.longest(stack, ask.split, sizes), trained=trained)
                for part, real in chunks.split(stack, kind, at_once):
                    local = stack.local[ask.clients[part]]
                    longest = chunks.longest(stack, ask.split, stack.sizes[ask.split][local])
                    yield part, real, *samples.whole(stack, ask.split, local, longest)
            return
        for part, real in chunks.split(stack, pairs, chunks.at_once(stack, ask.batch, trained=trained)):
            yield part, real, samples.drawn(stack, ask, part, now), None

    # ---- Loss --------------------------------------------------------------------------------------------------------

    def loss(self, ask: Loss, now: Now) -> Answer:
        """The loss of each pair."""
        parts, device = self.parts, self.parts.device
        losses = torch.zeros(ask.m, dtype=parts.dtype, device=device)
        for stack, pairs in parts.by_stack(ask):
            one = parts.compute.batched(stack, False, parts.compute.value(stack))
            with torch.no_grad():
                for part, _, samples, weights in self._chunks(stack, ask, pairs, now):
                    local = stack.local[ask.clients[part]]
                    rows = parts.memory.models(stack, ask, part)
                    keys = parts.samples.keys(stack, local, now, drawn_by(ask, part))
                    shade = shades(keys, 0, samples.shape[1])
                    there = ask.clients[part].to(device)[:, None]
                    x, y = parts.samples.fetch(samples, there, shade, parts.population.online(ask.split))
                    buffers = self.outputs.buffers(stack, ask, local, rows)
                    loss, _ = one(stack.layout.views(rows), buffers, None, x, y, weights)
                    losses[part.to(device)] = loss.to(parts.dtype)
        good = torch.isfinite(losses)
        reason = torch.where(good, OK, NONFINITE).to(torch.int8)
        if ask.track and ask.sampling == "epoch" and ask.batch is not None:
            for stack, pairs in parts.by_stack(ask):
                parts.memory.move_on(stack, ask, pairs, torch.full((len(pairs),), ask.batch), reason)
        return Answer(reason, loss=torch.where(good, losses, 0))


def _fusable(stack: Stack, ask: Gradient) -> bool:
    """Whether a sum can be the gradient of one weighted loss: one model per sum, and samples that never meet."""
    plain = ask.compress is None and not (stack.fresh or stack.keys or not isinstance(ask.models, Tensor))
    if ask.into is None or ask.batch is None or not plain:
        return False
    at = torch.arange(ask.m) if ask.at is None else ask.at
    if at.ndim != 1:
        return False
    model = torch.full((ask.outputs or 0,), -1)
    model[ask.into] = at
    return bool((model[ask.into] == at).all())
