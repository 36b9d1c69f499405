import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coterie import cli
from coterie.experiments import reader
from coterie.runs.study import Study

COMMAND = [sys.executable, "-c", "from coterie.cli import main; main()"]


@pytest.fixture
def coterie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Call the command in this process: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['coterie', '--help']\nfrom coterie.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_quickstart_from_run_to_compare(coterie, tmp_path: Path):
    code, out, err = coterie(
        "run", "quickstart", "--scale", "smoke", "--json", "r.json", "--algorithms", "local,oracle"
    )
    assert (code, err) == (0, "")
    assert "local" in out
    assert out.splitlines()[-1].startswith("next: ")
    assert "coterie run quickstart" in out.splitlines()[-1]
    told = json.loads((tmp_path / "r.json").read_text())
    assert set(told) == {"experiment", "scale", "results"}
    assert (told["experiment"], told["scale"]) == ("quickstart", "smoke")
    for result in told["results"]:
        assert {"algorithm", "seed", "metrics", "last", "ledger", "seconds", "run"} <= set(result)
        assert {
            "accuracy",
            "accuracy_std_clients",
            "balanced_accuracy",
            "loss",
            "share_improved",
            "worst_client",
        } <= set(result["metrics"])
        assert set(result["metrics"]) == set(result["last"])
        assert set(result["ledger"]) == {"sent", "broadcast"}
        assert set(result["ledger"]["sent"]["up"]) == {"numbers", "bytes"}
        assert (tmp_path / result["run"] / "result.json").exists()
    assert told["results"][1]["metrics"]["share_improved"] is not None
    out_dir = tmp_path / "runs" / "quickstart-smoke"
    assert {p.name for p in (out_dir / "figures").iterdir()} >= {"curves.png", "graph-oracle.png", "holdings.png"}

    code, out, _ = coterie("compare", str(out_dir), "--markdown", "--json", "again.json")
    assert code == 0
    assert "| local" in out
    again = json.loads((tmp_path / "again.json").read_text())
    assert [r["metrics"] for r in again["results"]] == [r["metrics"] for r in told["results"]]

    code, out, _ = coterie("compare", str(out_dir), "--clients")
    assert (code, "gain over local" in out, "oracle" in out) == (0, True, True)

    code, out, _ = coterie("resume", str(out_dir))
    assert code == 0

    code, _, err = coterie("run", "quickstart", "--out", str(out_dir))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "already used" in err

    client = json.loads((out_dir / "local" / "seed-0" / "run.json").read_text())["keys"][0]
    code, out, err = coterie("export", str(out_dir / "local" / "seed-0"), "--client", client, "--to", "exported")
    assert code == 0, err
    assert (tmp_path / "exported" / "model.safetensors").exists()


