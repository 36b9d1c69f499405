"""What a site's node runs in tests in place of its own program: it answers as the site does, and notes or spoils that.

Each of these takes what `coterie.sites.node.answer` takes and runs in the process that Flower starts for a message.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from coterie.fleet import flower, wire
from coterie.sites import node
from coterie.sites.folder import PROGRAMS

LARGE = 1 << 30
DOWN = ("models", "pull/rows", "drift/rows", "distil/targets")
UP = ("rows", "sums", "outputs", "loss")
NOTES = "notes.jsonl"
HUGE = 4 << 20  # numbers of each huge array
Answer = Callable[[bytes, str, Mapping[str, Any]], bytes]


def play(actor: str) -> None:
    """From now on, and in what is forked from here, a node that starts a process starts this."""
    node.app = flower.client_app(globals()[actor])


def install(place: Path, actor: str) -> None:
    """The same where there is no worker to fork from, yet."""
    path = place / PROGRAMS / "flwr-clientapp"
    alone = f"import sys\n    sys.path.insert(0, {str(Path(__file__).parent)!r})\n    import actors\n"
    text = path.read_text().replace("    main()\n", f"    {alone}    actors.play({actor!r})\n    main()\n")
    path.write_text(text)


def noting(block: bytes, asker: str, settings: Mapping[str, Any]) -> bytes:
    """The site's own answer; what was asked and how many bytes came and went is in its notes."""
    reply = node.answer(block, asker, settings)
    note(settings, block, reply)
    return reply


BAD = ("NaN", "a wrong shape", "a huge array", "an old answer", "a refusal", "a crash", "nothing")
PLAN, OLD = "plan.json", "old"


def hostile(block: bytes, asker: str, settings: Mapping[str, Any]) -> bytes:
    """What the site's plan says for the round: one of `BAD`, or its own answer. The last good one is kept."""
    place = Path(settings["site"])
    head, _ = wire.unseal(block, LARGE)
    how = json.loads((place / PLAN).read_text()).get(str(head.get("round"))) if "asks" in head else None
    if "watch" in head or how is None:
        reply = noting(block, asker, settings)
        if "opening" in head:
            (place / OLD).write_bytes(reply)
        return reply
    with (place / "deeds.txt").open("a") as file:
        file.write(f"{head['round']} {how}\n")
    if how == "nothing":
        time.sleep(3600)
    if how == "a crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "an old answer":
        return (place / OLD).read_bytes()
    if how == "a refusal":
        return wire.seal({"refused": "not today"})
    said, arrays = wire.unseal(node.answer(block, asker, settings), LARGE)
    change = {
        "NaN": lambda v: torch.full_like(v, torch.nan),
        "a wrong shape": lambda v: v[..., :1],
        "a huge array": lambda v: torch.zeros(HUGE, dtype=v.dtype),
    }.get(how, lambda v: v)
    return wire.seal(said, {name: change(v) if v.is_floating_point() else v for name, v in arrays.items()})


def note(settings: Mapping[str, Any], block: bytes, reply: bytes) -> None:
    head, arrays = wire.unseal(block, LARGE)
    said, told = wire.unseal(reply, LARGE)
    kinds = {ask["name"]: ask["kind"] for ask in head.get("asks", ())}
    down = sum(v.nbytes for name, v in arrays.items() if name.partition("/")[2] in DOWN)
    up = 0
    for name, value in told.items():
        ask, _, what = name.partition("/")
        if what in UP and (what != "loss" or kinds[ask] == "loss"):
            up += value.nbytes
    line = {
        "run": head["run"],
        "round": head.get("round"),
        "opening": head.get("opening"),
        "phase": head.get("phase"),
        "kind": next((kind for kind in ("hello", "watch", "collect") if kind in head), "ask"),
        "refused": said.get("refused"),
        "reply": hashlib.sha256(reply).hexdigest(),
        "down": down,
        "up": up,
        "came": len(block),
        "went": len(reply),
    }
    with (Path(settings["site"]) / NOTES).open("a") as file:
        file.write(json.dumps(line) + "\n")


def notes(place: Path) -> list[dict[str, Any]]:
    """What a site has noted so far."""
    path = place / NOTES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


__all__ = ["hostile", "install", "notes", "noting", "play"]
