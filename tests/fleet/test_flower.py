"""Flower is the one that `coterie.fleet.flower` was written for, where it is pinned and where it is installed."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

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
