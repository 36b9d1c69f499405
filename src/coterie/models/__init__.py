"""The architectures of the experiments, plain `nn.Module`s.

Images are channels first. The last layer is always called `head`. Every model runs under `functional_call` with
`vmap(grad)` and under `torch.compile(fullgraph=True)`: nothing in place, no control flow on values, dropout only as
`nn.Dropout`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from coterie.models.cnn import CNN, cnn_scool
from coterie.models.cnn4 import CNN4
from coterie.models.cnn28 import CNN28
from coterie.models.gpt2 import gpt2
from coterie.models.lenet import LeNet, cnn_comet
from coterie.models.linear import Linear
from coterie.models.mean import Mean
from coterie.models.minilm import minilm
from coterie.models.mlp import MLP
from coterie.models.resnet9 import ResNet9
from coterie.models.resnet18 import ResNet18
from coterie.models.unet3d import UNet3d
from coterie.models.vgg import vgg11, vgg13
from coterie.settings import call

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": CNN,
    "cnn28": CNN28,
    "cnn4": CNN4,
    "cnn_comet": cnn_comet,
    "cnn_scool": cnn_scool,
    "gpt2": gpt2,
    "lenet": LeNet,
    "linear": Linear,
    "mean": Mean,
    "minilm": minilm,
    "mlp": MLP,
    "resnet18": ResNet18,
    "resnet9": ResNet9,
    "unet3d": UNet3d,
    "vgg11": vgg11,
    "vgg13": vgg13,
}


def names() -> tuple[str, ...]:
    """Every architecture that `build` knows."""
    return tuple(MODELS)


def build(name: str, /, **settings: Any) -> nn.Module:
    """A new model of this name: `build("cnn", channels=1, size=8)`. Draws its start from torch's generator."""
    return call("model", name, MODELS, **settings)
