"""A fleet around a fleet: what is not overridden goes to the one inside."""

from typing import Any

from torch import Tensor

from coterie.asks import Answer, Ask, Evaluate, Fit, Gradient, Loss, Predict
from coterie.fleet.base import Fleet


class Wrapper(Fleet):
    """Passes everything on. Rounds, versions, the ledger and randomness are the inner fleet's."""

    def __init__(self, inner: Fleet) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """What the inner fleet holds: n, keys, t, present, ledger …"""
        return getattr(self.inner, name)

    @property
    def present(self) -> Tensor:
        """Who is there, as the innermost fleet knows it: wrappers keep no copy."""
        return self.inner.present

    @present.setter
    def present(self, here: Tensor) -> None:
        self.inner.present = here

    @property
    def most(self) -> int:
        """As many as inside."""
        return self.inner.most

    def begin(self, t: int) -> None:
        """Open round t inside."""
        self.inner.begin(t)

    def ask(self, *asks: Ask) -> Any:
        """Ask inside."""
        return self.inner.ask(*asks)

    def watch(self, *asks: Ask) -> Any:
        """Watch inside."""
        return self.inner.watch(*asks)

    def reset(self) -> None:
        """Forget inside."""
        self.inner.reset()

    def state(self) -> dict[str, Tensor]:
        """What the inner fleet remembers."""
        return self.inner.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Give it back to the inner fleet."""
        self.inner.load(state)

    def buffers_of(self, client: int, memory: str) -> dict[str, Tensor]:
        """The buffers a client keeps inside."""
        return self.inner.buffers_of(client, memory)

    def _charge(self, ask: Ask, answer: Answer, heard: Tensor | None = None) -> None:
        self.inner._charge(ask, answer, heard)

    def _kept(self) -> dict[str, Tensor]:
        return self.inner._kept()

    def _restore(self, kept: dict[str, Tensor]) -> None:
        self.inner._restore(kept)

    def _gradient(self, ask: Gradient, place: int) -> Answer:
        return self.inner._gradient(ask, place)

    def _loss(self, ask: Loss, place: int) -> Answer:
        return self.inner._loss(ask, place)

    def _fit(self, ask: Fit, place: int) -> Answer:
        return self.inner._fit(ask, place)

    def _predict(self, ask: Predict) -> Answer:
        return self.inner._predict(ask)

    def _evaluate(self, ask: Evaluate) -> Answer:
        return self.inner._evaluate(ask)
