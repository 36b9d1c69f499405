"""The scripts that draw the papers' figures from finished runs: their numbers, and what they refuse."""

import json
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import write_run

from coterie.errors import RecordError

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, *told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, told)])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="script")["main"]()


def test_accuracy_and_loss_over_epochs(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {0: [[3.0, 1.0], [2.0, 0.5]], 1: [[2.0, 2.0], [1.0, 7.0]]}
    for seed, rounds in losses.items():
        plan = {"plan": {"epochs": 5, "steps": None}}
        run = write_run(out, "scool-sbm", seed, [0.6 + seed / 10, 0.8], rounds=(1, 2), settings=plan)
        write_run(out, "d_psgd", seed, [0.5, 0.5], rounds=(1, 2))  # in steps
        with (run / "metrics.jsonl").open("a") as lines:
            for t, each in enumerate(rounds, 1):
                there = [True, (seed, t) != (1, 2)]
                lines.write(json.dumps({"round": t, "kind": "training", "loss": each, "ok": there}) + "\n")
    told, picture = tmp_path / "a.json", tmp_path / "a.png"
    script("over_epochs", out, "--json", told, "--figure", picture, monkeypatch=monkeypatch)
    found = json.loads(told.read_text())["epochs"]["scool-sbm"]
    assert list(found["training loss"]) == ["5", "10"]
    assert found["training loss"]["10"]["mean"] == pytest.approx((1.25 + 1.0) / 2)
    share = 1 - 0.8 * np.exp(-3.0)
    assert found["accuracy"]["10"]["mean"] == pytest.approx(share * (0.7 + 0.75) / 2)
    assert found["accuracy"]["10"]["std"] == pytest.approx(share * statistics.stdev([0.7, 0.75]))
    assert picture.stat().st_size > 5_000
    with pytest.raises(RecordError, match="has no dice: there are loss, accuracy"):
        script("over_epochs", out, "--metric", "dice", monkeypatch=monkeypatch)
    with pytest.raises(RecordError, match="no run of scool-smb: there are d_psgd, scool-sbm"):
        script("over_epochs", out, "--algorithms", "scool-smb", monkeypatch=monkeypatch)


def test_distances_of_graphs_over_rounds(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
    for seed in (0, 1):
        even = np.full((3, 3), 1 / 3)
        graphs = {"round-1": even, "round-8": true if seed else even, "true": true}
        write_run(out, "scool-sbm", seed, [0.5] * 3, graphs=graphs)
    told, line, heat = tmp_path / "a.json", tmp_path / "a.png", tmp_path / "b.png"
    files = ("--json", told, "--figure", line, "--heat", heat)
    script("graph_over_rounds", out, "--rounds", "1,8", *files, monkeypatch=monkeypatch)
    found = json.loads(told.read_text())["rounds"]["scool-sbm"]
    far = (2 / 3 + 2 / 3 + 4 / 3) / 3  # of an even graph from the true one
    assert found["1"] == pytest.approx({"l1": far, "l1_std": 0, "right_peers": found["1"]["right_peers"]})
    assert found["8"]["l1"] == pytest.approx(far / 2)
    assert found["8"]["l1_std"] == pytest.approx(statistics.stdev([far, 0]))
    assert line.stat().st_size > 5_000
    assert heat.stat().st_size > 5_000
    with pytest.raises(RecordError, match=r"holds graphs of rounds 1, 8, not of \[5\]"):
        script("graph_over_rounds", out, "--rounds", "1,5", "--heat", heat, monkeypatch=monkeypatch)
