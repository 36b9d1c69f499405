import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from coterie.algorithm import Algorithm, Info
from coterie.algorithms import make
from coterie.asks import Evaluate, Fit, Own
from coterie.data.population import Client, Population, population
from coterie.errors import SettingError
from coterie.experiments.budget import Budget
from coterie.fleet.base import Fleet
from coterie.fleet.stacked import StackedFleet
from coterie.runs.listeners import Label, Listener
from coterie.runs.record import Record
from coterie.runs.runner import Outcome, drive


def people(n: int = 4, *, mixed: bool = False, norm: bool = False, validation: bool = True) -> Population:
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5, generator=draw)
        return x, (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 0.5).long()

    def small() -> nn.Module:
        layers = [nn.Linear(5, 6), nn.BatchNorm1d(6)] if norm else [nn.Linear(5, 6)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(6, 3))

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

    return population(
        [
            Client(
                f"c{i}",
                some(20 + i),
                some(11 + 2 * i) if validation else None,
                some(7 + 3 * i),
                large if mixed and i % 2 else small,
            )
            for i in range(n)
        ]
    )


PLAN = {"steps": 3, "batch": 8, "lr": 0.3}


def test_the_best_round_is_that_of_the_best_validation_and_its_model_is_kept():
    found: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []

    class Spy(Listener):
        """Measures by itself, after every round."""

        def evaluation(self, run: Label, done: int, split: str, mean: Mapping[str, float]) -> None:
            if split == "validation":
                rows = torch.stack(fleet.reveal(Own("model")))
                asked = [fleet.watch(Evaluate(fleet.everyone, rows, s)).metrics for s in ("validation", "test")]
                found.append((done, rows, asked[0]["accuracy"], asked[0]["loss"], asked[1]["accuracy"]))

    fleet = StackedFleet(people())
    wild = make("local", {"plan": {"steps": 3, "batch": 8, "lr": 3.0}})  # validation goes up and down
    out = drive(fleet, wild, Budget(rounds=12, evaluate_every=2), listeners=[Spy()])
    assert [f[0] for f in found] == [0, 2, 4, 6, 8, 10, 12]
    for i in range(fleet.n):
        done, rows, _, _, test = max(found, key=lambda f: (float(f[2][i]), -float(f[3][i]), -f[0]))
        assert out.result["best_round"][i] == done
        assert out.result["clients"]["accuracy"][i] == float(test[i])
        assert torch.equal(out.models["best"][f"c{i}/row"], rows[i])
        assert torch.equal(out.models["last"][f"c{i}/row"], found[-1][1][i])
    assert len(set(out.result["best_round"])) > 1


def test_means_are_plain_and_weighted_and_the_spread_is_over_clients():
    out = drive(StackedFleet(people()), make("local", {"plan": PLAN}), Budget(rounds=2, evaluate_every=1))
    line = [x for x in out.lines if x["split"] == "test"][-1]
    values, sizes = torch.tensor(line["clients"]["accuracy"]).double(), torch.tensor([7, 10, 13, 16]).double()
    assert line["mean"]["accuracy"] == pytest.approx(float(values.mean()), abs=1e-7)
    assert line["weighted"]["accuracy"] == pytest.approx(float((values * sizes).sum() / 46), abs=1e-7)
    assert out.result["last"]["accuracy_std_clients"] == pytest.approx(float(values.std(correction=0)), abs=1e-7)
    assert out.result["last"]["worst_client"] == pytest.approx(float(values.min()), abs=1e-7)


def test_after_local_is_the_model_after_one_more_training():
    fleet = StackedFleet(people())
    budget = Budget(rounds=2, evaluate_every=1, after_local=True)
    algorithm = make("fedavg", {"plan": PLAN})
    out = drive(fleet, algorithm, budget)
    rows = fleet.watch(Fit(fleet.everyone, out.state.x, algorithm.plan, give="rows", track=False)).rows
    expected = fleet.watch(Evaluate(fleet.everyone, rows, "test")).metrics["accuracy"]
    after = [x for x in out.lines if x["models"] == "after" and x["split"] == "test"]
    assert [x["round"] for x in after] == [0, 1, 2]
    assert after[-1]["clients"]["accuracy"] == expected.tolist()
    assert after[-1]["clients"] != [x for x in out.lines if x["models"] == "personal"][-1]["clients"]


@pytest.mark.parametrize("norm", [False, True])
def test_architectures_may_differ_and_buffers_are_kept(tmp_path: Path, norm: bool):
    fleet = StackedFleet(people(mixed=not norm, norm=norm))
    record = Record(tmp_path / "run")
    record.begin({}, None)
    budget = Budget(rounds=4, evaluate_every=2, after_local=True)
    out = drive(fleet, make("local", {"plan": PLAN}), budget, record=record)
    models = out.models["last"]
    widths = {k: v.numel() for k, v in models.items() if k.endswith("/row")}
    assert len(set(widths.values())) == (1 if norm else 2)
    assert ("c0/buffers/1.running_mean" in models) == norm
    for i in range(fleet.n):  # the recorded model, as a plain module, scores what the record says
        module = fleet.module(i, models[f"c{i}/row"])
        rows = fleet.population.index["test"][i]
        with torch.no_grad():
            guess = module(fleet.population.inputs[rows]).argmax(1)
        right = (guess == fleet.population.targets[rows]).double().mean()
        assert out.result["clients_last"]["accuracy"][i] == pytest.approx(float(right), abs=1e-7)


