"""How a module's trainable parameters lie in one flat row, and how a module is made fit for keyed randomness."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie import draws
from coterie.errors import ModelError


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (key, element), so that it does not depend on the place in a stack.

    The key is a buffer, to be given per row by `functional_call`; it stands for (seed, client, round, ask, draw, step).
    """

    key: Tensor

    def __init__(self, p: float, dims: int | None, layer: int) -> None:
        super().__init__()
        self.p, self.dims, self.layer = p, dims, layer  # dims: how many leading axes a mask has (None: all)
        self.register_buffer("key", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero with probability p, scale the rest by 1/(1 − p)."""
        if not self.training or self.p == 0:
            return x
        shape = x.shape if self.dims is None else x.shape[: self.dims] + (1,) * (x.ndim - self.dims)
        count = torch.arange(shape.numel(), device=x.device).view(shape)
        kept = draws.unit(draws.fold(draws.fold(self.key, self.layer), count), torch.float32) >= self.p
        return x * kept / (1 - self.p) if self.p < 1 else torch.zeros_like(x)


_DROPOUTS: Mapping[type[nn.Module], int | None] = {nn.Dropout: None, nn.Dropout1d: 2, nn.Dropout2d: 2, nn.Dropout3d: 2}


def keyed(module: nn.Module) -> nn.Module:
    """A deep copy of a module with every dropout layer replaced by a keyed one, each place where one stands its own."""
    twin = copy.deepcopy(module)
    every = twin.named_modules(remove_duplicate=False)
    layers = [(name, layer) for name, layer in every if type(layer) in _DROPOUTS]
    for number, (name, layer) in enumerate(layers):
        replacement = KeyedDropout(float(layer.p), _DROPOUTS[type(layer)], number)
        if not name:
            return replacement
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, replacement)
    return twin


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter lies in a row, in the order of `module.parameters()`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]  # one more than parameters: the last is d

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """The layout of a module; frozen parameters are not part of a row."""
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        starts = [0]
        for _, p in trainable:
            starts.append(starts[-1] + p.numel())
        if not trainable:
            raise ModelError(f"{type(module).__name__} has no trainable parameter")
        return cls(tuple(n for n, _ in trainable), tuple(p.shape for _, p in trainable), tuple(starts))

    @property
    def d(self) -> int:
        """How wide a row is."""
        return self.starts[-1]

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters of m rows, each m×shape, as views: nothing is copied."""
        if rows.shape[-1] != self.d:
            raise ModelError(f"rows are {rows.shape[-1]} wide where the model has {self.d} trainable parameters")
        return {
            name: rows[..., a:b].view(*rows.shape[:-1], *shape)
            for name, shape, a, b in zip(self.names, self.shapes, self.starts[:-1], self.starts[1:], strict=True)
        }

    def flatten(self, parameters: Mapping[str, Tensor], lead: int = 1) -> Tensor:
        """One matrix of rows from parameters that each have `lead` leading axes."""
        return torch.cat([parameters[name].flatten(lead) for name in self.names], dim=-1)

    def row(self, module: nn.Module) -> Tensor:
        """The row a module holds."""
        own = dict(module.named_parameters())
        return torch.cat([own[name].detach().flatten() for name in self.names])

    def load(self, module: nn.Module, row: Tensor) -> None:
        """Write a row into a module, in place."""
        own = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.views(row).items():
                own[name].copy_(value)

    def columns(self, part: str) -> Tensor:
        """The columns of every parameter named `part` or below it; "head" is the last module that has any."""
        if part == "head" and not any(name.split(".")[0] == "head" for name in self.names):
            part = self.names[-1].rpartition(".")[0]
        spans = [
            torch.arange(a, b)
            for name, a, b in zip(self.names, self.starts[:-1], self.starts[1:], strict=True)
            if name == part or name.startswith(part + ".") or not part
        ]
        if not spans:
            raise ModelError(f"no parameter below {part!r}: there are {', '.join(self.names)}")
        return torch.cat(spans)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """What a module remembers beside its parameters; dropout keys are not memory."""
    keys = {f"{name}.key" if name else "key" for name, m in module.named_modules() if isinstance(m, KeyedDropout)}
    return {name: value for name, value in module.named_buffers() if name not in keys}
