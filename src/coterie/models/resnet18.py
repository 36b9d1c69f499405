"""ResNet-18 in its CIFAR form: a 3×3 stem without pooling, for 32×32 images."""

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.models.norm import Norm, norm2d


class _Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            norm2d(norm, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            norm2d(norm, outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm2d(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """11,173,962 parameters with three channels, ten classes."""

    def __init__(self, channels: int = 3, classes: int = 10, norm: Norm = "batch") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1, bias=False), norm2d(norm, 64), nn.ReLU())
        inputs = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            self.body.extend([_Block(inputs, width, stride, norm), _Block(width, width, 1, norm)])
            inputs = width
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×32×32 → B×classes."""
        out: Tensor = self.head(self.body(x).mean((-2, -1)))
        return out
