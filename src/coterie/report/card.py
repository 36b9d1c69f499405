"""The card that goes with an exported model: what it is, what it was made of, and how to load it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coterie.data.population import SPLITS, Population
from coterie.experiments.reader import Experiment
from coterie.models import build
from coterie.report import reading
from coterie.report.narrate import sentence
from coterie.report.numbers import title, value
from coterie.report.tables import comparisons

_NAMED = 10  # neighbours listed by name


def write(
    result: dict[str, Any],
    experiment: Experiment,
    people: Population,
    model: nn.Module,
    client: str,
    which: str,
    example: Tensor,
    trouble: str,
) -> str:
    """The card of one client's model, as Markdown; `trouble` says why there is no ONNX file, if there is none."""
    told = result["about"]
    i = told["keys"].index(client)
    facts = told.get("facts") or {}
    round_ = result.get("best_round", [None] * len(told["keys"]))[i] if which == "best" else result["rounds_run"]
    samples = ", ".join(f"{int(people.sizes(split)[i])} {split}" for split in SPLITS)
    parameters = sum(p.numel() for p in model.parameters())
    about = {
        "experiment": f"{told['experiment']}, scale {told['scale']}, seed {told['seed']}",
        "algorithm": told["algorithm"],
        "which model": f"{which}" + ("" if round_ is None else f", after round {round_} of {result['rounds_run']}"),
        "model": f"{type(model).__name__}, {parameters:,} parameters",
        "task": told["task"],
        "data": "; ".join(str(facts[key]) for key in ("data", "source", "licence") if key in facts) or "generated",
        "samples": samples,
        "split": comparisons([result])[0].split,
        "partition": _inline(experiment.given["population"].get("partition", "by the population's own rule")),
        "versions": ", ".join(f"{name} {number}" for name, number in (told.get("versions") or {}).items()),
    }
    parts = [
        f"# {client}, trained with {told['algorithm']}",
        "\n".join(["| | |", "|:--|:--|", *(f"| {name} | {_cell(text)} |" for name, text in about.items())]),
        f"## How good it is\n\n{_metrics(result, i)}",
        f"## Whom it listened to\n\n{_neighbours(result, i)}",
        f"## How to load it\n\n{_loading(people, client, example)}",
        "ONNX: " + (f"none, {trouble}." if trouble else "`model.onnx`, from `inputs` to `outputs`, any batch size."),
        "## Settings\n\n```\n"
        + "\n".join(f"{k} = {_inline(v)}" for k, v in told.get("settings", {}).items())
        + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _metrics(result: dict[str, Any], i: int) -> str:
    """This client's values at its best validation round and at the end."""
    best, last = result["clients"], result.get("clients_last", {})
    lines = [f"On this client's {result.get('split', 'test')} data:", "", "| | best | last |", "|:--|--:|--:|"]
    for metric in best:
        end = last[metric][i] if metric in last else None
        lines.append(f"| {title(metric)} | {value(metric, best[metric][i])} | {value(metric, end)} |")
    return "\n".join(lines)


def _neighbours(result: dict[str, Any], i: int) -> str:
    """The client's row of the last graph."""
    told, run = result["about"], Path(result["run"])
    learned = reading.graphs(run)[0] if (run / "graphs.safetensors").is_file() else {}
    if not learned:
        return "The record holds no graph."
    last = max(learned)
    w, keys = learned[last], told["keys"]
    others = sorted((j for j in range(len(keys)) if j != i and w[i, j] > 0), key=lambda j: -w[i, j])
    text = f"After round {last}, {sentence(w, keys, i)}; its own weight is {w[i, i]:.3g}."
    if not others:
        return text
    lines = [text, "", "| listens to | weight |", "|:--|--:|"]
    lines += [f"| {_cell(keys[j])} | {w[i, j]:.3g} |" for j in others[:_NAMED]]
    if len(others) > _NAMED:
        lines.append(f"| {len(others) - _NAMED} others | {w[i, others[_NAMED:]].sum():.3g} in all |")
    return "\n".join(lines)


def _loading(people: Population, client: str, example: Tensor) -> str:
    maker = people.architectures[people.architecture[people.keys.index(client)]]
    lines = ["from safetensors.torch import load_file"]
    if isinstance(maker, partial) and maker.func is build:
        settings = "".join(f", {name}={setting!r}" for name, setting in maker.keywords.items())
        lines += ["from coterie.models import build", "", f"model = build({maker.args[0]!r}{settings})"]
    else:
        lines += ["", f"model = {type(people.make(people.architectures.index(maker))).__name__}(…)  # as in training"]
    if example.is_floating_point() and example.dtype.itemsize != 4:
        lines.append(f"model.to({example.dtype})")
    lines += ['model.load_state_dict(load_file("model.safetensors"))', "model.eval()"]
    kind = str(example.dtype).removeprefix("torch.")
    text = f"It takes {kind} inputs of shape {('batch', *example.shape[1:])}".replace("'", "")
    if people.transform is not None:
        text += f", prepared by `{people.transform}` without keys"
    return "```python\n" + "\n".join(lines) + f"\n```\n\n{text}."


def _inline(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
