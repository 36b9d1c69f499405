"""What goes wrong in real processes: nothing is lost, and whoever is unharmed ends with an undisturbed run's numbers.

Undisturbed is a simulator in which nobody hears of the sites in the rounds in which they did not answer, as the record
says, and in which those are away who were.
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
import torch

import actors
import servers
from authority import authority, node_key
from coterie.fleet import flower
from coterie.fleet.base import Fleet
from coterie.fleet.wrapper import Wrapper
from coterie.runs.served import Served, listening
from coterie.runs.study import Study
from deployment import PATIENCE, Deployment, free_port, played
from test_equal import THREE, compare, experiment, of_tables, simulated

pytestmark = pytest.mark.full

ROUNDS, EARLY = 8, 4
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


class Unheard(Wrapper):
    """A fleet some of whose clients are there, as far as anyone knows, and are not heard: `here`, and `heard`."""

    def __init__(self, inner: Fleet, here: Mapping[int, Sequence[str]], heard: Sequence[Sequence[str]]) -> None:
        super().__init__(inner)
        self.here, self.heard = here, heard

    def begin(self, t: int) -> None:
        self.inner.begin(t)
        self.inner.present = torch.tensor([key in self.heard[t] for key in self.keys])

    @property
    def present(self) -> torch.Tensor:
        return torch.tensor([key in self.here[self.t] for key in self.keys])


def agree(deployment: Deployment, name: str, unharmed: Sequence[str]) -> None:
    """Everyone as in the simulator where the same are not heard; whoever is unharmed always is."""
    heard = attended(deployment, name)
    lines = map(json.loads, (deployment.root / servers.PRESENT).read_text().splitlines())
    here: dict[int, list[str]] = dict(lines)  # of a round that was begun twice, the second time
    print("who was there, and who was heard, round by round:")
    print(*zip(here.values(), heard, strict=True), sep="\n")
    assert all(set(unharmed) <= set(clients) <= set(here[t]) for t, clients in enumerate(heard))
    compare(deployment, name, simulated(deployment, name, lambda fleet: Unheard(fleet, here, heard)), unharmed)


# ---- killed ----------------------------------------------------------------------------------------------------------


def test_nodes_and_servers_are_killed_messages_come_twice_and_strangers_stay_outside(tmp_path: Path):
    draw = chance("kills")
    with Deployment(tmp_path / "d", experiment(DITTO, THREE, ROUNDS), of_tables(tmp_path, *THREE)) as deployment:
        trusted, other = authority(tmp_path / "ca"), authority(tmp_path / "other")
        deployment.prepare(deployment.inside)
        safe = ["--port", deployment.port, "--certificates", trusted, "--known-nodes"]
        said = deployment.inside("serve", deployment.given, "--out", deployment.out, *safe, "--print")
        link, run = said.splitlines()[-2:]  # the very commands that it shows
        servers.install(deployment.out / "server" / "coterie-app", "twice")
        deployment.allow(EARLY)
        deployment.start("server", ["bash", "-c", f"env {link}"])
        keys = {site: node_key(tmp_path / f"{site}.key") for site in (*deployment.sites, "nobody")}
        register(deployment, [keys[site] for site in deployment.sites])
        for site in deployment.sites:
            deployment.links[site] = ["--ca", str(trusted / "ca.crt"), "--key", str(keys[site])]
            deployment.join(site)
        victim = draw.choice(sorted(deployment.sites))
        thief = strangers(deployment, victim, trusted / "ca.crt", other / "ca.crt", keys)
        deployment.start("server", ["bash", "-c", f"env {run}"])

        message = draw.randrange(1, EARLY)
        deployment.until(f"{victim}'s answer {message}", lambda: asked(deployment, victim) >= message)
        time.sleep(draw.uniform(0, 5))
        print(f"{victim} is killed after {asked(deployment, victim)} answers")
        deployment.kill(victim)
        before = deployment.connected(victim)
        deployment.join(victim)  # again and again: for a minute Flower takes the killed one for alive
        deployment.until(f"{victim} is back", lambda: deployment.connected(victim) > before)
        deployment.allow(ROUNDS - 1)
        done = draw.randrange(EARLY, ROUNDS - 1)
        deployment.until(f"round {done}", lambda: checkpoints(deployment) >= done)
        time.sleep(draw.uniform(0, 5))
        print(f"the server is killed after {checkpoints(deployment)} rounds")
        deployment.kill("server")
        deployment.allow(ROUNDS)
        resumed = deployment.start("server", [*played("servers", "paced"), "resume", str(deployment.out)])
        deployment.until("the end", lambda: resumed.poll() is not None)
        assert resumed.returncode == 0, deployment.logs()
        there = attended(deployment, "ditto")
        assert len(there) == ROUNDS
        assert set(there[-1]) == set(deployment.clients)
        agree(deployment, "ditto", [c for site, clients in deployment.sites.items() if site != victim for c in clients])
        repeated(deployment)
        for name, (_, why) in STRANGERS.items():
            deployment.until(f"{name} is refused", lambda name=name, why=why: deployment.said(f"{name}.log", why))
            assert not deployment.connected(name)
        assert not (thief / "log.jsonl").exists(), "a stranger was asked something"


def register(deployment: Deployment, keys: Sequence[Path]) -> None:
    """Let the nodes with these keys in, as soon as the server listens."""
    study = Study.find(deployment.out)
    assert isinstance(study, Served)
    deployment.until("the server listens", lambda: listening(study.serving.link))
    for key in keys:
        command = flower.register(study.home, key.with_suffix(".pub"))
        subprocess.run(command.words, env=command.environment, check=True, timeout=PATIENCE, capture_output=True)


STRANGERS = {  # name → what it has of the victim's connection, and what it hears
    "unregistered": (("ca", "own key"), "[code: 2004]"),
    "no-key": (("ca",), "[code: 2001]"),
    "other-authority": (("other ca", "key"), "CERTIFICATE_VERIFY_FAILED"),
    "no-certificate": ((), "Connection attempt failed"),
}


def strangers(deployment: Deployment, victim: str, ca: Path, other: Path, keys: Mapping[str, Path]) -> Path:
    """Nodes with all that is the victim's but its key, or that trust another authority, or none."""
    thief = deployment.root / "thief"
    shutil.copytree(deployment.place(victim), thief)
    options = {"ca": ["--ca", ca], "other ca": ["--ca", other], "key": ["--key", keys[victim]],
               "own key": ["--key", keys["nobody"]]}  # fmt: skip
    for name, (has, _) in STRANGERS.items():
        words = ["site", "join", thief, f"127.0.0.1:{deployment.port}", "--port", free_port()]
        words += [word for each in has for word in options[each]]
        deployment.start(name, ["bash", "-c", f"exec env {deployment.inside(*words, '--print')}"])
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
    quick = draw.sample(actors.BAD[:-2], len(actors.BAD) - 2)
    plan = dict(enumerate([*quick, *actors.BAD[-2:]], 1))  # after "nothing" it is asked nothing more
    rounds = len(plan) + 3
    with Deployment(tmp_path / "d", experiment(COBO, FOUR, rounds), of_tables(tmp_path, *FOUR)) as deployment:
        deployment.prepare(deployment.inside)
        (deployment.place("at-west") / actors.PLAN).write_text(json.dumps(plan))
        for site in ("at-north", "at-south"):
            deployment.join(site)
        deployment.join("at-west", "hostile")
        begin = allowed = draw.randrange(1, 3)
        deployment.allow(allowed)
        words = ["serve", str(deployment.given), "--out", str(deployment.out), "--port", str(deployment.port)]
        words += ["--least", "3", "--deadline", "120"]
        server = deployment.start("serve", [*played("servers", "paced"), *words])
        deployment.until(f"round {begin}", lambda: checkpoints(deployment) >= begin)
        deployment.join("at-east")
        deployment.until("east is known", lambda: welcomed(deployment, "east") == 1)
        deployment.allow(begin + 1)
        deployment.until("east answers", lambda: asked(deployment, "at-east") >= 1)
        time.sleep(draw.uniform(0, 5))
        deployment.leave("at-east")
        deployment.allow(begin + 3)  # without it
        deployment.until(f"round {begin + 3}", lambda: checkpoints(deployment) >= begin + 3)
        deployment.join("at-east")
        deployment.until("east is known again", lambda: welcomed(deployment, "east") == 2)
        deployment.allow(rounds)
        deployment.until("the end", lambda: server.poll() is not None)
        assert server.returncode == 0, deployment.logs()
        agree(deployment, "cobo", ["north", "south"])
        there = attended(deployment, "cobo")
        deeds = (deployment.place("at-west") / "deeds.txt").read_text().splitlines()
        assert deeds == [f"{t} {how}" for t, how in plan.items()]
        assert ["west" in clients for clients in there] == [True, *[False] * (rounds - 1)]
        assert ["east" in clients for clients in there[:begin]] == [False] * begin
        assert ["east" in clients for clients in there[begin + 1 :]] == [False] * 2 + [True] * (rounds - begin - 3)


def welcomed(deployment: Deployment, client: str) -> int:
    """How often a client was taken in."""
    return deployment.said("server/server/server.log", f"{client}: here")
