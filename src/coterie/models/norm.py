"""The two normalisations the image models can be built with."""

import math
from typing import Literal

from torch import nn

from coterie.errors import SettingError

Norm = Literal["batch", "group"]


def norm2d(kind: Norm, channels: int, groups: int = 32) -> nn.Module:
    """BatchNorm, or GroupNorm, which keeps no buffers and so has nothing to share or mix between clients."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(math.gcd(groups, channels), channels)
    raise SettingError(f'norm is {kind!r}; it must be "batch" or "group"')
