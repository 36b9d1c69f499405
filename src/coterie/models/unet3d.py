"""A small 3-D U-Net for volumes."""

import math

import torch
from torch import Tensor, nn

from coterie.errors import ModelError


class UNet3d(nn.Module):
    """Two poolings, channels doubling inside each level; width 8 gives the 246,000 parameters of All-for-one's U-Net.

    `classes` counts the output channels: 1 is the logit of a single foreground class. GroupNorm, so that tiny batches
    and clients with different scanners need no shared statistics. Upsampling repeats voxels (its gradient is exact and
    deterministic on GPUs, that of linear interpolation is not). Every side must be divisible by 4.
    """

    def __init__(self, channels: int = 1, classes: int = 1, width: int = 8) -> None:
        super().__init__()
        w = width
        self.down1 = _level(channels, w, 2 * w)
        self.down2 = _level(2 * w, 2 * w, 4 * w)
        self.bottom = _level(4 * w, 4 * w, 8 * w)
        self.up2 = _level(8 * w + 4 * w, 4 * w, 4 * w)
        self.up1 = _level(4 * w + 2 * w, 2 * w, 2 * w)
        self.pool = nn.MaxPool3d(2)
        self.grow = nn.Upsample(scale_factor=2)
        self.head = nn.Conv3d(2 * w, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×D×H×W → B×classes×D×H×W."""
        if any(side % 4 for side in x.shape[2:]):
            raise ModelError(f"volumes are {tuple(x.shape[2:])}; unet3d needs sides divisible by 4: pad or crop them")
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        x = self.bottom(self.pool(coarse))
        x = self.up2(torch.cat([self.grow(x), coarse], 1))
        x = self.up1(torch.cat([self.grow(x), fine], 1))
        out: Tensor = self.head(x)
        return out


def _level(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    layers = nn.Sequential()
    for before, after in ((inputs, middle), (middle, outputs)):
        norm = nn.GroupNorm(math.gcd(8, after), after)
        layers.extend([nn.Conv3d(before, after, 3, padding=1, bias=False), norm, nn.ReLU()])
    return layers
