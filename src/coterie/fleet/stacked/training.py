"""Fit: rows that train side by side, each on its own client's batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import NONFINITE, OK, Answer, Distil, Fit, Own, Plan
from coterie.fleet.reduce import finite, zeroed
from coterie.fleet.stacked import distillation
from coterie.fleet.stacked.chunks import powers
from coterie.fleet.stacked.compute import given
from coterie.fleet.stacked.optimiser import RowOptimiser, descend, hold
from coterie.fleet.stacked.outputs import Outputs
from coterie.fleet.stacked.parts import Parts
from coterie.fleet.stacked.samples import shades
from coterie.fleet.stacked.stack import Now, Rows, Stack, drawn_by
from coterie.fleet.stacked.taps import Taps
from coterie.tasks import logits_of

Step = Callable[..., tuple[Tensor, Rows, list[Tensor] | None]]
Keep = Callable[[Tensor, Tensor, Tensor], None]


class Training:
    """Answers Fit."""

    def __init__(self, parts: Parts, outputs: Outputs) -> None:
        self.parts, self.outputs = parts, outputs
        self._steps: dict[Any, Step] = {}
        self._taps: dict[int, Taps] = {}

    def fit(self, ask: Fit, now: Now) -> Answer:
        """Train every pair's model; give it, keep it at the client, or both."""
        parts, plan, device = self.parts, ask.plan, self.parts.device
        reason = torch.zeros(ask.m, dtype=torch.int8, device=device)
        losses = torch.zeros(ask.m, dtype=parts.dtype, device=device)
        choice = torch.zeros(ask.m if ask.distil is not None else 0, dtype=torch.long, device=device)
        rows_out: Tensor | None = None
        for stack, pairs in parts.by_stack(ask):
            sizes = stack.sizes[ask.split][stack.local[ask.clients[pairs]]]
            steps = torch.tensor([ask.steps_for(int(s)) for s in sizes])
            order = torch.argsort(steps, descending=True, stable=True)
            whole = parts.chunks.longest(stack, ask.split, sizes)
            samples = max(plan.batch or whole, 0 if ask.distil is None else ask.distil.batch)
            if plan.batch is None and stack.fresh and len(set(sizes.tolist())) > 1:
                groups = [order[sizes[order] == s] for s in sizes.unique()]
            else:
                groups = [order]
            for chosen in groups:
                ragged = bool(steps[chosen[0]] != steps[chosen[-1]])
                at_once = parts.chunks.at_once(stack, samples, trained=len(chosen))
                for part, real in parts.chunks.split(stack, chosen, at_once, pad=not ragged):
                    these = pairs[part]
                    start = parts.memory.models(stack, ask, these)
                    if ask.distil is not None:
                        near = distillation.nearest(parts, self.outputs, stack, ask, these, start)
                        choice[these.to(device)] = near
                    trained, loss, keep = self.train(stack, ask, these, real, steps[part], start, now, choice, ragged)
                    these, start = these[:real], start[:real]
                    local, there = stack.local[ask.clients[these]], these.to(device)
                    good = finite(trained) & torch.isfinite(loss)
                    reason[there] = torch.where(good, OK, NONFINITE).to(torch.int8)
                    losses[there] = torch.where(good, loss, 0).to(parts.dtype)
                    if ask.give != "nothing":
                        made = trained - start if ask.give == "update" else trained
                        made = zeroed(parts.squeezed(stack, ask, these, made, now), good)
                        if len(these) == ask.m and bool((these == torch.arange(ask.m)).all()):
                            rows_out = made
                        else:
                            if rows_out is None:
                                rows_out = torch.zeros(ask.m, made.shape[1], dtype=parts.dtype, device=device)
                            rows_out[there] = made
                    if ask.keep is not None:  # last, since an Own start may be a view of what is remembered
                        own = ask.models if isinstance(ask.models, Own) else Own(ask.keep)
                        parts.memory.keep_own(stack, ask.keep, own, local, trained, good)
                    if ask.track:
                        keep(local, good, reason)
        if rows_out is None:
            rows_out = torch.empty(0, device=device)
        return Answer(reason, rows=rows_out, loss=losses, choice=choice)

    def train(
        self, stack: Stack, ask: Fit, pairs: Tensor, real: int, steps: Tensor, start: Tensor, now: Now,
        choice: Tensor, ragged: bool,
    ) -> tuple[Tensor, Tensor, Keep]:  # fmt: skip
        """Train some rows side by side, most steps first: at each step the rows still training are a prefix.

        Of the answer only the first `real` ones are meant; the others pad a chunk of rows with equally many steps.
        Gives the rows, their mean losses, and what writes down who remembers what.
        """
        parts, plan, layout = self.parts, ask.plan, stack.layout
        memory, compiled = parts.memory, parts.compute.compiled
        local = stack.local[ask.clients[pairs]]
        most = int(steps.max()) if len(steps) else 0
        batch = self._batches(stack, ask, pairs, now, most)
        parameters = {
            name: value.clone(memory_format=torch.contiguous_format) for name, value in layout.views(start).items()
        }
        moments = f"{ask.memory}/{plan.optimiser}"
        kept, behind = memory.moments(stack, moments, local) if plan.keep_optimiser else ({}, torch.zeros_like(local))
        optimiser = RowOptimiser(plan, list(parameters.values()), kept, behind)
        riders = self._riders(ask, pairs)
        still = None
        if ask.columns is not None:
            mask = torch.zeros(layout.d, dtype=torch.bool)
            mask[ask.columns] = True
            still = [~m for m in layout.views(mask.to(parts.device)).values()]
        final = {name: b.clone() for name, b in memory.buffers(stack, ask.memory, local).items()}
        total = torch.zeros(len(pairs), dtype=parts.dtype, device=parts.device)
        public = None
        if ask.distil is not None:
            public = distillation.batches(parts, stack, ask, pairs, choice, now, most)
        bare = plan == Plan(plan.steps, plan.epochs, plan.batch, plan.lr, sampling=plan.sampling)
        bare = bare and not (riders or public or still or parts.compute.autocast)
        online = parts.population.online(ask.split)
        step_fn = self._step(stack, plan, online, bare, ask.distil)
        look = self._step(stack, Plan(steps=1), online, False) if plan.ahead else None

        def told(rate: float) -> float | Tensor:
            """A rate in a tensor does not recompile when it changes."""
            return torch.tensor(rate, dtype=parts.dtype, device=parts.device) if compiled else rate

        rate, far = told(plan.lr), told(plan.ahead)

        def note(after: Rows, a: int, b: int) -> None:
            for n, v in after.items():
                final[n][a:b] = v

        ordered = steps.tolist()
        active = len(ordered)
        for step in range(most):
            while ordered[active - 1] <= step:
                active -= 1
            for a, b in powers(active) if ragged and compiled else [(0, active)]:
                part = [p[a:b] for p in parameters.values()]
                at, ahead = part, []
                if look is not None:  # the gradient of this step is taken one step of another batch ahead
                    at = [p.clone() for p in at]
                    _, after, _ = look(at, None, *batch(2 * step, a, b, final), {}, None, None, far)
                    note(after, a, b)
                    ahead = [p.clone() for p in at]
                data = batch(plan.batches * (step + 1) - 1, a, b, final)
                extra = public(step, a, b) if public else None
                ride = {n: r[a:b] for n, r in riders.items()}
                loss, after, left = step_fn(at, optimiser.slices(a, b), *data, ride, extra, still, rate)
                for p, moved, before in zip(part, at, ahead, strict=False):
                    p.add_(moved - before)
                if left is not None:
                    optimiser.step(left, a, b, still)
                total[a:b] += loss
                note(after, a, b)
        trained = layout.flatten({name: p[:real] for name, p in parameters.items()})

        def keep(where: Tensor, good: Tensor, reason: Tensor) -> None:
            memory.keep_buffers(stack, ask.memory, where, {n: b[:real] for n, b in final.items()}, good)
            if plan.sampling == "epoch" and plan.batch is not None and not ask.public_only:
                memory.move_on(stack, ask, pairs[:real], steps[:real] * plan.batches * plan.batch, reason)
            if plan.keep_optimiser:
                state = {name: every[:real] for name, every in optimiser.state(layout).items()}
                memory.keep_moments(stack, moments, where, state, good)

        return trained, (total / steps.clamp(min=1).to(parts.device))[:real], keep

    def _batches(
        self, stack: Stack, ask: Fit, pairs: Tensor, now: Now, most: int
    ) -> Callable[[int, int, int, Rows], tuple[Any, ...]]:
        """What a step is told of data, by the number of its batch: (number, rows from, to, all buffers) → buffers, keys
        of dropout, samples, clients, shades, weights.
        """  # fmt: skip
        parts, plan = self.parts, ask.plan
        local, draw = stack.local[ask.clients[pairs]], drawn_by(ask, pairs)
        clients = ask.clients[pairs].to(parts.device)
        weights: Tensor | None = None
        if ask.public_only:
            samples = torch.zeros(len(pairs), 0, dtype=torch.long, device=parts.device)
        elif plan.batch is None:
            longest = parts.chunks.longest(stack, ask.split, stack.sizes[ask.split][local])
            samples, weights = parts.samples.whole(stack, ask.split, local, longest)
        else:
            epoch = plan.sampling == "epoch"
            if epoch:
                starts = parts.memory.places(stack, ask.memory, ask.split, local)
            else:
                starts = stack.streams.starts(ask.split, local, now.t, now.place, draw)
            samples = stack.streams.samples(ask.split, local, starts, most * plan.batches * plan.batch, not epoch)
        shade = parts.samples.keys(stack, local, now, draw)
        drop = stack.dropout_keys(local, now, draw)

        def batch(number: int, a: int, b: int, buffers: Rows) -> tuple[Any, ...]:
            chosen = samples
            if plan.batch is not None:  # laid out alike however long the stream was read
                chosen = samples[:, number * plan.batch : (number + 1) * plan.batch].contiguous()
            return (
                {n: v[a:b] for n, v in buffers.items()},
                None if drop is None else draws.fold(drop[a:b], number),
                chosen[a:b],
                clients[a:b, None],
                None if shade is None else shades(shade[a:b], number * (plan.batch or 0), chosen.shape[1]),
                None if weights is None else weights[a:b],
            )

        return batch

    def _riders(self, ask: Fit, pairs: Tensor) -> Rows:
        """Rows that ride along, one per pair: pull, its weight, drift."""
        riders: Rows = {}
        device = self.parts.device
        for name, rider in (("pull", ask.pull), ("drift", ask.drift)):
            if rider is None:
                continue
            if rider.rows.ndim == 1:
                riders[name] = rider.rows.expand(len(pairs), -1)
            elif rider.at is None:
                riders[name] = rider.rows[pairs.to(device)]
            else:
                at = torch.as_tensor(rider.at)[pairs].to(device)
                riders[name] = rider.rows[at] if at.ndim == 1 else rider.rows[at].mean(1)
        if ask.pull is not None:
            riders["weight"] = distillation.weights(ask.pull.weight, pairs, self.parts)
        return riders

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _step(self, stack: Stack, plan: Plan, online: bool, bare: bool, distil: Distil | None = None) -> Step:
        """One step of training, in place. SGD's update is part of it; for others it gives the gradient that is left.

        Where a step is nothing but a rate times a gradient (`bare`), linear layers are tapped.
        """
        sgd = plan.optimiser == "sgd"
        torchs = (plan.clip, plan.momentum, plan.nesterov, plan.weight_decay)
        pull = () if distil is None else (distil.loss, distil.temperature)
        alone = distil is not None and distil.alone
        mark = (stack.number, online, sgd, *torchs, bare, pull, alone)
        if mark in self._steps:
            return self._steps[mark]
        compute, fetch, layout = self.parts.compute, self.parts.samples.fetch, stack.layout
        if bare and self.taps(stack).layers:
            self._steps[mark] = compute.compiled_step(self._tapped_step(stack, plan, online))
            return self._steps[mark]
        one = compute.differentiated(stack, compute.value(stack))
        other = distillation.gradient(self.parts, stack, *pull) if pull else None

        def step(parameters: list[Tensor], moments: list[Tensor] | None, buffers: Rows, key: Tensor | None,
                 samples: Tensor, clients: Tensor, shade: Tensor | None, weights: Tensor | None, ride: Rows,
                 extra: distillation.Batch | None, still: list[Tensor] | None, rate: float | Tensor,
                 ) -> tuple[Tensor, Rows, list[Tensor] | None]:  # fmt: skip
            named = dict(zip(layout.names, parameters, strict=True))
            pulls: Rows = {}
            after: Rows = {}
            if other is not None and extra is not None:
                pulls, loss = other(named, buffers, key, *extra)
            if alone:
                gradient = [pulls[n] for n in layout.names]
            else:
                x, y = fetch(samples, clients, shade, online)
                grads, (loss, (_, after)) = one(named, buffers, key, x, y, weights)
                gradient = [grads[n] + pulls[n] if pulls else grads[n] for n in layout.names]
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

        self._steps[mark] = compute.compiled_step(step)
        return self._steps[mark]

    def taps(self, stack: Stack) -> Taps:
        """The taps of a stack's module, tried on two of its samples."""
        if stack.number not in self._taps:
            parts = self.parts
            index = parts.population.index["train"]
            held = next((r for c in stack.clients for r in [index[int(c)]] if len(r)), None)
            if held is None or parts.population.stream is not None:
                return Taps(stack.module, {})
            with torch.no_grad():
                x, y = parts.samples.fetch(held[:2].to(parts.device)[None], None, None)
            stack.module.train()
            self._taps[stack.number] = Taps.of(stack.module, parts.task, x[0], y[0], parts.dtype)
        return self._taps[stack.number]

    def _tapped_step(self, stack: Stack, plan: Plan, online: bool) -> Step:
        """A step of plain SGD in which no gradient of a tapped weight is made."""
        taps, layout, task, fetch = self.taps(stack), stack.layout, self.parts.task, self.parts.samples.fetch
        tapped = {f"{name}.weight" for name in taps.layers}

        def value(free: Rows, zeros: Rows, held: Rows, buffers: Rows, key: Tensor | None, x: Tensor, y: Tensor,
                  w: Tensor | None) -> tuple[Tensor, tuple[Rows, Rows]]:  # fmt: skip
            state, after = given(stack, {**free, **held}, buffers, key)
            out, seen = taps.call(state, x, zeros)
            each = task.loss(logits_of(out), y)
            return (each.mean() if w is None else (each * w).sum()), (seen, after)

        one = self.parts.compute.differentiated(stack, value, (0, 1))

        def step(parameters: list[Tensor], moments: None, buffers: Rows, key: Tensor | None, samples: Tensor,
                 clients: Tensor, shade: Tensor | None, weights: Tensor | None, ride: Rows, extra: None,
                 still: None, rate: float | Tensor) -> tuple[Tensor, Rows, None]:  # fmt: skip
            x, y = fetch(samples, clients, shade, online)
            named = dict(zip(layout.names, parameters, strict=True))
            held = {n: p for n, p in named.items() if n in tapped}
            free = {n: p for n, p in named.items() if n not in tapped}
            zeros = taps.zeros(len(samples), x, named)
            (grads, back), (loss, (seen, after)) = one(free, zeros, held, buffers, key, x, y, weights)
            descend(plan, list(free.values()), [grads[n] for n in free], None, rate)
            taps.descend(named, back, seen, rate)
            return loss, after, None

        return step
