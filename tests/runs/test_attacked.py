"""Runs under attack: from the command line to the record, several seeds at once, and whom the averages leave out."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import SettingError
from coterie.experiments import reader
from coterie.report import reading
from coterie.report.tables import collect, markdown
from coterie.runs.study import Study

ALIE = ("attack.kind=alie", "attack.clients=client-1,client-3")


def went(tiny: str, out: Path, *sets: str, names: tuple[str, ...] = ("fedavg", "local"), **how: Any) -> Study:
    study = Study.begin(reader.read(tiny, algorithms=names, sets=sets, **how), out)
    study.go()
    return study


def test_attackers_do_not_count_and_their_weight_is_recorded(tiny: str, tmp_path: Path) -> None:
    study = went(tiny, tmp_path / "a", *ALIE, names=("local", "fedavg"))
    local, fedavg = study.results()
    for result in (local, fedavg):
        values = result["clients"]["accuracy"]
        assert [v is None for v in values] == [False, True, False, True]
        assert result["metrics"]["accuracy"] == pytest.approx((values[0] + values[2]) / 2)
        assert result["metrics"]["worst_client"] == min(values[0], values[2])
    assert fedavg["metrics"]["share_improved"] in (0, 0.5, 1)
    run = tmp_path / "a" / "fedavg" / "seed-0"
    assert json.loads((run / "run.json").read_text())["attackers"] == ["client-1", "client-3"]
    graphs, _ = reading.graphs(run)
    lines = [line for line in reading.lines(run) if line["kind"] == "training"]
    assert [line["round"] for line in lines] == list(range(1, 7))
    for line in lines:
        w = graphs[line["round"]] if line["round"] in graphs else graphs[1]  # FedAvg's weights never change
        mass = fmean((w[i][1] + w[i][3]) / sum(w[i]) for i in (0, 2))
        assert line["extra"]["on_attackers"] == pytest.approx(mass, abs=1e-6)
    assert fedavg["on_attackers"] == pytest.approx({"1": mass, "6": mass}, abs=1e-6)
    assert set(local["on_attackers"].values()) == {0.0}
    table = markdown(collect([tmp_path / "a"]))
    assert "on attackers" in table
    assert f"{100 * mass:.1f} %" in table


def test_nobody_attacking_is_the_undisturbed_run_averaged_over_the_honest(tiny: str, tmp_path: Path) -> None:
    plain = went(tiny, tmp_path / "plain", names=("fedavg",)).results()[0]
    none = went(tiny, tmp_path / "none", "attack.kind=none", "attack.clients=2", names=("fedavg",)).results()[0]
    flip = went(tiny, tmp_path / "flip", "attack.kind=label_flip", "attack.clients=2", names=("fedavg",)).results()[0]
    a, b, c = (r["clients_last"]["accuracy"] for r in (plain, none, flip))
    assert b == [*a[:2], None, None]
    assert c[:2] != a[:2]
    assert c[2:] == [None, None]
    assert plain["on_attackers"] == {}
    assert none["on_attackers"].keys() == {"1", "6"}
    assert none["ledger"] == plain["ledger"] == flip["ledger"]
    assert "on attackers" not in markdown(collect([tmp_path / "plain"]))


@pytest.mark.parametrize("kind", ["gaussian", "label_flip"])
def test_seeds_under_attack_together_are_those_alone(tiny: str, tmp_path: Path, kind: str) -> None:
    sets = (f"attack.kind={kind}", "run.dtype=float64", "participation.count=3")
    together = went(tiny, tmp_path / "both", *sets, names=("fedavg",), seeds=[0, 1]).results()
    assert Study.find(tmp_path / "both").record("fedavg", 0).about["batch"] == [0, 1]
    for seed, result in enumerate(together):
        alone = went(tiny, tmp_path / f"alone-{seed}", *sets, names=("fedavg",), seeds=[seed]).results()[0]
        assert alone["clients"]["accuracy"] == result["clients"]["accuracy"]
        assert alone["last"]["loss"] == pytest.approx(result["last"]["loss"], rel=1e-9)


def test_an_attack_stopped_and_resumed_is_one_that_was_not(tiny: str, tmp_path: Path) -> None:
    from coterie.runs.listeners import Label, Listener
    from coterie.runs.signals import Stop

    class StopAfter(Listener):
        def round(self, run: Label, done: int) -> None:
            if done == 3:
                stop.set()

    stop = Stop()
    sets = ("attack.kind=gaussian", "attack.clients=last half")
    whole = went(tiny, tmp_path / "whole", *sets, names=("fedavg",)).results()[0]
    cut = Study.begin(reader.read(tiny, algorithms=["fedavg"], sets=sets), tmp_path / "cut")
    cut.go([StopAfter()], stop)
    assert not cut.results()
    resumed = Study.find(tmp_path / "cut").go()[0]
    for name in ("clients", "clients_last", "on_attackers", "ledger"):
        assert resumed[name] == whole[name]


def test_the_command_line_says_what_is_wrong_with_an_attack(tiny: str, tmp_path: Path) -> None:
    for sets, words in (
        (["attack.kind=alei"], "no attack is called 'alei': did you mean alie?"),
        (["attack.kind=alie", "attack.clients=5"], "5 attackers were asked for, and there are 4 clients"),
        (["attack.kind=alie", "attack.strenght=2"], "attack has no setting 'strenght': did you mean strength?"),
        (["attack.clients=2"], "attack needs the setting 'kind'"),
        (["attack.kind=alie", "attack.clients=true"], "attack.clients must be a whole number, not True"),
    ):
        options = [word for each in sets for word in ("--set", each)]
        out = tmp_path / "never"
        done = CliRunner().invoke(app, ["run", tiny, *options, "--out", str(out)])
        told = str(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else done.output
        assert words in " ".join(told.split()), told
        assert not out.exists()
    with pytest.raises(SettingError, match="alei"):
        reader.read(tiny, sets=["attack.kind=alei"])
