"""All clients of one architecture as one batched computation, on the CPU or one GPU.

Rows are unflattened as views outside `vmap`; `vmap` runs over (row, batch). Clients hold indices into one store of
samples on the device, so ragged data costs nothing. Pairs are answered in chunks that fit in memory. Populations of
several architectures are several stacks, answered one after the other in the same phase.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_map

from coterie import draws
from coterie.asks import NONFINITE, OK, Answer, Ask, Distil, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict
from coterie.data.population import SPLITS, Population
from coterie.errors import DeviceError, ModelError
from coterie.fleet.base import RECALIBRATION, Fleet
from coterie.fleet.compress import coarsened, squeezed
from coterie.fleet.layout import KeyedDropout, Layout
from coterie.fleet.optimiser import RowOptimiser, descend, hold
from coterie.fleet.reduce import Sink, finite, zeroed
from coterie.fleet.streams import Streams
from coterie.fleet.taps import Taps
from coterie.tasks import logits_of

CONVOLVED, CONVOLVED_EACH = 12e6, 1.6e6  # products in a batch's convolutions: see docs/performance.md
CACHED = 20 << 20  # bytes of parameters side by side on a CPU: more fall out of its caches between two steps
ROOM = 1 << 30  # bytes that a chunk may take on a CPU, which more would not make faster
Rows = dict[str, Tensor]  # parameter or buffer name → stacked tensors


@dataclass
class _Stack:
    """The clients of one architecture."""

    number: int
    clients: Tensor  # their numbers
    local: Tensor  # client number → place in this stack, −1 elsewhere
    layout: Layout
    module: nn.Module
    fresh: Rows  # buffers of a new module, without dropout keys
    keys: tuple[str, ...]  # names of the dropout keys
    held: dict[str, Tensor]  # split → clients × longest, the samples each holds
    sizes: dict[str, Tensor]  # split → how many
    streams: Streams


class StackedFleet(Fleet):
    """The simulator.

    `compile` is True on a GPU unless told otherwise, or the name of one of torch.compile's backends; `chunk` (rows at
    once) is what fits in memory; `autocast` the lower precision of forward passes, such as torch.bfloat16.
    """

    def __init__(
        self,
        population: Population,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        compile: bool | str | None = None,
        chunk: int | None = None,
    ) -> None:
        device = torch.device(device)
        super().__init__(population, seed=seed, device=device, dtype=dtype)
        self.autocast = autocast
        self.compile = device.type == "cuda" if compile is None else compile
        self.chunk = chunk
        self._tried = 1  # pairs at once, in the chunk that was begun last
        self._most: int | None = None  # pairs at once since memory ran out
        self._inputs = _store(population.inputs, device, dtype)
        self._targets = _store(population.targets, device, dtype)
        if population.stream_clients is not None:
            self._streams_there = population.stream_clients.to(device)
        self._relabel = None if population.relabel is None else population.relabel.to(device)
        self._public = {name: _store(x, device, dtype) for name, x in population.public.items()}
        self._stacks = [self._build(a) for a in range(len(self._modules))]
        self._memory: Rows = {}  # what clients remember, by name; never changed in place
        self._steps: dict[Any, Callable[..., Any]] = {}
        self._taps: dict[int, Taps] = {}
        self._copied: set[str] = set()  # what was copied for the ask that is being answered
        self._seen: set[int] = set()  # stacks whose module was seen to run under vmap
        self._costs: dict[int, tuple[int, int]] = {}

    def _build(self, a: int) -> _Stack:
        clients = (self._architecture == a).nonzero().flatten()
        local = torch.full((len(self.population.keys),), -1)
        local[clients] = torch.arange(len(clients))
        module = self._modules[a].to(self.device)
        keys = tuple(f"{n}.key" if n else "key" for n, m in module.named_modules() if isinstance(m, KeyedDropout))
        held, sizes = {}, {}
        for split in SPLITS:
            rows = [self.population.index[split][int(c)] for c in clients]
            sizes[split] = torch.tensor([len(r) for r in rows])
            longest = max(1, int(sizes[split].max()))
            table = torch.zeros(len(rows), longest, dtype=torch.long)
            for i, r in enumerate(rows):
                table[i, : len(r)] = r
            held[split] = table.to(self.device)
        for name, x in self._public.items():  # everyone holds all public inputs
            sizes[f"public/{name}"] = torch.full((len(clients),), len(x))
            held[f"public/{name}"] = torch.arange(len(x), device=self.device).expand(len(clients), -1)
        fresh = {n: b.detach().clone() for n, b in module.named_buffers() if n not in keys}
        endless = ("train",) if self.population.stream is not None else ()
        streams = Streams(self._ids[clients], held, sizes, endless, self.device)
        return _Stack(a, clients, local, self._layouts[a], module, fresh, keys, held, sizes, streams)

    # ---- what clients remember ---------------------------------------------------------------------------------------

    def _kept(self) -> Rows:
        return self._memory

    def placed(self, kept: Rows) -> Rows:
        """Memories where this fleet keeps them: counts on the host, the rest on the device."""
        return {name: value if _on_host(name) else value.to(self.device) for name, value in kept.items()}

    def _restore(self, kept: Rows) -> None:
        self._memory = self.placed(kept)

    def _write(self, name: str, local: Tensor, value: Tensor, good: Tensor | None, old: Callable[[], Tensor]) -> None:
        """Remember `value` for some clients of a stack, where `good`.

        What was remembered before an ask is never changed in place: the first chunk makes a copy, to which others add.
        """
        before = self._memory.get(name)
        if before is None:
            before = old()
        whole = len(local) == len(before) and bool((local == torch.arange(len(before))).all())
        where = None if whole else local.to(before.device)
        if good is not None:
            mask = good.to(before.device).view(-1, *[1] * (value.ndim - 1))
            value = torch.where(mask, value, before if where is None else before[where])
        if where is None:
            self._memory[name] = value
        elif name in self._copied:
            before.index_copy_(0, where, value.to(before.dtype))
        else:
            self._memory[name] = before.index_copy(0, where, value.to(before.dtype))
            self._copied.add(name)

    def _own(self, stack: _Stack, own: Own) -> Tensor:
        kept = self._memory.get(f"{stack.number}/own/{own.slot}")
        if kept is None:
            return self._initial(stack.clients.tolist(), own.shared).to(self.device)
        return kept

    def _buffers(self, stack: _Stack, memory: str, local: Tensor) -> Rows:
        rows = {}
        where = local.to(self.device)
        for name, value in stack.fresh.items():
            kept = self._memory.get(f"{stack.number}/buffers/{memory}/{name}")
            rows[name] = value.expand(len(local), *value.shape) if kept is None else kept[where]
        return rows

    def buffers_of(self, client: int, memory: str) -> Rows:
        """The buffers a client keeps under a memory."""
        stack = self._stacks[int(self._architecture[client])]
        return {
            name: value[0] for name, value in self._buffers(stack, memory, stack.local[client : client + 1]).items()
        }

    def _keep_buffers(self, stack: _Stack, memory: str, local: Tensor, buffers: Rows, good: Tensor) -> None:
        n = len(stack.clients)
        for name, value in buffers.items():
            fresh = stack.fresh[name]
            start = partial(fresh.expand, n, *fresh.shape)
            self._write(f"{stack.number}/buffers/{memory}/{name}", local, value, good, start)

    def _positions(self, stack: _Stack, memory: str, split: str, local: Tensor) -> Tensor:
        kept = self._memory.get(f"{stack.number}/place/{memory}/{split}")
        return torch.zeros(len(local), dtype=torch.long) if kept is None else kept[local]

    def _move_on(self, stack: _Stack, ask: Gradient | Loss | Fit, pairs: Tensor, by: Tensor, reason: Tensor) -> None:
        """Move the place in the stream of those who are ok."""
        local = stack.local[ask.clients[pairs]]
        after = self._positions(stack, ask.memory, ask.split, local) + by
        good = (reason[pairs.to(reason.device)] == OK).cpu()
        name = f"{stack.number}/place/{ask.memory}/{ask.split}"
        self._write(name, local, after, good, lambda: torch.zeros(len(stack.clients), dtype=torch.long))

    # ---- samples -----------------------------------------------------------------------------------------------------

    def _sample_keys(self, stack: _Stack, local: Tensor, place: int, draw: Tensor | None) -> Tensor | None:
        """One key per pair, to be folded with the sample's place in the ask."""
        return self._row_keys(stack, local, place, draw, "augment") if self.population.transform is not None else None

    def _row_keys(self, stack: _Stack, local: Tensor, place: int, draw: Tensor | None, tag: str) -> Tensor:
        key = self._ids[stack.clients[local]]
        for counter in (draws.name(tag), self.t, place):
            key = draws.fold(key, counter)
        return draws.fold(key, 0 if draw is None else draw).to(self.device)

    def _fetch(
        self, samples: Tensor, clients: Tensor | None, keys: Tensor | None, online: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of m×B samples as their clients (m×B or m×1) see them; online, samples are made here."""
        if online and clients is not None:
            assert self.population.stream is not None
            x, y = self.population.stream.samples(self._streams_there[clients], samples)
            return x.to(self.dtype), y.to(self.dtype) if y.is_floating_point() else y
        x = _taken(self._inputs, samples)
        if self.population.transform is not None:
            x = self.population.transform(x, keys)
        y = _taken(self._targets, samples)
        if self._relabel is not None and clients is not None:
            y = self._relabel[clients, y]
        return (x.to(self.dtype) if x.is_floating_point() else x), y

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, stack: _Stack, ask: Ask, pairs: Tensor) -> Tensor:
        """The models that some pairs mean, as rows; a view where the pairs are a run of rows, midpoints made here."""
        if isinstance(ask.models, Own):
            return _run(self._own(stack, ask.models), stack.local[ask.clients[pairs]])
        at = pairs if ask.at is None else ask.at[pairs]
        if at.ndim == 1:
            return _run(ask.models, at)
        at = at.to(self.device)
        total = ask.models[at[:, 0]]
        for column in at.T[1:]:
            total += ask.models[column]
        return total.div_(at.shape[1])

    def _by_stack(self, ask: Ask) -> Iterator[tuple[_Stack, Tensor]]:
        """The pairs of each architecture."""
        if len(self._stacks) == 1:
            if ask.m:
                yield self._stacks[0], torch.arange(ask.m)
            return
        which = self._architecture[ask.clients]
        for stack in self._stacks:
            pairs = (which == stack.number).nonzero().flatten()
            if len(pairs):
                yield stack, pairs

    def _rows_at_once(self, stack: _Stack, samples: int, pairs: int = 1, trained: int | None = None) -> int:
        """How many rows are computed at once: what should fit, and never more than what did not fit before allows.

        Where a row stands for several pairs, whose samples are `samples` together, that may be none. `trained` says how
        many rows there are of which a gradient is wanted.
        """
        if self.chunk is not None:
            rows = self.chunk
        elif trained is not None and self._apart(stack, samples, trained):
            rows = 1
        else:
            rows = self._should_fit(stack, samples)
        if self._most is not None:
            rows = min(rows, self._most // pairs)
        self._tried = rows * pairs
        return rows

    def _should_fit(self, stack: _Stack, samples: int) -> int:
        """How many rows fit: parameters, gradients, moments, and what a batch leaves behind for the backward pass.

        The machine's whole memory counts, not what is free just now: equal chunks round equally.
        """
        bytes_each = self.dtype.itemsize * (6 * stack.layout.d + samples * self._cost(stack)[0])
        if self.device.type == "cuda":
            room = torch.cuda.get_device_properties(self.device).total_memory * 0.5
        else:
            room = min(ROOM, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.2)
        fit = max(1, int(room // max(1, bytes_each)))
        if self.device.type == "cpu" and not self.compile:
            fit = min(fit, max(8, CACHED // (self.dtype.itemsize * stack.layout.d)))
        return fit

    def _apart(self, stack: _Stack, samples: int, rows: int) -> bool:
        """Whether rows train faster one after the other: on a CPU, a convolution with a kernel per client is slower.

        What a stack saves is the cost of calls, which few rows, or much to compute in each, do not make up for. This is
        a rule and no measurement, since equal chunks round equally: a run that is resumed must pick as it did before.
        """
        if self.device.type != "cpu" or self.compile:
            return False
        products = self._cost(stack)[1] * samples
        return products > CONVOLVED or products > CONVOLVED_EACH * rows

    def _cost(self, stack: _Stack) -> tuple[int, int]:
        """Numbers a sample leaves behind in a forward pass, and products in its convolutions; counted once by hooks."""
        if stack.number not in self._costs:
            total, products = [int(self._inputs[0].numel())], [0]

            def count(layer: nn.Module, _given: Any, out: Any) -> None:
                size = logits_of(out).numel()
                total.append(2 * size)
                if isinstance(layer, nn.modules.conv._ConvNd):
                    products.append(size * layer.weight[0].numel())

            hooks = [m.register_forward_hook(count) for m in stack.module.modules() if not list(m.children())]
            try:
                first = next(int(r[0]) for split in SPLITS for r in self.population.index[split] if len(r))
                with torch.no_grad():
                    x, _ = self._fetch(torch.tensor([[first]], device=self.device), None, None)
                    stack.module.eval()(x[0])
            finally:
                for hook in hooks:
                    hook.remove()
            self._costs[stack.number] = sum(total), sum(products)
        return self._costs[stack.number]

    def _chunks(self, stack: _Stack, pairs: Tensor, most: int, pad: bool = True) -> Iterator[tuple[Tensor, int]]:
        """Pairs in chunks of no more than `most`, and how many of each chunk are real.

        A step is compiled for every size it meets, and compiling is slow, so there are few: as many rows as the stack
        has clients (its own gradients have been compiled anyway), a quarter of that, a sixteenth … A rest that fills
        more than half of a size is padded to it with its last pair.
        """
        for chunk in pairs.split(most):
            if not (self.compile and pad):
                yield chunk, len(chunk)
                continue
            size = min(len(stack.clients), most)
            while len(chunk):
                while 2 * len(chunk) <= size and size > 2:
                    size = max(2, size // 4)
                real = min(size, len(chunk))
                yield torch.cat([chunk[:real], chunk[real - 1 : real].expand(size - real)]), real
                chunk = chunk[real:]

    # ---- one forward pass, and its gradient --------------------------------------------------------------------------

    def _value(self, stack: _Stack) -> Callable[..., tuple[Tensor, tuple[Tensor, Rows]]]:
        """(parameters, buffers, dropout key, x, y, weights) of one row → loss, (loss per sample, buffers after)."""

        def value(
            parameters: Rows, buffers: Rows, key: Tensor | None, x: Tensor, y: Tensor, w: Tensor | None
        ) -> tuple[Tensor, tuple[Tensor, Rows]]:
            after = {name: b.clone() for name, b in buffers.items()}
            state = {**parameters, **after}
            if key is not None:
                state.update(dict.fromkeys(stack.keys, key))
            each = self.task.loss(logits_of(functional_call(stack.module, state, (x,))), y)
            return (each.mean() if w is None else (each * w).sum()), (each, after)

        return value

    def _batched(self, stack: _Stack, train: bool, fn: Callable[..., Any]) -> Callable[..., Any]:
        """vmap over rows, with the module in train or eval mode."""

        def call(*args: Any) -> Any:
            stack.module.train(train)
            try:
                with self._precision():
                    return vmap(fn, in_dims=tuple(_axes(a) for a in args))(*args)
            except RuntimeError as error:
                name, line = type(stack.module).__name__, str(error).splitlines()[0]
                if "randomness" in line:
                    raise ModelError(
                        f"{name} draws random numbers outside nn.Dropout, which cannot be keyed in a stack: "
                        "use nn.Dropout modules, or LoopFleet"
                    ) from error
                if "vmap" in str(error) or "data-dependent" in str(error):
                    raise ModelError(f"{name} cannot run under vmap ({line}): use LoopFleet") from error
                raise

        return call

    def _differentiated(
        self, stack: _Stack, value: Callable[..., Any], argnums: int | tuple[int, ...] = 0
    ) -> Callable[..., Any]:
        """Gradients and values of all rows under vmap; of a single row by plain autograd, whose layers cost half.

        That a module can run under vmap is seen once, so that a lone client is refused what many would be refused.
        """
        many = self._batched(stack, True, grad_and_value(value, argnums=argnums, has_aux=True))
        places = (argnums,) if isinstance(argnums, int) else argnums

        def one(*args: Any) -> Any:
            if self.compile or next(len(p) for i in places for p in args[i].values()) > 1:
                return many(*args)
            if stack.number not in self._seen:
                with torch.no_grad():
                    self._batched(stack, True, value)(*args)
                self._seen.add(stack.number)
            alone = [tree_map(lambda t: t if t is None else t[0], a) for a in args]
            for i in places:
                alone[i] = {name: p.detach().requires_grad_() for name, p in alone[i].items()}
            stack.module.train()
            with torch.enable_grad(), self._precision():
                loss, aux = value(*alone)
            leaves = [p for i in places for p in alone[i].values()]
            if loss.requires_grad:
                found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            else:  # nothing of the model is in it
                found = tuple(torch.zeros_like(leaf) for leaf in leaves)
            flat = iter(found)
            grads = tuple({name: next(flat)[None] for name in alone[i]} for i in places)
            after = tree_map(lambda t: t.detach()[None], (loss, aux))
            return (grads[0] if isinstance(argnums, int) else grads), after

        return one

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    # ---- Gradient ----------------------------------------------------------------------------------------------------

    def _gradient(self, ask: Gradient, place: int) -> Answer:
        width = int(self._widths[ask.clients[0]]) if ask.m else _width(ask)
        sink = Sink(ask, width, self.dtype, self.device, draws.fold_int(draws.name("sketch"), self.seed, self.t, place))
        reason = torch.zeros(ask.m, dtype=torch.int8, device=self.device)
        losses = torch.zeros(ask.m, dtype=self.dtype, device=self.device)
        for stack, pairs in self._by_stack(ask):
            fused = self._fusable(stack, ask) and self._fused_sum(stack, ask, pairs, place, sink, reason, losses)
            for part, real, samples, weights in () if fused else self._gradient_batches(stack, ask, pairs, place):
                grads, loss, after = self._gradients(stack, ask, part, samples, weights, place)
                if real < len(part):
                    part, grads, loss = part[:real], grads[:real], loss[:real]
                    after = {name: b[:real] for name, b in after.items()}
                good = finite(grads) & torch.isfinite(loss)
                there = part.to(self.device)
                reason[there] = torch.where(good, OK, NONFINITE).to(torch.int8)
                losses[there] = torch.where(good, loss, 0).to(self.dtype)
                sink.take(part, self._squeezed(stack, ask, part, grads, place), good)
                if ask.track:
                    self._keep_buffers(stack, ask.memory, stack.local[ask.clients[part]], after, good)
            if ask.track and ask.sampling == "epoch" and ask.batch is not None:
                self._move_on(stack, ask, pairs, torch.full((len(pairs),), ask.batch), reason)
        return sink.answer(reason, losses)

    def _gradients(
        self, stack: _Stack, ask: Gradient, part: Tensor, samples: Tensor, weights: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor, Rows]:
        """One gradient per pair, as rows; the losses; and the buffers afterwards."""
        clients = ask.clients[part]
        here = stack.local[clients]
        draw = None if ask.draw is None else ask.draw[part]
        key = draws.fold(self._row_keys(stack, here, place, draw, "dropout"), 0) if stack.keys else None
        shade = _shades(self._sample_keys(stack, here, place, draw), 0, samples.shape[1])
        rows, buffers = self._rows(stack, ask, part), self._buffers(stack, ask.memory, here)
        step = self._gradient_step(stack, self.online(ask.split))
        grads, loss, _, after = step(rows, buffers, key, samples, clients.to(self.device)[:, None], shade, weights)
        return grads, loss, after

    def _squeezed(self, stack: _Stack, ask: Gradient | Fit, part: Tensor, rows: Tensor, place: int) -> Tensor:
        """Rows as they arrive."""
        if ask.compress is None:
            return rows
        draw = None if ask.draw is None else ask.draw[part]
        keys = self._row_keys(stack, stack.local[ask.clients[part]], place, draw, "compress")
        return squeezed(rows, ask.compress, keys)

    def _fusable(self, stack: _Stack, ask: Gradient) -> bool:
        """Whether a sum can be the gradient of one weighted loss: one model per sum, and samples that never meet."""
        plain = ask.compress is None and not (stack.fresh or stack.keys or isinstance(ask.models, Own))
        if ask.into is None or ask.batch is None or not plain:
            return False
        at = torch.arange(ask.m) if ask.at is None else ask.at
        if at.ndim != 1:
            return False
        model = torch.full((ask.outputs or 0,), -1)
        model[ask.into] = at
        return bool((model[ask.into] == at).all())

    def _fused_sum(
        self, stack: _Stack, ask: Gradient, pairs: Tensor, place: int, sink: Sink, reason: Tensor, losses: Tensor
    ) -> bool:
        """Σ weight · gradient as one gradient per sum.

        False, and nothing done, where any number is not finite, or where not even one sum's samples fit in memory.
        """
        assert ask.into is not None
        assert ask.batch is not None
        assert isinstance(ask.models, Tensor)
        outputs, slot, counts = torch.unique(ask.into[pairs], return_inverse=True, return_counts=True)
        order = torch.argsort(slot, stable=True)
        rank = torch.empty_like(slot)
        rank[order] = torch.arange(len(pairs)) - (torch.cumsum(counts, 0) - counts)[slot[order]]
        q = int(counts.max())
        if self.compile:
            q = _rounded(q, len(stack.clients))
        most = self._rows_at_once(stack, ask.batch * q, q, trained=len(outputs))
        if not most:
            return False
        table = torch.full((len(outputs), q), -1)
        table[slot, rank] = torch.arange(len(pairs))
        weight = torch.ones(len(pairs), dtype=self.dtype, device=self.device)
        if ask.weights is not None:
            weight = ask.weights.to(self.device, self.dtype)[pairs.to(self.device)]
        step = self._gradient_step(stack, self.online(ask.split))
        done: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for part, real in self._chunks(stack, torch.arange(len(outputs)), most):
            which = table[part]
            missing = which < 0
            chosen = pairs[which.clamp(min=0)]
            flat = chosen.flatten()
            clients = ask.clients[flat]
            local = stack.local[clients]
            draw = None if ask.draw is None else ask.draw[flat]
            samples = self._starts_and_samples(stack, ask, local, flat, place)
            o, b = len(part), ask.batch
            shade = _shades(self._sample_keys(stack, local, place, draw), 0, b)
            shade = None if shade is None else shade.view(o, q * b)
            w = weight[which.clamp(min=0).to(self.device)].masked_fill(missing.to(self.device), 0)
            spread = (w / b).repeat_interleave(b, 1)
            at = chosen[:, 0] if ask.at is None else ask.at[chosen[:, 0]]
            owner = clients.to(self.device).view(o, q).repeat_interleave(b, 1)
            grads, _, each, _ = step(_run(ask.models, at), {}, None, samples.view(o, q * b), owner, shade, spread)
            part, missing, chosen, grads, w = part[:real], missing[:real], chosen[:real], grads[:real], w[:real]
            mean = each.view(o, q, b).mean(2)[:real]
            if not bool(finite(grads).all() & torch.isfinite(mean).all()):
                return False
            done.append((outputs[part].to(self.device), grads, w, mean))
            losses[chosen[~missing].to(self.device)] = mean[~missing.to(self.device)].to(self.dtype)
        for rows, grads, w, _ in done:
            sink.sums[rows] = sink.sums[rows] + grads
            sink.weight[rows] = sink.weight[rows] + w.sum(1)
        return True

    def _starts_and_samples(
        self, stack: _Stack, ask: Gradient | Loss, local: Tensor, pairs: Tensor, place: int
    ) -> Tensor:
        assert ask.batch is not None
        fresh = ask.sampling == "fresh"
        if fresh:
            draw = None if ask.draw is None else ask.draw[pairs]
            starts = stack.streams.starts(ask.split, local, self.t, place, draw)
        else:
            starts = self._positions(stack, ask.memory, ask.split, local)
        return stack.streams.samples(ask.split, local, starts, ask.batch, fresh)

    def _gradient_batches(
        self, stack: _Stack, ask: Gradient | Loss, pairs: Tensor, place: int
    ) -> Iterator[tuple[Tensor, int, Tensor, Tensor | None]]:
        """Chunks of pairs, how many of them are real and not padding, their samples, and the samples' weights.

        Weights are there where clients of different sizes give their whole split: shorter ones are padded.
        """
        if isinstance(ask, Gradient) and ask.group is not None:
            pairs = pairs[torch.argsort(ask.group[pairs], stable=True)]
        trained = len(pairs) if isinstance(ask, Gradient) else None
        if ask.batch is None:
            sizes = stack.sizes[ask.split][stack.local[ask.clients[pairs]]]
            separate = bool(stack.fresh) and isinstance(ask, Gradient)  # batch statistics must not see padding
            for kind in [pairs[sizes == size] for size in sizes.unique()] if separate else [pairs]:
                longest = self._longest(stack, ask.split, sizes)
                for part, real in self._chunks(stack, kind, self._rows_at_once(stack, longest, trained=trained)):
                    yield part, real, *self._whole(stack, ask.split, stack.local[ask.clients[part]])
            return
        for part, real in self._chunks(stack, pairs, self._rows_at_once(stack, ask.batch, trained=trained)):
            local = stack.local[ask.clients[part]]
            yield part, real, self._starts_and_samples(stack, ask, local, part, place), None

    def _whole(self, stack: _Stack, split: str, local: Tensor) -> tuple[Tensor, Tensor | None]:
        """Whole splits, padded to the longest, with weights 1/n where they differ in length."""
        sizes = stack.sizes[split][local]
        longest = self._longest(stack, split, sizes)
        samples = stack.held[split][local.to(self.device), :longest]
        if bool((sizes == longest).all()):
            return samples, None
        there = sizes.to(self.device)[:, None]
        real = torch.arange(longest, device=self.device) < there
        samples = torch.where(real, samples, samples[:, :1])
        return samples, real.to(self.dtype) / there

    def _longest(self, stack: _Stack, split: str, sizes: Tensor) -> int:
        """How many samples whole splits of these sizes are padded to; a compiled step meets few such numbers."""
        longest = int(sizes.max())
        if not self.compile or stack.fresh:  # batch statistics must not see padding
            return longest
        return _rounded(longest, stack.held[split].shape[1])

    def _gradient_step(self, stack: _Stack, online: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor, Rows]]:
        mark = ("gradient", stack.number, online)
        if mark not in self._steps:
            one = self._differentiated(stack, self._value(stack))

            def step(rows: Tensor, buffers: Rows, key: Tensor | None, samples: Tensor, clients: Tensor,
                     shade: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Rows]:  # fmt: skip
                x, y = self._fetch(samples, clients, shade, online)
                grads, (loss, (each, after)) = one(stack.layout.views(rows), buffers, key, x, y, weights)
                return stack.layout.flatten(grads), loss, each, after

            self._steps[mark] = self._compiled(step)
        return self._steps[mark]

    def _answer(self, ask: Ask, place: int) -> Answer:
        """Out of memory halves the chunk and begins the ask again; nobody remembers the try that failed."""
        while True:
            before = dict(self._memory)
            self._copied.clear()
            try:
                return self._compiled_answer(ask, place)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not _out_of_memory(error):
                    raise
                why = str(error).partition("\n")[0]
            self._memory = before  # outside of the handler, whose traceback holds tensors
            rows = min(self._tried, ask.m)
            if rows < 2:
                raise DeviceError(f"not even one model and its batch fit in memory: {why}")
            self._most = rows // 2
            warnings.warn(f"out of memory with {rows} models at once: going on with {self._most}", stacklevel=2)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _compiled_answer(self, ask: Ask, place: int) -> Answer:
        """Never silently eager: more sizes than torch keeps is an error."""
        if not self.compile:
            return super()._answer(ask, place)
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            return super()._answer(ask, place)

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, compiled where asked for."""
        if not self.compile:
            return step
        backend = self.compile if isinstance(self.compile, str) else "inductor"
        given = {f"L[{name!r}]" for name in inspect.signature(step).parameters}

        def varies(guards: Sequence[Any]) -> list[bool]:
            """Only what is given to a step differs from call to call: modules, tasks and code need no second look."""
            return [not g.name.startswith(("L[", "G[")) or g.name.partition("]")[0] + "]" in given for g in guards]

        options: dict[str, Any] = {"guard_filter_fn": varies}
        return torch.compile(step, fullgraph=True, dynamic=False, backend=backend, options=options)

    # ---- Loss, Predict, Evaluate -------------------------------------------------------------------------------------

    def _loss(self, ask: Loss, place: int) -> Answer:
        losses = torch.zeros(ask.m, dtype=self.dtype, device=self.device)
        for stack, pairs in self._by_stack(ask):
            one = self._batched(stack, False, self._value(stack))
            with torch.no_grad():
                for part, _, samples, weights in self._gradient_batches(stack, ask, pairs, place):
                    local = stack.local[ask.clients[part]]
                    rows = self._rows(stack, ask, part)
                    draw = None if ask.draw is None else ask.draw[part]
                    shade = _shades(self._sample_keys(stack, local, place, draw), 0, samples.shape[1])
                    there = ask.clients[part].to(self.device)[:, None]
                    x, y = self._fetch(samples, there, shade, self.online(ask.split))
                    buffers = self._policy_buffers(stack, ask, local, rows)
                    loss, _ = one(stack.layout.views(rows), buffers, None, x, y, weights)
                    losses[part.to(self.device)] = loss.to(self.dtype)
        good = torch.isfinite(losses)
        reason = torch.where(good, OK, NONFINITE).to(torch.int8)
        if ask.track and ask.sampling == "epoch" and ask.batch is not None:
            for stack, pairs in self._by_stack(ask):
                self._move_on(stack, ask, pairs, torch.full((len(pairs),), ask.batch), reason)
        return Answer(reason, loss=torch.where(good, losses, 0))

    def _policy_buffers(self, stack: _Stack, ask: Loss | Predict | Evaluate, local: Tensor, rows: Tensor) -> Rows:
        mine = self._buffers(stack, ask.memory, local)
        if ask.buffers == "personal" or not mine:
            return mine
        if ask.buffers == "averaged":
            taking_part = stack.local[stack.clients[stack.clients < self.n]]
            everyone = self._buffers(stack, ask.memory, taking_part)
            return {k: v.double().mean(0).to(v.dtype).expand(len(local), *v.shape[1:]) for k, v in everyone.items()}
        return self._recalibrated(stack, local, rows)

    def _recalibrated(self, stack: _Stack, local: Tensor, rows: Tensor) -> Rows:
        """Buffers after one pass over each client's training data, every batch weighing the same."""
        norms = [m for m in stack.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        quiet = [m for m in stack.module.modules() if isinstance(m, KeyedDropout)]
        before = [(m, m.momentum) for m in norms]
        result = {k: v.expand(len(local), *v.shape).clone() for k, v in stack.fresh.items()}
        sizes = stack.sizes["train"][local]
        parameters = stack.layout.views(rows)
        drops = [m.p for m in quiet]

        def run(p: Rows, b: Rows, x: Tensor) -> Rows:
            after = {name: value.clone() for name, value in b.items()}
            functional_call(stack.module, {**p, **after}, (x,))
            return after

        try:
            for layer in quiet:
                layer.p = 0.0
            one = self._batched(stack, True, run)
            for size in sizes.unique().tolist():
                these = (sizes == size).nonzero().flatten()
                there = these.to(self.device)
                batch = min(RECALIBRATION, size)
                buffers = {k: v[there] for k, v in result.items()}
                part = {k: v[there] for k, v in parameters.items()}
                for number, start in enumerate(range(0, size - batch + 1, batch)):
                    for m in norms:  # momentum 1/(number + 1) is the plain mean over batches
                        m.momentum = 1.0 / (number + 1)
                    samples = stack.held["train"][local[these].to(self.device), start : start + batch]
                    with torch.no_grad():
                        buffers = one(part, buffers, self._fetch(samples, None, None)[0])
                for k, v in buffers.items():
                    result[k][there] = v
            return result
        finally:
            for m, momentum in before:
                m.momentum = momentum
            for layer, p in zip(quiet, drops, strict=True):
                layer.p = p

    def _forward(self, stack: _Stack) -> Callable[..., Tensor]:
        def forward(parameters: Rows, buffers: Rows, x: Tensor) -> Tensor:
            return logits_of(functional_call(stack.module, {**parameters, **buffers}, (x,)))

        return self._batched(stack, False, forward)

    def _predict(self, ask: Predict) -> Answer:
        x = self._public_inputs(ask.inputs)
        parts: list[tuple[Tensor, Tensor]] = []
        for stack, pairs in self._by_stack(ask):
            block = 256
            for part in pairs.split(self._rows_at_once(stack, block)):
                rows = self._rows(stack, ask, part)
                local = stack.local[ask.clients[part]]
                buffers = self._policy_buffers(stack, ask, local, rows)
                parts.append((part, self._outputs(stack, rows, buffers, x, block)))
        if not parts:
            return Answer(torch.zeros(0, dtype=torch.int8, device=self.device))
        outputs = torch.empty(ask.m, *parts[0][1].shape[1:], dtype=parts[0][1].dtype, device=self.device)
        for part, out in parts:
            outputs[part.to(self.device)] = out
        if ask.soft:
            outputs = self.task.soft(outputs.flatten(0, 1)).view_as(outputs)
        good = finite(outputs.flatten(1))
        outputs = zeroed(coarsened(outputs, ask.coarse), good)
        return Answer(torch.where(good, OK, NONFINITE).to(torch.int8), outputs=outputs)

    def _public_inputs(self, name: str) -> Tensor:
        x = self._public[name]
        if self.population.transform is not None:
            x = self.population.transform(x, None)
        return x.to(self.dtype) if x.is_floating_point() else x

    def _outputs(self, stack: _Stack, rows: Tensor, buffers: Rows, x: Tensor, block: int) -> Tensor:
        forward = self._forward(stack)
        parameters = stack.layout.views(rows)
        with torch.no_grad():
            blocks = [forward(parameters, buffers, b.expand(len(rows), *b.shape)) for b in x.split(block)]
        return torch.cat(blocks, 1)

    def _evaluate(self, ask: Evaluate) -> Answer:
        names = ask.metrics or self.task.metrics
        values = {name: torch.full((ask.m,), torch.nan, dtype=torch.float64, device=self.device) for name in names}
        for stack, pairs in self._by_stack(ask):
            forward = self._forward(stack)
            sizes = stack.sizes[ask.split][stack.local[ask.clients[pairs]]]
            pairs = pairs[torch.argsort(sizes, stable=True)]  # equal sizes together: little padding
            block = 64
            for part in pairs.split(min(len(pairs), self._rows_at_once(stack, block))):
                local = stack.local[ask.clients[part]]
                mine = stack.sizes[ask.split][local]
                longest = int(mine.max())
                if not longest:
                    continue
                rows = self._rows(stack, ask, part)
                buffers = self._policy_buffers(stack, ask, local, rows)
                parameters = stack.layout.views(rows)
                there = local.to(self.device)
                clients = ask.clients[part].to(self.device)
                summaries = []
                with torch.no_grad():
                    room = max(block, self._rows_at_once(stack, 1) // (4 * len(part))) if self.chunk is None else block
                    for start in range(0, longest, min(room, 1024)):
                        samples = stack.held[ask.split][there, start : min(start + min(room, 1024), longest)]
                        x, y = self._fetch(samples, clients[:, None], None)
                        out = forward(parameters, buffers, x)
                        summaries.append(vmap(self.task.summary)(out, y))
                valid = torch.arange(longest) < mine[:, None]
                measured = self.task.measure(torch.cat(summaries, 1), valid.to(self.device), names)
                for name in names:
                    values[name][part.to(self.device)] = measured[name].double()
        return Answer(torch.zeros(ask.m, dtype=torch.int8, device=self.device), metrics=values)

    # ---- Fit ---------------------------------------------------------------------------------------------------------

    def _fit(self, ask: Fit, place: int) -> Answer:
        plan = ask.plan
        reason = torch.zeros(ask.m, dtype=torch.int8, device=self.device)
        losses = torch.zeros(ask.m, dtype=self.dtype, device=self.device)
        choice = torch.zeros(ask.m if ask.distil is not None else 0, dtype=torch.long, device=self.device)
        rows_out: Tensor | None = None
        for stack, pairs in self._by_stack(ask):
            sizes = stack.sizes[ask.split][stack.local[ask.clients[pairs]]]
            steps = torch.tensor([ask.steps_for(int(s)) for s in sizes])
            order = torch.argsort(steps, descending=True, stable=True)
            whole = self._longest(stack, ask.split, sizes)
            samples = max(plan.batch or whole, 0 if ask.distil is None else ask.distil.batch)
            if plan.batch is None and stack.fresh and len(set(sizes.tolist())) > 1:
                groups = [order[sizes[order] == s] for s in sizes.unique()]
            else:
                groups = [order]
            for chosen in groups:
                ragged = bool(steps[chosen[0]] != steps[chosen[-1]])
                at_once = self._rows_at_once(stack, samples, trained=len(chosen))
                for part, real in self._chunks(stack, chosen, at_once, pad=not ragged):
                    these = pairs[part]
                    start = self._rows(stack, ask, these)
                    if ask.distil is not None:
                        choice[these.to(self.device)] = self._nearest(stack, ask, these, start)
                    trained, loss, keep = self._train(
                        stack, ask, these, real, steps[part], start, place, choice, ragged
                    )
                    these, start = these[:real], start[:real]
                    local, there = stack.local[ask.clients[these]], these.to(self.device)
                    good = finite(trained) & torch.isfinite(loss)
                    reason[there] = torch.where(good, OK, NONFINITE).to(torch.int8)
                    losses[there] = torch.where(good, loss, 0).to(self.dtype)
                    if ask.give != "nothing":
                        given = trained - start if ask.give == "update" else trained
                        given = zeroed(self._squeezed(stack, ask, these, given, place), good)
                        if len(these) == ask.m and bool((these == torch.arange(ask.m)).all()):
                            rows_out = given
                        else:
                            if rows_out is None:
                                rows_out = torch.zeros(ask.m, given.shape[1], dtype=self.dtype, device=self.device)
                            rows_out[there] = given
                    if ask.keep is not None:  # last, since an Own start may be a view of what is remembered
                        own = ask.models if isinstance(ask.models, Own) else Own(ask.keep)
                        self._write(
                            f"{stack.number}/own/{ask.keep}", local, trained, good, partial(self._own, stack, own)
                        )
                    if ask.track:
                        keep(local, good, reason)
        if rows_out is None:
            rows_out = torch.empty(0, device=self.device)
        return Answer(reason, rows=rows_out, loss=losses, choice=choice)

    def _train(
        self, stack: _Stack, ask: Fit, pairs: Tensor, real: int, steps: Tensor, start: Tensor, place: int,
        choice: Tensor, ragged: bool,
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], None]]:  # fmt: skip
        """Train some rows side by side, most steps first: at each step the rows still training are a prefix.

        Of the answer only the first `real` ones are meant; the others pad a chunk of rows with equally many steps.
        """
        plan, layout = ask.plan, stack.layout
        local = stack.local[ask.clients[pairs]]
        clients = ask.clients[pairs].to(self.device)
        draw = None if ask.draw is None else ask.draw[pairs]
        most = int(steps.max()) if len(steps) else 0
        epoch = plan.sampling == "epoch" and not ask.public_only
        weights: Tensor | None = None
        if ask.public_only:
            samples = torch.zeros(len(pairs), 0, dtype=torch.long, device=self.device)
        elif plan.batch is None:
            samples, weights = self._whole(stack, ask.split, local)
        else:
            if epoch:
                starts = self._positions(stack, ask.memory, ask.split, local)
            else:
                starts = stack.streams.starts(ask.split, local, self.t, place, draw)
            samples = stack.streams.samples(ask.split, local, starts, most * plan.batches * plan.batch, not epoch)
        shade = self._sample_keys(stack, local, place, draw)
        drop = self._row_keys(stack, local, place, draw, "dropout") if stack.keys else None
        parameters = {
            name: value.clone(memory_format=torch.contiguous_format) for name, value in layout.views(start).items()
        }
        optimiser = RowOptimiser(plan, list(parameters.values()), *self._moments(stack, ask, local, plan))
        riders = self._riders(stack, ask, pairs, start)
        still = None
        if ask.columns is not None:
            mask = torch.zeros(layout.d, dtype=torch.bool)
            mask[ask.columns] = True
            still = [~m for m in layout.views(mask.to(self.device)).values()]
        buffers = self._buffers(stack, ask.memory, local)
        final = {name: b.clone() for name, b in buffers.items()} if buffers else {}
        total = torch.zeros(len(pairs), dtype=self.dtype, device=self.device)
        public = self._distillation(stack, ask, pairs, choice, place, most)
        bare = plan == Plan(plan.steps, plan.epochs, plan.batch, plan.lr, sampling=plan.sampling)
        bare = bare and not (riders or public or still or self.autocast)
        step_fn = self._fit_step(stack, plan, self.online(ask.split), bare, ask.public_only)
        look = self._fit_step(stack, Plan(steps=1), self.online(ask.split), False, False) if plan.ahead else None
        far: float | Tensor = plan.ahead
        if self.compile:
            far = torch.tensor(far, dtype=self.dtype, device=self.device)
        rate: float | Tensor = torch.tensor(plan.lr, dtype=self.dtype, device=self.device) if self.compile else plan.lr

        def batch(number: int, a: int, b: int) -> tuple[Any, ...]:
            """What a step on some rows is told of data: buffers, keys of dropout, and the batch of this number."""
            now = samples
            if plan.batch is not None:  # laid out alike however long the stream was read
                now = samples[:, number * plan.batch : (number + 1) * plan.batch].contiguous()
            return (
                {n: v[a:b] for n, v in final.items()},
                None if drop is None else draws.fold(drop[a:b], number),
                now[a:b],
                clients[a:b, None],
                None if shade is None else _shades(shade[a:b], number * (plan.batch or 0), now.shape[1]),
                None if weights is None else weights[a:b],
            )

        ordered = steps.tolist()
        active = len(ordered)
        for step in range(most):
            while ordered[active - 1] <= step:
                active -= 1
            for a, b in _powers(active) if ragged and self.compile else [(0, active)]:
                part = {n: p[a:b] for n, p in parameters.items()}
                at, ahead = list(part.values()), []
                if look is not None:
                    at = [p.clone() for p in at]
                    _, after, _ = look(at, None, *batch(2 * step, a, b), {}, None, None, far)
                    for n, v in after.items():
                        final[n][a:b] = v
                    ahead = [p.clone() for p in at]
                now = batch(plan.batches * (step + 1) - 1, a, b)
                extra = public(step, a, b, part, final, now[1]) if public else None
                ride = {n: r[a:b] for n, r in riders.items()}
                loss, after, left = step_fn(at, optimiser.slices(a, b), *now, ride, extra, still, rate)
                for p, moved, start in zip(part.values(), at, ahead, strict=False):
                    p.add_(moved - start)
                if left is not None:
                    optimiser.step(left, a, b, still)
                total[a:b] += loss
                for n, v in after.items():
                    final[n][a:b] = v
        trained = layout.flatten({name: p[:real] for name, p in parameters.items()})

        def keep(where: Tensor, good: Tensor, reason: Tensor) -> None:
            if final:
                self._keep_buffers(stack, ask.memory, where, {n: b[:real] for n, b in final.items()}, good)
            if epoch and plan.batch is not None:
                self._move_on(stack, ask, pairs[:real], steps[:real] * plan.batches * plan.batch, reason)
            if plan.keep_optimiser:
                n = len(stack.clients)
                for name, every in optimiser.state(layout).items():
                    value = every[:real]
                    start = partial(value.new_zeros, (n, *value.shape[1:]))
                    self._write(
                        f"{stack.number}/optimiser/{ask.memory}/{plan.optimiser}/{name}", where, value, good, start
                    )

        return trained, (total / steps.clamp(min=1).to(self.device))[:real], keep

    def _moments(self, stack: _Stack, ask: Fit, local: Tensor, plan: Plan) -> tuple[dict[str, list[Tensor]], Tensor]:
        """The optimiser's moments as each row left them, and how many steps each row has behind it."""
        kept: dict[str, list[Tensor]] = {}
        behind = torch.zeros(len(local), dtype=torch.long)
        if plan.keep_optimiser:
            prefix = f"{stack.number}/optimiser/{ask.memory}/{plan.optimiser}/"
            for name, value in self._memory.items():
                if name.startswith(prefix):
                    if name.endswith("/step"):
                        behind = value[local]
                    else:
                        views = stack.layout.views(value[local.to(self.device)])
                        kept[name.removeprefix(prefix)] = [v.clone() for v in views.values()]
        return kept, behind

    def _riders(self, stack: _Stack, ask: Fit, pairs: Tensor, start: Tensor) -> Rows:
        """Rows that ride along, one per pair: pull, its weight, drift."""
        riders: Rows = {}
        for name, rider in (("pull", ask.pull), ("drift", ask.drift)):
            if rider is None:
                continue
            if rider.rows.ndim == 1:
                riders[name] = rider.rows.expand(len(pairs), -1)
            elif rider.at is None:
                riders[name] = rider.rows[pairs.to(self.device)]
            else:
                at = torch.as_tensor(rider.at)[pairs].to(self.device)
                riders[name] = rider.rows[at] if at.ndim == 1 else rider.rows[at].mean(1)
        if ask.pull is not None:
            riders["weight"] = _weights(ask.pull.weight, pairs, self)
        return riders

    def _fit_step(
        self, stack: _Stack, plan: Plan, online: bool, bare: bool, public_only: bool
    ) -> Callable[..., tuple[Tensor, Rows, list[Tensor] | None]]:
        """One step of training, in place. SGD's update is part of it; for others it gives the gradient that is left.

        Where a step is nothing but a rate times a gradient (`bare`), linear layers are tapped.
        """
        sgd = plan.optimiser == "sgd"
        torchs = (plan.clip, plan.momentum, plan.nesterov, plan.weight_decay)
        mark = ("fit", stack.number, online, sgd, *torchs, bare, public_only)
        if mark in self._steps:
            return self._steps[mark]
        if bare and self._taps_of(stack).layers:
            self._steps[mark] = self._compiled(self._tapped_step(stack, plan, online))
            return self._steps[mark]
        one = self._differentiated(stack, self._value(stack))
        layout = stack.layout

        def step(parameters: list[Tensor], moments: list[Tensor] | None, buffers: Rows, key: Tensor | None,
                 samples: Tensor, clients: Tensor, shade: Tensor | None, weights: Tensor | None, ride: Rows,
                 extra: tuple[Rows, Tensor] | None, still: list[Tensor] | None, rate: float | Tensor,
                 ) -> tuple[Tensor, Rows, list[Tensor] | None]:  # fmt: skip
            if public_only and extra is not None:
                (grads, loss), after = extra, {}
                gradient = [grads[n] for n in layout.names]
            else:
                x, y = self._fetch(samples, clients, shade, online)
                named = dict(zip(layout.names, parameters, strict=True))
                grads, (loss, (_, after)) = one(named, buffers, key, x, y, weights)
                gradient = [grads[n] if extra is None else grads[n] + extra[0][n] for n in layout.names]
            if "pull" in ride:
                for g, p, target in zip(gradient, parameters, layout.views(ride["pull"]).values(), strict=True):
                    g.add_((p - target) * ride["weight"].view(-1, *[1] * (g.ndim - 1)))
            if "drift" in ride:
                for g, drift in zip(gradient, layout.views(ride["drift"]).values(), strict=True):
                    g.add_(drift)
            if plan.clip is not None:
                norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradient]).norm(dim=0)
                scale = (plan.clip / (norm + 1e-6)).clamp(max=1.0)
                for g in gradient:
                    g.mul_(scale.view(-1, *[1] * (g.ndim - 1)))
            if not sgd:
                return loss, after, gradient
            before = [] if still is None else [p.clone() for p in parameters]
            descend(plan, parameters, gradient, moments, rate)
            if still is not None:
                hold(parameters, before, still)
            return loss, after, None

        self._steps[mark] = self._compiled(step)
        return self._steps[mark]

    def _taps_of(self, stack: _Stack) -> Taps:
        """The taps of a stack's module, tried on two of its samples."""
        if stack.number not in self._taps:
            held = next((r for c in stack.clients for r in [self.population.index["train"][int(c)]] if len(r)), None)
            if held is None or self.population.stream is not None:
                return Taps(stack.module, {})
            with torch.no_grad():
                x, y = self._fetch(held[:2].to(self.device)[None], None, None)
            stack.module.train()
            self._taps[stack.number] = Taps.of(stack.module, self.task, x[0], y[0], self.dtype)
        return self._taps[stack.number]

    def _tapped_step(self, stack: _Stack, plan: Plan, online: bool) -> Callable[..., tuple[Tensor, Rows, None]]:
        """A step of plain SGD in which no gradient of a tapped weight is made."""
        taps, layout = self._taps_of(stack), stack.layout
        weights = {f"{name}.weight" for name in taps.layers}

        def value(free: Rows, zeros: Rows, held: Rows, buffers: Rows, key: Tensor | None, x: Tensor, y: Tensor,
                  w: Tensor | None) -> tuple[Tensor, tuple[Rows, Rows]]:  # fmt: skip
            after = {name: b.clone() for name, b in buffers.items()}
            state = {**free, **held, **after}
            if key is not None:
                state.update(dict.fromkeys(stack.keys, key))
            out, seen = taps.call(state, x, zeros)
            each = self.task.loss(logits_of(out), y)
            return (each.mean() if w is None else (each * w).sum()), (seen, after)

        one = self._differentiated(stack, value, (0, 1))

        def step(parameters: list[Tensor], moments: None, buffers: Rows, key: Tensor | None, samples: Tensor,
                 clients: Tensor, shade: Tensor | None, weights_of_samples: Tensor | None, ride: Rows, extra: None,
                 still: None, rate: float | Tensor) -> tuple[Tensor, Rows, None]:  # fmt: skip
            x, y = self._fetch(samples, clients, shade, online)
            named = dict(zip(layout.names, parameters, strict=True))
            held = {n: p for n, p in named.items() if n in weights}
            free = {n: p for n, p in named.items() if n not in weights}
            zeros = taps.zeros(len(samples), x, named)
            (grads, back), (loss, (seen, after)) = one(free, zeros, held, buffers, key, x, y, weights_of_samples)
            descend(plan, list(free.values()), [grads[n] for n in free], None, rate)
            taps.descend(named, back, seen, rate)
            return loss, after, None

        return step

    def _targets_of(self, distil: Distil, pairs: Tensor) -> Tensor:
        """Which targets each pair may take: pairs × q."""
        at = torch.arange(len(distil.targets)).expand(len(pairs), -1) if distil.at is None else distil.at[pairs]
        return at.reshape(len(pairs), -1).to(self.device)

    def _nearest(self, stack: _Stack, ask: Fit, pairs: Tensor, start: Tensor) -> Tensor:
        """Which of its targets is nearest to each pair's outputs before training."""
        assert ask.distil is not None
        at, targets = self._targets_of(ask.distil, pairs), ask.distil.targets
        if at.shape[1] == 1:
            return torch.zeros(len(pairs), dtype=torch.long, device=self.device)
        local = stack.local[ask.clients[pairs]]
        x = self._public_inputs(ask.distil.inputs)
        out = self._outputs(stack, start, self._buffers(stack, ask.memory, local), x, 256)
        mine = self._student(ask.distil, out.flatten(0, 1)).view_as(out)
        gaps = torch.stack([((targets[c].to(mine.dtype) - mine) ** 2).flatten(1).sum(1) for c in at.T], 1)
        return gaps.argmin(1)

    def _student(self, distil: Distil, outputs: Tensor) -> Tensor:
        """What is held against the targets."""
        return outputs if distil.loss == "logits" else self.task.soft(outputs / distil.temperature)

    def _distance(self, distil: Distil, outputs: Tensor, target: Tensor) -> Tensor:
        """The mean distance of the outputs of a batch to their targets."""
        target = target.to(outputs.dtype)
        if distil.loss == "cross_entropy":
            return -(target * (outputs / distil.temperature).log_softmax(-1)).flatten(1).sum(1).mean()
        apart = target - self._student(distil, outputs)
        return apart.abs().mean() if distil.loss == "logits" else apart.square().flatten(1).sum(1).mean()

    def _distillation(
        self, stack: _Stack, ask: Fit, pairs: Tensor, choice: Tensor, place: int, steps: int
    ) -> Callable[[int, int, int, Rows, Rows, Tensor | None], tuple[Rows, Tensor]] | None:
        """The weighted gradient of the distance to the nearest target on a public batch, and the distance, by step."""
        if ask.distil is None:
            return None
        distil: Distil = ask.distil
        local = stack.local[ask.clients[pairs]]
        x = self._public_inputs(distil.inputs)
        at = self._targets_of(distil, pairs)
        nearest = at.gather(1, choice[pairs.to(self.device), None]).flatten()
        weight = _weights(distil.weight, pairs, self)
        draw = None if ask.draw is None else ask.draw[pairs]
        name = f"public/{distil.inputs}"
        starts = stack.streams.starts(name, local, self.t, place, draw)
        chosen = stack.streams.samples(name, local, starts, steps * distil.batch, True)

        def gap(
            parameters: Rows, buffers: Rows, key: Tensor | None, x: Tensor, target: Tensor, w: Tensor
        ) -> tuple[Tensor, Tensor]:
            state = {**parameters, **{n: b.clone() for n, b in buffers.items()}}
            if key is not None:
                state.update(dict.fromkeys(stack.keys, key))
            value = self._distance(distil, logits_of(functional_call(stack.module, state, (x,))), target)
            return w * value, value

        one = self._batched(stack, True, torch.func.grad(gap, has_aux=True))

        def gradient(
            step: int, a: int, b: int, parameters: Rows, buffers: Rows, key: Tensor | None
        ) -> tuple[Rows, Tensor]:
            now = chosen[a:b, step * distil.batch : (step + 1) * distil.batch]
            targets = distil.targets[nearest[a:b, None], now]
            mine = {n: v[a:b] for n, v in buffers.items()}
            given: tuple[Rows, Tensor] = one(parameters, mine, key, x[now], targets, weight[a:b])
            return given

        return gradient


