"""A site's folder from `coterie site prepare` to the first answer, and every way in which a person can get it wrong."""

import hashlib
import json
import stat
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from authority import authority
from coterie import cli
from coterie.asks import Evaluate, Fit, Own, Plan
from coterie.experiments import reader
from coterie.fleet.remote import InProcess, RemoteFleet, declared
from coterie.sites.folder import SiteFolder, answer

EXPERIMENT = """\
name = "wards"
[population]
kind = "sites"
clients = ["north", "south"]
model = { name = "linear", inputs = 2, outputs = 2 }
data = { columns = ["age", "bmi"], target = "ill", classes = ["no", "yes"], scale = "client", test = 0.25 }
[run]
rounds = 3
seeds = [0]
checkpoint_every = 1
keep_models = false
[plan]
steps = 1
batch = 8
[algorithms.fedavg]
[algorithms.ditto]
"""


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.runs.files.os.fsync", lambda handle: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the experiment and two hospitals' tables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wards.toml").write_text(EXPERIMENT)
    g = torch.Generator().manual_seed(0)
    for name in ("north", "south"):
        rows = torch.rand(40, 2, generator=g)
        lines = ["age,bmi,ill", *(f"{a:.3f},{b:.3f},{'yes' if a > b else 'no'}" for a, b in rows.tolist())]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def coterie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path):
    """Call the command in this process: exit code, output, errors."""

    def call(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *words.split()])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


PREPARE = "site prepare N --experiment wards.toml --client north --csv north.csv"


def test_from_prepare_to_the_first_answer(coterie, here: Path) -> None:
    code, out, err = coterie(PREPARE)
    assert (code, err) == (0, "")
    assert "north: train: 30" in out
    mark = out.split()[-1]
    assert out.endswith(f"coterie site approve N {mark}\n")
    for name in ("N", "N/secret"):
        assert stat.S_IMODE((here / name).stat().st_mode) & 0o077 == 0, name
    assert coterie(f"site approve N {mark}")[0] == 0
    assert coterie("site check N")[1].splitlines()[-1].startswith(f"approved: {mark}")
    coterie(PREPARE.replace("north", "south").replace(" N ", " S "))
    SiteFolder(here / "S").approve(mark)

    experiment = reader.read("wards.toml")
    assert reader.fingerprint(experiment) == mark  # of the file as it was given, and of the copy with everything in it
    told: list[str] = []
    sites = {name: (lambda block, name=name: answer(here / name, block, "Flower run 7")) for name in ("N", "S")}
    fleet = RemoteFleet(declared(experiment.population(0)), InProcess(sites), experiment=mark, run="study/ditto",
                        tell=told.append)  # fmt: skip
    fleet.begin(0)
    assert fleet.present.all(), told
    assert fleet.sizes("train").tolist() == [30, 30]
    trained = fleet.ask(Fit(fleet.everyone, fleet.initial()[0], Plan(steps=20, batch=8, lr=0.5)))
    assert trained.ok.all(), told
    after = fleet.initial()[0] + trained.rows
    assert float(fleet.watch(Evaluate(fleet.everyone, after)).metrics["accuracy"].mean()) > 0.7
    lines = [json.loads(line) for line in (here / "N" / "log.jsonl").read_text().splitlines()]
    assert all(line["asker"] == "Flower run 7" and line["numbers"] >= 0 for line in lines)
    fit = next(line for line in lines if line.get("ask") == "fit")
    assert fit["numbers"] == fleet.d + 2  # the update, its loss, whether it went well
    assert not coterie("site check N")[2]


