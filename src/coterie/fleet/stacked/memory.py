"""What the clients of a simulator remember: own models, buffers, moments of optimisers, places in their streams."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from coterie.asks import OK, Ask, Fit, Gradient, Loss, Own
from coterie.fleet.stacked.stack import Rows, Stack

Initial = Callable[[Iterable[int], bool], Tensor]


class Memory:
    """Tensors by name, a row for each client of a stack. What was there before an ask is never changed in place."""

    def __init__(self, device: torch.device, initial: Initial) -> None:
        self.device, self.initial = device, initial
        self.kept: Rows = {}
        self._copied: set[str] = set()  # what was copied for the ask that is being answered

    def begin(self) -> Rows:
        """Begin an ask; what to `restore` if it must begin again."""
        self._copied.clear()
        return dict(self.kept)

    def restore(self, kept: Rows) -> None:
        """Go back to what was remembered."""
        self.kept = self.placed(kept)

    def placed(self, kept: Rows) -> Rows:
        """Memories where they belong: counts on the host, the rest on the device."""
        return {name: value if _on_host(name) else value.to(self.device) for name, value in kept.items()}

    def write(self, name: str, local: Tensor, value: Tensor, good: Tensor | None, old: Callable[[], Tensor]) -> None:
        """Remember `value` for some clients, where `good`: the first chunk makes a copy, others add to it."""
        before = self.kept.get(name)
        if before is None:
            before = old()
        whole = len(local) == len(before) and bool((local == torch.arange(len(before))).all())
        where = None if whole else local.to(before.device)
        if good is not None:
            mask = good.to(before.device).view(-1, *[1] * (value.ndim - 1))
            value = torch.where(mask, value, before if where is None else before[where])
        if where is None:
            self.kept[name] = value
        elif name in self._copied:
            before.index_copy_(0, where, value.to(before.dtype))
        else:
            self.kept[name] = before.index_copy(0, where, value.to(before.dtype))
            self._copied.add(name)

    # ---- models ------------------------------------------------------------------------------------------------------

    def own(self, stack: Stack, own: Own) -> Tensor:
        """The models that live at the clients of a stack."""
        kept = self.kept.get(f"{stack.number}/own/{own.slot}")
        if kept is None:
            return self.initial(stack.clients.tolist(), own.shared).to(self.device)
        return kept

    def keep_own(self, stack: Stack, slot: str, start: Own, local: Tensor, rows: Tensor, good: Tensor) -> None:
        """Remember rows in a slot; who never had one there began with `start`."""
        self.write(f"{stack.number}/own/{slot}", local, rows, good, partial(self.own, stack, start))

    def models(self, stack: Stack, ask: Ask, pairs: Tensor) -> Tensor:
        """The models that some pairs mean, as rows; a view where the pairs are a run of rows, midpoints made here."""
        if isinstance(ask.models, Own):
            return run_of(self.own(stack, ask.models), stack.local[ask.clients[pairs]])
        at = pairs if ask.at is None else ask.at[pairs]
        if at.ndim == 1:
            return run_of(ask.models, at)
        return embedding_bag(at.to(self.device), ask.models, mode="mean")  # one pass over the rows

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def buffers(self, stack: Stack, memory: str, local: Tensor) -> Rows:
        """The buffers of some clients; of a new module for who has none yet."""
        rows = {}
        where = local.to(self.device)
        for name, value in stack.fresh.items():
            kept = self.kept.get(f"{stack.number}/buffers/{memory}/{name}")
            rows[name] = value.expand(len(local), *value.shape) if kept is None else kept[where]
        return rows

    def keep_buffers(self, stack: Stack, memory: str, local: Tensor, buffers: Rows, good: Tensor) -> None:
        """Remember the buffers of some clients, where `good`."""
        for name, value in buffers.items():
            fresh = stack.fresh[name]
            start = partial(fresh.expand, stack.n, *fresh.shape)
            self.write(f"{stack.number}/buffers/{memory}/{name}", local, value, good, start)

    # ---- places in streams, and moments ------------------------------------------------------------------------------

    def places(self, stack: Stack, memory: str, split: str, local: Tensor) -> Tensor:
        """How far some clients have read their streams: on the host."""
        kept = self.kept.get(f"{stack.number}/place/{memory}/{split}")
        return torch.zeros(len(local), dtype=torch.long) if kept is None else kept[local]

    def move_on(self, stack: Stack, ask: Gradient | Loss | Fit, pairs: Tensor, by: Tensor, reason: Tensor) -> None:
        """Move the place in the stream of those who are ok."""
        local = stack.local[ask.clients[pairs]]
        after = self.places(stack, ask.memory, ask.split, local) + by
        good = (reason[pairs.to(reason.device)] == OK).cpu()
        name = f"{stack.number}/place/{ask.memory}/{ask.split}"
        self.write(name, local, after, good, lambda: torch.zeros(stack.n, dtype=torch.long))

    def moments(self, stack: Stack, prefix: str, local: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
        """An optimiser's moments as each row left them, and how many steps each row has behind it."""
        kept: dict[str, list[Tensor]] = {}
        behind = torch.zeros(len(local), dtype=torch.long)
        prefix = f"{stack.number}/optimiser/{prefix}/"
        for name, value in self.kept.items():
            if name.startswith(prefix):
                if name.endswith("/step"):
                    behind = value[local]
                else:
                    views = stack.layout.views(value[local.to(self.device)])
                    kept[name.removeprefix(prefix)] = [v.clone() for v in views.values()]
        return kept, behind

    def keep_moments(self, stack: Stack, prefix: str, local: Tensor, state: Rows, good: Tensor) -> None:
        """Remember an optimiser's moments, which are zero before the first step."""
        for name, value in state.items():
            start = partial(value.new_zeros, (stack.n, *value.shape[1:]))
            self.write(f"{stack.number}/optimiser/{prefix}/{name}", local, value, good, start)


def run_of(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix; a view where they are a run, or all the same one."""
    first = int(rows[0])
    if bool((rows == torch.arange(first, first + len(rows))).all()):
        return matrix[first : first + len(rows)]
    if bool((rows == first).all()):
        return matrix[first].expand(len(rows), -1)
    return matrix[rows.to(matrix.device)]


def _on_host(name: str) -> bool:
    return "/place/" in name or name.endswith("/step")
