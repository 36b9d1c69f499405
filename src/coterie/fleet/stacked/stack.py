"""The clients of one architecture, side by side, and which keys their draws follow from."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coterie import draws
from coterie.asks import Ask
from coterie.data.population import SPLITS, Population
from coterie.fleet.layout import KeyedDropout, Layout
from coterie.fleet.stacked.streams import Streams

Rows = dict[str, Tensor]  # parameter or buffer name → stacked tensors


class Now(NamedTuple):
    """What all draws of an ask depend on, beside the client and the draw."""

    seed: int
    t: int
    place: int  # of the ask in its round


@dataclass
class Stack:
    """The clients of one architecture. `local` says of some of them which they are here."""

    number: int
    clients: Tensor  # their numbers
    local: Tensor  # client number → place in this stack, −1 elsewhere
    ids: Tensor  # the key of each
    layout: Layout
    module: nn.Module
    fresh: Rows  # buffers of a new module, without dropout keys
    keys: tuple[str, ...]  # names of the dropout keys
    held: dict[str, Tensor]  # split → clients × longest, the samples each holds
    sizes: dict[str, Tensor]  # split → how many
    streams: Streams
    device: torch.device

    @classmethod
    def of(
        cls,
        number: int,
        population: Population,
        architectures: Tensor,
        ids: Tensor,
        module: nn.Module,
        layout: Layout,
        device: torch.device,
    ) -> "Stack":
        """The clients of a population that have this architecture; everyone holds all public inputs."""
        clients = (architectures == number).nonzero().flatten()
        local = torch.full((len(architectures),), -1)
        local[clients] = torch.arange(len(clients))
        module = module.to(device)
        keys = tuple(f"{n}.key" if n else "key" for n, m in module.named_modules() if isinstance(m, KeyedDropout))
        held, sizes = {}, {}
        for split in SPLITS:
            rows = [population.index[split][int(c)] for c in clients]
            sizes[split] = torch.tensor([len(r) for r in rows])
            longest = max(1, int(sizes[split].max()))
            table = torch.zeros(len(rows), longest, dtype=torch.long)
            for i, r in enumerate(rows):
                table[i, : len(r)] = r
            held[split] = table.to(device)
        for name, x in population.public.items():
            sizes[f"public/{name}"] = torch.full((len(clients),), len(x))
            held[f"public/{name}"] = torch.arange(len(x), device=device).expand(len(clients), -1)
        fresh = {n: b.detach().clone() for n, b in module.named_buffers() if n not in keys}
        endless = ("train",) if population.stream is not None else ()
        streams = Streams(ids[clients], held, sizes, endless, device)
        return cls(number, clients, local, ids[clients], layout, module, fresh, keys, held, sizes, streams, device)

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.clients)

    def row_keys(self, local: Tensor, now: Now, draw: Tensor | None, tag: str) -> Tensor:
        """One key for each of some clients, for what `tag` says."""
        key = self.ids[local]
        for counter in (draws.name(tag), now.t, now.place):
            key = draws.fold(key, counter)
        return draws.fold(key, 0 if draw is None else draw).to(self.device)

    def dropout_keys(self, local: Tensor, now: Now, draw: Tensor | None) -> Tensor | None:
        """One key each for dropout, to be folded with the step; None for a module without."""
        return self.row_keys(local, now, draw, "dropout") if self.keys else None


def drawn_by(ask: Ask, pairs: Tensor) -> Tensor | None:
    """The draws of some pairs."""
    draw: Tensor | None = getattr(ask, "draw", None)
    return None if draw is None else draw[pairs]
