"""Clients whose answers are altered on their way, or come too late: faults to test with."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.asks import LATE, Answer, Ask
from coterie.fleet.altering import VALUES, Altering
from coterie.fleet.base import Fleet

Alter = Callable[[Ask, Tensor], Tensor]  # values of some pairs (m × …) → what arrives instead


def nan(ask: Ask, values: Tensor) -> Tensor:
    """Not a number, everywhere."""
    return torch.full_like(values, torch.nan)


def one_infinity(ask: Ask, values: Tensor) -> Tensor:
    """One infinite entry in each answer."""
    altered = values.clone()
    altered.view(len(values), -1)[:, -1] = torch.inf
    return altered


class Faulty(Altering):
    """Alters the answers of chosen clients, and drops those that `late` names."""

    def __init__(
        self, inner: Fleet, clients: Sequence[str], alter: Alter | None = nan, late: Sequence[str] = ()
    ) -> None:
        super().__init__(inner)
        self.altered = torch.tensor([key in clients for key in inner.keys])
        self.late = torch.tensor([key in late for key in inner.keys])
        self.change = alter

    def touches(self, ask: Ask) -> bool:
        """Everything passes through here."""
        return True

    def alter(self, ask: Ask, answer: Answer, place: int) -> Answer:
        """Changed values, and the reason `late`."""
        who = (self.among(ask, self.altered) & answer.ok.cpu()).nonzero().flatten().to(self.device)
        values = {}
        for name in VALUES:
            value = getattr(answer, name)
            if len(who) and len(value) == ask.m and self.change is not None:
                value = value.clone()
                value[who] = self.change(ask, value[who])
                values[name] = value
        late = self.among(ask, self.late).to(self.device) & answer.ok
        return replace(answer, reason=torch.where(late, LATE, answer.reason), **values)
