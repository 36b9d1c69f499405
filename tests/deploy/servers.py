"""What Flower starts as the server in tests: rounds begin when the test lets them, and messages may come twice."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.fleet import flower
from coterie.fleet.remote import RemoteFleet
from coterie.runs import served

MARK = "COTERIE_TEST_DEPLOYMENT"
GATE, PRESENT = "rounds.txt", "present.jsonl"
COMPONENTS = """\
import sys

sys.path.insert(0, {here!r})

from coterie.sites.node import app as client
from servers import {server} as server

__all__ = ["client", "server"]
"""


class Paced(RemoteFleet):
    """Begins a round when so many may begin; until then it takes in whoever comes. Notes who was there."""

    def begin(self, t: int) -> None:
        root = Path(os.environ[MARK])
        while int((root / GATE).read_text()) <= t:
            self.meet()
            time.sleep(0.2)
        super().begin(t)
        here = [key for key, present in zip(self.keys, self.present.tolist(), strict=True) if present]
        with (root / PRESENT).open("a") as file:
            file.write(json.dumps([t, here]) + "\n")


class Twice:
    """Flower's grid; what is pushed goes out a second time, as a message of its own."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """The names of the first ones only."""
        from flwr.app import Message

        pushed = []
        for message in messages:
            to = message.metadata
            again = Message(message.content, to.dst_node_id, to.message_type, ttl=to.ttl)
            pushed += self.grid.push_messages([message])
            self.grid.push_messages([again])
        return pushed


def main(grid: Any, settings: Mapping[str, Any]) -> None:
    """A study whose rounds wait."""
    served.RemoteFleet = Paced  # type: ignore[misc]
    served.main(grid, settings)


def components(server: str) -> str:
    """The text of an app with one of these servers."""
    return COMPONENTS.format(here=str(Path(__file__).parent), server=server)


def install(app: Path, server: str) -> None:
    """Have Flower start this, in an app that was written."""
    (app / "coterie_app.py").write_text(components(server))


def play(server: str) -> None:
    """The same for whatever app is written from now on."""
    flower.COMPONENTS = components(server)


paced = flower.server_app(main)
twice = flower.server_app(lambda grid, settings: main(Twice(grid), settings))
