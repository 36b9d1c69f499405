"""Who is there in a round: a rule, and the wrapper that makes any fleet follow it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.wrapper import Wrapper


class Rule(ABC):
    """Says which clients are there in the round that is open."""

    @abstractmethod
    def present(self, fleet: Fleet) -> Tensor:
        """n booleans. What is drawn depends on seed, round and the clients' keys only."""

    def most(self, n: int) -> int:
        """How many of n clients that can be at most."""
        return n


def _lowest(marks: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(len(marks), dtype=torch.bool)
    chosen[marks.argsort(stable=True)[:count]] = True
    return chosen


@dataclass(frozen=True)
class Fraction(Rule):
    """A share of the clients, drawn anew each round without replacement; at least one."""

    share: float

    def __post_init__(self) -> None:
        """A share is in (0, 1]."""
        if not 0 < self.share <= 1:
            raise SettingError(f"the share of clients must be above 0 and at most 1, not {self.share}")

    def present(self, fleet: Fleet) -> Tensor:
        """The clients with the lowest draws."""
        return _lowest(fleet.uniform("participation", fleet.everyone), self.most(fleet.n))

    def most(self, n: int) -> int:
        """The share."""
        return max(1, round(self.share * n))


@dataclass(frozen=True)
class Count(Rule):
    """A fixed number of clients, drawn anew each round without replacement; by data share if asked."""

    clients: int
    by_size: bool = False  # chances in proportion to the training data (successive draws without replacement)

    def __post_init__(self) -> None:
        """At least one client."""
        if self.clients < 1:
            raise SettingError(f"at least one client must be there, not {self.clients}")

    def present(self, fleet: Fleet) -> Tensor:
        """The clients with the lowest draws; an exponential clock per unit of data gives shares their due."""
        if self.clients > fleet.n:
            raise SettingError(f"{self.clients} clients a round were asked for, and there are {fleet.n}")
        marks = fleet.uniform("participation", fleet.everyone)
        if self.by_size:
            marks = -torch.log1p(-marks) / fleet.sizes("train").double()
        return _lowest(marks, self.clients)

    def most(self, n: int) -> int:
        """The count."""
        return self.clients


@dataclass(frozen=True)
class Schedule(Rule):
    """Given round by round: the keys of those who are there. After the last entry the list begins again."""

    rounds: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        """At least one entry, which may name nobody."""
        if not self.rounds:
            raise SettingError("a schedule of who is there has at least one round")

    def present(self, fleet: Fleet) -> Tensor:
        """The clients of this round's entry."""
        here = self.rounds[fleet.t % len(self.rounds)]
        unknown = [key for key in here if key not in fleet.keys]
        if unknown:
            raise SettingError(f"round {fleet.t} of the schedule names {unknown[0]!r}, who is no client")
        return torch.tensor([key in here for key in fleet.keys])


@dataclass(frozen=True)
class Stay(Rule):
    """Clients that join late or leave early: key → (first round, first round gone or None). Others are always there."""

    spans: tuple[tuple[str, int, int | None], ...]

    def present(self, fleet: Fleet) -> Tensor:
        """Those whose span covers this round."""
        here = torch.ones(fleet.n, dtype=torch.bool)
        for key, first, gone in self.spans:
            if key not in fleet.keys:
                raise SettingError(f"{key!r} joins or leaves, but is no client")
            here[fleet.keys.index(key)] = first <= fleet.t and (gone is None or fleet.t < gone)
        return here


class Participation(Wrapper):
    """Any fleet, with absences by one or more rules: a client is there when all of them say so."""

    def __init__(self, inner: Fleet, *rules: Rule) -> None:
        super().__init__(inner)
        self.rules: Sequence[Rule] = rules

    @property
    def most(self) -> int:
        """As many as every rule lets be there."""
        return min([self.inner.most, *(rule.most(self.inner.n) for rule in self.rules)])

    def begin(self, t: int) -> None:
        """Open the round, then let the rules speak."""
        self.inner.begin(t)
        for rule in self.rules:
            self.inner.present = self.inner.present & rule.present(self.inner)
