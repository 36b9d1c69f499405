"""A run that was stopped, damaged or refused; compared, byte for byte, with one that never stopped."""

import json
import shutil
from pathlib import Path

import pytest

from coterie.errors import RecordError
from coterie.experiments import reader
from coterie.runs.listeners import Label, Listener
from coterie.runs.signals import Stop
from coterie.runs.study import Study

BYTES = ("metrics.jsonl", "graphs.safetensors", "models/best.safetensors", "models/last.safetensors")


class StopAfter(Listener):
    def __init__(self, stop: Stop, done: int) -> None:
        self.stop, self.done, self.told = stop, done, []

    def round(self, run: Label, done: int) -> None:
        if done == self.done:
            self.stop.set()

    def tell(self, message: str) -> None:
        self.told.append(message)


def outcome(study: Study, algorithm: str) -> dict[str, object]:
    folder = study.out / algorithm / "seed-0"
    result = json.loads((folder / "result.json").read_text())
    kept = {k: v for k, v in result.items() if k not in ("seconds", "run")}
    return {"result": kept} | {name: (folder / name).read_bytes() for name in BYTES}


def stopped(tiny: str, out: Path, algorithm: str, done: int, *sets: str) -> Study:
    study = Study.begin(reader.read(tiny, algorithms=[algorithm], sets=sets), out)
    stop = Stop()
    assert study.go([StopAfter(stop, done)], stop) == []
    assert study.record(algorithm, 0).status == "paused"
    return study


@pytest.mark.parametrize("algorithm", ["local", "fedavg", "finetuned_fedavg", "oracle"])
def test_stopping_at_any_round_changes_nothing(tiny: str, tmp_path: Path, algorithm: str):
    whole = Study.begin(reader.read(tiny, algorithms=[algorithm]), tmp_path / "whole")
    whole.go()
    expected = outcome(whole, algorithm)
    for done in range(1, 6):
        study = stopped(tiny, tmp_path / f"after-{done}", algorithm, done)
        again = Study.find(study.out / algorithm / "seed-0")
        again.go()
        assert outcome(again, algorithm) == expected, f"stopped after {done}"


def test_stopping_before_anything_and_between_checkpoints(tiny: str, tmp_path: Path):
    sets = ("run.checkpoint_every=4", "run.patience=9", "run.after_local=true")
    whole = Study.begin(reader.read(tiny, algorithms=["fedavg"], sets=sets), tmp_path / "whole")
    whole.go()
    early = Study.begin(reader.read(tiny, algorithms=["fedavg"], sets=sets), tmp_path / "early")
    stop = Stop()
    stop.set()
    early.go([], stop)
    Study.find(early.out).go()
    assert outcome(early, "fedavg") == outcome(whole, "fedavg")

    killed = stopped(tiny, tmp_path / "killed", "fedavg", 5, *sets)
    folder = killed.out / "fedavg" / "seed-0"
    (folder / "checkpoints" / "round-000005.safetensors").unlink()  # as if killed: nothing was saved at the stop
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round":5,"kind":"trai')
    Study.find(killed.out).go()
    assert outcome(killed, "fedavg") == outcome(whole, "fedavg")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tiny: str, tmp_path: Path):
    whole = Study.begin(reader.read(tiny, algorithms=["fedavg"]), tmp_path / "whole")
    whole.go()
    study = stopped(tiny, tmp_path / "stopped", "fedavg", 4)
    folder = study.out / "fedavg" / "seed-0" / "checkpoints"
    path = folder / "round-000004.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    listener = StopAfter(Stop(), -1)
    Study.find(study.out).go([listener])
    assert len(listener.told) == 1
    assert "round-000004.safetensors is damaged" in listener.told[0]
    assert outcome(study, "fedavg") == outcome(whole, "fedavg")


def test_both_checkpoints_damaged_begins_anew(tiny: str, tmp_path: Path):
    whole = Study.begin(reader.read(tiny, algorithms=["fedavg"]), tmp_path / "whole")
    whole.go()
    study = stopped(tiny, tmp_path / "stopped", "fedavg", 4)
    for path in (study.out / "fedavg" / "seed-0" / "checkpoints").iterdir():
        path.write_bytes(b"x")
    listener = StopAfter(Stop(), -1)
    Study.find(study.out).go([listener])
    assert len(listener.told) == 2
    assert outcome(study, "fedavg") == outcome(whole, "fedavg")


def test_finished_runs_are_not_run_again(tiny: str, tmp_path: Path):
    study = Study.begin(reader.read(tiny, algorithms=["fedavg"]), tmp_path / "out")
    study.go()
    before = (study.out / "fedavg" / "seed-0" / "run.json").stat().st_mtime_ns
    Study.find(study.out).go()
    assert (study.out / "fedavg" / "seed-0" / "run.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("which", ["experiment.json", "fedavg/seed-0/run.json"])
def test_the_record_of_a_newer_version_is_refused(tiny: str, tmp_path: Path, which: str):
    study = stopped(tiny, tmp_path / "out", "fedavg", 2)
    about = json.loads((study.out / which).read_text())
    (study.out / which).write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(RecordError, match=r"newer Coterie \(format 99"):
        Study.find(study.out).go()


def test_one_folder_is_for_one_process(tiny: str, tmp_path: Path):
    study = stopped(tiny, tmp_path / "out", "fedavg", 2)
    with study._locked(), pytest.raises(RecordError, match="in use by another process"):
        Study.find(study.out).go()


def test_a_used_folder_is_refused_and_left_alone(tiny: str, tmp_path: Path):
    study = stopped(tiny, tmp_path / "out", "fedavg", 2)
    before = sorted(p for p in study.out.rglob("*"))
    with pytest.raises(RecordError, match="already used"):
        Study.begin(reader.read(tiny), study.out)
    assert sorted(p for p in study.out.rglob("*")) == before
    file = tmp_path / "file"
    file.write_text("")
    for out, words in ((file, "is a file"), (file / "below", "cannot be used")):
        with pytest.raises(RecordError, match=words):
            Study.begin(reader.read(tiny), out)


def test_the_default_folder_gets_a_number(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    outs = [Study.begin(reader.read(tiny), None).out for _ in range(3)]
    assert [str(o) for o in outs] == ["runs/tiny-small", "runs/tiny-small-2", "runs/tiny-small-3"]


def test_nothing_that_is_no_record_is_resumed(tmp_path: Path):
    with pytest.raises(RecordError, match="holds no experiment"):
        Study.find(tmp_path)


def test_a_moved_record_goes_on(tiny: str, tmp_path: Path):
    study = stopped(tiny, tmp_path / "out", "fedavg", 3)
    shutil.move(study.out, tmp_path / "elsewhere")
    (result,) = Study.find(tmp_path / "elsewhere").go()
    assert result["run"] == str(tmp_path / "elsewhere" / "fedavg" / "seed-0")