def _store(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x.to(device=device, dtype=dtype) if x.is_floating_point() else x.to(device)


def _taken(store: Tensor, samples: Tensor) -> Tensor:
    """The samples with these numbers, as whole rows: on the host much faster than indexing where rows are short."""
    return store.index_select(0, samples.flatten()).view(*samples.shape, *store.shape[1:])


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether it was memory: a CPU's allocator has no error of its own, nor have libraries and compilers."""
    signs = ("can't allocate memory", "out of memory", "OutOfMemoryError", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def _width(ask: Ask) -> int:
    """How wide an answer without pairs is."""
    return ask.models.shape[1] if isinstance(ask.models, Tensor) else 0


def _on_host(name: str) -> bool:
    return "/place/" in name or name.endswith("/step")


def _powers(count: int) -> Iterator[tuple[int, int]]:
    """The spans of powers of two that a count is made of, largest first."""
    start = 0
    while start < count:
        size = 1 << ((count - start).bit_length() - 1)
        yield start, start + size
        start += size


def _rounded(count: int, whole: int) -> int:
    """The least that is no less than a count, of: the whole, its double, half, quarter … (rounded up)."""
    size = max(1, whole)
    while size < count:
        size *= 2
    while size > 1 and -(-size // 2) >= count:
        size = -(-size // 2)
    return size


def _axes(arg: Any) -> Any:
    """vmap's axis of an argument: rows first, and None for what is not there."""
    return None if arg is None or (isinstance(arg, dict) and not arg) else 0


def _run(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix; a view where they are a run, or all the same one."""
    first = int(rows[0])
    if bool((rows == torch.arange(first, first + len(rows))).all()):
        return matrix[first : first + len(rows)]
    if bool((rows == first).all()):
        return matrix[first].expand(len(rows), -1)
    return matrix[rows.to(matrix.device)]


def _shades(keys: Tensor | None, first: int, count: int) -> Tensor | None:
    """Keys of single samples from keys of pairs: m×count."""
    if keys is None:
        return None
    return draws.fold(keys[:, None], first + torch.arange(count, device=keys.device))


def _weights(weight: float | Tensor, pairs: Tensor, fleet: StackedFleet) -> Tensor:
    if isinstance(weight, Tensor) and weight.ndim:
        return weight.to(fleet.device, fleet.dtype)[pairs.to(fleet.device)]
    return torch.full((len(pairs),), float(weight), dtype=fleet.dtype, device=fleet.device)
