"""The four-layer CNN with GroupNorm for MiniImageNet."""

from torch import Tensor, nn

from coterie.errors import SettingError
from coterie.models.norm import norm2d


class CNN4(nn.Module):
    """Four times 3×3 conv, GroupNorm, ReLU, 2×2 max-pool; then linear."""

    def __init__(self, channels: int = 3, size: int = 84, classes: int = 100, width: int = 64) -> None:
        super().__init__()
        if size < 16:
            raise SettingError(f"size is {size}; four poolings need at least 16")
        self.body = nn.Sequential()
        for inputs in (channels, width, width, width):
            self.body.extend(
                [nn.Conv2d(inputs, width, 3, padding=1), norm2d("group", width), nn.ReLU(), nn.MaxPool2d(2)]
            )
        self.head = nn.Linear(width * (size // 16) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """B×channels×size×size → B×classes."""
        out: Tensor = self.head(self.body(x).flatten(1))
        return out
