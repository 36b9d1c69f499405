"""What goes wrong in real processes: nothing is lost, and whoever is unharmed ends with an undisturbed run's numbers.

Undisturbed is a simulator in which the sites are away in the rounds in which they did not answer, as the record says.
"""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import actors
import twice
from authority import authority, node_key
from coterie.fleet import flower
from coterie.fleet.participation import Schedule
from coterie.runs.served import Served, listening
from coterie.runs.study import Study
from deployment import COTERIE, PATIENCE, Deployment, free_port
from test_equal import THREE, compare, experiment, of_tables, simulated

pytestmark = pytest.mark.full

ROUNDS = 8
FOUR = (*THREE, "east")
DITTO = """
[algorithms.ditto]
plan = { steps = 3, batch = 8, lr = 0.1, momentum = 0.9, keep_optimiser = true, sampling = "epoch" }
"""
COBO = """
[algorithms.cobo]
local_steps = 3
batch = 8
schedule = "all"
"""


def lines(deployment: Deployment, name: str) -> list[dict[str, Any]]:
    """The rounds that are on record."""
    found = [*(deployment.out / name).glob("seed-*/metrics.jsonl")]
    read = [json.loads(line) for path in found for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in read if line["kind"] == "training"]


def attended(deployment: Deployment, name: str) -> list[list[str]]:
    """Who answered, round by round."""
    keys = deployment.clients
    return [[key for key, ok in zip(keys, line["ok"], strict=True) if ok] for line in lines(deployment, name)]


def checkpoints(deployment: Deployment) -> int:
    """After how many rounds the last one was made."""
    names = [p.stem.removeprefix("round-") for p in deployment.out.glob("*/seed-*/checkpoints/round-*.safetensors")]
    return max(map(int, names), default=0)


