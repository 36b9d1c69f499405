"""Flower is the one that `coterie.fleet.flower` was written for, where it is pinned and where it is installed."""

import asyncio
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.asks import ABSENT, LATE, MALFORMED, OK, REFUSED
from coterie.errors import SettingError
from coterie.fleet import flower
from coterie.fleet.flower import Link, Nodes

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


# ---- what goes through a grid ----------------------------------------------------------------------------------------


class Grid:
    """Flower's, with replies that the test puts there."""

    def __init__(self, *nodes: int) -> None:
        self.nodes, self.sent, self.replies = list(nodes), {}, []

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: Iterable[Any]) -> list[str | None]:
        names: list[str | None] = []
        for message in messages:
            node = message.metadata.dst_node_id
            names.append(f"to-{node}-{len(self.sent)}" if node in self.nodes else None)
            self.sent[names[-1]] = node
            assert message.metadata.ttl > 3600
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        known = set(names)
        found = [r for r in self.replies if r.metadata.reply_to_message_id in known]
        self.replies = [r for r in self.replies if r not in found]
        return found

    def reply(self, node: int, content: Any = None, error: int | None = None, to: str | None = None) -> None:
        """To the last message that this node was sent, or another. As in Flower, an error does not say whose it is."""
        name = to or [name for name, to in self.sent.items() if to == node][-1]
        told = SimpleNamespace(code=error, reason="so it is")
        records = SimpleNamespace(array_records={}) if content is None else content
        self.replies.append(
            SimpleNamespace(
                metadata=SimpleNamespace(reply_to_message_id=name, src_node_id=1 if error is not None else node),
                has_error=lambda: error is not None, error=told, content=records,
            )
        )  # fmt: skip


class Eager(Grid):
    """Where nodes answer at once, each as it is told to."""

    def __init__(self, **how: Any) -> None:
        super().__init__(*[int(node[1:]) for node in how])
        self.how = {int(node[1:]): answer for node, answer in how.items()}
        self.pushed = lambda: None  # happens after each push

    def push_messages(self, messages: Iterable[Any]) -> list[str | None]:
        messages = list(messages)
        names = super().push_messages(messages)
        for message in messages:
            node = message.metadata.dst_node_id
            if isinstance(self.how.get(node), bytes):
                self.reply(node, flower._packed(self.how[node]))
            elif node in self.how and self.how[node] != "silence":
                self.reply(node, error=self.how[node]) if isinstance(self.how[node], int) else self.reply(node)
        self.pushed()
        return names


class Clock:
    """Time that passes where it is slept through, and at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """As in a Flower run, and in no time."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    made = Clock()
    monkeypatch.setattr(flower, "time", made)
    return made


@pytest.mark.usefixtures("clock")
def test_replies_find_their_nodes_by_the_message_they_answer():
    grid = Eager(n11=b"one", n12=5, n13=8, n14="an empty record", n15="silence")
    grid.nodes.remove(13)
    replies = Nodes(grid, 60.0).exchange({str(n): b"block" for n in (11, 12, 13, 14, 15)})
    assert (replies["11"].block, replies["11"].reason) == (b"one", OK)
    assert [replies[str(n)].reason for n in (12, 13, 14, 15)] == [ABSENT, ABSENT, MALFORMED, LATE]
    grid.nodes.append(13)
    assert Nodes(grid, 60.0).exchange({"13": b"block"})["13"].reason == REFUSED


@pytest.mark.usefixtures("clock")
def test_a_node_that_owes_an_answer_is_not_asked_again_until_it_has_answered_or_is_gone():
    grid = Eager(n11=b"one", n12="silence", n13="silence")
    nodes = Nodes(grid, 60.0)
    nodes.exchange({str(n): b"block" for n in (11, 12, 13)})
    assert nodes.there() == ["11"]
    grid.reply(12, flower._packed(b"late"))
    assert nodes.there() == ["11", "12"]
    grid.reply(13, error=5)
    assert nodes.there() == ["11", "12", "13"]  # Flower says itself who is connected
    assert len(grid.sent) == 3


@pytest.mark.usefixtures("clock")
def test_a_stranger_is_greeted_once_and_heard_whenever_it_answers():
    grid = Eager(n11=b"one", n12="silence")
    nodes = Nodes(grid, 60.0)
    assert {n: r.block for n, r in nodes.greet(["11", "12"], b"hello").items()} == {"11": b"one"}
    for _ in range(3):
        assert nodes.greet(["12"], b"hello") == {}
    assert len(grid.sent) == 2
    grid.reply(12, flower._packed(b"two"))
    assert nodes.greet(["12"], b"hello")["12"].block == b"two"
    assert nodes.there() == ["11", "12"]


def test_a_node_that_owes_an_answer_is_sent_nothing_more_and_nobody_waits_for_it_twice(clock: Clock):
    grid = Eager(n11=b"one", n12="silence")
    nodes = Nodes(grid, 60.0)
    nodes.exchange({"11": b"block", "12": b"block"})
    waited = clock.now
    replies = nodes.exchange({"11": b"block", "12": b"block"})  # the round's next phase
    assert (replies["11"].reason, replies["12"].reason) == (OK, LATE)
    assert list(grid.sent.values()) == [11, 12, 11]
    assert waited >= 60
    assert clock.now == waited


def test_what_a_node_lost_is_not_waited_for_once_it_answers_what_it_was_sent_later(clock: Clock):
    """It came back under the same key between two looks, so Flower says nothing."""
    grid, told = Eager(n11="silence"), []
    nodes = Nodes(grid, 3600.0, told.append)
    grid.pushed = lambda: grid.how.update({11: b"hello"})  # it answers from now on, and not what it had
    assert nodes.greet([], b"greeting") == {}
    assert nodes.exchange({"11": b"block"})["11"].reason == ABSENT
    assert clock.now == pytest.approx(flower.SILENCE, abs=1)
    assert told == ["node 11: what it was sent got lost"]
    assert nodes.there() == ["11"]
    assert nodes.exchange({"11": b"block"})["11"].block == b"hello"


def test_a_node_that_only_works_long_is_asked_ever_more_seldom_and_its_answer_counts(clock: Clock):
    grid = Eager(n11="silence")
    nodes = Nodes(grid, 20 * flower.SILENCE)
    nodes.greet([], b"greeting")
    assert nodes.exchange({"11": b"block"})["11"].reason == LATE
    first, *probes = grid.sent
    assert len(probes) == 4  # after 1, 3, 7 and 15 times as long
    grid.reply(11, flower._packed(b"done"), to=first)
    for probe in probes:
        grid.reply(11, flower._packed(b"hello"), to=probe)
    assert nodes.there() == ["11"]
    grid.how[11] = b"more"
    assert nodes.exchange({"11": b"block"})["11"].block == b"more"  # greetings of then say nothing of this one


def test_a_greeting_that_got_lost_is_repeated(clock: Clock):
    grid = Eager(n11="silence")
    nodes = Nodes(grid, 60.0)
    assert nodes.greet(["11"], b"hello") == {}
    clock.sleep(flower.SILENCE)
    grid.how[11] = b"here"
    assert nodes.greet(["11"], b"hello")["11"].reason == ABSENT
    assert nodes.greet(["11"], b"hello")["11"].block == b"here"