WRONG = {
    ("run", "quikstart"): "did you mean quickstart?",
    ("run", "quickstart", "--algorithms", "fedavgg"): "did you mean fedavg?",
    ("run", "quickstart", "--set", "run.rouns=3"): "did you mean rounds?",
    ("run", "quickstart", "--set", "population.partition.share=7"): "share",
    ("run", "quickstart", "--seeds", "a"): "--seeds takes whole numbers",
    ("run", "quickstart", "--scale", "huge"): "no scale is called 'huge'",
    ("run", "quickstart", "--device", "gpu"): "there is no device 'gpu'",
    ("run", "quickstart", "--json", "nowhere/r.json"): "nowhere/r.json cannot be written",
    ("run", "quickstart", "--tuned", "none.toml"): "cannot be read",
    ("resume", "nowhere"): "holds no experiment",
    ("compare", "nowhere"): "nowhere",
    ("compare", "nowhere", "--clients", "--latex"): "--clients is for the terminal or --markdown",
    ("compare", "nowhere", "--metric", "loss"): "--metric goes with --clients",
    ("list", "algoritms"): "did you mean algorithms?",
    ("sweep", "quickstart", "--grid", "plan.lr"): "--grid takes path=v1,v2",
    ("rum", "quickstart"): "run",
    ("run", "quickstart", "--seed", "1"): "--seeds",
    ("data", "get", "mnits"): "mnist",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_is_wrong_is_one_line_and_exit_code_2(coterie, tmp_path: Path, arguments: tuple[str, ...]):
    code, out, err = coterie(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert WRONG[arguments] in err
    assert not list(tmp_path.iterdir())


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["coterie", "run", "quikstart", "--debug"])
    with pytest.raises(ValueError, match="quickstart"):
        cli.main()


def test_lists_and_show(coterie, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert "quickstart" in coterie("list")[1]
    assert "oracle" in coterie("list", "algorithms")[1]
    listed = coterie("list", "data")[1]
    assert re.search(r"digits .* library .*CC BY 4\.0", listed)
    assert re.search(r"cifar10 +CIFAR-10 +no +184\.8 .* official", listed)
    assert f"In {tmp_path}"[:20] in listed
    code, out, _ = coterie("show", "quickstart", "--set", "fedavg.server_lr=0.5", "--quick")
    assert code == 0
    assert "server_lr = 0.5" in out
    assert "# clients: 8, true groups: 4" in out
    assert "# parameters of a model: 2,410" in out
    assert "phases 1" in out


def test_a_sweep_and_a_run_with_what_it_chose(coterie, tmp_path: Path):
    code, out, err = coterie(
        "sweep", "quickstart", "--scale", "smoke", "--algorithms", "local,fedavg", "--grid", "plan.lr=0.0,0.3"
    )
    assert code == 0, err
    assert "local: plan.lr = 0.3" in out
    command = out.splitlines()[-1].removeprefix("next: coterie ").split()
    code, out, err = coterie(*command, "--scale", "smoke", "--algorithms", "local", "--out", "tuned")
    assert code == 0, err
    assert json.loads((tmp_path / "tuned/local/seed-0/run.json").read_text())["settings"]["plan"]["lr"] == 0.3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_pauses_with_a_checkpoint_and_resuming_ends_with_the_same_numbers(
    coterie, tmp_path: Path, number: int, code: int
):
    sets = ["run.rounds=120", "run.evaluate_every=20", "run.checkpoint_every=1000", "run.seeds=[0]"]
    options = ["--algorithms", "fedavg", *(word for change in sets for word in ("--set", change))]
    command = [*COMMAND, "run", "quickstart", *options, "--out", "paused"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "paused/fedavg/seed-0/metrics.jsonl"
    while not (metrics.exists() and '"round":20' in metrics.read_text()):
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.splitlines() == ["paused: go on with `coterie resume paused`"]
    folder = tmp_path / "paused/fedavg/seed-0"
    about = json.loads((folder / "run.json").read_text())
    assert about["status"] == "paused"
    assert 20 <= about["rounds_run"] < 120
    assert coterie("resume", "paused")[0] == 0
    assert (folder / "metrics.jsonl").read_bytes() == never_stopped(tmp_path / "whole", sets)


def never_stopped(out: Path, sets: list[str]) -> bytes:
    Study.begin(reader.read("quickstart", algorithms=["fedavg"], sets=sets), out).go()
    return (out / "fedavg/seed-0/metrics.jsonl").read_bytes()


def test_a_full_disk_pauses_with_the_checkpoint_intact(coterie, tmp_path: Path):
    sets = ["run.rounds=40", "run.evaluate_every=2", "run.checkpoint_every=5", "run.seeds=[0]", "run.keep_models=false"]
    options = ["--algorithms", "fedavg", *(word for change in sets for word in ("--set", change))]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
    limited = [sys.executable, "-c", limit + COMMAND[-1], "run", "quickstart", *options, "--out", "full"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "the disk is full" in done.stderr
    assert "coterie resume full" in done.stderr
    folder = tmp_path / "full/fedavg/seed-0"
    about = json.loads((folder / "run.json").read_text())
    assert about["status"] == "paused"
    assert 0 < about["rounds_run"] < 40
    assert coterie("resume", "full")[0] == 0
    assert (folder / "metrics.jsonl").read_bytes() == never_stopped(tmp_path / "whole", sets)
