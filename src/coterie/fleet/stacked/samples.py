"""What the clients hold, in one store on the device, and the batches they draw from it."""

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import Gradient, Loss
from coterie.data.population import Population
from coterie.fleet.stacked.memory import Memory
from coterie.fleet.stacked.stack import Now, Stack, drawn_by


class Samples:
    """Clients hold numbers of samples in one store, so ragged data costs nothing."""

    def __init__(self, population: Population, device: torch.device, dtype: torch.dtype, memory: Memory) -> None:
        self.population, self.device, self.dtype, self.memory = population, device, dtype, memory
        self.inputs = self._stored(population.inputs)
        self.targets = self._stored(population.targets)
        self._public = {name: self._stored(x) for name, x in population.public.items()}
        self._relabel = None if population.relabel is None else population.relabel.to(device)
        if population.stream_clients is not None:
            self._streams_there = population.stream_clients.to(device)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(device=self.device, dtype=self.dtype) if x.is_floating_point() else x.to(self.device)

    def fetch(
        self, samples: Tensor, clients: Tensor | None, keys: Tensor | None, online: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of m×B samples as their clients (m×B or m×1) see them; online, samples are made here."""
        if online and clients is not None:
            assert self.population.stream is not None
            x, y = self.population.stream.samples(self._streams_there[clients], samples)
            return x.to(self.dtype), y.to(self.dtype) if y.is_floating_point() else y
        x = _taken(self.inputs, samples)
        if self.population.transform is not None:
            x = self.population.transform(x, keys)
        y = _taken(self.targets, samples)
        if self._relabel is not None and clients is not None:
            y = self._relabel[clients, y]
        return (x.to(self.dtype) if x.is_floating_point() else x), y

    def public(self, name: str) -> Tensor:
        """Public inputs as models take them."""
        x = self._public[name]
        if self.population.transform is not None:
            x = self.population.transform(x, None)
        return x.to(self.dtype) if x.is_floating_point() else x

    def keys(self, stack: Stack, local: Tensor, now: Now, draw: Tensor | None) -> Tensor | None:
        """One key per client for augmentation, to be folded with the sample's place in the ask; None without."""
        return stack.row_keys(local, now, draw, "augment") if self.population.transform is not None else None

    def drawn(self, stack: Stack, ask: Gradient | Loss, pairs: Tensor, now: Now) -> Tensor:
        """The samples of each pair's batch."""
        assert ask.batch is not None
        local = stack.local[ask.clients[pairs]]
        fresh = ask.sampling == "fresh"
        if fresh:
            starts = stack.streams.starts(ask.split, local, now.t, now.place, drawn_by(ask, pairs))
        else:
            starts = self.memory.places(stack, ask.memory, ask.split, local)
        return stack.streams.samples(ask.split, local, starts, ask.batch, fresh)

    def whole(self, stack: Stack, split: str, local: Tensor, longest: int) -> tuple[Tensor, Tensor | None]:
        """Whole splits, padded to the longest, with weights 1/n where they differ in length."""
        sizes = stack.sizes[split][local]
        samples = stack.held[split][local.to(self.device), :longest]
        if bool((sizes == longest).all()):
            return samples, None
        there = sizes.to(self.device)[:, None]
        real = torch.arange(longest, device=self.device) < there
        samples = torch.where(real, samples, samples[:, :1])
        return samples, real.to(self.dtype) / there


def shades(keys: Tensor | None, first: int, count: int) -> Tensor | None:
    """Keys of single samples from keys of pairs: m×count."""
    if keys is None:
        return None
    return draws.fold(keys[:, None], first + torch.arange(count, device=keys.device))


def _taken(store: Tensor, samples: Tensor) -> Tensor:
    """The samples with these numbers, as whole rows: on the host much faster than indexing where rows are short."""
    return store.index_select(0, samples.flatten()).view(*samples.shape, *store.shape[1:])
