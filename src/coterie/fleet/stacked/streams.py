"""Which samples the clients of a stack draw: endless permutations, sorted once and read by place (see fleet.base)."""

import numpy as np
import torch
from torch import Tensor

from coterie import draws
from coterie.fleet.base import FRESH, RING

CACHED = 1 << 17  # marks to sort at once: more fall out of a CPU's caches
TABLES = 4  # of a split that are kept: fresh batches, two places in an epoch, and what one of them just left
Table = tuple[Tensor, Tensor]  # clients × RING·longest numbers of samples, and of whom they are sorted (on the host)


class Streams:
    """The streams of some clients that stand side by side. `local` says which of them an ask means.

    `held` and `sizes` are, per split, which samples each client holds (clients × longest) and how many (on the host).
    """

    def __init__(
        self,
        ids: Tensor,
        held: dict[str, Tensor],
        sizes: dict[str, Tensor],
        endless: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self.ids, self.held, self.sizes = ids, held, sizes
        self.endless = endless  # splits whose samples are made as they are asked for
        self.device = device
        self._tables: dict[str, dict[int, Table]] = {}  # split → block → table, the latest used last

    def starts(self, split: str, local: Tensor, t: int, place: int, draw: Tensor | None) -> Tensor:
        """Where fresh batches of this round, ask and draw begin: on the host."""
        key = self.ids[local]
        for counter in (draws.name("fresh"), draws.name(split), t, place):
            key = draws.fold(key, counter)
        key = draws.fold(key, 0 if draw is None else draw)
        return (key & ((1 << 62) - 1)) % (FRESH if split in self.endless else self.sizes[split][local] * RING)

    def samples(self, split: str, local: Tensor, starts: Tensor, count: int, fresh: bool) -> Tensor:
        """`count` samples of each stream from its start on: m×count numbers of samples on the device."""
        start = starts.to(self.device)[:, None]
        k = torch.arange(count, device=self.device)
        if split in self.endless:
            return start + k
        size, where = self.sizes[split][local], local.to(self.device)[:, None]
        if fresh:
            table, span = self._table(split, 0, local), size.to(self.device)[:, None]
            return table[where, (start // span + k // span) % RING * span + (start + k) % span]
        lap = size * RING
        first, last = starts // lap, (starts + count - 1) // lap
        begin = int(starts[0] % lap[0])
        if bool((starts == starts[0]).all() & (lap == lap[0]).all()) and begin + count <= int(lap[0]):
            rows = self._table(split, int(first[0]), local)[:, begin : begin + count]  # all at one place: a slice
            whole = len(local) == len(rows) and bool((local == torch.arange(len(rows))).all())
            return rows.contiguous() if whole else rows[where[:, 0]]  # one layout: a step is compiled for each
        place, there = start + k, lap.to(self.device)[:, None]
        chosen = torch.zeros_like(place)
        for block in range(int(first.min()), int(last.max()) + 1):
            here = local[(first <= block) & (block <= last)]
            if len(here):
                found = self._table(split, block, here)[where, place % there]
                chosen = torch.where(place // there == block, found, chosen)
        return chosen

    def _table(self, split: str, block: int, local: Tensor) -> Tensor:
        """Permutations block·RING to (block + 1)·RING one after the other, of some clients at least."""
        tables = self._tables.setdefault(split, {})
        table, sorted_ = tables.pop(block) if block in tables else self._empty(split)
        tables[block] = table, sorted_
        for old in list(tables)[:-TABLES]:
            del tables[old]
        missing = local[~sorted_[local]].unique()
        for some in missing.split(max(1, CACHED // table.shape[1])) if len(missing) else ():
            table[some.to(self.device)] = self._sorted(split, block, some)
            sorted_[some] = True
        return table

    def _empty(self, split: str) -> Table:
        held = self.held[split]
        return held.new_zeros(len(held), held.shape[1] * RING), torch.zeros(len(held), dtype=torch.bool)

    def _sorted(self, split: str, block: int, local: Tensor) -> Tensor:
        held, size = self.held[split][local.to(self.device)], self.sizes[split][local].to(self.device)[:, None]
        longest = held.shape[1]
        keys = self.ids[local].to(self.device)
        for counter in (draws.name("permutation"), draws.name(split)):
            keys = draws.fold(keys, counter)
        epochs = torch.arange(block * RING, (block + 1) * RING, device=self.device)
        sample = torch.arange(longest, device=self.device)
        marks = draws.fold(draws.fold(keys[:, None], epochs)[..., None], sample)  # clients × RING × longest
        if bool((size == longest).all()):
            return held.gather(1, argsort(marks).flatten(1))
        marks = marks.masked_fill((sample >= size)[:, None], torch.iinfo(torch.long).max)
        order = argsort(marks).flatten(1)
        place, size = torch.arange(longest * RING, device=self.device), size.clamp(min=1)
        epoch, within = (place // size).clamp(max=RING - 1), place % size
        return held.gather(1, order.gather(1, epoch * longest + within))


def argsort(marks: Tensor) -> Tensor:
    """The order of the marks along the last axis. NumPy's sort is four times as fast as torch's on the host."""
    if marks.device.type == "cpu":
        return torch.from_numpy(np.argsort(marks.numpy(), axis=-1))
    return marks.argsort(dim=-1)
