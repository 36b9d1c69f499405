"""Every experiment that ships runs, in seconds, at its smallest scale."""

import json
import math
import sys
from pathlib import Path

import pytest

from coterie import cli
from coterie.experiments import reader


@pytest.mark.parametrize("name", reader.names())
def test_every_experiment_runs_at_smoke_scale(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told.json"
    command = ["coterie", "run", name, "--scale", "smoke", "--out", str(tmp_path / "out"), "--json", str(told)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    results = json.loads(told.read_text())["results"]
    experiment = reader.read(name, scale="smoke")
    assert [r["algorithm"] for r in results] == list(experiment.given["algorithms"])
    for result in results:
        assert result["rounds_run"] == experiment.budget.rounds
        assert math.isfinite(result["metrics"]["loss"])
        assert 0 <= result["metrics"].get("accuracy", 0) <= 1
        assert result["ledger"]["sent"]["up"]["numbers"] > 0 or result["algorithm"] == "local"
