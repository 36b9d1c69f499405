import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie.errors import SettingError
from coterie.experiments import reader
from coterie.runs import files
from coterie.runs.study import Study


def test_the_record_of_a_study(tiny: str, tmp_path: Path):
    experiment = reader.read(tiny, algorithms=["local", "oracle"], seeds=[3, 4])
    results = Study.begin(experiment, tmp_path / "out", command="coterie run tiny").go()
    assert [(r["algorithm"], r["seed"]) for r in results] == [("local", 3), ("local", 4), ("oracle", 3), ("oracle", 4)]
    assert results[0]["metrics"]["share_improved"] is None
    local, oracle = results[0]["clients"]["accuracy"], results[2]["clients"]["accuracy"]
    assert results[2]["metrics"]["share_improved"] == sum(o > a for o, a in zip(oracle, local, strict=True)) / 4
    about = json.loads((tmp_path / "out" / "oracle" / "seed-4" / "run.json").read_text())
    assert about["status"] == "finished"
    assert about["groups"] == [0, 0, 1, 1]
    assert about["settings"]["groups"] == [0, 0, 1, 1]
    assert about["settings"]["plan"]["rounds"] == 6
    assert (about["main"], about["higher"], about["resplit"]) == ("accuracy", True, False)
    assert about["sizes"] == {"train": [22] * 4, "validation": [14] * 4, "test": [359] * 4}
    graphs = load_file(tmp_path / "out" / "oracle" / "seed-4" / "graphs.safetensors")
    assert sorted(graphs) == ["round-000001", "round-000002", "round-000003", "round-000004", "round-000006", "true"]
    assert torch.equal(graphs["true"], torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)))
    assert torch.equal(graphs["round-000006"] > 0, graphs["true"] > 0)
    experiment_json = json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert experiment_json["command"] == "coterie run tiny"
    again = reader.plain(reader.restore(experiment_json["experiment"], "x"))
    assert files.plain(again) == experiment_json["experiment"]


def test_seeds_deal_and_start_differently(tiny: str):
    experiment = reader.read(tiny)
    a, b, again = experiment.population(0), experiment.population(1), experiment.population(0)
    assert not torch.equal(a.index["train"][0], b.index["train"][0])
    assert torch.equal(a.index["train"][0], again.index["train"][0])


def test_one_that_fails_does_not_take_the_others_with_it(tiny: str, tmp_path: Path):
    experiment = reader.read(tiny, algorithms=["oracle", "local"], sets=["oracle.groups=[0]"])
    study = Study.begin(experiment, tmp_path / "out")
    with pytest.raises(SettingError, match="oracle: oracle must be told"):
        study.go()
    assert [r["algorithm"] for r in study.results()] == ["local"]
    assert study.record("oracle", 0).status == "failed"


def test_a_loop_fleet_and_double_precision_can_be_asked_for(tiny: str, tmp_path: Path):
    sets = ["run.rounds=2", 'run.dtype="float64"']
    found = []
    for fleet in ("stacked", "loop"):
        experiment = reader.read(tiny, algorithms=["fedavg"], sets=[*sets, f"run.fleet={fleet}"])
        Study.begin(experiment, tmp_path / fleet).go()
        found.append(load_file(tmp_path / fleet / "fedavg" / "seed-0" / "models" / "last.safetensors"))
    for key, row in found[0].items():
        assert row.dtype == torch.float64
        assert torch.allclose(row, found[1][key], rtol=0, atol=1e-9)


def test_tensorboard_hears_of_every_evaluation(tiny: str, tmp_path: Path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    experiment = reader.read(tiny, algorithms=["local"], sets=['run.track=["tensorboard"]'])
    (result,) = Study.begin(experiment, tmp_path / "out").go()
    events = loader.EventAccumulator(str(tmp_path / "out" / "tensorboard" / "local" / "seed-0"))
    events.Reload()
    scalars = events.Scalars("test/accuracy")
    assert [s.step for s in scalars] == [0, 2, 4, 6]
    assert scalars[-1].value == pytest.approx(result["last"]["accuracy"])
