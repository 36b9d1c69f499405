"""A site's own process that has imported everything, and forks for each message: a new process without the seconds.

Flower starts a program for every message. Importing torch, Flower and Coterie takes that longer than answering does
(some 2.5 seconds of a core, at every site, in every phase), so `coterie site join` starts a worker beside the node. The
program hands its arguments, environment and output over to it, and waits for the end; where there is no worker, it does
the work itself. The worker listens at a socket in the site's folder, which is its owner's only, and ends with the node.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from coterie.fleet.flower import CLIENTAPP, OTHERS

SOCKET = "worker"
PAUSE = 1.0  # seconds between looks whether the node is still there

# What Flower starts: it imports next to nothing. Paths of sockets are short, hence the change of folder.
PROGRAM = """\
#!{python}
# Flower starts this for every message. What came with the message is never unpacked.
import json, os, socket, sys

here = os.getcwd()
worker = socket.socket(socket.AF_UNIX)
try:
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    worker.connect("{socket}")
except OSError:
    os.chdir(here)
    from coterie.sites.node import main

    main()
else:
    told = json.dumps([sys.argv, dict(os.environ), here]).encode()
    socket.send_fds(worker, [len(told).to_bytes(8, "little")], [0, 1, 2])
    worker.sendall(told)
    worker.recv(1)  # until it is done
"""
REFUSAL = """\
#!{python}
# Flower starts this for work of another kind, which is done by code that was sent.
import sys

sys.exit("this site runs no code that it was sent")
"""


def programs() -> dict[str, str]:
    """What Flower's node finds where it looks for its own commands: their names and texts."""
    refusal = REFUSAL.format(python=sys.executable)
    return {CLIENTAPP: PROGRAM.format(python=sys.executable, socket=SOCKET)} | dict.fromkeys(OTHERS, refusal)


def serve(folder: Path, main: Callable[[], object], node: int) -> None:
    """Fork for every program that connects, until the node, by its process id, is no more. `main` is what it runs."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the node, which ends this too
    os.chdir(folder)
    with suppress(FileNotFoundError):
        os.unlink(SOCKET)
    before = os.umask(0o077)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    os.umask(before)
    mine = os.stat(SOCKET).st_ino
    listener.listen(16)
    while _alive(node):
        if not select.select([listener], [], [], PAUSE)[0]:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(connection, main)
        connection.close()
    with suppress(FileNotFoundError):
        if os.stat(SOCKET).st_ino == mine:  # and not the one of a node that was started since
            os.unlink(SOCKET)


def _become(connection: socket.socket, main: Callable[[], object]) -> None:
    """Go on as the program that asked."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        size, handles, _, _ = socket.recv_fds(connection, 8, 3)
        told = b""
        while len(told) < int.from_bytes(size, "little"):
            if not (more := connection.recv(1 << 16)):
                return  # it was ended before it had said what it wants
            told += more
        arguments, environment, folder = json.loads(told)
        for number, handle in enumerate(handles):
            os.dup2(handle, number)
            os.close(handle)
        sys.argv[:] = arguments
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
