"""A multi-layer perceptron on the flattened input."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from coterie.errors import SettingError


class MLP(nn.Module):
    """`sizes` names every layer's width, input first: [784, 100, 10] is one hidden layer. ReLU between layers."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise SettingError(f"sizes is {list(sizes)}; an mlp needs at least an input and an output width")
        self.body = nn.Sequential(nn.Flatten())
        for inputs, outputs in pairwise(sizes[:-1]):
            self.body.extend([nn.Linear(inputs, outputs), nn.ReLU()])
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        """B×anything → B×sizes[-1]."""
        out: Tensor = self.head(self.body(x))
        return out
