"""One client at a time in a plain Python loop: slow, simple, any `nn.Module`; the oracle other fleets are tested by.

It shares no sampling or reduction code with them: permutations come from numpy, gradients from `loss.backward()`,
training from `torch.optim` on the module itself, one pair after the other.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie import draws
from coterie.asks import NONFINITE, OK, Answer, Ask, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict
from coterie.data.population import Population
from coterie.fleet.base import FRESH, RECALIBRATION, RING, Fleet
from coterie.fleet.compress import coarsened, squeezed
from coterie.fleet.layout import KeyedDropout, buffers
from coterie.tasks import logits_of

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
EVALUATION = 512  # samples at once
Kept = dict[str, Tensor]


def _fold(key: int, counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The hash of `draws.fold`, written again in numpy."""
    with np.errstate(over="ignore"):
        z = np.uint64(key & _MASK) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
        return z ^ (z >> np.uint64(31))


class LoopFleet(Fleet):
    """The plain loop. On the CPU or one GPU; every number it gives is computed for one pair alone."""

    def __init__(
        self,
        population: Population,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(population, seed=seed, device=torch.device(device), dtype=dtype)
        self._client_state: list[Kept] = [{} for _ in population.keys]
        self._permutations: dict[tuple[int, str, int], NDArray[np.int64]] = {}
        self._modules = [module.to(self.device) for module in self._modules]
        self._fresh_buffers = [{k: v.clone() for k, v in buffers(module).items()} for module in self._modules]

    def _kept(self) -> Kept:
        return {f"{c}/{k}": v for c, kept in enumerate(self._client_state) for k, v in kept.items()}

    def _restore(self, kept: Kept) -> None:
        self._client_state = [{} for _ in self.population.keys]
        for name, value in kept.items():
            c, _, rest = name.partition("/")
            self._client_state[int(c)][rest] = value

    # ---- one client --------------------------------------------------------------------------------------------------

    def _row(self, ask: Ask, pair: int) -> Tensor:
        """The model a pair means."""
        c = int(ask.clients[pair])
        if isinstance(ask.models, Own):
            kept = self._client_state[c].get(f"own/{ask.models.slot}")
            return kept if kept is not None else self._initial([c], ask.models.shared)[0].to(self.device)
        if ask.at is None:
            return ask.models[pair]
        if ask.at.ndim == 1:
            return ask.models[int(ask.at[pair])]
        rows = [ask.models[int(r)] for r in ask.at[pair]]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total / len(rows)

    def _module(self, c: int, row: Tensor, buffers: Kept) -> nn.Module:
        a = int(self._architecture[c])
        module = self._modules[a]
        self._layouts[a].load(module, row)
        own = dict(module.named_buffers())
        for name, value in buffers.items():
            own[name].copy_(value)
        return module

    def _buffers_of(self, ask: Ask, pair: int, row: Tensor) -> Kept:
        """The buffers a pair is answered with, by the ask's policy."""
        c = int(ask.clients[pair])
        policy = getattr(ask, "buffers", "personal")
        mine = self._remembered(c, ask.memory)
        if policy == "personal" or not mine:
            return mine
        if policy == "averaged":
            same = [k for k in range(self.n) if self._architecture[k] == self._architecture[c]]
            all_of_them = [self._remembered(k, ask.memory) for k in same]
            mean = {}
            for name, value in mine.items():
                total = torch.zeros_like(value, dtype=torch.float64)
                for other in all_of_them:
                    total += other[name].double()
                mean[name] = (total / len(same)).to(value.dtype)
            return mean
        return self._recalibrated(c, row, mine)

    def buffers_of(self, client: int, memory: str) -> Kept:
        """The buffers a client keeps under a memory."""
        return self._remembered(client, memory)

    def _remembered(self, c: int, memory: str) -> Kept:
        fresh = self._fresh_buffers[int(self._architecture[c])]
        return {name: self._client_state[c].get(f"buffers/{memory}/{name}", value) for name, value in fresh.items()}

    def _recalibrated(self, c: int, row: Tensor, mine: Kept) -> Kept:
        """Buffers after one pass over the client's training data at this model, every batch weighing the same."""
        module = self._module(c, row, self._fresh_buffers[int(self._architecture[c])]).train()
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        before = [m.momentum for m in norms]
        samples = self.population.index["train"][c]
        size = min(RECALIBRATION, len(samples))
        for m in norms:
            m.momentum = None
        try:
            with torch.no_grad(), _quiet_dropout(module):
                for start in range(0, len(samples) - size + 1, size):
                    module(self._inputs(samples[start : start + size], None))
            return {k: v.clone() for k, v in buffers(module).items()}
        finally:
            for m, momentum in zip(norms, before, strict=True):
                m.momentum = momentum

    # ---- samples -----------------------------------------------------------------------------------------------------

    def _permutation(self, c: int, split: str, size: int, epoch: int) -> NDArray[np.int64]:
        mark = (c, split, epoch)
        if mark not in self._permutations:
            key = self._client_keys[c]
            for counter in (draws.name("permutation"), draws.name(split), epoch):
                key = draws.fold_int(key, counter)
            order = np.argsort(_fold(key, np.arange(size)).view(np.int64), kind="stable")
            self._permutations[mark] = order.astype(np.int64)
        return self._permutations[mark]

    def _stream(self, c: int, split: str, size: int, start: int, ring: bool, span: range) -> list[int]:
        """Samples (as places in the client's list) of a span of its endless stream from a place on."""
        places = []
        for k in span:
            epoch, place = (start // size + k // size) % RING if ring else (start + k) // size, (start + k) % size
            places.append(int(self._permutation(c, split, size, epoch)[place]))
        return places

    def _fresh_start(self, c: int, split: str, size: int, place: int, draw: int) -> int:
        key = draws.fold_int(self._client_keys[c], draws.name("fresh"), draws.name(split), self.t, place, draw)
        return (key & ((1 << 62) - 1)) % (FRESH if self.online(split) else size * RING)

    def _sample_keys(self, c: int, place: int, draw: int, first: int, count: int) -> Tensor | None:
        if self.population.transform is None:
            return None
        key = draws.fold_int(self._client_keys[c], draws.name("augment"), self.t, place, draw)
        return torch.tensor([draws.fold_int(key, first + i) for i in range(count)], device=self.device)

    def _inputs(self, samples: Tensor, keys: Tensor | None) -> Tensor:
        x = self.population.inputs[samples].to(self.device)
        if self.population.transform is not None:
            x = self.population.transform(x, keys)
        return x.to(self.dtype) if x.is_floating_point() else x

    def _targets(self, c: int, samples: Tensor) -> Tensor:
        y = self.population.labels(c, samples).to(self.device)
        return y.to(self.dtype) if y.is_floating_point() else y

    def _batch(
        self, c: int, split: str, batch: int | None, start: int, ring: bool, place: int, draw: int, done: int
    ) -> tuple[Tensor, Tensor]:
        """The batch that begins `done` samples after the start: inputs and targets."""
        if self.online(split):
            assert batch is not None
            assert self.population.stream is not None
            assert self.population.stream_clients is not None
            counters = torch.arange(start + done, start + done + batch)
            x, y = self.population.stream.samples(self.population.stream_clients[c], counters)
            made = y.to(self.device, self.dtype if y.is_floating_point() else None)
            return x.to(self.device, self.dtype), made
        held = self.population.index[split][c]
        if batch is None:
            samples = held
            done, count = 0, len(held)
        else:
            samples = held[self._stream(c, split, len(held), start, ring, range(done, done + batch))]
            count = batch
        keys = self._sample_keys(c, place, draw, done, count)
        return self._inputs(samples, keys), self._targets(c, samples)

    def _dropout(self, module: nn.Module, c: int, place: int, draw: int, step: int) -> None:
        key = draws.fold_int(self._client_keys[c], draws.name("dropout"), self.t, place, draw, step)
        for part in module.modules():
            if isinstance(part, KeyedDropout):
                part.key.fill_(key)
        torch.manual_seed(key & ((1 << 63) - 1))  # for what a module draws by itself

    # ---- the five asks -----------------------------------------------------------------------------------------------

    def _one_gradient(self, ask: Gradient, pair: int, place: int) -> tuple[Tensor, float, int, Kept]:
        c = int(ask.clients[pair])
        draw = 0 if ask.draw is None else int(ask.draw[pair])
        size = len(self.population.index[ask.split][c])
        mark = f"place/{ask.memory}/{ask.split}"
        epoch = ask.sampling == "epoch"
        if epoch:
            start = int(self._client_state[c].get(mark, torch.tensor(0)))
        else:
            start = self._fresh_start(c, ask.split, size, place, draw)
        row = self._row(ask, pair)
        module = self._module(c, row, self._remembered(c, ask.memory)).train()
        x, y = self._batch(c, ask.split, ask.batch, start, not epoch, place, draw, 0)
        module.zero_grad()
        with _own_randomness():
            self._dropout(module, c, place, draw, 0)
            loss = self.task.loss(logits_of(module(x)), y).mean()
        loss.backward()
        own = dict(module.named_parameters())
        layout = self._layouts[int(self._architecture[c])]
        parts = [own[name].grad for name in layout.names]
        grad = torch.cat([torch.zeros_like(own[n]).flatten() if g is None else g.flatten()
                          for n, g in zip(layout.names, parts, strict=True)])  # fmt: skip
        value = float(loss.detach())
        reason = OK if math.isfinite(value) and bool(torch.isfinite(grad).all()) else NONFINITE
        after: Kept = {}
        if ask.track and reason == OK:
            after = {f"buffers/{ask.memory}/{k}": v.clone() for k, v in buffers(module).items()}
            if epoch and ask.batch is not None:
                after[mark] = torch.tensor(start + ask.batch)
        return grad, value, reason, after

    def _gradient(self, ask: Gradient, place: int) -> Answer:
        width = int(self._widths[ask.clients[0]]) if ask.m else 0
        reasons, losses = [], []
        rows: list[Tensor] = []
        sums = torch.zeros(ask.outputs or 0, width, dtype=self.dtype, device=self.device)
        arrived = torch.zeros(ask.outputs or 0, dtype=self.dtype, device=self.device)
        for pair in range(ask.m):
            grad, loss, reason, after = self._one_gradient(ask, pair, place)
            self._client_state[int(ask.clients[pair])].update(after)
            grad = self._squeezed(ask, pair, grad, place) if reason == OK else torch.zeros_like(grad)
            seen = grad if ask.sketch is None else self._sketched(grad, ask.sketch, place)
            if ask.give == "gram" and not math.isfinite(float(seen @ seen)):  # its square is part of the answer
                reason, seen = NONFINITE, torch.zeros_like(seen)
            good = reason == OK
            reasons.append(reason)
            losses.append(loss if good else 0.0)
            if ask.give == "sum":
                assert ask.into is not None
                weight = 1.0 if ask.weights is None else ask.weights[pair].to(self.device, self.dtype)
                if good:
                    sums[int(ask.into[pair])] += weight * grad
                    arrived[int(ask.into[pair])] += weight
            else:
                rows.append(seen)
        told = self._told(reasons)
        loss_values = torch.tensor(losses, dtype=self.dtype, device=self.device)
        if ask.give == "sum":
            return Answer(told, sums=sums, weight=arrived, loss=loss_values)
        if ask.give == "gram":
            return Answer(told, gram=self._gram(ask, rows), loss=loss_values)
        return Answer(told, rows=_stack(rows, width if ask.sketch is None else ask.sketch, self), loss=loss_values)

    def _squeezed(self, ask: Gradient | Fit, pair: int, row: Tensor, place: int) -> Tensor:
        draw = 0 if ask.draw is None else int(ask.draw[pair])
        key = draws.fold_int(self._client_keys[int(ask.clients[pair])], draws.name("compress"), self.t, place, draw)
        return squeezed(row[None], ask.compress, torch.tensor([key], device=row.device))[0]

    def _gram(self, ask: Gradient, rows: list[Tensor]) -> Tensor:
        assert ask.group is not None
        assert ask.slot is not None
        groups, size = ask.gram_shape
        gram = torch.zeros(groups, size, size, dtype=self.dtype, device=self.device)
        for p in range(ask.m):
            for q in range(ask.m):
                if ask.group[p] == ask.group[q]:
                    gram[ask.group[p], ask.slot[p], ask.slot[q]] = rows[p] @ rows[q]
        return gram

    def _sketched(self, grad: Tensor, k: int, place: int) -> Tensor:
        key = draws.fold_int(draws.name("sketch"), self.seed, self.t, place)
        bits = _fold(key, np.arange(len(grad)))
        signs = np.where(bits >> np.uint64(63), -1.0, 1.0)
        buckets = (bits & np.uint64((1 << 62) - 1)) % np.uint64(k)
        sums = np.bincount(buckets.astype(np.int64), weights=grad.cpu().double().numpy() * signs, minlength=k)
        return torch.from_numpy(sums).to(self.device, self.dtype)

    def _loss(self, ask: Loss, place: int) -> Answer:
        reasons, losses = [], []
        for pair in range(ask.m):
            c = int(ask.clients[pair])
            draw = 0 if ask.draw is None else int(ask.draw[pair])
            size = len(self.population.index[ask.split][c])
            mark = f"place/{ask.memory}/{ask.split}"
            epoch = ask.sampling == "epoch"
            if epoch:
                start = int(self._client_state[c].get(mark, torch.tensor(0)))
            else:
                start = self._fresh_start(c, ask.split, size, place, draw)
            row = self._row(ask, pair)
            module = self._module(c, row, self._buffers_of(ask, pair, row)).eval()
            x, y = self._batch(c, ask.split, ask.batch, start, not epoch, place, draw, 0)
            with torch.no_grad():
                value = float(self.task.loss(logits_of(module(x)), y).mean())
            good = math.isfinite(value)
            if ask.track and epoch and good and ask.batch is not None:
                self._client_state[c][mark] = torch.tensor(start + ask.batch)
            reasons.append(OK if good else NONFINITE)
            losses.append(value if good else 0.0)
        return Answer(self._told(reasons), loss=torch.tensor(losses, dtype=self.dtype, device=self.device))

    def _fit(self, ask: Fit, place: int) -> Answer:
        reasons, losses, rows = [], [], []
        choices = [] if ask.distil is None else [
            self._nearest_target(ask, pair, self._row(ask, pair)) for pair in range(ask.m)
        ]  # fmt: skip
        for pair in range(ask.m):
            c = int(ask.clients[pair])
            start = self._row(ask, pair)
            public = self._offered(ask, pair)[choices[pair]] if choices else None
            trained, loss, after = self._train(ask, pair, start, place, public)
            good = math.isfinite(loss) and bool(torch.isfinite(trained).all())
            reasons.append(OK if good else NONFINITE)
            losses.append(loss if good else 0.0)
            if good:
                if ask.keep is not None:
                    self._client_state[c][f"own/{ask.keep}"] = trained
                if ask.track:
                    self._client_state[c].update(after)
            if ask.give != "nothing":
                value = trained - start if ask.give == "update" else trained
                rows.append(self._squeezed(ask, pair, value, place) if good else torch.zeros_like(value))
        answer_rows = _stack(rows, 0, self) if ask.give != "nothing" else torch.empty(0)
        return Answer(
            self._told(reasons),
            rows=answer_rows,
            loss=torch.tensor(losses, dtype=self.dtype, device=self.device),
            choice=torch.tensor(choices, dtype=torch.long, device=self.device),
        )

    def _train(
        self, ask: Fit, pair: int, start: Tensor, place: int, public: Tensor | None
    ) -> tuple[Tensor, float, Kept]:
        c, plan = int(ask.clients[pair]), ask.plan
        layout = self._layouts[int(self._architecture[c])]
        draw = 0 if ask.draw is None else int(ask.draw[pair])
        size = len(self.population.index[ask.split][c])
        mark = f"place/{ask.memory}/{ask.split}"
        private = ask.distil is None or not ask.distil.alone
        epoch = plan.sampling == "epoch" and private
        if epoch:
            first = int(self._client_state[c].get(mark, torch.tensor(0)))
        else:
            first = self._fresh_start(c, ask.split, size, place, draw)
        module = self._module(c, start, self._remembered(c, ask.memory)).train()
        own = dict(module.named_parameters())
        moving = [own[name] for name in layout.names]
        optimiser = _optimiser(plan, moving)
        memory = f"optimiser/{ask.memory}/{plan.optimiser}/"
        if plan.keep_optimiser:
            _resume_optimiser(optimiser, self._client_state[c], memory, layout, moving)
        fixed = torch.ones(layout.d, dtype=torch.bool)
        if ask.columns is not None:
            fixed[ask.columns] = False
        steps = ask.steps_for(size)
        total = 0.0

        def private_loss(number: int) -> Tensor:
            """On the batch of this number."""
            x, y = self._batch(c, ask.split, plan.batch, first, not epoch, place, draw, number * (plan.batch or 0))
            with _own_randomness():
                self._dropout(module, c, place, draw, number)
                return self.task.loss(logits_of(module(x)), y).mean()

        for step in range(steps):
            optimiser.zero_grad()
            start_of_step = layout.row(module)
            if plan.ahead:
                private_loss(2 * step).backward()
                torch.optim.SGD(moving, lr=plan.ahead).step()
                optimiser.zero_grad()
            loss = torch.zeros((), dtype=self.dtype, device=self.device)
            if private:
                loss = private_loss(plan.batches * (step + 1) - 1)
            objective = loss
            if ask.pull is not None:
                target = _rider_row(ask.pull.rows, ask.pull.at, pair)
                weight = _per_pair(ask.pull.weight, pair)
                here = torch.cat([p.flatten() for p in moving])
                objective = objective + weight / 2 * ((here - target) ** 2).sum()
            if ask.drift is not None:
                drift = _rider_row(ask.drift.rows, ask.drift.at, pair)
                objective = objective + (torch.cat([p.flatten() for p in moving]) * drift).sum()
            if objective.requires_grad:
                objective.backward()
            if public is not None:
                gap = self._distil(ask, pair, module, public, place, draw, step)
                loss = loss if private else gap
            if plan.clip is not None:
                nn.utils.clip_grad_norm_(moving, plan.clip)
            if plan.ahead:
                layout.load(module, start_of_step)
            optimiser.step()
            if ask.columns is not None:
                layout.load(module, torch.where(fixed.to(self.device), start_of_step, layout.row(module)))
            total += float(loss.detach())
        after = {f"buffers/{ask.memory}/{k}": v.clone() for k, v in buffers(module).items()}
        if epoch and plan.batch is not None:
            after[mark] = torch.tensor(first + steps * plan.batches * plan.batch)
        if plan.keep_optimiser:
            after |= _optimiser_state(optimiser, memory, layout, moving)
        return layout.row(module), total / max(1, steps), after

    def _offered(self, ask: Fit, pair: int) -> Tensor:
        assert ask.distil is not None
        return ask.distil.targets if ask.distil.at is None else ask.distil.targets[ask.distil.at[pair].reshape(-1)]

    def _nearest_target(self, ask: Fit, pair: int, start: Tensor) -> int:
        assert ask.distil is not None
        c = int(ask.clients[pair])
        targets = self._offered(ask, pair)
        if len(targets) == 1:
            return 0
        module = self._module(c, start, self._remembered(c, ask.memory)).eval()
        with torch.no_grad():
            mine = logits_of(module(self._public(ask.distil.inputs)))
        if ask.distil.loss != "logits":
            mine = self.task.soft(mine / ask.distil.temperature)
        return int(np.argmin([float(((target - mine) ** 2).sum()) for target in targets]))

    def _distil(
        self, ask: Fit, pair: int, module: nn.Module, public: Tensor, place: int, draw: int, step: int
    ) -> Tensor:
        """Add the gradient of the distance to the target on a public batch, leaving no trace in the buffers."""
        assert ask.distil is not None
        c, b = int(ask.clients[pair]), ask.distil.batch
        name = f"public/{ask.distil.inputs}"
        start = self._fresh_start(c, name, len(public), place, draw)
        chosen = self._stream(c, name, len(public), start, True, range(step * b, (step + 1) * b))
        before = {k: v.clone() for k, v in buffers(module).items()}
        with _own_randomness():
            self._dropout(module, c, place, draw, step)
            mine = logits_of(module(self._public(ask.distil.inputs)[chosen]))
        wanted, soft = public[chosen].to(mine.dtype), mine / ask.distil.temperature
        match ask.distil.loss:
            case "squares":
                gap = ((wanted - self.task.soft(soft)) ** 2).flatten(1).sum(1).mean()
            case "cross_entropy":
                gap = -(wanted * soft.log_softmax(-1)).flatten(1).sum(1).mean()
            case "logits":
                gap = (wanted - mine).abs().mean()
        (_per_pair(ask.distil.weight, pair) * gap).backward()
        own = dict(module.named_buffers())
        for k, v in before.items():
            own[k].copy_(v)
        return gap

    def _public(self, name: str) -> Tensor:
        x = self.population.public[name].to(self.device)
        if self.population.transform is not None:
            x = self.population.transform(x, None)
        return x.to(self.dtype) if x.is_floating_point() else x

    def _predict(self, ask: Predict) -> Answer:
        reasons, outputs = [], []
        x = self._public(ask.inputs)
        for pair in range(ask.m):
            row = self._row(ask, pair)
            module = self._module(int(ask.clients[pair]), row, self._buffers_of(ask, pair, row)).eval()
            with torch.no_grad():
                out = self.task.soft(module(x)) if ask.soft else logits_of(module(x)).clone()
            good = bool(torch.isfinite(out).all())
            reasons.append(OK if good else NONFINITE)
            outputs.append(coarsened(out, ask.coarse) if good else torch.zeros_like(out))
        return Answer(self._told(reasons), outputs=torch.stack(outputs))

    def _evaluate(self, ask: Evaluate) -> Answer:
        names = ask.metrics or self.task.metrics
        values: dict[str, list[float]] = {name: [] for name in names}
        for pair in range(ask.m):
            c = int(ask.clients[pair])
            held = self.population.index[ask.split][c]
            row = self._row(ask, pair)
            module = self._module(c, row, self._buffers_of(ask, pair, row)).eval()
            if not len(held):
                for name in names:
                    values[name].append(math.nan)
                continue
            with torch.no_grad():
                blocks = held.split(EVALUATION)
                outputs = [logits_of(module(self._inputs(b, None))) for b in blocks]
                parts = [self.task.summary(o, self._targets(c, b)) for o, b in zip(outputs, blocks, strict=True)]
                summary = torch.cat(parts)
            measured = self.task.measure(
                summary[None], torch.ones(1, len(held), dtype=torch.bool, device=self.device), names
            )
            for name in names:
                values[name].append(float(measured[name]))
        told = self._told([OK] * ask.m)
        return Answer(told, metrics={k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()})

    def _told(self, reasons: list[int]) -> Tensor:
        return torch.tensor(reasons, dtype=torch.int8, device=self.device)


def _stack(rows: list[Tensor], width: int, fleet: LoopFleet) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, width, dtype=fleet.dtype, device=fleet.device)


def _rider_row(rows: Tensor, at: Tensor | None, pair: int) -> Tensor:
    if rows.ndim == 1:
        return rows
    if at is None:
        return rows[pair]
    chosen = torch.as_tensor(at)[pair]
    return rows[int(chosen)] if chosen.ndim == 0 else rows[chosen].mean(0)


def _per_pair(value: float | Tensor, pair: int) -> float | Tensor:
    return value[pair] if isinstance(value, Tensor) and value.ndim else value


def _optimiser(plan: Plan, moving: list[nn.Parameter]) -> torch.optim.Optimizer:
    decay = plan.weight_decay
    if plan.optimiser == "sgd":
        return torch.optim.SGD(moving, plan.lr, momentum=plan.momentum, nesterov=plan.nesterov, weight_decay=decay)
    kind = torch.optim.Adam if plan.optimiser == "adam" else torch.optim.AdamW
    return kind(moving, plan.lr, betas=plan.betas, eps=plan.eps, weight_decay=decay)


def _resume_optimiser(optimiser: Any, kept: Kept, prefix: str, layout: Any, moving: list[nn.Parameter]) -> None:
    mine = {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
    for name, value in mine.items():
        views = [value.clone()] * len(moving) if name == "step" else list(layout.views(value.clone()).values())
        for p, view in zip(moving, views, strict=True):
            optimiser.state[p][name] = view.clone() if name == "step" else view


def _optimiser_state(optimiser: Any, prefix: str, layout: Any, moving: list[nn.Parameter]) -> Kept:
    kept: Kept = {}
    names = {name for p in moving for name, value in optimiser.state[p].items() if isinstance(value, Tensor)}
    for name in names:
        values = [optimiser.state[p][name] for p in moving]
        kept[prefix + name] = values[0].clone() if name == "step" else torch.cat([v.flatten() for v in values])
    return kept


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Let a module draw from torch's generator without moving the caller's."""
    with torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _quiet_dropout(module: nn.Module) -> Iterator[None]:
    quiet: list[tuple[KeyedDropout, Callable[..., Any] | bool]] = []
    for part in module.modules():
        if isinstance(part, KeyedDropout):
            quiet.append((part, part.training))
            part.eval()
    try:
        yield
    finally:
        for part, training in quiet:
            part.train(bool(training))