def test_a_site_answers_the_experiment_it_approved_and_no_other(coterie, here: Path) -> None:
    mark = coterie(PREPARE)[1].split()[-1]
    experiment = reader.read("wards.toml")

    def present(hash_: str) -> bool:
        sites = {"N": lambda block: answer(here / "N", block, "")}
        fleet = RemoteFleet(declared(experiment.population(0)), InProcess(sites), experiment=hash_, run="a/ditto")
        return bool(fleet.meet()[0])

    assert not present(mark)
    SiteFolder(here / "N").approve(mark)
    assert present(mark)
    assert not present("0" * 64)
    with (here / "N" / "experiment.toml").open("a") as file:
        file.write("\n[participation]\nfraction = 0.5\n")
    assert not present(mark)  # what lies there now is not what was approved


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (PREPARE.replace("--client north", "--client nort"), "no client 'nort': did you mean north?"),
        (PREPARE.replace("north.csv", "nowhere.csv"), "nowhere.csv cannot be read"),
        (PREPARE.replace("--csv north.csv", ""), "give one of --csv, --images, --tensors and --loader"),
        (PREPARE + " --tensors x.npz", "give one of"),
        (PREPARE.replace("--csv", "--images"), "declares no images"),
        (PREPARE.replace("--csv north.csv", "--loader north.csv"), "given as FILE.py:FUNCTION"),
        (PREPARE.replace("wards.toml", "nowhere.toml"), "nowhere.toml cannot be read"),
        (PREPARE.replace("wards.toml", "quickstart"), "its clients are no real sites"),
        ("site check N", "N is no site: there is no site.toml in it"),
        ("site approve N 00", "N is no site"),
        ("site join N 127.0.0.1:1 --print", "N is no site"),
    ],
)
def test_what_is_wrong_at_first_is_one_sentence(coterie, words: str, why: str) -> None:
    code, _, err = coterie(words)
    assert code == 2
    assert why in err
    assert err.count("\n") == 1


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "words", "why"),
    [
        (lambda d: None, "site approve N 00", "has the hash"),
        (lambda d: None, "site join N 127.0.0.1:1 --print", "not approved yet: read N/experiment.toml"),
        (lambda d: [SiteFolder(d / "N").approve(SiteFolder(d / "N").hash), (d / "N/bin/flwr-agentapp").unlink()],
         "site join N 127.0.0.1:1 --print", "no flwr-agentapp, in whose place Flower's own would run"),
        (lambda d: edited(d / "north.csv", "yes", "no"), "site check N", "has changed since it was prepared"),
        (lambda d: edited(d / "wards.toml", "0.25", "0.3"), PREPARE, "a site of another experiment"),
        (lambda d: edited(d / "N/site.toml", "per_round", "per_rond"), "site check N", "did you mean per_round?"),
        (lambda d: edited(d / "N/site.toml", "least_batch = 8", "least_batch = 0"), "site check N", "at least 1"),
        (lambda d: edited(d / "N/site.toml", 'device = "cpu"', 'device = "tpu0"'), "site check N", "no device 'tpu0'"),
        (lambda d: (d / "N/site.toml").write_text("[guard]\nnoise = 1.0\n[clients.north]\ncsv = 'x'\n"),
         "site check N", "give clip"),
        (lambda d: (d / "N/site.toml").write_text("approved = "), "site check N", "cannot be read"),
        (lambda d: (d / "N/data/north.safetensors").write_bytes(b"x"), "site check N", "is damaged"),
        (lambda d: (d / "N/site.toml").write_text("[clients.north]\nexcel = 'x'\n"), "site check N", "says one of csv"),
    ],
)  # fmt: skip
def test_what_is_wrong_later_is_one_sentence(coterie, here: Path, spoil, words: str, why: str) -> None:
    coterie(PREPARE)
    spoil(here)
    code, _, err = coterie(words)
    assert code == 2
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("127.0.0.1", "the server is HOST:PORT"),
        ("127.0.0.1:9o92", "the server is HOST:PORT"),
        ("https://coterie.example:9092 --ca ca/ca.crt", "the server is HOST:PORT"),
        ("coterie.example:9092", "anyone could pose as coterie.example"),
        ("127.0.0.1:9092 --port 0", "--port must be a whole number from 1"),
        ("127.0.0.1:9092 --ca ca/ca.crtt", "--ca: there is no file ca/ca.crtt"),
        ("127.0.0.1:9092 --ca north.csv", "north.csv holds no certificate"),
        ("127.0.0.1:9092 --key north.csv", "--key goes with --ca"),
        ("127.0.0.1:9092 --ca ca/ca.crt --key north.csv", "north.csv is no node's private key: ssh-keygen"),
    ],
)
def test_what_is_wrong_on_the_way_to_a_server_is_one_sentence(coterie, here: Path, words: str, why: str) -> None:
    authority(here / "ca")
    mark = coterie(PREPARE)[1].split()[-1]
    SiteFolder(here / "N").approve(mark)
    code, _, err = coterie(f"site join N {words} --print")
    assert code == 2
    assert why in err
    assert err.count("\n") == 1


