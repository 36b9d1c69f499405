"""A study whose clients are real sites: the same runner and record, with a fleet that Flower reaches.

`coterie serve` prepares the folder and starts the server's commands; the study itself runs inside the Flower run that
they start (`app`). A server that was stopped or killed goes on with `coterie resume`, which starts another Flower run.
"""

import ctypes
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console

import coterie
from coterie.data import holding
from coterie.errors import CoterieError, RecordError, SettingError
from coterie.experiments import populations, reader, toml
from coterie.experiments.reader import Experiment
from coterie.fleet import flower
from coterie.fleet.base import Fleet
from coterie.fleet.flower import Command, Link
from coterie.fleet.remote import Heard, InProcess, RemoteFleet, Transport, declared
from coterie.fleet.wire import Precision
from coterie.runs import files
from coterie.runs.listeners import Terminal
from coterie.runs.study import Study
from coterie.settings import build, real, whole

SERVER, LOG = "server", "server.log"
START = 600.0  # seconds that Flower's server may take to listen: it says itself when it cannot
STOP = 30.0  # and to end
PDEATHSIG = 1  # of Linux's prctl: be sent this signal when the parent is gone


@dataclass(frozen=True)
class Serving:
    """How sites are waited for."""

    least: int | None = None  # clients that must be there before a run begins; None: all
    patience: float = 3600.0  # seconds to wait for them, and in any round for anybody at all
    deadline: float = 600.0  # seconds that a phase may take
    precision: Precision = "full"  # of rows on their way up
    name: str = ""  # under which sites keep their state of this study
    node_keys: str = ""  # the folder of the public keys of nodes that are let in, NAME.pub
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        """Refuse what nobody could wait for."""
        if self.least is not None:
            whole("least", self.least, 1)
        real("patience", self.patience, 0)
        real("deadline", self.deadline, 0)

    @property
    def keys(self) -> list[Path]:
        """The public keys of nodes that are let in."""
        return sorted(Path(self.node_keys).glob("*.pub")) if self.node_keys else []


class Served(Study):
    """One experiment with real sites, in one folder."""

    transport: Transport | None = None  # set where the study runs
    remote = True
    queue = 60.0  # a Flower run whose server was killed lets go of the folder a little later
    tell = staticmethod(lambda message: None)

    def __init__(self, out: Path, experiment: Experiment, device: str, serving: Serving | None = None) -> None:
        _servable(experiment)
        super().__init__(out, experiment, device)
        self.serving = serving or Serving()
        self.heard = Heard()

    @classmethod
    def prepared(
        cls, experiment: Experiment, out: Path | None, serving: Serving, *, device: str = "cpu", command: str = ""
    ) -> "Served":
        """A folder with the experiment as its sites must have it."""
        _tried(experiment, serving)
        named = replace(serving, name=f"{experiment.name}-{secrets.token_hex(8)}")
        made = cls.begin(experiment, out, device=device, command=command, serving=named)
        assert isinstance(made, Served)
        files.write(made.out / "experiment.toml", toml.dump(reader.plain(experiment)).encode())
        return made

    def own(self) -> dict[str, Any]:
        """What experiment.json says besides."""
        return {"serving": asdict(self.serving)}

    @classmethod
    def of(cls, out: Path, about: Mapping[str, Any], experiment: Experiment) -> "Served":
        """From experiment.json."""
        return cls(out, experiment, about["device"], build(Serving, about["serving"], str(out)))

    def _fits(self, chosen: Sequence[int]) -> bool:
        return False

    def _fleets(self, algorithm: str, batch: Sequence[int]) -> list[Fleet]:
        if self.transport is None:
            raise RecordError(f"the clients of {self.out} are real sites: go on with `coterie resume {self.out}`")
        (seed,) = batch
        serving, budget = self.serving, self.experiment.budget
        fleet = RemoteFleet(
            declared(self.population(seed)),
            self.transport,
            seed=seed,
            device=self.device,
            dtype=getattr(torch, budget.dtype),
            experiment=self.hash,
            run=f"{serving.name}/{algorithm}",
            precision=serving.precision,
            tell=self.tell,
            heard=self.heard,
            patience=serving.patience,
        )
        fleet.await_clients(serving.least or fleet.n, serving.patience)
        return [self._wrapped(fleet)]

    # ---- the commands ------------------------------------------------------------------------------------------------

    @property
    def hash(self) -> str:
        """By which sites know the experiment."""
        return reader.fingerprint(self.experiment)

    @property
    def home(self) -> Path:
        """Flower's own folder."""
        return self.out / SERVER / "flower"

    def commands(self) -> tuple[Command, ...]:
        """The server, who is let in, and last the run."""
        link, app = self.serving.link, self.out / SERVER / "coterie-app"
        known = [flower.register(self.home, key) for key in self.serving.keys]
        run = flower.submit(link, self.home, app, {"study": str(self.out.absolute())})
        return flower.superlink(link, self.home, self.out / SERVER / "bin"), *known, run

    def ready(self) -> None:
        """Write what the commands need."""
        flower.needed()
        flower.write_app(self.out / SERVER / "coterie-app", coterie.__version__)
        flower.write_server(self.out / SERVER / "bin")
        flower.write_connection(self.serving.link, self.home)

    def serve(self, stop: threading.Event) -> bool:
        """Start the server, unless one listens already, and a run; wait for its end. Whether all runs are finished."""
        self.ready()
        server, *known, run = self.commands()
        processes = []
        try:
            if not listening(self.serving.link):
                with (self.out / SERVER / "superlink.log").open("ab") as log:
                    processes.append(_started(server, log))
                self._await(processes[0])
            for key in known:
                done = subprocess.run(key.words, env=key.environment, capture_output=True, text=True, check=False)
                if done.returncode and "already" not in done.stdout + done.stderr:
                    raise CoterieError(f"{key.words[-2]} cannot be registered: {done.stderr or done.stdout}")
            processes.append(_started(run))
            while processes[-1].poll() is None and not stop.is_set():
                if processes[0].poll() is not None:
                    raise CoterieError(
                        f"Flower's server has ended: {self.out / SERVER / 'superlink.log'} may say why; "
                        f"go on with `coterie resume {self.out}`"
                    )
                stop.wait(0.2)
            if not stop.is_set() and processes[-1].returncode:
                raise CoterieError(
                    f"flwr run ended with {processes[-1].returncode}: {self.out / SERVER / LOG} says more"
                )
        finally:
            for process in reversed(processes):
                _end(process)
        return len(self.results()) == len(self.experiment.algorithms) * len(self.experiment.budget.seeds)

    def _await(self, server: "subprocess.Popen[bytes]") -> None:
        end = time.monotonic() + START
        while not listening(self.serving.link):
            if server.poll() is not None or time.monotonic() > end:
                raise CoterieError(f"Flower's server does not start: {self.out / SERVER / 'superlink.log'} says why")
            time.sleep(0.1)


