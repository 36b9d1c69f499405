"""Sites behind Flower: everything Coterie knows of flwr, whose interface moves between minor versions (`VERSION`).

Server: a loop on Flower's `Grid`, not its `Strategy`, which keeps one global model. A phase is one message to each
node; replies are polled for, every `PAUSE` seconds, until all are there or the phase's deadline has passed, and
matched by the id of the message that they answer: an error does not carry its node's id. Nodes, and
whoever starts runs or lets nodes in, knock at one port of Flower's; `Doors` lets the latter in from this machine only.

Site: a Flower node starts a new process for every message, installs the app that came with it, and imports that. Ours
does not: `clientapp` is what a site's node runs in place of Flower's command, and it answers with the site's own
Coterie. Nothing that was sent is unpacked or imported, let alone run; what it was asked is in `coterie.sites.site`.
A server can say that a run is of another kind (an agent's), for which a node starts another of Flower's commands, with
the code that came along: at a site, programs that refuse stand in the place of all of those (`OTHERS`).

Blocks travel as one array of bytes, which Flower cuts into chunks.
"""

import argparse
import importlib.metadata
import os
import shlex
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.asks import ABSENT, LATE, MALFORMED, REFUSED
from coterie.errors import CoterieError, SettingError
from coterie.fleet.remote import Reply
from coterie.settings import whole

VERSION = "1.41"  # of flwr; tests/fleet/test_flower.py guards that it is the one that is pinned and installed
PAUSE = 0.2  # seconds between looks for replies
GREETING = 30.0  # seconds that a round waits for a node that it does not know
SILENCE = 120.0  # seconds after which a silent node is asked something small; each time twice as long
LIFE = 12 * 3600.0  # seconds that Flower keeps a message
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # hosts have no internet, and run nothing that was sent
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's own: a second
}
ACTION = "query.coterie"  # the type of our messages
CLIENTAPP = "flwr-clientapp"  # what a node starts for a message
OTHERS = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation")  # if the server says so
_BLOCK = "block"
_GONE = 5  # flwr.common.constant.ErrorCode.NODE_UNAVAILABLE


class FlowerError(CoterieError):
    """Flower is not there, or not what it must be."""


def needed() -> None:
    """Refuse, in one sentence, to go on without the Flower that this file was written for."""
    try:
        found = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise FlowerError("deployment needs Flower: pip install 'coterie[flower]'") from None
    if not found.startswith(f"{VERSION}."):
        raise FlowerError(f"deployment needs flwr {VERSION}, and {found} is installed: pip install 'coterie[flower]'")


# ---- the server ------------------------------------------------------------------------------------------------------


