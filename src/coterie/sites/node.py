"""A site as Flower sees it: what a node starts for each message."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.fleet import flower
from coterie.sites import folder, worker
from coterie.sites.folder import PROGRAMS


def answer(block: bytes, asker: str, settings: Mapping[str, Any]) -> bytes:
    """The answer of the site that the node's settings name."""
    return folder.answer(Path(str(settings["site"])), block, asker)


def main() -> None:
    """Answer one message."""
    flower.clientapp(app)


def work(folder: Path, process: int) -> None:
    """Beside the node of this process: have everything imported, and fork for every message."""
    flower.ready()
    worker.serve(folder / PROGRAMS, main, process)


app = flower.client_app(answer)
