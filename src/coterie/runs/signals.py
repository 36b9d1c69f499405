"""Ctrl-C and SIGTERM ask runs to stop between rounds; a second Ctrl-C does not wait."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop(threading.Event):
    """Set once a signal came, and by which."""

    signal: int = 0

    @property
    def exit_code(self) -> int:
        """As a shell counts it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal


@contextmanager
def heeded(stop: Stop) -> Iterator[None]:
    """While this lasts, signals set `stop`. Only the main thread can hear them."""

    def hear(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number
        stop.set()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
