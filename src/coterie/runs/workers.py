"""Several algorithms of one experiment at a time, each in a process of its own, where one core is all a run can use.

A process is a fork: it has the populations without making or copying them. What it says goes through a pipe to the
listeners here; what it finds goes into its own folders. It ends with the process that started it, however that ends.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from coterie.runs.listeners import Label, Listener

Work = Callable[[str, Sequence[Listener]], None]
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
PAUSE = 0.2  # seconds between looks whether to stop


class _Pipe(Listener):
    """Says everything to another process."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.lock = pipe, threading.Lock()

    def _send(self, what: str, *told: Any) -> None:
        with self.lock:
            self.pipe.send((what, told))

    def begin(self, run: Label, done: int) -> None:
        self._send("begin", run, done)

    def round(self, run: Label, done: int) -> None:
        self._send("round", run, done)

    def evaluation(self, run: Label, done: int, split: str, mean: Mapping[str, float]) -> None:
        self._send("evaluation", run, done, split, dict(mean))

    def end(self, run: Label, status: str) -> None:
        self._send("end", run, status)

    def tell(self, message: str) -> None:
        self._send("tell", message)


def able() -> bool:
    """Whether this machine can: it forks, and has more than one core."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def side_by_side(
    names: Sequence[str], work: Work, most: int, listeners: Sequence[Listener], stop: threading.Event
) -> list[BaseException]:
    """Do the work of every name, at most so many at a time; what went wrong."""
    importlib.import_module("torch._dynamo")  # vmap's first use does, which takes seconds in each process
    context = multiprocessing.get_context("fork")
    waiting = list(names)
    problems: list[BaseException] = []
    going: dict[Connection, Any] = {}
    stopped = False
    while waiting or going:
        while waiting and len(going) < min(most, len(os.sched_getaffinity(0))) and not stop.is_set():
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_do, args=(work, waiting.pop(0), there, os.getpid()), daemon=True)
            process.start()
            there.close()
            going[here] = process
        if stop.is_set():
            waiting.clear()
            for process in () if stopped else going.values():
                process.terminate()  # heard as SIGTERM: it pauses at the end of its round
            stopped = True
        for pipe in wait(list(going), PAUSE):
            assert isinstance(pipe, Connection)
            try:
                what, told = pipe.recv()
            except EOFError:
                process = going.pop(pipe)
                process.join()
                if process.exitcode:
                    problems.append(RuntimeError(f"a process ended with code {process.exitcode}"))
                continue
            if what == "problem":
                problems.append(told[0])
            else:
                for each in listeners:
                    getattr(each, what)(*told)
    return problems


def _do(work: Work, name: str, pipe: Connection, parent: int) -> None:
    """In the new process: work, and say what went wrong."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    told = _Pipe(pipe)
    try:
        work(name, [told])
    except BaseException as problem:
        told._send("problem", problem)