class Nodes:
    """Carries blocks to Flower nodes and back: the transport of a RemoteFleet, inside a Flower run.

    A node takes one message at a time. One that did not answer in time is out until it has, or what it was sent is
    known to be lost: so a node that hangs, or answers nothing on purpose, makes the others wait once.

    Flower calls a message lost only if one looks while its node is away. What a node lost on its way, or was given
    before it came back under the same key between two looks, would be waited for until the message's own end. So a
    silent node is greeted: it answers in the order of what it was sent, and what it then still owes does not come.
    """

    def __init__(self, grid: Any, deadline: float, tell: Callable[[str], None] = lambda message: None) -> None:
        self.grid, self.deadline, self.tell = grid, deadline, tell
        self._late: dict[str, str] = {}  # message → node
        self._greeted: dict[str, str] = {}
        self._greeting = b""
        self._probes: dict[str, tuple[str, set[str]]] = {}  # greeting of a silent node → it, and what it then owed
        self._spoken: dict[str, float] = {}  # node → when it was last sent anything
        self._lost: set[str] = set()  # messages

    def there(self) -> Sequence[str]:
        """The ids of the nodes that are connected and owe nothing."""
        owing = self._owing()
        return [node for node in map(str, self.grid.get_node_ids()) if node not in owing]

    def exchange(self, blocks: Mapping[str, bytes]) -> Mapping[str, Reply]:
        """One message to each node that owes nothing; what came back before the deadline."""
        owing = self._owing()
        sent = self._pushed({node: block for node, block in blocks.items() if node not in owing})
        gone = set(blocks) - set(sent.values()) - owing
        replies = self._pulled(sent, self.deadline)
        self._late |= sent
        return {n: replies.get(n, Reply(reason=ABSENT if n in gone else LATE)) for n in blocks}

    def greet(self, addresses: Sequence[str], block: bytes) -> Mapping[str, Reply]:
        """One message to each node that has none yet; nobody waits long for a stranger, and not twice."""
        self._greeting = block
        new = [node for node in addresses if node not in self._greeted.values()]
        self._greeted |= self._pushed(dict.fromkeys(new, block))
        return self._pulled(self._greeted, min(GREETING, self.deadline) if new else 0)

    def _owing(self) -> set[str]:
        """The nodes whose answers are late, after a look for those."""
        self._pulled(self._late, 0)
        return set(self._late.values())

    def _pushed(self, blocks: Mapping[str, bytes]) -> dict[str, str]:
        """Which message went to which node."""
        from flwr.app import Message

        sent = {}
        for node, block in blocks.items():  # one by one: together they could be more than Flower takes at once
            for name in self.grid.push_messages([Message(_packed(block), int(node), ACTION, ttl=LIFE)]):
                if name:
                    sent[name] = node
            self._spoken[node] = time.monotonic()
        return sent

    def _pulled(self, sent: dict[str, str], seconds: float) -> dict[str, Reply]:
        """Replies to these messages, which are no longer waited for; what is left in `sent` did not come in time."""
        end = time.monotonic() + seconds
        replies: dict[str, Reply] = {}
        while sent:
            self._probe(sent)
            for message in self.grid.pull_messages([*sent, *self._probes]):
                name = message.metadata.reply_to_message_id
                if name in sent:
                    node = sent.pop(name)
                    replies[node] = self._read(node, message)
                elif name in self._probes:
                    _, owed = self._probes.pop(name)
                    if not _away(message):
                        self._lost |= owed
            for name in self._lost & set(sent):
                self._lost.discard(name)
                node = sent.pop(name)
                replies[node] = Reply(reason=ABSENT)
                self.tell(f"node {node}: what it was sent got lost")
            if not sent or time.monotonic() >= end:
                break
            time.sleep(PAUSE)
        return replies

    def _probe(self, sent: Mapping[str, str]) -> None:
        """Greet the nodes that have been silent for long."""
        for node in set(sent.values()) if self._greeting else ():
            before = sum(to == node for to, _ in self._probes.values())
            if time.monotonic() - self._spoken[node] >= SILENCE * 2**before:
                owed = {name for name, to in sent.items() if to == node}
                self._probes |= dict.fromkeys(self._pushed({node: self._greeting}), (node, owed))

    def _read(self, node: str, message: Any) -> Reply:
        if message.has_error():
            self.tell(f"node {node}: {message.error.reason}")
            return Reply(reason=ABSENT if _away(message) else REFUSED)
        block = _unpacked(message)
        return Reply(reason=MALFORMED) if block is None else Reply(block)


def _away(message: Any) -> bool:
    """Whether Flower, and not the node, has answered: it is not there."""
    return bool(message.has_error() and message.error.code == _GONE)


def server_app(main: Callable[[Any, Mapping[str, Any]], None]) -> Any:
    """A ServerApp whose run is main(grid, the run's settings)."""
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    app = ServerApp()

    def run(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    app.main()(run)
    return app


NODES = ("/v1/fleet/", "/health")  # what nodes knock at; the rest starts runs, which is running code


class Doors:
    """Around Flower's server: from elsewhere, only what nodes need."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application. A connection from this machine has the same address at both ends."""
        here = scope["type"] == "lifespan" or (scope.get("client") and scope["client"][0] == scope["server"][0])
        if here or (scope["type"] == "http" and str(scope["path"]).startswith(NODES)):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"not from here"})


def superlink_process() -> None:
    """Flower's command flower-superlink, with its doors closed."""
    from flwr.superlink import cli, main

    changed: Any = main
    make = main.create_app

    def made(*given: Any, **settings: Any) -> Any:
        app = make(*given, **settings)
        app.add_middleware(Doors)
        return app

    changed.create_app = made
    cli.flower_superlink()


# ---- a site ----------------------------------------------------------------------------------------------------------


