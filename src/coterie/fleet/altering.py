"""A fleet whose answers are altered on their way, before anyone looks at them: what faults and attacks share."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import ABSENT, NONFINITE, OK, Answer, Ask, Gradient
from coterie.fleet.reduce import Sink, finite, zeroed
from coterie.fleet.wrapper import Wrapper

VALUES = ("rows", "loss", "outputs")  # what an answer holds of each pair


class Altering(Wrapper):
    """Subclasses say which asks they touch, and what arrives of their answers.

    Sums, inner products and sketches are made here from single rows, since an alteration acts on what one client says.
    The ledger counts what was asked, not the rows that are looked at here.
    """

    @abstractmethod
    def touches(self, ask: Ask) -> bool:
        """Whether anything of the answers may be altered; what is not touched passes as it is."""

    @abstractmethod
    def alter(self, ask: Ask, answer: Answer, place: int) -> Answer:
        """What arrives of single rows, losses and outputs, and why some does not. Nothing need be finite."""

    def ask(self, *asks: Ask) -> Any:
        """Ask for rows, alter them, check them, and only then add up."""
        touched = [self.touches(ask) for ask in asks]
        if not any(touched):
            return self.inner.ask(*asks)
        place = self.inner._place
        before = self.ledger.state()
        answers = self.inner.ask(*[_singly(ask) if t else ask for ask, t in zip(asks, touched, strict=True)])
        answers = answers if isinstance(answers, tuple) else (answers,)
        self.ledger.load(before)
        for ask, answer in zip(asks, answers, strict=True):
            self._charge_again(ask, answer)
        done = [
            self._arrived(ask, self.alter(ask, answer, place + i), place + i) if t else answer
            for i, (ask, answer, t) in enumerate(zip(asks, answers, touched, strict=True))
        ]
        return done[0] if len(done) == 1 else tuple(done)

    def _charge_again(self, ask: Ask, answer: Answer) -> None:
        reason = answer.reason.cpu()
        there = (reason != ABSENT).nonzero().flatten()
        if len(there):
            heard = (reason == OK) | (reason == NONFINITE)
            self._charge(ask if len(there) == ask.m else ask.take(there), answer, heard[there])

    def _arrived(self, ask: Ask, answer: Answer, place: int) -> Answer:
        """Zero where an answer is not ok or not finite, given as it was asked for."""
        values = {name: value for name in VALUES if ask.m and len(value := getattr(answer, name)) == ask.m}
        reason = answer.reason
        for value in values.values():
            reason = torch.where((reason == OK) & ~finite(value.reshape(ask.m, -1)), NONFINITE, reason)
        good = reason == OK
        values = {name: zeroed(value, good) for name, value in values.items()}
        metrics = {name: value.where(good.to(value.device), 0) for name, value in answer.metrics.items()}
        answer = replace(answer, reason=reason.to(torch.int8), metrics=metrics, **values)
        if not isinstance(ask, Gradient) or (ask.give == "rows" and ask.sketch is None):
            return answer
        key = draws.fold_int(draws.name("sketch"), self.seed, self.t, place)
        sink = Sink(ask, answer.rows.shape[1], self.dtype, self.device, key)
        order = torch.arange(ask.m) if ask.group is None else torch.argsort(ask.group, stable=True)
        there = order.to(self.device)
        sink.take(order, answer.rows[there], good[there])
        return sink.answer(answer.reason, answer.loss)

    def among(self, ask: Ask, some: Tensor) -> Tensor:
        """Which pairs are about some of the clients (n booleans); the reserved server is none of them."""
        return some[ask.clients.clamp(max=self.n - 1)] & (ask.clients < self.n)


def _singly(ask: Ask) -> Ask:
    """The same question, to be answered pair by pair."""
    if not isinstance(ask, Gradient):
        return ask
    return replace(ask, give="rows", into=None, outputs=None, group=None, slot=None, weights=None, sketch=None)