def _servable(experiment: Experiment) -> None:
    """Refuse what sites cannot take part in."""
    if not experiment.remote:
        raise SettingError(f"{experiment.source}: only [population] kind = 'sites' can be served")
    if experiment.budget.checkpoint_every != 1:
        raise SettingError(f"{experiment.source}: run.checkpoint_every must be 1: sites go back a few rounds only")


def _tried(experiment: Experiment, serving: Serving) -> None:
    """Refuse now what would otherwise come out when all sites have prepared, approved and joined."""
    _servable(experiment)
    population = experiment.population(experiment.budget.seeds[0])
    if (serving.least or 0) > population.n:
        raise SettingError(f"--least {serving.least}: {experiment.source} declares {population.n} clients")
    for key in serving.keys:
        flower.check_key(key, private=False)
    try:
        holding.fit(population, populations.schema_of(experiment.given["population"]["data"]))
        for name in experiment.algorithms:
            experiment.algorithm(name, **population.told).init(RemoteFleet(declared(population), InProcess({})))
    except CoterieError as error:
        raise SettingError(f"{experiment.source}: {str(error).removeprefix(f'{experiment.source}: ')}") from None


def _started(command: Command, log: IO[bytes] | None = None) -> "subprocess.Popen[bytes]":
    """A process that hears no Ctrl-C of its own, and does not outlive this one where the system can see to that."""
    follow = (
        partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None
    )  # PR_SET_PDEATHSIG
    return subprocess.Popen(
        command.words, env=command.environment, stdout=log, stderr=log, preexec_fn=follow, start_new_session=True
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask first."""
    process.terminate()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def listening(link: Link) -> bool:
    """Whether something listens there."""
    with socket.socket(socket.AF_INET6 if ":" in link.host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        try:
            return probe.connect_ex((link.host, link.port)) == 0
        except socket.gaierror:
            raise SettingError(f"--host {link.host}: no address of this name is known here") from None


def main(grid: Any, settings: Mapping[str, Any]) -> None:
    """What the Flower run does: the study, from where it stands."""
    study = Study.find(Path(str(settings["study"])))
    if not isinstance(study, Served):
        raise RecordError(f"{study.out} was not made by `coterie serve`")
    with (study.out / SERVER / LOG).open("a", encoding="utf-8") as log:
        terminal = Terminal(Console(file=log, width=120))

        def tell(message: str) -> None:
            terminal.tell(message)
            log.flush()
            print(message, flush=True)

        study.tell = tell
        study.transport = flower.Nodes(grid, study.serving.deadline, tell)
        try:
            study.go([terminal])
        except CoterieError as error:
            tell(f"stopped: {error}")
            raise


def __getattr__(name: str) -> Any:
    """The app itself, made where Flower asks for it."""
    if name == "app":
        return flower.server_app(main)
    raise AttributeError(name)