def chance(what: str) -> random.Random:
    """Random, and printed: COTERIE_TEST_SEED repeats it."""
    seed = int(os.environ.get("COTERIE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"{what}: COTERIE_TEST_SEED={seed}")
    return random.Random(seed)


def asked(deployment: Deployment, site: str) -> int:
    """How many asks a site has answered."""
    return sum(note["kind"] == "ask" for note in actors.notes(deployment.place(site)))


def agree(deployment: Deployment, name: str, unharmed: Sequence[str]) -> None:
    """Everyone as in the simulator with the same absences; whoever is unharmed has none."""
    there = attended(deployment, name)
    print("who answered, round by round:", *there, sep="\n")
    assert all(set(unharmed) <= set(clients) for clients in there)
    compare(deployment, name, simulated(deployment, name, Schedule(tuple(map(tuple, there)))), deployment.clients)


# ---- killed ----------------------------------------------------------------------------------------------------------


def test_nodes_and_servers_are_killed_messages_come_twice_and_strangers_stay_outside(tmp_path: Path):
    draw = chance("kills")
    with Deployment(tmp_path / "d", experiment(DITTO, THREE, ROUNDS), of_tables(tmp_path, *THREE)) as deployment:
        trusted, other = authority(tmp_path / "ca"), authority(tmp_path / "other")
        deployment.prepare(deployment.inside)
        safe = ["--port", deployment.port, "--certificates", trusted, "--known-nodes"]
        said = deployment.inside("serve", deployment.given, "--out", deployment.out, *safe, "--print")
        link, run = said.splitlines()[-2:]  # the very commands that it shows
        twice.install(deployment.out / "server" / "coterie-app")
        deployment.start("server", ["bash", "-c", f"env {link}"])
        keys = {site: node_key(tmp_path / f"{site}.key") for site in (*deployment.sites, "nobody")}
        register(deployment, [keys[site] for site in deployment.sites])
        for site in deployment.sites:
            deployment.links[site] = ["--ca", str(trusted / "ca.crt"), "--key", str(keys[site])]
            deployment.join(site)
        victim = draw.choice(sorted(deployment.sites))
        thief = strangers(deployment, victim, trusted / "ca.crt", other / "ca.crt", keys)
        deployment.start("server", ["bash", "-c", f"env {run}"])

        message = draw.randrange(1, 4)
        deployment.until(f"{victim}'s answer {message}", lambda: asked(deployment, victim) >= message)
        time.sleep(draw.uniform(0, 5))
        print(f"{victim} is killed after {asked(deployment, victim)} answers")
        deployment.kill(victim)
        node = deployment.join(victim)

        def alive() -> None:
            nonlocal node
            if node.poll() is not None:  # Flower takes the killed one for alive for a minute, and refuses another
                node = deployment.join(victim)

        done = draw.randrange(4, ROUNDS - 1)
        deployment.until(f"round {done}", lambda: alive() or checkpoints(deployment) >= done)
        time.sleep(draw.uniform(0, 5))
        print(f"the server is killed after {checkpoints(deployment)} rounds")
        deployment.kill("server")
        resumed = deployment.start("server", [*COTERIE, "resume", str(deployment.out)])
        deployment.until("the end", lambda: alive() or resumed.poll() is not None, 1800)
        assert resumed.returncode == 0, deployment.logs()
        assert len(attended(deployment, "ditto")) == ROUNDS
        agree(deployment, "ditto", [c for site, clients in deployment.sites.items() if site != victim for c in clients])
        repeated(deployment)
        assert not (thief / "log.jsonl").exists(), "a stranger was asked something"


def register(deployment: Deployment, keys: Sequence[Path]) -> None:
    """Let the nodes with these keys in, as soon as the server listens."""
    study = Study.find(deployment.out)
    assert isinstance(study, Served)
    deployment.until("the server listens", lambda: listening(study.serving.link))
    for key in keys:
        command = flower.register(study.home, key.with_suffix(".pub"))
        subprocess.run(command.words, env=command.environment, check=True, timeout=PATIENCE, capture_output=True)


def strangers(deployment: Deployment, victim: str, ca: Path, other: Path, keys: Mapping[str, Path]) -> Path:
    """Nodes with all that is the victim's but its key, or that trust another authority, or none."""
    thief = deployment.root / "thief"
    shutil.copytree(deployment.place(victim), thief)
    for name, options in {
        "unregistered": ["--ca", str(ca), "--key", str(keys["nobody"])],
        "no-key": ["--ca", str(ca)],
        "other-authority": ["--ca", str(other), "--key", str(keys[victim])],
        "no-certificate": [],
    }.items():
        words = ["site", "join", str(thief), f"127.0.0.1:{deployment.port}", "--port", str(free_port())]
        deployment.start(name, [*COTERIE, *words, *options])
    return thief


def repeated(deployment: Deployment) -> None:
    """The same message was answered twice, and alike."""
    for site in deployment.sites:
        answers: dict[tuple[int, int], list[str]] = {}
        for note in actors.notes(deployment.place(site)):
            if note["kind"] == "ask":
                answers.setdefault((note["opening"], note["phase"]), []).append(note["reply"])
        assert any(len(replies) > 1 for replies in answers.values())
        assert all(len(set(replies)) == 1 for replies in answers.values())


# ---- hostile ---------------------------------------------------------------------------------------------------------


def test_a_hostile_site_harms_nobody_and_one_that_comes_and_goes_has_its_row_when_it_returns(tmp_path: Path):
    draw = chance("deeds")
    with Deployment(tmp_path / "d", experiment(COBO, FOUR, 10), of_tables(tmp_path, *FOUR)) as deployment:
        deployment.prepare(deployment.inside)
        quick, slow = draw.sample(actors.BAD[:-2], len(actors.BAD) - 2), draw.sample(actors.BAD[-2:], 2)
        plan = dict(enumerate([*quick, *slow], 1))
        (deployment.place("at-west") / actors.PLAN).write_text(json.dumps(plan))
        for site in ("at-north", "at-south"):
            deployment.join(site)
        deployment.join("at-west", "hostile")
        words = ["serve", str(deployment.given), "--out", str(deployment.out), "--port", str(deployment.port)]
        server = deployment.start("serve", [*COTERIE, *words, "--least", "3", "--deadline", "90"])
        begin = draw.randrange(1, 3)
        deployment.until(f"round {begin}", lambda: checkpoints(deployment) >= begin)
        node = deployment.join("at-east")
        deployment.until("east answers", lambda: asked(deployment, "at-east") >= 1)
        node.terminate()  # it leaves as one should
        deployment.until("east is gone", lambda: not deployment.mine("at-east"))
        before = asked(deployment, "at-east")
        deployment.join("at-east")
        deployment.until("the end", lambda: server.poll() is not None, 1800)
        assert server.returncode == 0, deployment.logs()
        agree(deployment, "cobo", ["north", "south"])
        there = attended(deployment, "cobo")
        deeds = (deployment.place("at-west") / "deeds.txt").read_text().splitlines()
        assert len(deeds) >= len(quick) + 1, deeds
        assert not any("west" in there[int(deed.split()[0])] for deed in deeds)
        assert asked(deployment, "at-east") > before
        assert "east" not in there[0]
        assert "east" in there[-1]
