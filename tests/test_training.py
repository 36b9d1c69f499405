"""The Python API, as the README shows it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from builders import batchnorm, classes
from coterie.algorithms import make


def test_the_readme_example_runs_and_finds_the_two_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code
    assert len([line for line in code[1].splitlines() if line.strip()]) < 25
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(code[1], names)
    graph = names["trained"].graph  # type: ignore[attr-defined]
    kind = np.arange(6) % 2
    same = kind[:, None] == kind
    assert graph[same & ~np.eye(6, dtype=bool)].mean() > 0.5
    assert graph[~same].mean() < 0.1
    assert isinstance(names["net"], torch.nn.Module)
    assert capsys.readouterr().out


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_model_gives_the_accuracy_that_was_reported(which: str) -> None:
    people = classes(batchnorm, groups=(0, 0, 1, 1))
    fleet = coterie.StackedFleet(people, seed=0, dtype=torch.float64)
    trained = coterie.train("local", fleet, rounds=6, evaluate_every=2, plan={"steps": 4, "batch": 8, "lr": 0.2})
    evaluations = [e for e in trained.history if e.get("split") == "test" and e["models"] == "personal"]
    for i, key in enumerate(fleet.keys):
        net = trained.model(key, which)
        held = people.index["test"][i]
        with torch.no_grad():
            right = (net(people.inputs[held].double()).argmax(1) == people.targets[held]).double().mean()
        told = trained.clients["accuracy"][i] if which == "best" else evaluations[-1]["clients"]["accuracy"][i]
        assert float(right) == pytest.approx(told, abs=1e-12)


def test_what_cannot_be_is_said_in_a_sentence() -> None:
    fleet = coterie.StackedFleet(classes(), seed=0)
    trained = coterie.train("local", fleet, rounds=1, plan={"steps": 1})
    with pytest.raises(coterie.CoterieError, match=r"no client is called 'site-9'.*did you mean site-"):
        trained.model("site-9")
    with pytest.raises(coterie.CoterieError, match="'best' or the 'last'"):
        trained.model("site-0", "worst")
    with pytest.raises(coterie.CoterieError, match="did you mean fedavg"):
        coterie.train("fedavgg", fleet, rounds=1)
    with pytest.raises(coterie.CoterieError, match="cannot be set"):
        coterie.train(make("local"), fleet, rounds=1, lr=0.1)
    with pytest.raises(AttributeError):
        coterie.nothing  # noqa: B018


def test_a_fleet_can_be_trained_again_from_its_start() -> None:
    people = classes(batchnorm, groups=(0, 0, 1, 1))
    fleet = coterie.StackedFleet(people, seed=0, dtype=torch.float64)
    plan = {"steps": 2, "batch": 8, "lr": 0.2}
    first = coterie.train("local", fleet, rounds=3, plan=plan)
    coterie.train("fedavg", fleet, rounds=2, plan=plan)
    again = coterie.train("local", fleet, rounds=3, plan=plan)
    assert first.clients == again.clients
    assert first.ledger == again.ledger
    assert all(torch.equal(first.rows["last"][k], again.rows["last"][k]) for k in first.rows["last"])


def test_a_stray_label_is_its_holders_and_not_the_first_clients() -> None:
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    bad = y.clone()
    bad[5] = 7
    clients = [coterie.Client("a", (x, y)), coterie.Client("b", (x, y), test=(x, bad))]
    with pytest.raises(coterie.CoterieError, match=r"client 'b': test label 7 is out of range: .* 2 outputs"):
        coterie.population(clients, model=lambda: torch.nn.Linear(4, 2))


def test_where_there_are_training_data_alone_models_are_measured_on_them() -> None:
    g = torch.Generator().manual_seed(0)
    people = [coterie.Client(f"site-{i}", train=(torch.randn(9, 6, generator=g), torch.arange(9) % 3)) for i in (0, 1)]
    fleet = coterie.StackedFleet(coterie.population(people, model=lambda: torch.nn.Linear(6, 3)), seed=0)
    trained = coterie.train("local", fleet, rounds=5, plan={"steps": 20, "lr": 0.5})
    assert {line["split"] for line in trained.history if line["kind"] == "evaluation"} == {"train"}
    right = [float((trained.model(f"site-{i}")(people[i].train[0]).argmax(1) == people[i].train[1]).float().mean())
             for i in (0, 1)]  # fmt: skip
    assert trained.metrics["accuracy"] == pytest.approx(sum(right) / 2)
