"""Which samples the clients of a stack draw: endless permutations, sorted once and read by place (see fleet.base)."""

import torch
from torch import Tensor

from coterie import draws
from coterie.fleet.base import FRESH, RING


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
        self._tables: dict[tuple[str, int], Tensor] = {}

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
        where = local.to(self.device)[:, None]
        size = self.sizes[split][local].to(self.device)[:, None]
        if fresh:
            place = (start // size + k // size) % RING * size + (start + k) % size
            return self._table(split, 0)[where, place]
        lap = self.sizes[split][local] * RING
        place, there = start + k, size * RING
        blocks = range(int((starts // lap).min()), int(((starts + count - 1) // lap).max()) + 1)
        chosen = self._table(split, blocks[0])[where, place % there]
        for block in blocks[1:]:
            chosen = torch.where(place // there == block, self._table(split, block)[where, place % there], chosen)
        return chosen

    def _table(self, split: str, block: int) -> Tensor:
        """Permutations block·RING to (block + 1)·RING of every client, one after the other; the latest are kept."""
        if (split, block) not in self._tables:
            for old in [m for m in self._tables if m[0] == split and m[1] not in (0, block - 1)]:
                del self._tables[old]
            self._tables[split, block] = self._sorted(split, block)
        return self._tables[split, block]

    def _sorted(self, split: str, block: int) -> Tensor:
        held, size = self.held[split], self.sizes[split].to(self.device)[:, None]
        longest = held.shape[1]
        keys = self.ids.to(self.device)
        for counter in (draws.name("permutation"), draws.name(split)):
            keys = draws.fold(keys, counter)
        epochs = torch.arange(block * RING, (block + 1) * RING, device=self.device)
        sample = torch.arange(longest, device=self.device)
        marks = draws.fold(draws.fold(keys[:, None], epochs)[..., None], sample)  # clients × RING × longest
        marks = marks.masked_fill((sample >= size)[:, None], torch.iinfo(torch.long).max)
        order = marks.argsort(dim=-1, stable=True).flatten(1)
        place, size = torch.arange(longest * RING, device=self.device), size.clamp(min=1)
        epoch, within = (place // size).clamp(max=RING - 1), place % size
        return held.gather(1, order.gather(1, epoch * longest + within))
