"""LeNet for 32×32 images, and the deeper-headed CNN that COMET's heterogeneous clients use."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class LeNet(nn.Module):
    """5×5 conv 6, pool, 5×5 conv 16, pool, linear 120, 84, linear: 62,006 parameters for CIFAR-10."""

    def __init__(self, channels: int = 3, classes: int = 10, hidden: Sequence[int] = (120, 84)) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        widths = [16 * 5 * 5, *hidden]
        for inputs, outputs in pairwise(widths):
            self.body.extend([nn.Linear(inputs, outputs), nn.ReLU()])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×32×32 → B×classes."""
        out: Tensor = self.head(self.body(x))
        return out


def cnn_comet(channels: int = 3, classes: int = 10) -> LeNet:
    """COMET's own CNN: 2 conv and hidden linear layers of 120, 100, 84, 50; its convolutions, unstated, as in LeNet."""
    return LeNet(channels, classes, hidden=(120, 100, 84, 50))
