"""Small populations and models that many tests use."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from coterie.data.population import Client, Population, population


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.a(x))))


def linear() -> nn.Module:
    return nn.Linear(6, 3)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batchnorm() -> nn.Module:
    # no bias before the normalisation: its gradient would be rounding noise, which Adam divides by itself
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def groupnorm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def conv_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(16, 3)
    )


IMAGE = (2, 4, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (linear, (6,)),
    "mlp": (mlp, (6,)),
    "dropout": (Dropping, (6,)),
    "batchnorm": (batchnorm, (6,)),
    "groupnorm": (groupnorm, IMAGE),
    "conv_batchnorm_dropout": (conv_batchnorm, IMAGE),
}


def classes(
    model: Callable[[], nn.Module] | Sequence[Callable[[], nn.Module]] = mlp,
    shape: tuple[int, ...] = (6,),
    n: int = 4,
    seed: int = 0,
    size: int = 20,
    ragged: int = 7,
    groups: Sequence[int] | None = None,
) -> Population:
    """n clients with three classes and data of different sizes; several models are dealt in turn."""
    g = torch.Generator().manual_seed(seed)
    models = [model] if callable(model) else list(model)
    clients = []
    for i in range(n):
        m = size + ragged * i
        x = torch.randn(m + 24, *shape, generator=g)
        y = torch.randint(0, 3, (m + 24,), generator=g)
        y[:3] = torch.arange(3)
        parts = [(x[a:b], y[a:b]) for a, b in ((0, m), (m, m + 5 + i), (m + 5 + i, m + 16 + 2 * i))]
        clients.append(Client(f"site-{i}", *parts, model=models[i % len(models)]))
    public = {"public": (torch.randn(13, *shape, generator=g), torch.randint(0, 3, (13,), generator=g))}
    return population(clients, task="classification", groups=groups, public=public)
