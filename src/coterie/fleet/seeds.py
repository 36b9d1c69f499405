"""Several seeds of one experiment as one batch: a seed is one more axis of the stack.

Every seed has its own view: a fleet with its own clients, randomness, ledger and memory. Each view is driven by its
own thread, unaware of the others; their asks meet, are answered by one joint stacked fleet, and part again. A draw
depends on the client's key and its seed, so the numbers are those of single runs up to rounding. Asks that do not match
(another round, another plan, a sketch, which is keyed by the seed) are answered one seed after the other.
"""

import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from coterie.asks import Answer, Ask, Distil, Drift, Evaluate, Fit, Gradient, Loss, Own, Predict, Pull
from coterie.data.population import SPLITS, Population
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet

Memory = dict[str, Tensor]


def batchable(populations: Sequence[Population]) -> bool:
    """Whether populations differ in their seeds' data only, so that their clients can stand in one stack."""
    first = populations[0]
    return all(
        p.architecture == first.architecture
        and p.inputs.shape[1:] == first.inputs.shape[1:]
        and p.inputs.dtype == first.inputs.dtype
        and p.targets.shape[1:] == first.targets.shape[1:]
        and p.task == first.task
        and p.transform == first.transform
        and not p.server
        and p.stream is None
        and (p.relabel is None) == (first.relabel is None)
        and p.public.keys() == first.public.keys()
        and all(torch.equal(p.public[name], first.public[name]) for name in p.public)
        for p in populations
    )


def together(populations: Sequence[Population], seeds: Sequence[int], **settings: Any) -> list["View"]:
    """One view per seed; drive each from its own thread, in lockstep, and close it when its run ends.

    `settings` are those of StackedFleet.
    """
    joint = StackedFleet(_joined(populations, seeds), **settings)
    party = _Party(joint)
    return [View(party, p, seed, i) for i, (p, seed) in enumerate(zip(populations, seeds, strict=True))]


def _joined(populations: Sequence[Population], seeds: Sequence[int]) -> Population:
    """All clients of all seeds over one store; samples that the populations share are not copied."""
    first = populations[0]
    blocks: dict[tuple[int, int], int] = {}
    parts: list[Population] = []
    starts = []
    total = 0
    for p in populations:
        mark = (p.inputs.data_ptr(), p.targets.data_ptr())
        if mark not in blocks:
            blocks[mark] = total
            total += len(p.inputs)
            parts.append(p)
        starts.append(blocks[mark])
    return replace(
        first,
        keys=tuple(key for p in populations for key in p.keys),
        inputs=first.inputs if len(parts) == 1 else torch.cat([p.inputs for p in parts]),
        targets=first.targets if len(parts) == 1 else torch.cat([p.targets for p in parts]),
        index={s: tuple(r + a for p, a in zip(populations, starts, strict=True) for r in p.index[s]) for s in SPLITS},
        architecture=tuple(a for p in populations for a in p.architecture),
        relabel=None if first.relabel is None else torch.cat([p.relabel for p in populations if p.relabel is not None]),
        groups=None,
        seeds=tuple(
            seed if own is None else own for p, seed in zip(populations, seeds, strict=True) for own in p.seeds
        ),
    )


class View(Fleet):
    """One seed's clients: a fleet like any other, whose answers come from the joint one."""

    def __init__(self, party: "_Party", population: Population, seed: int, number: int) -> None:
        super().__init__(population, seed=seed, device=party.joint.device, dtype=party.joint.dtype)
        self.party, self.number = party, number
        self.memory: Memory = {}
        party.join(self)

    def close(self) -> None:
        """Leave: the others go on without this one."""
        self.party.leave(self)

    def buffers_of(self, client: int, memory: str) -> Memory:
        """The buffers a client keeps under a memory."""
        a = int(self._architecture[client])
        place = int((self._architecture[:client] == a).sum())
        fresh = self.party.joint.parts.stacks[a].fresh
        kept = {name: self.memory.get(f"{a}/buffers/{memory}/{name}") for name in fresh}
        return {name: value if (own := kept[name]) is None else own[place] for name, value in fresh.items()}

    def _kept(self) -> Memory:
        return self.memory

    def _restore(self, kept: Memory) -> None:
        self.memory = self.party.joint.parts.memory.placed(kept)

    def _answer(self, ask: Ask, place: int) -> Answer:
        return self.party.meet(self, ask, place)

    def _gradient(self, ask: Gradient, place: int) -> Answer:
        return self._answer(ask, place)

    def _loss(self, ask: Loss, place: int) -> Answer:
        return self._answer(ask, place)

    def _fit(self, ask: Fit, place: int) -> Answer:
        return self._answer(ask, place)

    def _predict(self, ask: Predict) -> Answer:
        return self._answer(ask, -1)

    def _evaluate(self, ask: Evaluate) -> Answer:
        return self._answer(ask, -1)


