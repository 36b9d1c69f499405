"""A data set cut into parts and joined again elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from published import mnist, packed, random, shrunk

from coterie.data import sources
from coterie.data.sources import door, idx, store

SCRIPT = Path(__file__).parents[3] / "scripts" / "pack_data.py"


def run(*told, fails=False):
    done = subprocess.run([sys.executable, SCRIPT, *map(str, told)], capture_output=True, text=True)
    assert bool(done.returncode) == fails, done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture
def parts(home, tmp_path):
    for name, content in packed(mnist(300, 100)[0]).items():
        (tmp_path / name).write_bytes(content)
    door.obtain(shrunk(idx.MNIST, counts=(300, 100)), "files", tmp_path)
    run("pack", "mnist", "--out", tmp_path / "parts", "--mb", "0.15")
    return sorted((tmp_path / "parts").iterdir())


def test_joined_it_is_the_same_data_set(parts, home, tmp_path, monkeypatch):
    assert len(parts) > 2
    assert all(sum(path.stat().st_size for path in part.iterdir()) <= 150_000 for part in parts)
    said = run("--root", tmp_path / "there", "join", *reversed(parts))
    assert said.strip() == str(tmp_path / "there" / "mnist")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "there"))
    store.verify("mnist")
    np.testing.assert_array_equal(sources.load("mnist").inputs, mnist(300, 100)[1])
    assert list((tmp_path / "there").iterdir()) == [tmp_path / "there" / "mnist"]


def test_what_is_wrong_with_parts_is_said(parts, home, tmp_path):
    there = ("--root", tmp_path / "there", "join")
    assert "these are missing: [1]" in run(*there, parts[0], *parts[2:], fails=True)
    content = (parts[1] / "part.xz").read_bytes()
    (parts[1] / "part.xz").write_bytes(content[:-1] + b"!")
    assert "its SHA-256 is" in run(*there, *parts, fails=True)
    (parts[1] / "part.xz").write_bytes(content)
    for part in parts:
        index = json.loads((part / "index.json").read_text())
        index["files"][0]["name"] = "../evil"
        (part / "index.json").write_text(json.dumps(index))
    assert "outside the data set" in run(*there, *parts, fails=True)
    assert "no part: there is no index.json" in run(*there, tmp_path / "nowhere", fails=True)
    (parts[0] / "index.json").write_text("{")
    assert "is damaged; bring this part again" in run(*there, *parts, fails=True)
    assert not (tmp_path / "there").exists()
    assert "remove it" in run("pack", "mnist", "--out", tmp_path / "parts", fails=True)
    said = run("pack", "cifar10", "--out", tmp_path, fails=True)
    assert "only mnist; fetch it first: coterie data get cifar10" in said


@pytest.mark.parametrize("what", ["pack", "join"])
def test_a_full_disk_leaves_no_part_of_it(what, parts, home, tmp_path):
    """The system itself lets no file grow further than a limit, as a full disk would."""
    out = tmp_path / "more"
    told = ("pack", "mnist", "--out", out, "--mb", "1") if what == "pack" else ("--root", out, "join", *parts)
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 40; trap "" XFSZ; "$@"', "bash", sys.executable, SCRIPT, *map(str, told)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "[Errno 27] File too large"
    assert list(out.iterdir()) == []


def test_differences_fit_any_shape(home, tmp_path, monkeypatch):
    arrays = {
        "a": random(3, 5, 7),
        "b": np.arange(10),
        "c": random(9),
        "d": random(4, 1),
        "e": np.zeros((0, 4), np.uint8),
    }
    with store.installing("odd", {"source": "files", "facts": {}}) as out:
        for name, values in arrays.items():
            out.array(name, values)
        out.text("f.txt", "text")
    run("pack", "odd", "--out", tmp_path / "parts", "--mb", "1")
    run("--root", tmp_path / "there", "join", tmp_path / "parts" / "odd-00")
    for name, values in arrays.items():
        np.testing.assert_array_equal(store.array(tmp_path / "there" / "odd", name), values)
