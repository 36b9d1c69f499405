"""What is wrong with an experiment for real sites, or with the way to them, comes out before any site is asked."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from authority import node_key
from coterie import cli

EXPERIMENT = """\
name = "wards"
[population]
kind = "sites"
clients = ["north", "south"]
model = { name = "mlp", sizes = [2, 4, 2] }
data = { columns = ["age", "bmi"], target = "ill", classes = ["no", "yes"] }
[run]
rounds = 3
checkpoint_every = 1
[algorithms.fedavg]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coterie.runs.files.os.fsync", lambda handle: None)
    for folder in ("tls", "half", "keys", "none", "rubbish"):
        (tmp_path / folder).mkdir()
    for file in ("tls/ca.crt", "tls/server.pem", "tls/server.key", "half/ca.crt"):
        (tmp_path / file).touch()  # Flower reads them, not Coterie
    (tmp_path / "rubbish" / "north.pub").write_text("ssh-ed25519 AAAA")
    node_key(tmp_path / "keys" / "north.key")
    return tmp_path


def coterie(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["coterie", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def serve(words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    return coterie(["serve", *words.split(), "--out", "study", "--print"], monkeypatch)


FAR = "wards.toml --host coterie.example --certificates tls"


@pytest.mark.parametrize(
    ("change", "words", "why"),
    [
        ("", "ward.toml", "ward.toml cannot be read"),
        ("", "quickstart", "only [population] kind = 'sites' can be served"),
        ("", "wards.toml --host coterie.example", "needs certificates: --certificates DIR"),
        ("", FAR.replace("tls", "half"), "there is no file half/server.pem"),
        ("", FAR + " --node-keys none", "there is no key NAME.pub in none"),
        ("", FAR + " --node-keys rubbish", "north.pub is no node's public key: ssh-keygen"),
        ("", "wards.toml --known-nodes", "Flower checks them over TLS only"),
        ("", "wards.toml --port 99999", "port must be a whole number from 1 to 65535"),
        ("", "wards.toml --least 3", "--least 3: wards.toml declares 2 clients"),
        ("", "wards.toml --deadline 0", "deadline must be a number above 0"),
        ("", "wards.toml --precision float8", "must be one of 'full'"),
        ("checkpoint_every = 1->checkpoint_every = 2", "wards.toml", "checkpoint_every must be 1"),
        ("mlp->mpl", "wards.toml", "no model is called 'mpl': did you mean mlp?"),
        ("[2, 4, 2]->[3, 4, 2]", "wards.toml", "cannot take samples of shape (2,)"),
        ("[2, 4, 2]->[2, 4, 1]", "wards.toml", "wards.toml: client 'north': train label 1 is out of range"),
        ("fedavg->comet", "wards.toml", "wards.toml: no public inputs called 'public'"),
        ("fedavg->fedavgg", "wards.toml", "did you mean fedavg?"),
    ],
)
def test_what_could_not_work_is_one_sentence_and_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str, words: str, why: str
) -> None:
    old, _, new = change.partition("->")
    assert old in EXPERIMENT
    (here / "wards.toml").write_text(EXPERIMENT.replace(old, new) if old else EXPERIMENT)
    assert serve(words, monkeypatch) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1
    assert not (here / "study").exists()


@pytest.mark.parametrize("command", ["run wards.toml", "sweep wards.toml --grid plan.lr=0.1,0.2"])
def test_a_simulator_has_no_data_of_real_sites(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (here / "wards.toml").write_text(EXPERIMENT)
    assert coterie([*command.split(), "--out", "study"], monkeypatch) == 2
    assert capsys.readouterr().err == "coterie: wards.toml: the data are at real sites: see `coterie serve --help`\n"


def test_what_an_experiment_of_real_sites_costs_is_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "wards.toml").write_text(EXPERIMENT)
    assert coterie(["show", "wards.toml"], monkeypatch) == 0
    said = capsys.readouterr().out
    assert "# fedavg: up m·d, down m·d; phases 1" in said
    assert said.endswith("# time and memory: known at the sites\n")


def test_what_could_work_is_prepared_and_its_commands_are_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "wards.toml").write_text(EXPERIMENT)
    assert serve(FAR + " --node-keys keys --least 2 --port 65535", monkeypatch) == 0
    first, link, register, run = capsys.readouterr().out.splitlines()
    assert first.startswith("for the sites: study/experiment.toml, hash ")
    assert "flower-superlink --host coterie.example --port 65535" in link
    assert register.endswith(f"flwr supernode register {here}/keys/north.pub coterie")
    assert f"flwr run {here}/study/server/coterie-app coterie" in run
