"""One data set: the publisher's training samples first, then the publisher's test samples."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie import draws
from coterie.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets of one data set.

    Rows `[0, train)` are the publisher's training samples, rows `[train, N)` its test samples; partitions refer to
    samples by their place in this order, and never move one from one side to the other without saying `resplit`.
    """

    name: str
    inputs: NDArray[Any]  # N × sample shape; images are uint8, channels first
    targets: NDArray[Any]  # N class numbers, or N × target shape
    train: int  # how many rows are the publisher's training samples
    classes: tuple[str, ...] = ()  # names of the classes, if the targets are class numbers
    groups: NDArray[Any] | None = None  # a natural owner of each sample (hospital, page, language), if there is one
    facts: dict[str, Any] = field(default_factory=dict)  # source, licence, channel means: what a report should say
    validation: int = 0  # how many training rows, the last ones, the publisher keeps for validation

    def __post_init__(self) -> None:
        """Refuse what no partition could deal out."""
        if len(self.inputs) != len(self.targets):
            raise DataError(f"data set {self.name}: {len(self.inputs)} inputs but {len(self.targets)} targets")
        if not 0 < self.train <= len(self.inputs):
            raise DataError(f"data set {self.name}: {self.train} training samples of {len(self.inputs)} in all")
        if not 0 <= self.validation < self.train:
            raise DataError(f"data set {self.name}: {self.validation} validation samples of {self.train} for training")

    @property
    def train_indices(self) -> NDArray[np.int64]:
        """Places of the publisher's training samples."""
        return np.arange(self.train)

    @property
    def test_indices(self) -> NDArray[np.int64]:
        """Places of the publisher's test samples."""
        return np.arange(self.train, len(self.inputs))


def training_share(labels: NDArray[np.int64], share: float, name: str) -> NDArray[np.bool_]:
    """Which samples are for training where nobody divides them: a share of each class, as near as whole samples allow.

    The order within a class comes from counter-based draws: the same on every machine and with every version.
    """
    key = draws.fold(torch.tensor(draws.name(name)), torch.arange(len(labels)))
    order = np.lexsort((draws.unit(key).numpy(), labels))
    rank = np.empty_like(labels)  # place of each sample in the random order of its own class
    rank[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    chosen: NDArray[np.bool_] = rank < np.rint(share * np.bincount(labels))[labels]
    return chosen
