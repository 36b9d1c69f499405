"""The CNN for 28×28 images of about 20,000 parameters."""

from torch import Tensor, nn


class CNN28(nn.Module):
    """5×5 conv 10, pool, 5×5 conv 20, pool, linear 50, linear: 21,840 parameters with one channel and ten classes."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 10, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(10, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(20 * 4 * 4, 50),
            nn.ReLU(),
        )
        self.head = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×28×28 → B×classes."""
        out: Tensor = self.head(self.body(x))
        return out
