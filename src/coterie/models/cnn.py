"""Two convolutions and a hidden layer, for square images of any size: small by default, SCooL's CNN in full."""

from collections.abc import Sequence

from torch import Tensor, nn

from coterie.errors import SettingError


class CNN(nn.Module):
    """For each width a convolution, ReLU and 2×2 max-pool; then a hidden linear layer, ReLU, linear."""

    def __init__(
        self,
        channels: int = 1,
        size: int = 28,
        classes: int = 10,
        widths: Sequence[int] = (8, 16),
        kernel: int = 3,
        padding: int = 1,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential()
        inputs, side = channels, size
        for width in widths:
            self.body.extend([nn.Conv2d(inputs, width, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)])
            inputs, side = width, (side + 2 * padding - kernel + 1) // 2
        if side < 1:
            raise SettingError(f"size {size} is too small for {len(widths)} convolutions of {kernel}×{kernel}")
        self.body.extend([nn.Flatten(), nn.Linear(inputs * side * side, hidden), nn.ReLU()])
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×size×size → B×classes."""
        out: Tensor = self.head(self.body(x))
        return out


def cnn_scool(channels: int = 3, size: int = 32, classes: int = 10) -> CNN:
    """SCooL's CNN, 5×5 conv 32 and 64 without padding, linear 512: 878,538 parameters for CIFAR-10."""
    return CNN(channels, size, classes, widths=(32, 64), kernel=5, padding=0, hidden=512)
