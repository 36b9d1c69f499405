"""An exported model computes what the recorded one does, in a fresh module and in ONNX."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import write_run
from safetensors.torch import load_file, save_file
from torch import nn

from coterie.data.population import Client, Population, population
from coterie.errors import RecordError, SettingError
from coterie.experiments import populations, reader
from coterie.models import build
from coterie.report.export import export

W = np.array([[0.5, 0.4, 0.1, 0.0], [0.1, 0.9, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.2, 0.3, 0.1, 0.4]])


def normed() -> nn.Module:
    """A model with buffers."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


def choosy_one() -> nn.Module:
    """A model that no tracer can follow."""

    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.jit.is_tracing():
                raise RuntimeError("not while tracing")
            return self.head(x.flatten(1))

    return Choosy()


def made(seed: int, *, choosy: bool = False) -> Population:
    maker = choosy_one if choosy else normed
    x, y = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(12) % 2
    return population([Client(f"client-{i}", (x[i : i + 9], y[i : i + 9])) for i in range(4)], model=maker)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated clients whose model has buffers."""
    monkeypatch.setitem(populations.POPULATIONS, "toy", made)


def given(people: dict[str, Any], name: str = "toy") -> dict[str, Any]:
    tables = {"name": name, "scale": "small", "population": people, "run": {"rounds": 8}, "algorithms": {"local": {}}}
    return {"format": 1, "experiment": tables}


def saved(module: nn.Module, key: str) -> dict[str, torch.Tensor]:
    """A module as the record names it, without the package's own flattening."""
    row = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return {f"{key}/row": row} | {f"{key}/buffers/{k}": v.clone() for k, v in module.named_buffers()}


def record(
    out: Path, people: dict[str, Any], make: Any, graphs: dict[str, np.ndarray] | None = None
) -> tuple[Path, Any]:
    """A run with random models; the modules they came from, by which and client."""
    run = write_run(out, "cobo", 0, [0.5, 0.6, 0.7, 0.8], graphs=graphs or {"round-000008": W})
    (out / "experiment.json").write_text(json.dumps(given(people)))
    (run / "models").mkdir()
    torch.manual_seed(0)
    modules = {}
    for which in ("best", "last"):
        held = {}
        for i in range(4):
            module = make()
            for name, buffer in module.named_buffers():
                if "running" in name:
                    buffer.uniform_(0.5, 2)
            modules[which, i] = module.eval()
            held |= saved(module, f"client-{i}")
        save_file(held, run / "models" / f"{which}.safetensors")
    return run, modules


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("which", ["best", "last"])
def test_model_and_buffers_come_back(out: Path, which: str) -> None:
    run, modules = record(out, {"kind": "toy"}, normed)
    paths = export(run, "client-2", which=which)
    assert [p.name for p in paths] == ["model.safetensors", "model.onnx", "card.md"]
    fresh = normed()
    fresh.load_state_dict(load_file(paths[0]))
    x = torch.randn(5, 1, 4, 4)
    with torch.no_grad():
        wanted = modules[which, 2](x)
        torch.testing.assert_close(fresh.eval()(x), wanted, rtol=0, atol=0)
        from onnx.reference import ReferenceEvaluator

        got = ReferenceEvaluator(str(paths[1])).run(None, {"inputs": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-5, atol=1e-6)


def test_the_lines_on_the_card_load_the_model(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        "data": "digits",
        "partition": {"name": "permuted_clusters", "clusters": 2, "clients_per_cluster": 2, "share": 0.1},
        "model": {"name": "mlp", "sizes": [64, 8, 10]},
    }
    run, modules = record(out, tables, lambda: build("mlp", sizes=[64, 8, 10]))
    paths = export(run, "client-1", tmp_path / "mine")
    assert paths[0].parent == tmp_path / "mine"
    text = paths[-1].read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line]) == 5
    monkeypatch.chdir(tmp_path / "mine")
    scope: dict[str, Any] = {}
    exec(code[1], scope)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(scope["model"](x), modules["best", 1](x), rtol=0, atol=0)
    assert "(batch, 1, 8, 8)" in text
    assert "permuted_clusters" in text
    assert "| accuracy (%) | 60.0 |" in text
    assert '"lr": 0.1' in text
    assert "torch 2.13" in text
    assert "After round 8, client-1 listens to client-0 (0.1) only; its own weight is 0.9." in text
    assert "| client-0 | 0.1 |" in text
    assert "client-2" not in text


@pytest.mark.usefixtures("toy")
def test_a_model_that_does_not_convert_is_still_exported(out: Path) -> None:
    run, _ = record(out, {"kind": "toy", "choosy": True}, choosy_one)
    said: list[str] = []
    paths = export(run, "client-0", say=said.append)
    assert [p.name for p in paths] == ["model.safetensors", "card.md"]
    assert not (paths[0].parent / "model.onnx").exists()
    (line,) = said
    assert line == "no ONNX file: this model does not convert (not while tracing)"
    assert "not while tracing" in paths[-1].read_text()


@pytest.mark.usefixtures("toy")
def test_without_the_extra_there_is_no_onnx_and_one_line(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = record(out, {"kind": "toy"}, normed)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnx" else real(name, *a))
    said: list[str] = []
    paths = export(run, "client-0", say=said.append)
    assert [p.name for p in paths] == ["model.safetensors", "card.md"]
    assert said == ["no ONNX file: the package onnx is not installed (it comes with coterie[onnx])"]


@pytest.mark.usefixtures("toy")
def test_what_is_wrong_is_said(out: Path, tmp_path: Path) -> None:
    run, _ = record(out, {"kind": "toy"}, normed)
    with pytest.raises(SettingError, match=r"no client of .* is called 'klient-2': did you mean client-2\?"):
        export(run, "klient-2")
    with pytest.raises(SettingError, match=r"did you mean best\?"):
        export(run, "client-2", which="bets")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be used"):
        export(run, "client-2", tmp_path / "file")
    assert export(out, "client-2", tmp_path / "one")  # the only run of a folder is meant
    write_run(out, "local", 0, [0.5] * 4)
    with pytest.raises(RecordError, match="holds 2 runs: name one of them"):
        export(out, "client-2")
    held = load_file(run / "models" / "best.safetensors")
    save_file({k: v for k, v in held.items() if "client-2" not in k}, run / "models" / "best.safetensors")
    with pytest.raises(RecordError, match="holds no model of 'client-2'"):
        export(run, "client-2")
    (run / "models" / "best.safetensors").write_bytes(b"no")
    with pytest.raises(RecordError, match=r"best\.safetensors cannot be read"):
        export(run, "client-2")
    shutil.rmtree(run / "models")
    with pytest.raises(RecordError, match=r"best\.safetensors is missing"):
        export(run, "client-2")
    (out / "experiment.json").unlink()
    with pytest.raises(RecordError, match=r"experiment\.json is missing"):
        export(run, "client-2")


def test_an_experiment_as_the_runner_writes_it_is_understood(out: Path) -> None:
    experiment = reader.read("quickstart", scale="smoke")
    assert reader.restore(reader.plain(experiment), "x").algorithms == experiment.algorithms
