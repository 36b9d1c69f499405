"""Seeds that run side by side, in threads that go from round to round together."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.data.population import Population
from coterie.errors import SettingError
from coterie.experiments import reader
from coterie.fleet.stacked import StackedFleet
from coterie.runs.listeners import Label, Listener
from coterie.runs.signals import Stop
from coterie.runs.study import Study

BYTES = ("metrics.jsonl", "graphs.safetensors", "models/best.safetensors")


class Lockstep:
    """Stands in for fleets that compute as one: nobody opens a round before all are there that have not closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.closed: list[int] = []

    def __call__(self, populations: Sequence[Population], seeds: Sequence[int], **options: Any) -> list[StackedFleet]:
        self.batches.append(list(seeds))
        barrier = Meeting(len(seeds))
        closed = self.closed

        class View(StackedFleet):
            def begin(self, t: int) -> None:
                barrier.wait()
                super().begin(t)

            def close(self) -> None:
                closed.append(self.seed)
                barrier.leave()

        return [View(p, seed=s, **options) for p, s in zip(populations, seeds, strict=True)]


class Meeting:
    def __init__(self, parties: int) -> None:
        self.parties, self.here, self.number, self.condition = parties, 0, 0, threading.Condition()

    def wait(self) -> None:
        with self.condition:
            self.here += 1
            number = self.number
            self._go()
            assert self.condition.wait_for(lambda: self.number > number, timeout=30), "a view was not closed"

    def leave(self) -> None:
        with self.condition:
            self.parties -= 1
            self._go()

    def _go(self) -> None:
        if self.here and self.here == self.parties:
            self.here, self.number = 0, self.number + 1
            self.condition.notify_all()


class StopAfter(Listener):
    def __init__(self, stop: Stop, seed: int, done: int) -> None:
        self.stop, self.seed, self.done = stop, seed, done

    def round(self, run: Label, done: int) -> None:
        if (run.seed, done) == (self.seed, self.done):
            self.stop.set()


def study(tiny: str, out: Path, *sets: str) -> Study:
    made = Study.begin(reader.read(tiny, algorithms=["fedavg"], seeds=[0, 1, 2], sets=sets), out)
    made.together = Lockstep()
    return made


def outcomes(out: Path, algorithm: str = "fedavg") -> list[Any]:
    found: list[Any] = []
    for seed in (0, 1, 2):
        folder = out / algorithm / f"seed-{seed}"
        result = json.loads((folder / "result.json").read_text())
        found.append({k: v for k, v in result.items() if k not in ("seconds", "run")})
        found += [(folder / name).read_bytes() for name in BYTES]
    return found


@pytest.fixture
def whole(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made = study(tiny, tmp_path / "one-by-one")
    with monkeypatch.context() as alone:
        alone.setattr(Study, "_fits", lambda self, chosen: False)
        made.go()
    assert made.together.batches == []
    return outcomes(made.out)


def test_side_by_side_is_one_after_the_other(tiny: str, tmp_path: Path, whole: list[Any]):
    made = study(tiny, tmp_path / "out")
    made.go()
    assert outcomes(made.out) == whole
    assert made.together.batches == [[0, 1, 2]]
    assert sorted(made.together.closed) == [0, 1, 2]
    assert made.record("fedavg", 1).about["batch"] == [0, 1, 2]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_batch_goes_on_from_a_round_that_all_have(tiny: str, tmp_path: Path, whole: list[Any], every: int):
    for done in (1, 3, 5):
        made = study(tiny, tmp_path / f"out-{done}", f"run.checkpoint_every={every}")
        stop = Stop()
        made.go([StopAfter(stop, 1, done)], stop)
        rounds = [made.record("fedavg", s).about["rounds_run"] for s in (0, 1, 2)]
        assert max(rounds) - min(rounds) <= 1
        again = Study.find(made.out)
        again.together = Lockstep()
        again.go()
        assert again.together.batches == ([[0, 1, 2]] if min(rounds) < 6 else [])
        assert outcomes(made.out) == whole


def test_one_that_finished_before_a_crash_goes_along_again(tiny: str, tmp_path: Path, whole: list[Any]):
    made = study(tiny, tmp_path / "out")
    made.go()
    for seed in (1, 2):  # as if killed just before the others had finished
        made.record("fedavg", seed).mark("running")
    again = Study.find(made.out)
    again.together = Lockstep()
    again.go()
    assert again.together.batches == [[0, 1, 2]]
    assert outcomes(made.out) == whole


def test_one_that_fails_lets_the_others_finish(tiny: str, tmp_path: Path, whole: list[Any]):
    class Fails(Listener):
        def round(self, run: Label, done: int) -> None:
            if (run.seed, done) == (1, 3):
                raise SettingError("no more")

    made = study(tiny, tmp_path / "out")
    with pytest.raises(SettingError, match="fedavg: no more"):
        made.go([Fails()])
    assert [made.record("fedavg", s).status for s in (0, 1, 2)] == ["finished", "failed", "finished"]
    again = Study.find(made.out)
    again.together = Lockstep()
    again.go()
    assert outcomes(made.out) == whole


@pytest.mark.parametrize("algorithm", ["local", "fedavg", "finetuned_fedavg", "oracle"])
def test_one_joint_fleet_stopped_and_resumed_ends_as_if_never_stopped(tiny: str, tmp_path: Path, algorithm: str):
    def joint(name: str) -> Study:
        return Study.begin(reader.read(tiny, algorithms=[algorithm], seeds=[0, 1, 2]), tmp_path / name)

    first = joint("whole")
    first.go()
    for done in (1, 2, 4):
        made = joint(f"out-{done}")
        stop = Stop()
        made.go([StopAfter(stop, 1, done)], stop)
        Study.find(made.out).go()
        assert outcomes(made.out, algorithm) == outcomes(first.out, algorithm)
