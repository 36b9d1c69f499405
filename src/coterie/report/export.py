"""Take one client's model out of a run: its tensors, ONNX where it converts, and a card that says what it is."""

import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.data.population import Population
from coterie.errors import CoterieError, RecordError, SettingError
from coterie.experiments.reader import Experiment, restore
from coterie.fleet.layout import Layout
from coterie.report import card, reading
from coterie.runs.files import explained
from coterie.settings import hint
from coterie.tasks import logits_of


def export(
    run: str | Path,
    client: str,
    to: str | Path | None = None,
    which: str = "best",
    say: Callable[[str], object] = print,
) -> list[Path]:
    """Write `model.safetensors`, `model.onnx` where it converts, and `card.md` of a client's model.

    `which` is the model of the client's best validation round, or of the last. They go to a folder `to`, by default
    below the run's own. The architecture comes from the experiment's own description, which needs its data at hand.
    """
    run = _one(Path(run))
    if which not in ("best", "last"):
        raise SettingError(f"no model is called {which!r}: {hint(which, ('best', 'last'))}")
    result = reading.finished(run)
    keys = result["about"]["keys"]
    if client not in keys:
        raise SettingError(f"no client of {run} is called {client!r}: {hint(client, keys)}")
    experiment = _experiment(run)
    people = experiment.population(result["about"]["seed"])
    if list(people.keys[: people.n]) != keys:
        raise RecordError(f"{run / 'run.json'} names other clients than its experiment makes: run it again")
    model = rebuilt(run, people, client, which)
    safe = re.sub(r"[^\w.-]", "_", client)
    folder = Path(to) if to is not None else run / "export" / f"{safe}-{which}"
    written, example, trouble = write_model(model, people, client, folder, say)
    with explained("the folder", folder):
        told = card.write(result, experiment, people, model, client, which, example, trouble)
        written.append(folder / "card.md")
        written[-1].write_text(told, encoding="utf-8")
    return written


def write_model(
    model: nn.Module, people: Population, client: str, folder: Path, say: Callable[[str], object] = print
) -> tuple[list[Path], Tensor, str]:
    """Write `model.safetensors`, and `model.onnx` where it converts; with what it was tried on, and why it does not."""
    with explained("the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "model.safetensors"]
        save_file({name: value.contiguous().clone() for name, value in model.state_dict().items()}, written[0])
        example = inputs(people, people.keys.index(client), model)
        trouble = onnx(model, example, folder / "model.onnx")
        if trouble:
            say(f"no ONNX file: {trouble}")
        else:
            written.append(folder / "model.onnx")
    return written, example, trouble


def rebuilt(run: Path, people: Population, client: str, which: str) -> nn.Module:
    """A module of the client's architecture with the recorded parameters and buffers, in eval mode."""
    path = run / "models" / f"{which}.safetensors"
    held = reading.tensors(path)
    if f"{client}/row" not in held:
        raise RecordError(f"{path} holds no model of {client!r}: it is damaged, or the run was told to keep none")
    model = people.make(people.architecture[people.keys.index(client)])
    row = torch.from_numpy(held[f"{client}/row"])
    model.to(row.dtype)
    Layout.of(model).load(model, row)
    own = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in held.items():
            if name.startswith(f"{client}/buffers/"):
                own[name.removeprefix(f"{client}/buffers/")].copy_(torch.from_numpy(value))
    return model.eval()


def inputs(people: Population, client: int, model: nn.Module) -> Tensor:
    """Two samples of a client as its model gets them; zeros where the samples stay at the client's site."""
    here = people.index["train"][client]
    x = people.inputs[here[:1].expand(2)] if len(here) else people.inputs.new_zeros(2, *people.inputs.shape[1:])
    if people.transform is not None:
        x = people.transform(x, None)
    return x.to(next(model.parameters()).dtype) if x.is_floating_point() else x


def onnx(model: nn.Module, example: Tensor, path: Path) -> str:
    """Convert, and check that the file computes what the model does; else one line that says why there is none."""
    path.unlink(missing_ok=True)
    if importlib.util.find_spec("onnx") is None:
        return "the package onnx is not installed (it comes with coterie[onnx])"
    from onnx.reference import ReferenceEvaluator

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter that needs no further package calls itself old
            wanted = logits_of(model(example))
            torch.onnx.export(
                model,
                (example,),
                path,
                dynamo=False,
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_axes={"inputs": {0: "batch"}, "outputs": {0: "batch"}},
            )
            got: Any = ReferenceEvaluator(str(path)).run(["outputs"], {"inputs": example.numpy()})
        torch.testing.assert_close(torch.from_numpy(got[0]), wanted, rtol=1e-3, atol=1e-4)
    except Exception as error:  # a converter fails in as many ways as there are layers, and none is the user's fault
        path.unlink(missing_ok=True)
        return f"this model does not convert ({str(error).strip().splitlines()[0]})"
    return ""


def _one(folder: Path) -> Path:
    """The run that is meant: the folder itself, or the only run below it."""
    found = reading.runs([folder])
    if len(found) > 1:
        raise RecordError(f"{folder} holds {len(found)} runs: name one of them, for example {found[0]}")
    return found[0]


def _experiment(run: Path) -> Experiment:
    path = run.parent.parent / "experiment.json"
    tables = reading.read(path).get("experiment")
    if not isinstance(tables, dict):
        raise RecordError(f"{path} is damaged: it has no table 'experiment'")
    try:
        return restore(tables, str(path))
    except SettingError as error:
        raise CoterieError(f"{error}; the run was made by another version of coterie") from None