def client_app(answer: Callable[[bytes, str, Mapping[str, Any]], bytes]) -> Any:
    """A ClientApp that answers a block by answer(block, who asks, the node's settings)."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def query(message: Message, context: Context) -> Message:
        asker = f"Flower run {message.metadata.run_id}"
        block = _unpacked(message)
        return Message(_packed(answer(block or b"", asker, context.node_config)), reply_to=message)

    app.query(ACTION.partition(".")[2])(query)
    return app


def ready() -> Any:
    """Import what `clientapp` runs, of the Flower that this file was written for."""
    needed()
    from flwr.supernode.runtime import run_clientapp

    for name in ("install_from_fab", "install_app_dependencies", "get_load_client_app_fn"):
        if not hasattr(run_clientapp, name):
            raise FlowerError(f"this Flower does not keep {name} where {VERSION} does")
    return run_clientapp


def clientapp(app: Any) -> None:
    """Flower's command of this name, but with this app, whatever came with the message."""
    from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    def nothing(*_: Any, **__: Any) -> None:
        """What was sent stays packed."""

    process = ready()
    process.install_from_fab = process.install_app_dependencies = nothing
    process.get_load_client_app_fn = lambda **_: lambda *_: app
    parser = argparse.ArgumentParser(CLIENTAPP)  # Flower's own lives where half of Flower is imported
    parser.add_argument("--runtime-api-address", required=True)
    add_args_flwr_app_common(parser=parser)
    given = parser.parse_args()
    process.run_clientapp(
        runtime_api_address=given.runtime_api_address,
        token=try_obtain_flwr_app_token(given),
        insecure=given.insecure,
        certificates=validate_and_resolve_root_certificates(given.root_certificates, given.insecure),
        parent_pid=given.parent_pid,
        runtime_dependency_install=False,
    )


def _packed(block: bytes) -> Any:
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({_BLOCK: ArrayRecord({_BLOCK: Array("uint8", (len(block),), "coterie", block)})})


def _unpacked(message: Any) -> bytes | None:
    """The block of a message, if it is one of ours. Its array is never turned into one: it is bytes."""
    records = message.content.array_records
    if set(records) != {_BLOCK} or set(records[_BLOCK]) != {_BLOCK}:
        return None
    return bytes(records[_BLOCK][_BLOCK].data)


# ---- the commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command as it is run, and as it is shown."""

    words: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)  # of its environment, besides the user's own

    def __str__(self) -> str:
        settings = " ".join(f"{name}={_shown(value)}" for name, value in self.settings.items())
        return f"{settings} {shlex.join(self.words)}".strip()

    @property
    def environment(self) -> dict[str, str]:
        """What the process sees."""
        return {**os.environ, **{k: v.replace("$PATH", os.environ.get("PATH", "")) for k, v in self.settings.items()}}


def _shown(value: str) -> str:
    return f'"{value}"' if "$" in value else shlex.quote(value)


LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Link:
    """Where the server is, and how one knows that it is the one: without certificates only on this machine."""

    host: str = "127.0.0.1"
    port: int = 9092
    ca: str = ""  # the authority's certificate
    certificate: str = ""  # of the server
    key: str = ""
    known_nodes: bool = False  # only nodes whose keys are registered

    def __post_init__(self) -> None:
        """Refuse what would be open to everyone, or to nobody."""
        whole("port", self.port, 1, 65_535)
        if not self.ca and self.host not in LOCAL:
            raise SettingError(
                f"a server at {self.host} needs certificates: --certificates DIR with ca.crt, server.pem and server.key"
            )
        if self.known_nodes and not self.ca:
            raise SettingError("registered keys need certificates: Flower checks them over TLS only")

    @property
    def address(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _around(home: Path, *first: Path) -> dict[str, str]:
    """The environment: Flower's folder, quiet, and programs found here first (it starts its own by name)."""
    path = ":".join([*(str(p.absolute()) for p in first), str(Path(sys.executable).parent), "$PATH"])
    return {"PATH": path, "FLWR_HOME": str(home.absolute()), **QUIET}


def superlink(link: Link, home: Path, programs: Path | None = None) -> Command:
    """The server that nodes connect to; it starts the runs. `programs` is the folder of our own flower-superlink.

    What it knows of nodes is in a file: with what is only in its memory, their registrations and every node that is
    connected would be lost with it.
    """
    words = ["flower-superlink", "--host", link.host, "--port", str(link.port)]
    words += ["--database", str(home.absolute() / "superlink.db")]
    if link.ca:
        words += ["--ssl-ca-certfile", link.ca, "--ssl-certfile", link.certificate, "--ssl-keyfile", link.key]
    else:
        words += ["--insecure"]
    if link.known_nodes:
        words += ["--enable-supernode-auth"]
    first = [] if programs is None else [programs]
    return Command((*words, "--disable-runtime-dependency-installation"), _around(home, *first))


def submit(link: Link, home: Path, app: Path, settings: Mapping[str, str]) -> Command:
    """Start a run on the server and show what it says."""
    told = " ".join(f'{name}="{value}"' for name, value in settings.items())
    return Command(("flwr", "run", str(app.absolute()), "coterie", "--stream", "--run-config", told), _around(home))


def register(home: Path, public_key: Path) -> Command:
    """Let the node with this key in."""
    check_key(public_key, private=False)
    return Command(("flwr", "supernode", "register", str(public_key.absolute()), "coterie"), _around(home))


def supernode(
    server: str, site: Path, home: Path, *, port: int, ca: str = "", key: str = "", programs: Path | None = None
) -> Command:
    """A site's node. `programs` is the folder of its own flwr-clientapp."""
    _check_server(server, ca)
    whole("--port", port, 1, 65_535)
    for name in (CLIENTAPP, *OTHERS):
        if programs is not None and not (programs / name).is_file():
            raise FlowerError(f"{programs} has no {name}, in whose place Flower's own would run: prepare the site anew")
    if key:
        if not ca:
            raise SettingError("--key goes with --ca: Flower checks keys over TLS only")
        check_key(Path(key), private=True)
    words = ["flower-supernode", "--superlink", server, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--root-certificates", ca] if ca else ["--insecure"]
    if key:
        words += ["--auth-supernode-private-key", key]
    words += ["--node-config", f'site="{site.absolute()}"']
    return Command(tuple(words), _around(home, *([] if programs is None else [programs])))


def _check_server(server: str, ca: str) -> None:
    """Refuse what is no address, a server that anyone could pose as, and a certificate that is none."""
    host, _, port = server.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise SettingError(f"the server is HOST:PORT, such as coterie.example:9092, not {server!r}")
    if not ca and host.strip("[]") not in LOCAL:
        raise SettingError(f"anyone could pose as {host}: give its authority's certificate, --ca FILE")
    if ca:
        try:
            ssl.create_default_context(cafile=ca)
        except ssl.SSLError:
            raise SettingError(f"--ca: {ca} holds no certificate") from None


def check_key(path: Path, *, private: bool) -> None:
    """Refuse what Flower takes for no node's key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    try:
        text = path.read_bytes()
        key: object = load_ssh_private_key(text, None) if private else load_ssh_public_key(text)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey if private else ec.EllipticCurvePublicKey):
        half = "private" if private else "public"
        raise SettingError(f"{path} is no node's {half} key: ssh-keygen -t ecdsa -b 384 -N '' -f FILE makes one")


SERVER = """\
#!{python}
# Flower's server; runs are started, and nodes let in, from this machine only.
from coterie.fleet.flower import superlink_process

superlink_process()
"""

APP = """\
# What Flower is given to start; the code is the server's own Coterie.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "coterie"
version = "{version}"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie_app:server"
clientapp = "coterie_app:client"

[tool.flwr.app.config]
study = ""
"""

COMPONENTS = '''\
"""The two halves of Coterie's Flower app, from the Coterie that is installed."""

from coterie.runs.served import app as server
from coterie.sites.node import app as client

__all__ = ["client", "server"]
'''


def write_app(folder: Path, version: str) -> Path:
    """The ready app, for `flwr run`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP.format(version=version), encoding="utf-8")
    (folder / "coterie_app.py").write_text(COMPONENTS, encoding="utf-8")
    return folder


def write_server(folder: Path) -> Path:
    """The program that `superlink` starts."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "flower-superlink"
    program.write_text(SERVER.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o700)
    return folder


def write_connection(link: Link, home: Path) -> None:
    """How `flwr` finds the server by the name "coterie"."""
    home.mkdir(parents=True, exist_ok=True)
    trust = f'root-certificates = "{link.ca}"' if link.ca else "insecure = true"
    text = f'[superlink]\ndefault = "coterie"\n\n[superlink.coterie]\naddress = "{link.address}"\n{trust}\n'
    (home / "config.toml").write_text(text, encoding="utf-8")
