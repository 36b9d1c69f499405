"""Counter-based randomness: what is drawn depends on named counters only, never on order, chunk, rank or process.

A key is a 64-bit integer. `fold(key, counter)` makes a new key from a key and a counter (the splitmix64 finaliser on
key + golden × (counter + 1), modulo 2⁶⁴); `unit(key)` turns a key into a number in [0, 1). Both work elementwise on
int64 tensors of any device, with the broadcasting of torch, and inside `vmap` and `torch.compile`.
"""

import hashlib

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MASK = (1 << 64) - 1
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def name(text: str) -> int:
    """The key that a piece of text stands for, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def fold(key: Tensor, counter: Tensor | int) -> Tensor:
    """A new key from a key and a counter. int64 products wrap, and `>>` keeps the sign, hence the masks."""
    if isinstance(counter, Tensor) and torch.compiler.is_compiling():
        counter = counter + (key & 0)  # else inductor folds an arange and the constant into a 32-bit index
    step = _signed((counter + 1) * _GOLDEN & _MASK) if isinstance(counter, int) else (counter + 1) * _GOLDEN
    z = key + step
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def fold_int(key: int, *counters: int) -> int:
    """`fold` on plain integers, for what the host decides."""
    z = key & _MASK
    for counter in counters:
        z = (z + (counter + 1) * (_GOLDEN & _MASK)) & _MASK
        z = ((z ^ (z >> 30)) * (_FIRST & _MASK)) & _MASK
        z = ((z ^ (z >> 27)) * (_SECOND & _MASK)) & _MASK
        z ^= z >> 31
    return _signed(z)


def unit(key: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A number in [0, 1) from each key, exact in float64 (53 bits) and in float32 (24 bits)."""
    if dtype == torch.float64:
        return ((key >> 11) & ((1 << 53) - 1)).to(dtype) * 2.0**-53
    return ((key >> 40) & ((1 << 24) - 1)).to(dtype) * 2.0**-24


def normal(key: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A standard normal number from each key (Box-Muller on two numbers folded from it)."""
    radius = torch.sqrt(-2 * torch.log1p(-unit(fold(key, 0))))
    return (radius * torch.cos(2 * torch.pi * unit(fold(key, 1)))).to(dtype)


def generator(key: int) -> torch.Generator:
    """A host generator that starts from a key."""
    return torch.Generator().manual_seed(key & ((1 << 63) - 1))
