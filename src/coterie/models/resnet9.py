"""ResNet-9 for 32×32 images."""

from torch import Tensor, nn

from coterie.models.norm import Norm, norm2d


class ResNet9(nn.Module):
    """64; 128, pool; residual 128×2; 256, pool; 512, pool; residual 512×2; max-pool 4; dropout; linear.

    Convolutions carry no bias, which the normalisation after them would take away.
    """

    def __init__(self, channels: int = 3, classes: int = 10, norm: Norm = "batch", dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(channels, 64, norm), _block(64, 128, norm), nn.MaxPool2d(2))
        self.residual1 = nn.Sequential(_block(128, 128, norm), _block(128, 128, norm))
        self.middle = nn.Sequential(_block(128, 256, norm), nn.MaxPool2d(2), _block(256, 512, norm), nn.MaxPool2d(2))
        self.residual2 = nn.Sequential(_block(512, 512, norm), _block(512, 512, norm))
        self.tail = nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×32×32 → B×classes."""
        x = self.stem(x)
        x = x + self.residual1(x)
        x = self.middle(x)
        x = x + self.residual2(x)
        out: Tensor = self.head(self.tail(x))
        return out


def _block(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm2d(norm, outputs), nn.ReLU())
