"""Seconds a round with real sites on this machine, beside Flower's own floor on the same server, against the payload.

A round is FedAvg's: one message to each site with a model, one step there, and as many numbers back. The floor is an
app of Flower's own that sends the same bytes back, on Flower's own nodes, pushed and polled for in the same way. Sites,
server and nodes are processes of one machine, and share its cores: with many sites or much payload they wait for one
another, as hosts of their own would not.

Run: python benchmarks/deploy.py --sites 2 --megabytes 0.01,1,25 --json results/deploy.json   (adds to what is there)
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.fleet import flower
from coterie.fleet.flower import Command, Link

DEADLINE = 300.0
COTERIE = (sys.executable, "-c", "from coterie.cli import main; main()")
ECHO = """\
from flwr.app import Message
from flwr.clientapp import ClientApp

client = ClientApp()


@client.query("echo")
def echo(message, context):
    return Message(message.content, reply_to=message)
"""
EXPERIMENT = """\
name = "deploy"
[population]
kind = "sites"
clients = [{clients}]
data = {{ shape = [10] }}
model = {{ name = "mlp", sizes = [10, {width}, {width}, 1] }}
task = "regression"
[run]
rounds = 100
checkpoint_every = 1
[plan]
steps = 1
batch = 8
lr = 0.001
[algorithms.fedavg]
"""


# ---- inside the Flower run -------------------------------------------------------------------------------------------


def main_of_server(grid: Any, settings: Mapping[str, Any]) -> None:
    """Time the rounds of one job, and write what they took."""
    job = json.loads(Path(str(settings["study"])).read_text())
    rounds = _echoes(grid, job) if job["experiment"] is None else _rounds(grid, job)
    Path(job["out"]).write_text(json.dumps([next(rounds) for _ in range(job["rounds"])]))


def _echoes(grid: Any, job: Mapping[str, Any]) -> Iterator[float]:
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    block = os.urandom(job["bytes"])
    while len(nodes := list(grid.get_node_ids())) < job["sites"]:
        time.sleep(0.2)
    while True:
        start = time.perf_counter()
        waiting = set()
        for node in nodes:
            content = RecordDict({"x": ArrayRecord({"x": Array("uint8", (len(block),), "bytes", block)})})
            waiting |= set(grid.push_messages([Message(content, node, "query.echo", ttl=DEADLINE)]))
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                assert not reply.has_error(), reply.error
                assert len(reply.content.array_records["x"]["x"].data) == len(block)
                waiting.discard(reply.metadata.reply_to_message_id)
            time.sleep(flower.PAUSE if waiting else 0)
        yield time.perf_counter() - start


def _rounds(grid: Any, job: Mapping[str, Any]) -> Iterator[float]:
    from coterie.experiments import reader
    from coterie.fleet.remote import RemoteFleet, declared

    experiment = reader.read(job["experiment"])
    fleet = RemoteFleet(
        declared(experiment.population(0)),
        flower.Nodes(grid, DEADLINE, print),
        experiment=reader.fingerprint(experiment),
        run="bench/fedavg",
    )
    algorithm = experiment.algorithm("fedavg")
    state = algorithm.init(fleet)
    fleet.await_clients(job["sites"], DEADLINE)
    t = 0
    while True:
        start = time.perf_counter()
        fleet.begin(t)
        state, info = algorithm.round(fleet, state)
        assert bool(info.ok.all()), "a site did not answer"
        assert fleet.ledger.totals()["sent"]["up"]["bytes"] == (t + 1) * job["sites"] * job["bytes"]
        t += 1
        yield time.perf_counter() - start


# ---- outside ---------------------------------------------------------------------------------------------------------


class Bench:
    """A server, and nodes that come and go."""

    def __init__(self, folder: Path, port: int, rounds: int) -> None:
        self.folder, self.link, self.rounds, self.home = folder, Link(port=port), rounds, folder / "flower"
        self.app = flower.write_app(folder / "app", "0")
        toml = self.app / "pyproject.toml"
        toml.write_text(toml.read_text().replace("coterie_app:client", "echo:client"))
        (self.app / "echo.py").write_text(ECHO)
        (self.app / "coterie_app.py").write_text(
            "from coterie.fleet import flower\nfrom deploy import main_of_server\n\n"
            "server = flower.server_app(main_of_server)\n"
        )
        flower.write_connection(self.link, self.home)

    @contextmanager
    def running(self, *commands: Command) -> Iterator[None]:
        """Processes that end with the block."""
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with (self.folder / "log").open("ab") as log:
            started = [
                subprocess.Popen(c.words, env={**c.environment, **more}, stdout=log, stderr=log) for c in commands
            ]
            try:
                yield
            finally:
                for process in started:
                    process.terminate()
                for process in started:
                    process.wait()

    def timed(self, sites: int, size: int, nodes: Sequence[Command], experiment: Path | None) -> list[float]:
        """Seconds of each round of one job."""
        out, job = self.folder / "out.json", self.folder / "job.json"
        out.unlink(missing_ok=True)
        told = None if experiment is None else str(experiment)
        job.write_text(json.dumps(
            {"experiment": told, "sites": sites, "bytes": size, "rounds": self.rounds, "out": str(out)}
        ))  # fmt: skip
        run = flower.submit(self.link, self.home, self.app, {"study": str(job)})
        with self.running(*nodes):
            done = subprocess.run(run.words, env=run.environment, capture_output=True, text=True, check=False)
        if not out.exists():
            raise SystemExit(f"the run ended without a result:\n{done.stdout}\n{done.stderr}\n{self._tail()}")
        found: list[float] = json.loads(out.read_text())
        return found

    def _tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def measure(self, sites: int, megabytes: float) -> dict[str, Any]:
        """Both, one after the other."""
        width = int(math.sqrt(megabytes * 1e6 / 4 + 42) - 6.5)
        size = 4 * (width * width + 13 * width + 1)
        ports = range(self.link.port + 10, self.link.port + 10 + sites)
        stock = [flower.supernode(self.link.address, self.folder, self.folder / f"n{i}", port=p)
                 for i, p in enumerate(ports)]  # fmt: skip
        floor = self.timed(sites, size, stock, None)
        place = self.folder / f"{width}"
        experiment = self._sites(place, sites, width)
        joins = [
            Command((*COTERIE, "site", "join", str(place / str(i)), self.link.address, "--port", str(p)))
            for i, p in enumerate(ports)
        ]
        ours = self.timed(sites, size, joins, experiment)
        shutil.rmtree(place)
        return {"sites": sites, "bytes": size, "rounds": self.rounds,
                "flower": _summary(floor), "coterie": _summary(ours)}  # fmt: skip

    def _sites(self, place: Path, sites: int, width: int) -> Path:
        import torch
        from safetensors.torch import save_file

        from coterie.experiments import reader
        from coterie.sites.folder import SiteFolder

        place.mkdir()
        file = place / "experiment.toml"
        keys = [f"site-{i}" for i in range(sites)]
        file.write_text(EXPERIMENT.format(clients=", ".join(f'"{k}"' for k in keys), width=width))
        experiment = reader.read(str(file))
        save_file({"inputs": torch.randn(16, 10), "targets": torch.randn(16, 1)}, place / "data.safetensors")
        for i, key in enumerate(keys):
            SiteFolder.prepare(place / str(i), experiment, key, "tensors", str(place / "data.safetensors"))
            here = SiteFolder(place / str(i))
            here.approve(here.hash)
        return file


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """The first round is told apart: caches are cold."""
    later = seconds[1:]
    return {
        "median": round(statistics.median(later), 2),
        "least": round(min(later), 2),
        "most": round(max(later), 2),
        "first": round(seconds[0], 2),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As docs/deploy.md has it."""
    lines = ["| sites | payload each way | Flower's floor, s | Coterie, s |", "|---:|---:|:--|:--|"]
    for row in rows:
        told = [f"{row[who]['median']} ({row[who]['least']} to {row[who]['most']})" for who in ("flower", "coterie")]
        lines.append(f"| {row['sites']} | {row['bytes'] / 1e6:.3g} MB | {told[0]} | {told[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", default="2")
    parser.add_argument("--megabytes", default="0.01,1,25")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=19400)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    flower.needed()
    rows: list[dict[str, Any]] = (
        json.loads(given.json.read_text())["rows"] if given.json and given.json.exists() else []
    )
    for sites in map(int, given.sites.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), given.port, given.rounds)
            with bench.running(flower.superlink(bench.link, bench.home)):
                from coterie.runs.served import listening

                while not listening(bench.link):
                    time.sleep(0.2)
                for megabytes in map(float, given.megabytes.split(",")):
                    row = bench.measure(sites, megabytes)
                    print(json.dumps(row), flush=True)
                    rows = [r for r in rows if (r["sites"], r["bytes"]) != (row["sites"], row["bytes"])] + [row]
                    if given.json:
                        about = {"what": "seconds a round", "flwr": flower.VERSION, "cores": os.cpu_count(),
                                 "python": platform.python_version()}  # fmt: skip
                        rows.sort(key=lambda r: (r["sites"], r["bytes"]))
                        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    sys.exit(main())
