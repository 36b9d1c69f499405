"""Public inputs: images that everyone holds, kept back from all clients or taken from another data set."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from coterie.data.dataset import Dataset
from coterie.errors import DataError
from coterie.settings import whole

_STREAM = 0x9B1C  # beside the partition's draws, which begin with the same seed


@dataclass(frozen=True)
class Shown:
    """The `[population.public]` table of a data set that is dealt: how many inputs, and of which data set."""

    samples: int = 2000
    data: str | None = None  # None: training samples of the clients' own data set, which then nobody else holds

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        whole("samples", self.samples, 1)


def keep_back(dataset: Dataset, samples: int, seed: int) -> tuple[Dataset, tuple[NDArray[np.generic], ...]]:
    """The data set without so many of its training samples; and these, with their classes where they have any."""
    if samples >= (there := dataset.train - dataset.validation):
        raise DataError(f"data set {dataset.name} has {there} training samples; {samples} cannot be kept back")
    chosen, left = _drawn(dataset, samples, seed)
    kept = replace(
        dataset,
        inputs=dataset.inputs[left],
        targets=dataset.targets[left],
        train=dataset.train - samples,
        groups=None if dataset.groups is None else dataset.groups[left],
    )
    return kept, _pair(dataset, dataset.inputs[chosen], chosen)


def borrow(other: Dataset, samples: int, like: Dataset, seed: int) -> tuple[NDArray[np.generic], ...]:
    """Training samples of another data set, its images in the size, the channels and the numbers of `like`."""
    if samples > (there := other.train - other.validation):
        raise DataError(f"data set {other.name} has {there} training samples, and {samples} are asked for")
    chosen, _ = _drawn(other, samples, seed)
    if other.inputs.shape[1:] == like.inputs.shape[1:] and other.inputs.dtype == like.inputs.dtype:
        return _pair(other, other.inputs[chosen], chosen)
    for each in (other, like):
        if each.inputs.ndim != 4:
            raise DataError(f"data set {each.name} has no images: public inputs of another shape cannot be scaled")
    images = torch.from_numpy(other.inputs[chosen])
    return _pair(other, fitted(images, like.inputs.shape[1:], like.inputs.dtype == np.uint8).numpy(), chosen)


def fitted(images: Tensor, shape: tuple[int, ...], as_bytes: bool) -> Tensor:
    """Images, bytes or in [0, 1], with other channels and in another size: grey is repeated, colours are averaged."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if x.shape[1] != shape[0]:
        x = x.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if x.shape[2:] != shape[1:]:
        x = interpolate(x, size=shape[1:], mode="bilinear", antialias=True).clamp(0, 1)
    return (x * 255).round().to(torch.uint8) if as_bytes else x.contiguous()


def _drawn(dataset: Dataset, samples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of some training samples, and all the others."""
    there = dataset.train - dataset.validation  # the publisher's validation samples stay behind their border
    chosen = np.sort(np.random.default_rng([seed, _STREAM]).choice(there, samples, replace=False))
    return chosen, np.setdiff1d(np.arange(len(dataset.inputs)), chosen)


def _pair(dataset: Dataset, inputs: NDArray[np.generic], chosen: NDArray[np.int64]) -> tuple[NDArray[np.generic], ...]:
    if dataset.targets.ndim != 1 or dataset.targets.dtype.kind not in "iu":
        return (inputs,)
    return inputs, dataset.targets[chosen].astype(np.int64)
