"""The commands of docs/deploy.md, run as they stand there, on one machine: three sites learn together over TLS.

What is changed: the server's name and port, a port for each site, a copy for `scp`, and `north` into each site's name.
"""

import http.client
import json
import os
import random
import re
import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment import PATIENCE, free_port

DOC = Path(__file__).parents[2] / "docs" / "deploy.md"
SITES = ("north", "east", "south")
SCP = """\
#!/bin/sh
for last; do :; done
for file; do [ "$file" = "$last" ] || cp "$file" "{root}/${{last%%:*}}/${{last#*:}}"; done
"""


def blocks() -> list[tuple[str, str]]:
    """(what is said behind the fence, its lines), in their order."""
    return re.findall(r"^```(\w[^\n]*)\n(.*?)^```$", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


class Hosts:
    """A folder for each host; what runs on it is ended with the test."""

    def __init__(self, root: Path) -> None:
        self.root, self.port, self.ports = root, free_port(), {name: free_port() for name in SITES}
        self.staying: list[subprocess.Popen[bytes]] = []
        for name in ("server", *SITES, "bin"):
            (root / name).mkdir()
        (root / "bin" / "scp").write_text(SCP.format(root=root))
        (root / "bin" / "scp").chmod(0o700)
        code = "import sys; from coterie.cli import main; main()"
        (root / "bin" / "coterie").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        (root / "bin" / "coterie").chmod(0o700)
        self.environment = {**os.environ, "PATH": f"{root / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def here(self, text: str, host: str, mark: str = "") -> str:
        text = text.replace("--host coterie.example", f"--host coterie.example --port {self.port}")
        text = text.replace("coterie.example", "localhost").replace(":9092", f":{self.port}").replace("HASH", mark)
        if host != "server":
            text = text.replace("north", host).replace("join site", f"join --port {self.ports[host]} site")
        return text

    def run(self, host: str, text: str, mark: str = "") -> str:
        done = subprocess.run(
            ["bash", "-ec", self.here(text, host, mark)], cwd=self.root / host, env=self.environment,
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, f"{host}: {text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def stay(self, host: str, text: str) -> subprocess.Popen[bytes]:
        with (self.root / host / "output").open("ab") as log:
            self.staying.append(subprocess.Popen(
                ["bash", "-c", self.here(text, host)], cwd=self.root / host, env=self.environment, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            ))  # fmt: skip
        return self.staying[-1]

    def end(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in self.staying:  # each leads a session, and nothing of Flower leaves it
                try:
                    os.killpg(process.pid, sent)
                except ProcessLookupError:
                    continue
            time.sleep(2)
        for process in self.staying:
            process.wait()

    def logs(self) -> str:
        files = [*self.root.glob("*/output"), *self.root.glob("server/study/server/*.log")]
        return "\n".join(f"== {f}\n{f.read_text(errors='replace')[-2000:]}" for f in files)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    for i, name in enumerate(SITES):
        draw = random.Random(i)
        people = [(draw.uniform(20, 90), draw.uniform(17, 40)) for _ in range(120)]
        lines = [f"{a:.0f},{b:.1f},{'yes' if a / 90 + b / 40 > 1.4 else 'no'}" for a, b in people]
        (tmp_path / name / "patients.csv").write_text("\n".join(["age,bmi,ill", *lines, "50,?,no"]) + "\n")
    try:
        yield made
    finally:
        made.end()


def started(words: list[str]) -> bool:
    """Whether a process with just these words, after its program, is alive."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = path.read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if said[-len(words) + 1 :] == words[1:] and any(word.endswith(words[0]) for word in said):
            return True
    return False


def words(line: str) -> list[str]:
    """A printed command without the settings in front of it."""
    parts = shlex.split(line)
    return [p for i, p in enumerate(parts) if not all("=" in q for q in parts[: i + 1])]


@pytest.mark.full
def test_the_walk_through_works_as_it_is_written(hosts: Hosts) -> None:
    mark, printed = "", ""
    for info, text in blocks():
        how, _, host = info.partition(" ")
        if how == "toml":
            (hosts.root / "server" / "wards.toml").write_text(text)
        elif host == "server":
            out = hosts.run("server", text)
            if "coterie serve " in text:
                (mark,) = re.findall(r"hash (\w{64})", out)
                printed = out
        elif host == "site":
            for site in SITES:
                hosts.run(site, text, mark)
        elif host == "server, stays":
            server = hosts.stay("server", text)
        elif host == "site, stays":
            nodes = [hosts.stay(site, text) for site in SITES]
            watch(hosts, server, printed)
            assert all(node.poll() is None for node in nodes)
    results = json.loads((hosts.root / "server" / "study" / "cobo" / "seed-0" / "result.json").read_text())
    assert results["rounds_run"] == 3
    for site in SITES:
        lines = [json.loads(line) for line in (hosts.root / site / "site" / "log.jsonl").read_text().splitlines()]
        assert {line["round"] for line in lines if line.get("ask") == "fit"} == {0, 1, 2}
        assert not any("refused" in line for line in lines)
    assert [*(hosts.root / "server" / "study").rglob("north-best/model.safetensors")]


def watch(hosts: Hosts, server: "subprocess.Popen[bytes]", printed: str) -> None:
    """Until the study has ended: what was printed is what runs, and others find closed doors."""
    superlink = words(next(line for line in printed.splitlines() if "flower-superlink" in line))
    run = words(next(line for line in printed.splitlines() if "flwr run" in line))
    seen = {"server": False, "run": False, "nodes": False, "doors": False}
    end = time.monotonic() + PATIENCE
    while server.poll() is None:
        assert time.monotonic() < end, hosts.logs()
        for what, line in (("server", superlink), ("run", run)):
            seen[what] = seen[what] or started(line)
        said = (hosts.root / "north" / "output").read_text(errors="replace").splitlines()
        nodes = [words(line) for line in said if "flower-supernode --superlink" in line]
        seen["nodes"] = seen["nodes"] or any(map(started, nodes))
        if seen["run"] and not seen["doors"]:
            codes = {place: knock(hosts, place) for place in ("/v1/control/start-run", "/docs", "/v1/fleet/get-run")}
            assert codes.pop("/v1/fleet/get-run") != 403
            assert set(codes.values()) == {403}
            seen["doors"] = True
        time.sleep(1)
    assert server.returncode == 0, hosts.logs()
    assert all(seen.values()), seen


def knock(hosts: Hosts, path: str) -> int:
    """What the server says to another address."""
    trusted = ssl.create_default_context(cafile=str(hosts.root / "server" / "tls" / "ca.crt"))
    line = http.client.HTTPSConnection(
        "localhost", hosts.port, context=trusted, source_address=("127.0.0.2", 0), timeout=60
    )
    try:
        line.request("POST", path, body=b"")
        return line.getresponse().status
    finally:
        line.close()


def test_the_walk_through_has_its_parts() -> None:
    kinds = [info for info, _ in blocks()]
    assert kinds[:2] == ["sh mirror", "sh hosts"]  # need a mirror and a bare host: tried by hand
    for needed in ("sh server", "sh site", "toml", "sh server, stays", "sh site, stays"):
        assert needed in kinds
