"""A deployment of real processes on this machine: Flower's server, a node for each site, and what they are to find out.

Every process is started by the command line that a user types, in a session of its own, and carries a mark in its
environment by which it and whatever it started are found and ended: by their numbers, and no others. Ports are free
ones of 127.0.0.1. Waiting ends with what is waited for, or after `PATIENCE` seconds with the ends of all logs.
"""

import io
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import actors
from coterie.cli import app
from coterie.experiments import reader
from coterie.sites.folder import SITE
from servers import GATE, MARK

COTERIE = (sys.executable, "-c", "import torch; torch.set_num_threads(1); from coterie.cli import main; main()")
HERE = str(Path(__file__).parent)
ROLE = "COTERIE_TEST_ROLE"
PATIENCE = 1800.0  # seconds: the machine may be slow and busy, and nothing here depends on when something happens
Sources = Mapping[str, tuple[str, Path]]  # client → how its data are read, and where they are


class Deployment:
    """One experiment, its server and its sites, each with a folder of its own. Ends every process it has started."""

    def __init__(self, root: Path, experiment: str, sites: Mapping[str, Sources]) -> None:
        self.root, self.sites = root, sites
        root.mkdir(parents=True, exist_ok=True)
        self.given = root / "given.toml"
        self.given.write_text(experiment, encoding="utf-8")
        self.out = root / "server"
        self.port = free_port()
        self.started: list[subprocess.Popen[bytes]] = []
        self.ports = {name: free_port() for name in sites}
        self.links: dict[str, list[str]] = {}  # more options of `coterie site join`, by site
        self.kept: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # site → its node, and as whom it answers

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # ---- processes ---------------------------------------------------------------------------------------------------

    def environment(self, role: str = "") -> dict[str, str]:
        """One thread a process, and marked."""
        return {**os.environ, MARK: str(self.root), ROLE: role, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process whose output is in NAME.log; NAME is its role, and that of whatever it starts."""
        with (self.root / f"{name}.log").open("ab") as log:
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(words, env=self.environment(name), start_new_session=True, **how)
        self.started.append(process)
        return process

    def coterie(self, *words: object) -> str:
        """Run a command to its end; what it says."""
        command = [*COTERIE, *map(str, words)]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"coterie {' '.join(map(str, words))}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def mine(self, *roles: str) -> list[int]:
        """Everything alive that was started from here, whoever its parent is now; or only what has these roles."""
        return [pid for pid, role in marked(str(self.root)) if not roles or role in roles]

    def kill(self, *roles: str) -> None:
        """kill -9 what has these roles, or everything, each by its number."""
        self.kept = {site: node for site, node in self.kept.items() if roles and site not in roles}

        def gone() -> bool:
            left = self.mine(*roles)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            return not left

        self.until(f"the end of {roles or 'all'}", gone)

    def reap(self) -> None:
        """A child that has ended and that nobody asks about would still be there for whoever it started."""
        for process in self.started:
            process.poll()

    def until(self, what: str, true: Callable[[], Any]) -> Any:
        """Wait for something. Nodes that end are started again, as a service does."""
        end = time.monotonic() + PATIENCE
        while not (found := true()):
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {PATIENCE:g} seconds\n{self.logs()}")
            self.reap()
            for site, (node, actor) in list(self.kept.items()):
                if node.returncode is not None:
                    self.join(site, actor)
            time.sleep(0.1)
        return found

    def allow(self, rounds: int) -> None:
        """So many rounds may begin, where the server is one of `servers`."""
        (self.root / "next").write_text(str(rounds))
        (self.root / "next").replace(self.root / GATE)

    def logs(self) -> str:
        """The ends of all logs."""
        paths = [*self.root.glob("*.log"), *self.out.glob("server/*.log"), *self.root.glob("*/log.jsonl")]
        return "\n".join(f"== {p.relative_to(self.root)}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def place(self, site: str) -> Path:
        """A site's folder."""
        return self.root / site

    def inside(self, *words: object) -> str:
        """The same as `coterie`, in this process: a start costs seconds."""
        told = io.StringIO()
        with redirect_stdout(told):
            app([*map(str, words)], standalone_mode=False)
        return told.getvalue()

    def prepare(self, coterie: Callable[..., str], *public: Path) -> None:
        """What people at the sites do once: prepare, allow, check and approve. Seeds are shared for the test."""
        shared = [word for file in public for word in ("--public", file)]
        found = self.given
        mark = reader.fingerprint(reader.read(str(found)))
        for site, clients in self.sites.items():
            place = self.place(site)
            for client, (kind, source) in clients.items():
                coterie("site", "prepare", place, "--experiment", found, "--client", client, f"--{kind}", source,
                        *shared)  # fmt: skip
            edited(place / SITE)
            coterie("site", "check", place)
            assert mark in coterie("site", "approve", place, mark)

    def join(self, site: str, actor: str = "noting") -> None:
        """Start a site's node, which answers as the actor does, and keep one there from now on."""
        actors.install(self.place(site), actor)
        words = ["site", "join", str(self.place(site)), f"127.0.0.1:{self.port}", "--port", str(self.ports[site])]
        node = self.start(site, [*played("actors", actor), *words, *self.links.get(site, ())])
        self.kept[site] = (node, actor)

    def leave(self, site: str) -> None:
        """Stop a site's node, as one should."""
        node, _ = self.kept.pop(site)
        node.terminate()
        self.until(f"{site} is gone", lambda: node.poll() is not None and not self.mine(site))

    def connected(self, site: str) -> int:
        """How often a site's node was let in."""
        return self.said(f"{site}.log", "SuperNode ID:")

    def said(self, log: str, what: str) -> int:
        """How often something stands in a log."""
        path = self.root / log
        return path.read_text(errors="replace").count(what) if path.exists() else 0

    @property
    def clients(self) -> list[str]:
        """All of them, in the experiment's order."""
        return list(reader.read(str(self.given)).population(0).keys)


def played(module: str, part: str) -> tuple[str, ...]:
    """`coterie`, where a module of the tests plays its part."""
    return *COTERIE[
        :-1
    ], f"import sys; sys.path.insert(0, {HERE!r}); import {module}; {module}.play({part!r}); " + COTERIE[-1]


def edited(settings: Path) -> None:
    """A site's settings as tests need them: draws as in a simulator, models that may leave, small batches."""
    text = settings.read_text(encoding="utf-8")
    for name, found, wanted in (("share_seed", "false", "true"), ("own_rows", "false", "true"), ("least_batch", 8, 4)):
        assert f"{name} = {found}\n" in text
        text = text.replace(f"{name} = {found}\n", f"{name} = {wanted}\n")
    settings.write_text(text, encoding="utf-8")


def free_port() -> int:
    """A port that nobody listens at: of this worker's own, and not of those from which connections take theirs."""
    worker = int("0" + "".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", ""))))
    draw = random.Random()
    while True:
        port = 20_000 + 1_500 * (worker % 8) + draw.randrange(1_500)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Processes whose environment holds the mark, and their roles."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                lines = (folder / "environ").read_bytes().split(b"\0")
                if f"{MARK}={mark}".encode() in lines:
                    role = next(line for line in lines if line.startswith(f"{ROLE}=".encode()))
                    yield int(folder.name), role.partition(b"=")[2].decode()
