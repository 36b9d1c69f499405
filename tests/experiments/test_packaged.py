"""Every experiment that ships runs, in seconds, at its smallest scale."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie import cli
from coterie.data import sources
from coterie.data.dataset import Dataset
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


@pytest.mark.parametrize("name", ["scool-noniid", "scool-sbm"])
@pytest.mark.parametrize(("scale", "side"), [("paper-cifar100", 32), ("paper-mini-imagenet", 84)])
def test_scools_other_data_sets_are_dealt_as_the_paper_has_it(
    name: str, scale: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.concatenate([np.repeat(np.arange(100), 500), np.repeat(np.arange(100), 100)])
    images = np.broadcast_to(np.zeros((1, 3, side, side), np.uint8), (60_000, 3, side, side))
    facts = {"mean": [0.5] * 3, "std": [0.2] * 3}
    found = Dataset(scale, images, labels, 50_000, tuple(map(str, range(100))), None, facts)
    monkeypatch.setattr(sources, "load", lambda name, **_: found)
    experiment = reader.read(name, scale=scale)
    assert experiment.given["population"]["data"] in scale
    people = experiment.population(0)
    labels_of = [set(labels[people.index["train"][i].numpy()]) for i in range(100)]
    assert people.n == 100
    assert all(len(held) == 10 for held in labels_of)
    assert set((people.sizes("train") + people.sizes("validation")).tolist()) == {500}
    assert set(people.sizes("test").tolist()) == {1_000}
    same = [[a == b for b in labels_of] for a in labels_of]
    assert (np.array(same).sum(1) == (10 if name == "scool-sbm" else 1)).all()
    out = people.make(0)(people.transform(people.inputs[:2]))
    assert out.shape == (2, 100)


def test_cobos_small_scale_has_the_settings_that_its_sweep_chose() -> None:
    tuned = Path(__file__).parents[2] / "results" / "cobo" / "cross-silo-small-tuned.toml"
    usual, chosen = (reader.read("cobo-cross-silo", scale="small", tuned=told) for told in (None, tuned))
    assert reader.plain(usual) == reader.plain(chosen)


def test_the_attack_table_has_the_settings_that_its_sweep_chose() -> None:
    tuned = Path(__file__).parents[2] / "results" / "meritfed" / "attacks-tuned.toml"
    usual, chosen = (reader.read("meritfed-attacks", tuned=told) for told in (None, tuned))
    assert reader.plain(usual) == reader.plain(chosen)
