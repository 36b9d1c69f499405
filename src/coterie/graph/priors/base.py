"""What a prior of the cooperation graph is: the part of SCooL that is swapped.

A prior keeps beliefs (its variational parameters, and what its M-step fits) as a dictionary of tensors, so that a
checkpoint needs to know nothing about it. Graphs and beliefs are float64 on the host; rows of models stay where they
are. Random numbers are drawn per client, never by a client's place: a permuted population must give a permuted graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

EPSILON = 1e-6  # in every logarithm, digamma and denominator of a prior
Beliefs = dict[str, Tensor]


class Clients(Protocol):
    """What a prior may know of the clients; every fleet is one."""

    n: int
    t: int  # the round

    @property
    def everyone(self) -> Tensor:
        """The number of every client."""
        ...

    @property
    def ids(self) -> Tensor:
        """A number per client that goes with it, not with its place."""
        ...

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each parameter tensor lies in a row."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """And its shape."""
        ...

    def uniform(self, tag: str, *clients: Tensor) -> Tensor:
        """A number in [0, 1) for each client, or for each tuple of clients in any order, new in every round."""
        ...

    def generator(self, tag: str) -> torch.Generator:
        """A generator for what is drawn as a whole."""
        ...


@dataclass(frozen=True, eq=False)
class Evidence:
    """What an E-step sees."""

    log_p: Tensor  # n×n: log P(D_j|θ_i), (baseline − loss)/temperature as last measured; zero where unknown
    known: Tensor  # n×n booleans: which of them have been measured, the diagonal included
    mask: Tensor  # n×n booleans: to whom i still listens, itself included
    temperature: float
    moved: Callable[[], Tensor]  # makes θ_i − θ_i⁰ of the trained models, n×d, for the priors that look at them
    clients: Clients

    @property
    def others(self) -> Tensor:
        """The measured pairs of two: sums of the paper leave j = i out."""
        return self.known & ~torch.eye(len(self.known), dtype=torch.bool)


class Prior(ABC):
    """A subclass is a frozen dataclass of settings, with at least three functions of beliefs and evidence."""

    likelihood: ClassVar[Literal["own", "cross"]] = "cross"  # with which likelihood it goes (cases 1.1 and 1.2)

    @abstractmethod
    def init(self, clients: Clients) -> tuple[Tensor, Beliefs]:
        """W and the beliefs before round 0; refuses what does not fit these clients."""

    @abstractmethod
    def e_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> tuple[Tensor, Beliefs]:
        """W and the beliefs that raise the ELBO (8). W has any diagonal; pairs that are not known are not used."""

    @abstractmethod
    def elbo(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Tensor:
        """The bound that the E-step must not lower, but for terms that it cannot change."""

    def m_step(self, w: Tensor, beliefs: Beliefs, evidence: Evidence) -> Beliefs:
        """The prior's own parameters, given W (9)."""
        return beliefs

    def rank(self, w: Tensor, evidence: Evidence) -> Tensor:
        """By what neighbours are kept at the cut; n×n, the greater the better."""
        return w

    def pull(
        self, w: Tensor, beliefs: Beliefs, x: Tensor, rate: float, here: Tensor, evidence: Evidence
    ) -> Tensor | None:
        """What P(θ|Y) or P(Y|θ) adds to the models x, at the rate of a local step; only those `here` take part."""
        return None


def keyed_simplex(clients: Clients, size: int, tag: str) -> Tensor:
    """A uniform draw from the simplex for every client: n × size."""
    clocks = torch.stack([-torch.log1p(-clients.uniform(f"{tag} {g}", clients.everyone)) for g in range(size)], 1)
    return clocks / clocks.sum(1, keepdim=True)


def entropy(p: Tensor) -> Tensor:
    """−p log p, zero at zero."""
    found: Tensor = torch.special.entr(p)
    return found


def softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Of each row over those allowed; zeros where nobody is."""
    return torch.where(allowed, scores.masked_fill(~allowed, -torch.inf).softmax(1), 0)
