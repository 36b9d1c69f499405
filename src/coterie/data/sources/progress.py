"""A progress bar for long work, silent when nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


class Progress:
    """Draws bars on standard error; `shown=None` means: only if that is a terminal."""

    def __init__(self, shown: bool | None = None) -> None:
        self.shown = sys.stderr.isatty() if shown is None else shown

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str = "bytes", done: int = 0) -> Iterator[Advance]:
        """A bar that the yielded function moves on; `unit` is "bytes" or a word for what is counted."""
        if not self.shown:
            yield lambda _: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
        with Rich(*columns, console=Console(stderr=True), transient=True) as rich:
            task = rich.add_task(title, total=total, completed=done)
            yield lambda step: rich.advance(task, step)