class _Party:
    """Where the asks of the views meet. Whoever comes last answers for all."""

    def __init__(self, joint: StackedFleet) -> None:
        self.joint = joint
        self.views: list[View] = []
        self.here: list[View] = []  # those who have not left
        self.asked: dict[int, tuple[Ask, int]] = {}
        self.answers: dict[int, Answer | BaseException] = {}
        self.meeting = threading.Condition()
        self.pieces: list[Memory] = []  # each view's part of the joint memory, as last handed out
        self.whole: Memory = {}

    def join(self, view: View) -> None:
        """Take a view in."""
        self.views.append(view)
        self.here.append(view)

    def leave(self, view: View) -> None:
        """Let a view go; those who wait need not wait for it."""
        with self.meeting:
            if view in self.here:
                self.here.remove(view)
            self.meeting.notify_all()

    def meet(self, view: View, ask: Ask, place: int) -> Answer:
        """Wait for the others, and come back with the answer."""
        with self.meeting:
            self.asked[view.number] = (ask, place)
            while view.number not in self.answers:
                if len(self.asked) >= len(self.here):
                    self._answer_all()
                    self.meeting.notify_all()
                else:
                    self.meeting.wait()
            answer = self.answers.pop(view.number)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _answer_all(self) -> None:
        asked, self.asked = self.asked, {}
        numbers = sorted(asked)
        try:
            self._gather()
            rounds = {(self.views[k].t, asked[k][1]) for k in numbers}
            merged = _merge([asked[k][0] for k in numbers], [self._offset(k) for k in numbers])
            if len(rounds) == 1 and merged is not None:
                (self.joint.t, place) = rounds.pop()
                parts = _part(self.joint._answer(merged, place), [asked[k][0] for k in numbers])
                self.answers.update(dict(zip(numbers, parts, strict=True)))
            else:
                for k in numbers:
                    ask, place = asked[k]
                    self.joint.t, self.joint.seed = self.views[k].t, self.views[k].seed
                    alone = _merge([ask], [self._offset(k)], alone=True)
                    assert alone is not None
                    self.answers[k] = self.joint._answer(alone, place)
            self._scatter()
        except BaseException as error:
            self.answers.update(dict.fromkeys(numbers, error))

    def _offset(self, number: int) -> int:
        return sum(v.n for v in self.views[:number])

    def _gather(self) -> None:
        """Put the memories of all views into the joint fleet, unless they are what it handed out."""
        if len(self.pieces) == len(self.views) and all(
            v.memory.keys() == piece.keys() and all(v.memory[k] is t for k, t in piece.items())
            for v, piece in zip(self.views, self.pieces, strict=True)
        ):
            self.joint._restore(self.whole)
            return
        names = {name for v in self.views for name in v.memory}
        whole = {}
        for name in names:
            known = next(v.memory[name] for v in self.views if name in v.memory)
            parts = [v.memory[name] if name in v.memory else self._default(v, name, known) for v in self.views]
            whole[name] = torch.cat(parts)
        self.joint._restore(whole)

    def _default(self, view: View, name: str, like: Tensor) -> Tensor:
        """What a view without this memory would begin with; one that left long ago is never asked again."""
        a, kind, rest = name.split("/", 2)
        count = int((view._architecture == int(a)).sum())
        if kind == "buffers":
            fresh = self.joint.parts.stacks[int(a)].fresh[rest.partition("/")[2]]
            return fresh.expand(count, *fresh.shape)
        return like.new_zeros(count, *like.shape[1:])

    def _scatter(self) -> None:
        """Give every view its part of what the joint fleet remembers now, without copying."""
        self.whole = dict(self.joint._kept())
        self.pieces = []
        at: dict[str, int] = {}
        for v in self.views:
            piece = {}
            for name, value in self.whole.items():
                a = int(name.partition("/")[0])
                count = int((v._architecture == a).sum())
                start = at.get(name, 0)
                piece[name] = value[start : start + count]
                at[name] = start + count
            self.pieces.append(piece)
            v.memory = dict(piece)


_SAME = (
    "memory",
    "batch",
    "split",
    "sampling",
    "track",
    "give",
    "plan",
    "keep",
    "inputs",
    "buffers",
    "metrics",
    "sketch",
    "compress",
    "soft",
    "coarse",
)


