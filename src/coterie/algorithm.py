"""What an algorithm is: frozen hyper-parameters, and three functions over a fleet and a state of tensors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.asks import Buffers, Own


@dataclass(frozen=True, eq=False)
class Info:
    """What a round tells the world; the algorithm never reads it back."""

    graph: Tensor  # n×n float64: row i says how much client i listens to each client
    ok: Tensor  # n booleans: whose answer counted
    loss: Tensor | None = None  # n: mean training loss of those who are ok
    extra: dict[str, Tensor] = field(default_factory=dict)  # anything else worth a line in the record


class Algorithm(ABC):
    """A subclass is a frozen dataclass of hyper-parameters named as in its paper.

    A field called `rounds` is filled with the run's budget; `groups`, `targets` and `pools` with what the population
    knows of them (Population.told), where they are not given. Its module's docstring has a line `Travels: up …, down …;
    phases …; graphs …; rows ….`: numbers sent a round in n, d, m (those present) and the scalars of Info.extra,
    messages per client, steps compiled, and the most rows of width d that one tensor holds. The contract suite measures
    all of them.
    """

    buffers: ClassVar[Buffers] = "personal"  # with which buffers its models are evaluated
    stochastic: ClassVar[bool] = True  # whether the rows of its graph sum to one
    absent_stays: ClassVar[bool] = True  # whether the personal model of an absent client stays as it was
    mixed: ClassVar[bool] = False  # whether clients of different architectures can take part

    @abstractmethod
    def init(self, fleet: Any) -> Any:
        """The state before round 0: a dataclass of tensors, everything the next round needs."""

    @abstractmethod
    def round(self, fleet: Any, state: Any) -> tuple[Any, Info]:
        """One round; a pure function of the state and the fleet's round."""

    @abstractmethod
    def personal(self, state: Any) -> Tensor | Own:
        """The model of every client: a matrix of n rows, one row for all, or Own."""


def per_client(n: int, clients: Tensor, values: Tensor) -> Tensor:
    """Values of some clients among zeros for the others."""
    full = torch.zeros(n, dtype=values.dtype, device=values.device)
    full[clients.to(values.device)] = values
    return full