def test_own_code_can_stand_where_rows_leave(coterie, here: Path) -> None:
    mark = coterie(PREPARE)[1].split()[-1]
    SiteFolder(here / "N").approve(mark)
    (here / "masks.py").write_text(
        "class Zeros:\n"
        "    def __init__(self, secret): assert len(secret) == 32\n"
        "    def rows(self, what, rows): return 0 * rows\n"
        "    def sums(self, what, sums, weight): return sums, weight\n"
    )
    with (here / "N" / "site.toml").open("a") as file:
        file.write(f'\n[guard]\ncode = "{here}/masks.py:Zeros"\n')
    assert tomllib.loads((here / "N" / "site.toml").read_text())["approved"] == mark
    experiment = reader.read("wards.toml")
    fleet = RemoteFleet(declared(experiment.population(0)),
                        InProcess({"N": lambda block: answer(here / "N", block, "")}),
                        experiment=mark, run="a/fedavg")  # fmt: skip
    fleet.begin(0)
    trained = fleet.ask(Fit([0], fleet.initial()[0], Plan(steps=3, batch=8, lr=0.5)))
    assert trained.ok.all()
    assert not trained.rows.any()


def test_a_site_takes_its_own_model_along(coterie, here: Path) -> None:
    from safetensors.torch import load_file

    mark = coterie(PREPARE)[1].split()[-1]
    SiteFolder(here / "N").approve(mark)
    export = "site export N --client north --to out --algorithm ditto"
    assert "was not asked anything yet" in coterie(export)[2]
    edited(here / "N/site.toml", "own_rows = false", "own_rows = true")
    fleet = RemoteFleet(declared(reader.read("wards.toml").population(0)),
                        InProcess({"N": lambda block: answer(here / "N", block, "")}),
                        experiment=mark, run="a/ditto")  # fmt: skip
    rows = []
    for t in range(2):
        fleet.begin(t)
        rows.append(fleet.ask(Fit([0], Own("personal"), Plan(steps=3, batch=8, lr=0.5), give="rows")).rows[0])
    code, out, err = coterie(export)
    assert (code, err) == (0, "")
    assert "out/model.safetensors" in out
    held = load_file(here / "out" / "model.safetensors")
    assert torch.equal(torch.cat([held["head.weight"].flatten(), held["head.bias"]]), rows[1])
    assert "--algorithm must say which of fedavg, ditto" in coterie(export.replace(" --algorithm ditto", ""))[2]
    assert "no model of 'north' lives here" in coterie(export.replace("ditto", "fedavg"))[2]
    assert "did you mean north?" in coterie(export.replace("north", "nort"))[2]


def test_public_inputs_are_one_file_that_every_site_holds(coterie, here: Path) -> None:
    from safetensors.torch import save_file

    from coterie.asks import Predict

    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    save_file({"inputs": x}, here / "public.safetensors")
    mark = hashlib.sha256((here / "public.safetensors").read_bytes()).hexdigest()
    text = EXPERIMENT.replace("[run]", f'[population.public]\npublic = {{ samples = 5, sha256 = "{mark}" }}\n[run]')
    (here / "wards.toml").write_text(text)
    assert "give their file with --public" in coterie(PREPARE)[2]
    assert "is none of the experiment's public inputs" in coterie(PREPARE + " --public north.csv")[2]
    code, out, err = coterie(PREPARE + " --public public.safetensors")
    assert (code, err) == (0, "")
    SiteFolder(here / "N").approve(out.split()[-1])
    assert coterie(PREPARE)[0] == 0  # they are there already

    experiment = reader.read("wards.toml")
    fleet = RemoteFleet(declared(experiment.population(0)),
                        InProcess({"N": lambda block: answer(here / "N", block, "")}),
                        experiment=reader.fingerprint(experiment), run="a/fedavg")  # fmt: skip
    fleet.begin(0)
    row = fleet.initial()[0]
    said = fleet.ask(Predict([0], row[None]))
    assert said.ok.all()
    w, b = row[:4].reshape(2, 2), row[4:]
    torch.testing.assert_close(said.outputs[0], x @ w.T + b)
    wrong = text.replace("samples = 5", "samples = 6")
    (here / "wards.toml").write_text(wrong)
    words = PREPARE.replace(" N ", " M ") + " --public public.safetensors"
    assert "has 5 public inputs, and 6 are declared" in coterie(words)[2]


def test_whatever_is_broken_at_a_site_is_refused_and_names_no_path(here: Path) -> None:
    from coterie.fleet import wire

    for spoil in (lambda: None, lambda: (here / "N").mkdir(), lambda: (here / "N" / "site.toml").write_bytes(b"\xff")):
        spoil()
        said, _ = wire.unseal(answer(here / "N", b"", "x"), 1 << 20)
        assert said["refused"]
        assert str(here) not in said["refused"]
