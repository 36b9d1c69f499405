"""Flower is the one that `coterie.fleet.flower` was written for, where it is pinned and where it is installed."""

import asyncio
import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import SettingError
from coterie.fleet import flower
from coterie.fleet.flower import Link

ROOT = Path(__file__).parents[2]


def test_flower_is_pinned_to_the_version_this_was_written_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor = flower.VERSION.split(".")
    assert extras["flower"] == [f"flwr>={flower.VERSION},<{major}.{int(minor) + 1}"]
    assert re.search(rf"^flwr=={re.escape(flower.VERSION)}\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    flower.needed()


def test_another_flower_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.42.0")
    with pytest.raises(flower.FlowerError, match=r"needs flwr 1\.41, and 1\.42\.0 is installed"):
        flower.needed()


def test_flower_is_imported_in_one_file_only():
    using = [
        p for p in (ROOT / "src").rglob("*.py") if re.search(r"^\s*(from|import) flwr\b", p.read_text(), re.MULTILINE)
    ]
    assert [p.name for p in using] == ["flower.py"]


def test_no_server_is_open_to_everyone():
    with pytest.raises(SettingError, match="needs certificates"):
        Link(host="0.0.0.0")
    with pytest.raises(SettingError, match="over TLS"):
        Link(known_nodes=True)


@pytest.mark.parametrize(
    ("client", "path", "open_"),
    [
        ("10.0.0.5", "/v1/control/start-run", True),  # the server's own machine
        ("10.0.0.6", "/v1/control/start-run", False),
        ("10.0.0.6", "/v1/control/../fleet/x", False),
        ("10.0.0.6", "/v1/runtime/pull", False),
        ("10.0.0.6", "/docs", False),
        ("10.0.0.6", "/v1/fleet/pull-messages", True),
        (None, "/v1/control/start-run", False),
    ],
)
def test_from_elsewhere_only_nodes_come_in(client: str | None, path: str, open_: bool):
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "server": ("10.0.0.5", 9092), "client": client and (client, 40000)}
    asyncio.run(flower.Doors(app)(scope, None, send))
    assert bool(reached) == open_
    assert [m["status"] for m in sent if "status" in m] == ([] if open_ else [403])
    asyncio.run(flower.Doors(app)({**scope, "type": "websocket"}, None, send))
    assert len(reached) == (2 if client == "10.0.0.5" else int(open_))


def test_flower_nodes_need_no_door_that_is_closed():
    """Every path that Flower's node calls at a server is one that is open to it."""
    folder = Path(importlib.metadata.distribution("flwr").locate_file("flwr/supernode"))
    paths = {p for file in folder.rglob("*http_client*.py") for p in re.findall(r'"(/v1/[^"]+)"', file.read_text())}
    assert len(paths) > 5
    assert all(path.startswith(flower.NODES) for path in paths)
