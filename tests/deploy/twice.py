"""A server whose network delivers every message twice: put in place of the app that Flower is given to start."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.fleet import flower
from coterie.runs import served


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
    """A study through it."""
    served.main(Twice(grid), settings)


def install(app: Path) -> None:
    """Have Flower start this."""
    text = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom twice import server\n"
    text += "from coterie.sites.node import app as client\n__all__ = ['client', 'server']\n"
    (app / "coterie_app.py").write_text(text)


server = flower.server_app(main)
