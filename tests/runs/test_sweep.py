import json
from pathlib import Path

import pytest

from coterie.errors import RecordError, SettingError
from coterie.experiments import reader
from coterie.runs.signals import Stop
from coterie.runs.sweep import Sweep

GRID = [("plan.lr", [0.0, 0.3]), ("fedavg.server_lr", [0.0, 1.0, 0.5])]


def sweep(tiny: str, out: Path, **changes) -> Sweep:
    experiment = reader.read(tiny, algorithms=["local", "fedavg"])
    settings = {"seeds": [1000], "trials": None, "rounds_share": 0.5} | changes
    return Sweep(experiment, GRID, **settings, device="cpu", out=out)


def test_as_many_trials_for_each_and_the_best_on_validation_is_chosen(tiny: str, tmp_path: Path):
    plan = sweep(tiny, tmp_path / "s")
    chosen = plan.go([], Stop())
    told = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert {name: len(tried) for name, tried in told["tried"].items()} == {"local": 2, "fedavg": 2}
    assert chosen["local"] == {"plan.lr": 0.3}
    for name, tried in told["tried"].items():
        assert chosen[name] == max(tried, key=lambda t: t["score"])["settings"]
        for trial in tried:
            folder = tmp_path / "s" / trial["folder"]
            about = json.loads((folder / name / "seed-1000" / "run.json").read_text())
            assert about["rounds"] == 3
            lines = [json.loads(x) for x in (folder / name / "seed-1000" / "metrics.jsonl").read_text().splitlines()]
            assert {x["split"] for x in lines if x["kind"] == "evaluation"} == {"validation"}  # test is never looked at
    tuned = reader.read(tiny, algorithms=["local", "oracle"], tuned=tmp_path / "s" / "tuned.toml")
    assert tuned.algorithm("local").plan.lr == 0.3
    assert tuned.algorithm("oracle").plan.lr == 0.2


def test_a_sweep_goes_on_where_it_was(tiny: str, tmp_path: Path):
    sweep(tiny, tmp_path / "s").go([], Stop())
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "trials").rglob("run.json")}
    first = (tmp_path / "s" / "sweep.json").read_text()
    sweep(tiny, tmp_path / "s").go([], Stop())
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "trials").rglob("run.json")} == times
    assert (tmp_path / "s" / "sweep.json").read_text() == first
    with pytest.raises(RecordError, match="another sweep"):
        sweep(tiny, tmp_path / "s", trials=1).go([], Stop())


def test_a_budget_and_the_smallest_grid_bound_the_trials(tiny: str, tmp_path: Path):
    assert {k: len(v) for k, v in sweep(tiny, tmp_path / "a").trials.items()} == {"local": 2, "fedavg": 2}
    assert {k: len(v) for k, v in sweep(tiny, tmp_path / "a", trials=1).trials.items()} == {"local": 1, "fedavg": 1}


def test_the_best_of_a_sweep_are_tried_again_for_longer(tiny: str, tmp_path: Path):
    first = Sweep(
        reader.read(tiny, algorithms=["local", "fedavg"]),
        [("plan.lr", [0.0, 0.3, 0.1, 0.2])], [1000], None, 0.5, "cpu", tmp_path / "first",
    )  # fmt: skip
    first.go([], Stop())
    tried = json.loads((tmp_path / "first" / "sweep.json").read_text())["tried"]

    def again(best: int, out: str = "again", **changes) -> Sweep:
        experiment = reader.read(tiny, algorithms=["local", "fedavg"], **changes)
        return Sweep(
            experiment, [], [1000, 1001], None, 1.0, "cpu", tmp_path / out, (tmp_path / "first" / "sweep.json", best)
        )

    second = again(2)
    for name, trials in second.trials.items():
        ranked = sorted(tried[name], key=lambda t: -t["score"])
        assert trials == [t["settings"] for t in ranked[:2]]
    chosen = second.go([], Stop())
    told = json.loads((tmp_path / "again" / "sweep.json").read_text())
    assert told["again"] == {"best": 2, "of": first.budget}
    assert told["budget"]["run.rounds"] == 2 * first.budget["run.rounds"]
    for name, trials in told["tried"].items():
        assert [len(t["scores"]) for t in trials] == [2, 2]
        assert chosen[name] == max(trials, key=lambda t: t["score"])["settings"]
    assert {name: len(trials) for name, trials in again(9, "all").trials.items()} == {"local": 4, "fedavg": 4}
    with pytest.raises(SettingError, match="a --grid, or the best of an earlier sweep"):
        Sweep(first.experiment, [], [1000], None, 1.0, "cpu", tmp_path / "none")
    with pytest.raises(SettingError, match="--best"):
        again(0)
    with pytest.raises(SettingError, match="other settings of fedavg"):
        again(2, "other", sets=["fedavg.weighted=false"])
    with pytest.raises(SettingError, match="another experiment: its population"):
        again(2, "other", sets=["population.partition.clients_per_cluster=3"])
    with pytest.raises(SettingError, match="no finished trial of oracle"):
        Sweep(
            reader.read(tiny, algorithms=["local", "oracle"]), [], [1000], None, 1.0, "cpu", None,
            (tmp_path / "first" / "sweep.json", 2),
        )  # fmt: skip
    with pytest.raises(SettingError, match="--trials is for a grid"):
        Sweep(first.experiment, [], [1000], 2, 1.0, "cpu", None, (tmp_path / "first" / "sweep.json", 2))
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(SettingError, match=r"is not the sweep\.json of a sweep"):
        Sweep(first.experiment, [], [1000], None, 1.0, "cpu", None, (tmp_path / "results.json", 2))
    with pytest.raises(SettingError, match="there is no file"):
        Sweep(first.experiment, [], [1000], None, 1.0, "cpu", None, (tmp_path / "nowhere.json", 2))


def test_reporting_seeds_and_grids_that_fit_nothing_are_refused(tiny: str, tmp_path: Path):
    with pytest.raises(SettingError, match="seed 0 is reported by tiny"):
        sweep(tiny, tmp_path / "a", seeds=[0])
    experiment = reader.read(tiny, algorithms=["local"])
    for path in ("cobo.rho", "plam.lr", "lr"):
        with pytest.raises(SettingError, match="fits none of the algorithms"):
            Sweep(experiment, [(path, [1])], [1000], None, 1.0, "cpu", tmp_path / "a")
    with pytest.raises(SettingError, match="local has no setting 'sahred'"):
        Sweep(experiment, [("local.sahred", [True])], [1000], None, 1.0, "cpu", tmp_path / "a").go([], Stop())


def test_a_grid_that_cannot_run_leaves_no_folder_and_another_one_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = reader.read("quickstart", scale="smoke", algorithms=["local", "cobo"])

    def sweep(*grid: tuple[str, list[object]]) -> Sweep:
        return Sweep(experiment, [*grid], [1000], None, 1.0, "cpu", None)

    for wrong in (("plan.lr", ["a"]), ("plan.lrr", [0.1])):
        with pytest.raises(SettingError):
            sweep(wrong)
    assert not (tmp_path / "runs").exists()
    first = sweep(("plan.lr", [0.1]))
    assert first.untouched == ["cobo"]
    first._open()
    assert sweep(("plan.lr", [0.1])).out == first.out
    assert sweep(("plan.lr", [0.2])).out.name == "sweep-quickstart-smoke-2"
