"""Clients whose answers are altered on their way: faults to test with, and the place for attacks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import ABSENT, LATE, NONFINITE, OK, Answer, Ask, Gradient
from coterie.fleet.base import Fleet
from coterie.fleet.reduce import Sink, finite, zeroed
from coterie.fleet.wrapper import Wrapper

Alter = Callable[[Ask, Tensor], Tensor]  # values of some pairs (m × …) → what arrives instead


def nan(ask: Ask, values: Tensor) -> Tensor:
    """Not a number, everywhere."""
    return torch.full_like(values, torch.nan)


def one_infinity(ask: Ask, values: Tensor) -> Tensor:
    """One infinite entry in each answer."""
    altered = values.clone()
    altered.view(len(values), -1)[:, -1] = torch.inf
    return altered


class Faulty(Wrapper):
    """Alters the answers of chosen clients, and drops those that `late` names, before anyone looks at them.

    Sums and inner products are made here from single rows, since an alteration acts on what one client says.
    """

    def __init__(
        self, inner: Fleet, clients: Sequence[str], alter: Alter | None = nan, late: Sequence[str] = ()
    ) -> None:
        super().__init__(inner)
        self.altered = torch.tensor([key in clients for key in inner.keys])
        self.late = torch.tensor([key in late for key in inner.keys])
        self.alter = alter

    def ask(self, *asks: Ask) -> Any:
        """Ask for rows, alter them, check them, and only then add up."""
        plain = [replace(a, give="rows", into=None, outputs=None, group=None, slot=None, weights=None, sketch=None)
                 if isinstance(a, Gradient) else a for a in asks]  # fmt: skip
        place = self.inner._place
        before = self.ledger.state()
        answers = self.inner.ask(*plain)
        answers = answers if isinstance(answers, tuple) else (answers,)
        self.ledger.load(before)  # what counts is what was asked, not the rows that are looked at here
        for a, answer in zip(asks, answers, strict=True):
            there = (answer.reason != ABSENT).nonzero().flatten().cpu()
            if len(there):
                self._charge(a if len(there) == a.m else a.take(there), answer)
        done = tuple(self._alter(a, answer, place + i) for i, (a, answer) in enumerate(zip(asks, answers, strict=True)))
        return done[0] if len(done) == 1 else done

    def _alter(self, ask: Ask, answer: Answer, place: int) -> Answer:
        pairs = self.altered[ask.clients.clamp(max=self.n - 1)] & (ask.clients < self.n)
        who = (pairs & answer.ok.cpu()).nonzero().flatten().to(self.device)
        reason = torch.where(
            self.late[ask.clients.clamp(max=self.n - 1)].to(self.device) & answer.ok, LATE, answer.reason
        )
        values = {}
        for name in ("rows", "loss", "outputs"):
            value = getattr(answer, name)
            if len(value) != ask.m or not ask.m:
                continue
            if len(who) and self.alter is not None:
                value = value.clone()
                value[who] = self.alter(ask, value[who])
            reason = torch.where((reason == OK) & ~finite(value.reshape(ask.m, -1)), NONFINITE, reason)
            values[name] = value
        good = reason == OK
        values = {name: zeroed(value, good) for name, value in values.items()}
        metrics = {name: value.where(good.to(value.device), 0) for name, value in answer.metrics.items()}
        altered = replace(answer, reason=reason.to(torch.int8), metrics=metrics, **values)
        if isinstance(ask, Gradient) and (ask.give != "rows" or ask.sketch is not None):
            key = draws.fold_int(draws.name("sketch"), self.seed, self.t, place)
            sink = Sink(ask, altered.rows.shape[1], self.dtype, self.device, key)
            order = torch.arange(ask.m) if ask.group is None else torch.argsort(ask.group, stable=True)
            there = order.to(self.device)
            sink.take(order, altered.rows[there], good[there])
            return sink.answer(altered.reason, altered.loss)
        return altered