def _merge(asks: Sequence[Ask], offsets: Sequence[int], alone: bool = False) -> Ask | None:
    """One ask for the pairs of several, or None where they do not match."""
    first = asks[0]
    if any(type(a) is not type(first) for a in asks):
        return None
    if any(getattr(a, name, None) != getattr(first, name, None) for a in asks for name in _SAME):
        return None
    if getattr(first, "sketch", None) is not None and not alone:
        return None
    changes: dict[str, Any] = {"clients": torch.cat([a.clients + o for a, o in zip(asks, offsets, strict=True)])}
    if isinstance(first.models, Own):
        if any(a.models != first.models for a in asks):
            return None
    else:
        matrices = [a.models for a in asks if isinstance(a.models, Tensor)]
        ats = [a.at for a in asks]
        if len(matrices) < len(asks) or len({None if at is None else at.shape[1:] for at in ats}) > 1:
            return None
        changes["models"] = torch.cat(matrices)
        changes["at"] = _shifted(ats, [len(m) for m in matrices])
    for name in ("draw", "weights"):
        values = [v for a in asks if (v := getattr(a, name, None)) is not None]
        if len(values) not in (0, len(asks)):
            return None
        if values:
            changes[name] = torch.cat(values)
    if isinstance(first, Gradient) and first.into is not None:
        gradients = [a for a in asks if isinstance(a, Gradient)]
        changes["into"] = _shifted([a.into for a in gradients], [a.outputs or 0 for a in gradients])
        changes["outputs"] = sum(a.outputs or 0 for a in gradients)
    if isinstance(first, Gradient) and first.group is not None:
        gradients = [a for a in asks if isinstance(a, Gradient)]
        changes["group"] = _shifted([a.group for a in gradients], [a.gram_shape[0] for a in gradients])
        changes["slot"] = torch.cat([a.slot for a in gradients if a.slot is not None])
        changes["gram_shape"] = (sum(a.gram_shape[0] for a in gradients), max(a.gram_shape[1] for a in gradients))
    if isinstance(first, Fit):
        columns = [a.columns for a in asks if isinstance(a, Fit)]
        if any((c is None) != (columns[0] is None) for c in columns):
            return None
        if columns[0] is not None and not all(c is not None and torch.equal(c, columns[0]) for c in columns):
            return None
        for name in ("pull", "drift", "distil"):
            riders = [getattr(a, name) for a in asks]
            if any((r is None) != (riders[0] is None) for r in riders):
                return None
            if len({getattr(r, "how", None) for r in riders}) > 1:
                return None
            if riders[0] is not None:
                changes[name] = _ride(riders, [a.m for a in asks])
    return replace(first, **changes)


def _shifted(indices: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor | None:
    """Indices into matrices that now stand one below the other."""
    parts, start = [], 0
    for index, count in zip(indices, counts, strict=True):
        if index is None:
            return None
        parts.append(index + start)
        start += count
    return torch.cat(parts)


def _ride(riders: Sequence[Any], pairs: Sequence[int]) -> Pull | Drift | Distil:
    """One rider from several, with explicit places."""
    first = riders[0]
    changes: dict[str, Any] = {}
    name = "targets" if isinstance(first, Distil) else "rows"
    matrices = [getattr(r, name) for r in riders]
    ats = []
    for rider, matrix, m in zip(riders, matrices, pairs, strict=True):
        if rider.at is not None:
            ats.append(torch.as_tensor(rider.at))
        elif isinstance(rider, Distil):
            ats.append(torch.arange(len(matrix)).expand(m, -1))
        else:
            ats.append(torch.zeros(m, dtype=torch.long) if matrix.ndim == 1 else torch.arange(m))
    matrices = [m[None] if name == "rows" and m.ndim == 1 else m for m in matrices]
    changes[name] = torch.cat(matrices)
    changes["at"] = _shifted(ats, [len(m) for m in matrices])
    if not isinstance(first, Drift):
        weights = [r.weight for r in riders]
        if any(isinstance(w, Tensor) or w != weights[0] for w in weights):
            spread = [
                w.expand(m) if isinstance(w, Tensor) else torch.full((m,), float(w))
                for w, m in zip(weights, pairs, strict=True)
            ]
            changes["weight"] = torch.cat(spread)
    joined: Pull | Drift | Distil = replace(first, **changes)
    return joined


def _part(answer: Answer, asks: Sequence[Ask]) -> list[Answer]:
    """The answer of each ask, from the one to all of them."""
    total = sum(a.m for a in asks)
    parts, pair, output, group = [], 0, 0, 0
    special = {"metrics"}
    if isinstance(asks[0], Gradient) and asks[0].into is not None:
        special |= {"sums", "weight"}
    if isinstance(asks[0], Gradient) and asks[0].group is not None:
        special |= {"gram"}
    values = {f.name: getattr(answer, f.name) for f in fields(answer) if f.name not in special}
    values = {name: value for name, value in values.items() if value.shape[0] == total}
    for ask in asks:
        mine = slice(pair, pair + ask.m)
        changes: dict[str, Any] = {name: value[mine] for name, value in values.items()}
        if answer.metrics:
            changes["metrics"] = {name: v[mine] for name, v in answer.metrics.items()}
        if isinstance(ask, Gradient) and ask.into is not None:
            here = slice(output, output + (ask.outputs or 0))
            changes |= {"sums": answer.sums[here], "weight": answer.weight[here]}
        if isinstance(ask, Gradient) and ask.group is not None:
            groups, size = ask.gram_shape
            changes["gram"] = answer.gram[group : group + groups, :size, :size]
        parts.append(replace(answer, **changes))
        pair += ask.m
        if isinstance(ask, Gradient):
            output += ask.outputs or 0
            group += ask.gram_shape[0]
    return parts
