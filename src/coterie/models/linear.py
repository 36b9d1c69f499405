"""One linear map of the flattened input: least squares, logistic regression."""

from torch import Tensor, nn


class Linear(nn.Module):
    """Inputs → outputs."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """B×anything → B×outputs."""
        out: Tensor = self.head(x.flatten(1))
        return out
