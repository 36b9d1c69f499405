"""Runs in which some are helped and the others only help: what is measured, what is kept, and several cores at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coterie.errors import CoterieError
from coterie.experiments import reader
from coterie.report import figures, reading
from coterie.report.tables import collect, markdown
from coterie.runs import workers
from coterie.runs.listeners import Label, Listener
from coterie.runs.signals import Stop, heeded
from coterie.runs.study import Study

TARGETS = ("mu-0.001-0", "mu-0.01-0", "mu-0.1-0")


def went(out: Path, *sets: str, names: tuple[str, ...] = ("sgd_full", "sgd_ideal", "tawt"), **how: Any) -> Study:
    study = Study.begin(reader.read("meritfed-mean", scale="smoke", algorithms=names, sets=sets), out)
    study.go(**how)
    return study


def test_distances_and_masses_are_those_of_the_targets(tmp_path: Path) -> None:
    study = went(tmp_path / "a", "run.keep_models=true", "run.workers=1", names=("meritfed-md",))
    result, people = study.results()[0], study.population(0)
    run = Path(result["run"])
    assert tuple(result["targets"]) == TARGETS == people.helped
    last = load_file(run / "models" / "last.safetensors")
    graphs, truth = reading.graphs(run)
    assert truth is None
    assert graphs[4].shape == (3, 27)
    for k, key in enumerate(TARGETS):
        told, place = result["targets"][key], people.keys.index(key)
        x = last[f"{key}/row"].double()
        assert told["distance"] == pytest.approx(float((x**2).sum()), rel=1e-6)  # the target's mean is zero
        y = people.targets[people.index["test"][place]]
        assert told["loss"] == pytest.approx(float((x - y).square().mean()), rel=1e-6)
        assert list(told["mass"]) == ["0", "1", "2"]
        for g, mass in told["mass"].items():
            mine = [i for i in range(27) if str(people.groups[i]) == g and people.pools[i] == k]
            assert mass == pytest.approx(float(graphs[4][k, mine].sum()), abs=1e-6)
        assert sum(told["mass"].values()) == pytest.approx(1)
        assert result["clients_last"]["distance"][place] == told["distance"]
    assert sum(v is not None for v in result["clients"]["distance"]) == 3
    assert result["last"]["distance"] == pytest.approx(sum(t["distance"] for t in result["targets"].values()) / 3)
    lines = [line for line in reading.lines(run) if line["kind"] == "training"]
    assert [len(line["ok"]) for line in lines] == [3] * 4


def test_reports_show_the_targets(tmp_path: Path) -> None:
    went(tmp_path / "a")
    text = markdown(collect([tmp_path / "a"]))
    assert "distance" in text
    for key in TARGETS:
        assert f"for {key}" in text
    tawt = next(line for line in text.splitlines() if line.startswith("| tawt") and "/" in line)
    assert tawt.count("/") == 6  # three masses for each of three targets
    drawn = {path.name for path in figures.draw(tmp_path / "a")}
    assert {"curves.png", "clients.png", "graph-tawt.png"} <= drawn


def same(a: Study, b: Study) -> None:
    for one, other in zip(a.results(), b.results(), strict=True):
        for key in ("algorithm", "seed", "targets", "ledger", "clients_last"):
            assert json.dumps(one[key]) == json.dumps(other[key])


@pytest.mark.skipif(not workers.able(), reason="needs Linux and two cores")
def test_algorithms_on_cores_of_their_own_find_the_same(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Ear(Listener):
        def round(self, run: Label, done: int) -> None:
            heard.append((run.algorithm, done))

        def end(self, run: Label, status: str) -> None:
            heard.append((run.algorithm, status))

    alone = went(tmp_path / "one", "run.workers=1")
    both = went(tmp_path / "two", "run.workers=2", listeners=[Ear()])
    same(alone, both)
    for name in ("sgd_full", "sgd_ideal", "tawt"):
        assert [what for algorithm, what in heard if algorithm == name] == [1, 2, 3, 4, "finished"]


@pytest.mark.skipif(not workers.able(), reason="needs Linux and two cores")
def test_one_that_fails_leaves_the_others_and_one_that_stops_goes_on(tmp_path: Path) -> None:
    sets = ("run.workers=2", "meritfed.alpha=[1.0, 2.0]", "run.checkpoint_every=1")
    study = Study.begin(
        reader.read("meritfed-mean", scale="smoke", algorithms=("meritfed", "sgd_full", "tawt"), sets=sets),
        tmp_path / "a",
    )
    with pytest.raises(CoterieError, match=r"meritfed: .*alpha has 2 values for 3 targets"):
        study.go()
    assert [r["algorithm"] for r in study.results()] == ["sgd_full", "tawt"]

    class Impatient(Listener):
        def __init__(self, stop: Stop) -> None:
            self.stop = stop

        def round(self, run: Label, done: int) -> None:
            self.stop.set()

    stop = Stop()
    long = ("run.workers=2", "run.rounds=100", "run.evaluate_every=50", "run.checkpoint_every=20")
    names = ("sgd_full", "sgd_ideal", "tawt")
    study = Study.begin(reader.read("meritfed-mean", scale="smoke", algorithms=names, sets=long), tmp_path / "b")
    with heeded(stop):  # as `coterie run` has it: the processes hear SIGTERM as it would
        study.go([Impatient(stop)], stop)
    assert study.record("tawt", 0).status == ""  # two were going, and no third began
    stood = {study.record(name, 0).status for name in names[:2]}
    assert stood & {"paused", "finished"}
    assert stood <= {"paused", "finished", ""}  # the one whose round was heard, and one that may not have begun
    again = Study.find(tmp_path / "b")
    again.go()
    same(went(tmp_path / "c", *long), again)


def test_the_three_means_differ_by_their_means_alone() -> None:
    people = reader.read("meritfed-mean", scale="smoke").population(3)
    held = torch.stack([people.targets[rows] for rows in people.index["train"]]).view(3, 9, 40, 10)
    assert people.inputs.shape[1] == 1
    shift = (held[1] - held[0])[2:6].mean((0, 1))
    torch.testing.assert_close(shift, torch.full((10,), (0.01 - 0.001) / 10**0.5).double(), rtol=0, atol=1e-9)
    assert torch.equal(held[0, :2], held[1, :2])
    assert torch.equal(held[0, 6:], held[2, 6:])
    sizes = {split: people.sizes(split).nonzero().flatten().tolist() for split in ("validation", "test")}
    assert sizes == {"validation": [0, 9, 18], "test": [0, 9, 18]}
    assert float(people.truth[8].norm()) == pytest.approx(1)
    start = torch.nn.utils.parameters_to_vector(people.make(0).parameters())
    torch.testing.assert_close(start, torch.full((10,), 10**-0.5))
