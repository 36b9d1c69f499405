"""A folder of data sets of its own for every test, and a publisher to fetch from."""

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a network or starts a program fails the test."""

    def asked(*told: object, **more: object) -> None:
        raise AssertionError(f"the network was asked: {told}")

    monkeypatch.setattr("urllib.request.urlopen", asked)
    monkeypatch.setattr("subprocess.run", asked)


class Publisher:
    """A small web server: what it has, how it fails, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []  # the next answers end after so many bytes
        self.statuses: list[int] = []  # the next answers are these errors
        self.ranges = True
        self.asked: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.address = ""


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    told = Publisher()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.asked.append(self.headers.get("Range", "all"))
            told.during()
            content = told.files.get(self.path.lstrip("/"))
            if told.statuses or content is None:
                self.send_error(told.statuses.pop(0) if told.statuses else 404)
                return
            start, sign = 0, f'"{hash(content)}"'
            if told.ranges and "Range" in self.headers and self.headers.get("If-Range") == sign:
                start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if start else 200)
            self.send_header("ETag", sign)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            cut = told.cuts.pop(0) if told.cuts else len(content)
            self.wfile.write(content[start : start + cut])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield told
    server.shutdown()
    server.server_close()