def test_patience_stops_early_and_the_best_is_reported():
    plan = {"steps": 1, "batch": 8, "lr": 0.0}  # nothing ever improves
    out = drive(StackedFleet(people()), make("local", {"plan": plan}), Budget(rounds=50, evaluate_every=5, patience=3))
    assert out.rounds == 15
    assert out.result["rounds_run"] == 15
    assert out.result["best_round"] == [0, 0, 0, 0]


def test_without_validation_data_the_last_round_is_reported():
    out = drive(
        StackedFleet(people(validation=False)), make("local", {"plan": PLAN}), Budget(rounds=3, evaluate_every=1)
    )
    assert out.result["best_round"] == [3, 3, 3, 3]
    assert out.result["clients"] == out.result["clients_last"]


def test_unknown_metrics_are_refused():
    with pytest.raises(SettingError, match="accuracy"):
        drive(StackedFleet(people()), make("local"), Budget(rounds=1, metrics=("acuracy",)))


@dataclass(frozen=True)
class Nothing(Algorithm):
    """Looks at the fleet and does nothing: what is left is the runner's own time. Tensors say when they are read."""

    def init(self, fleet: Fleet) -> Tensor:
        return fleet.initial()

    def round(self, fleet: Fleet, state: Tensor) -> tuple[Tensor, Info]:
        watched = torch.ones(fleet.n).as_subclass(Watched)
        return state, Info(torch.eye(fleet.n).as_subclass(Watched), torch.ones(fleet.n).bool(), watched)

    def personal(self, state: Tensor) -> Tensor:
        return state


class Watched(Tensor):
    """Counts how often its values are brought to the host."""

    looks = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.to, Tensor.numpy, Tensor.__bool__, Tensor.__float__):
            Watched.looks += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_no_tensor_of_a_round_is_read_before_models_are_measured():
    looks: list[int] = []

    class Spy(Listener):
        def round(self, run: Label, done: int) -> None:
            looks.append(Watched.looks)

    Watched.looks = 0
    drive(StackedFleet(people()), Nothing(), Budget(rounds=20, evaluate_every=10), listeners=[Spy()])
    assert looks[8] == 0
    assert looks[9] > 0
    assert looks[10:19] == [looks[9]] * 9


def test_several_runs_go_on_in_threads_of_one_process():
    import threading

    def one(seed: int) -> Outcome:
        return drive(StackedFleet(people(), seed=seed), make("fedavg", {"plan": PLAN}), Budget(rounds=4))

    expected = {seed: one(seed).result["clients_last"] for seed in (0, 1)}
    found: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: one(seed).result["clients_last"]}))
        for seed in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_training_lines_say_who_took_part(tmp_path: Path):
    import json

    from coterie.fleet.participation import Count, Participation

    record = Record(tmp_path / "run")
    record.begin({}, None)
    fleet = Participation(StackedFleet(people()), Count(2))
    drive(fleet, make("fedavg", {"plan": PLAN}), Budget(rounds=5, evaluate_every=2), record=record)
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    training = [x for x in lines if x["kind"] == "training"]
    assert [x["round"] for x in training] == [1, 2, 3, 4, 5]
    assert all(sum(x["ok"]) == 2 for x in training)
    assert len({tuple(x["ok"]) for x in training}) > 1


def test_the_graph_is_compared_with_the_true_one_early_and_in_the_end():
    groups = (0, 0, 1, 1)
    told = dataclasses.replace(people(), groups=groups)
    budget = Budget(rounds=20, evaluate_every=10)
    result = drive(StackedFleet(told), make("oracle", {"plan": PLAN}, groups=groups), budget).result
    assert result["found"] == {"graphs": 5, "exact": 5}  # the first three, and those of two evaluations
    oracle = result["graph"]
    assert list(oracle) == ["3", "20"]
    assert all(g["found"] == 1 and g["top_share"] == 1 and g["across"] == 0 for g in oracle.values())
    result = drive(StackedFleet(told), make("fedavg", {"plan": PLAN}), budget).result
    assert result["found"] == {"graphs": 5, "exact": 0}
    alike = result["graph"]["20"]
    assert alike["found"] == 0
    assert alike["l1"] == pytest.approx((58 / 46 + 34 / 46) / 2)  # rows by data: 7, 10, 13 and 16 of 46
    assert drive(StackedFleet(people()), make("local", {"plan": PLAN}), budget).result["graph"] == {}


def test_training_data_are_measured_where_asked_for_and_choose_nothing():
    outcomes = []
    for splits in (("validation", "test"), ("train", "validation", "test")):
        fleet = StackedFleet(people(), seed=0)
        algo = make("local", {"plan": PLAN}, rounds=6)
        outcomes.append(drive(fleet, algo, Budget(rounds=6, evaluate_every=2, splits=splits)))
    without, measured = (o.result for o in outcomes)
    assert not without["train"]
    assert measured["metrics"] == without["metrics"]
    assert measured["best_round"] == without["best_round"]
    fleet = StackedFleet(people(), seed=0)
    rows = torch.stack([outcomes[1].models["best"][f"{key}/row"] for key in fleet.keys])
    found = fleet.watch(Evaluate(fleet.everyone, rows, "train")).metrics["accuracy"]
    assert measured["train"]["accuracy"] == pytest.approx(float(found.mean()))
