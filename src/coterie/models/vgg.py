"""VGG11 and VGG13 with BatchNorm for 32×32 images: torchvision's features, a classifier of 512-512-classes."""

from collections.abc import Sequence

from torch import Tensor, nn


class VGG(nn.Module):
    """3×3 convolutions of the given widths, a max-pool at the end of each stage."""

    def __init__(self, stages: Sequence[Sequence[int]], channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential()
        inputs = channels
        for stage in stages:
            for width in stage:
                self.body.extend([nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()])
                inputs = width
            self.body.append(nn.MaxPool2d(2))
        self.body.append(nn.Flatten())
        for _ in range(2):
            self.body.extend([nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout)])
        self.head = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # as torchvision; its linear layers are drawn for a width of 4096
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×32×32 → B×classes."""
        out: Tensor = self.head(self.body(x))
        return out


def vgg11(channels: int = 3, classes: int = 10, dropout: float = 0.5) -> VGG:
    """9,756,426 parameters with three channels, ten classes."""
    return VGG(((64,), (128,), (256, 256), (512, 512), (512, 512)), channels, classes, dropout)


def vgg13(channels: int = 3, classes: int = 10, dropout: float = 0.5) -> VGG:
    """9,941,322 parameters with three channels, ten classes."""
    return VGG(((64, 64), (128, 128), (256, 256), (512, 512), (512, 512)), channels, classes, dropout)
