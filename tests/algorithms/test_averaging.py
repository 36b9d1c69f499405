"""Local, FedAvg, fine-tuned FedAvg and Oracle against plain loops over modules that share nothing with the fleets."""

import copy

import pytest
import torch
from torch import nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.asks import Plan
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

GROUPS = (0, 1, 0, 1)
PLAN = {"steps": 3, "batch": None, "lr": 0.2}  # whole splits: nothing is drawn, so a loop needs no stream


def modules(fleet: StackedFleet) -> list[nn.Module]:
    made = []
    for row in fleet.initial():
        module = mlp().double()
        nn.utils.vector_to_parameters(row.clone(), module.parameters())  # it takes views
        made.append(module)
    return made


def train(module: nn.Module, client: int, fleet: StackedFleet, lr: float = 0.2) -> None:
    held = fleet.population.index["train"][client]
    x, y = fleet.population.inputs[held].double(), fleet.population.targets[held]
    optimiser = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()


def average(models: list[nn.Module], weights: list[float]) -> nn.Module:
    mean = copy.deepcopy(models[0])
    with torch.no_grad():
        for p, *all_of_them in zip(mean.parameters(), *(m.parameters() for m in models), strict=True):
            p.copy_(sum(w * q for w, q in zip(weights, all_of_them, strict=True)) / sum(weights))
    return mean


def learned(
    name: str, rounds: int = 6, away: int | None = None, **settings: object
) -> tuple[StackedFleet, torch.Tensor]:
    fleet = StackedFleet(classes(groups=GROUPS), seed=5, dtype=torch.float64)
    rules = [] if away is None else [Stay(((fleet.keys[away], rounds, None),))]
    party = Participation(fleet, *rules)
    algo = make(name, {"plan": PLAN} | settings, rounds=rounds, groups=GROUPS)
    state = algo.init(party)
    for t in range(rounds):
        party.begin(t)
        state, _ = algo.round(party, state)
    return fleet, torch.stack(fleet.reveal(algo.personal(state)))


def rows(models: list[nn.Module]) -> torch.Tensor:
    return torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models])


def test_local_is_everyone_alone() -> None:
    fleet, result = learned("local")
    alone = modules(fleet)
    for _ in range(6):
        for i, module in enumerate(alone):
            train(module, i, fleet)
    torch.testing.assert_close(result, rows(alone), rtol=0, atol=1e-9)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("away", [None, 2])
def test_fedavg_averages_by_data_over_those_who_answered(weighted: bool, away: int | None) -> None:
    fleet, result = learned("fedavg", away=away, weighted=weighted)
    x = modules(fleet)[0]
    there = [i for i in range(4) if i != away]
    for _ in range(6):
        trained = [copy.deepcopy(x) for _ in there]
        for i, module in zip(there, trained, strict=True):
            train(module, i, fleet)
        sizes = [len(fleet.population.index["train"][i]) for i in there]
        x = average(trained, [float(s) if weighted else 1.0 for s in sizes])
    torch.testing.assert_close(result, rows([x] * 4), rtol=0, atol=1e-9)


def test_with_a_share_a_round_is_of_those_drawn() -> None:
    fleet = StackedFleet(classes(groups=GROUPS), seed=5, dtype=torch.float64)
    party = Participation(fleet, Stay(((fleet.keys[1], 4, None),)))
    algo = make("fedavg", {"plan": PLAN, "share": 0.5})
    state, x = algo.init(party), modules(fleet)[0]
    asked: list[tuple[int, ...]] = []
    for t in range(10):
        party.begin(t)
        before = fleet.ledger.totals()["sent"]["up"]["numbers"]
        state, info = algo.round(party, state)
        who = info.ok.nonzero().flatten().tolist()
        asked.append(tuple(who))
        assert len(who) == 2  # half of four, and half of three rounded up
        assert t >= 4 or 1 not in who
        assert fleet.ledger.totals()["sent"]["up"]["numbers"] - before == 2 * fleet.d
        trained = [copy.deepcopy(x) for _ in who]
        for i, module in zip(who, trained, strict=True):
            train(module, i, fleet)
        x = average(trained, [float(len(fleet.population.index["train"][i])) for i in who])
        torch.testing.assert_close(state.x, rows([x])[0], rtol=0, atol=1e-9)
    assert len(set(asked)) > 3


def test_fine_tuning_goes_on_alone_from_the_global_model() -> None:
    fleet, result = learned("finetuned_fedavg", finetune=0.5)
    x = modules(fleet)[0]
    sizes = [float(len(fleet.population.index["train"][i])) for i in range(4)]
    for _ in range(3):
        trained = [copy.deepcopy(x) for _ in range(4)]
        for i, module in enumerate(trained):
            train(module, i, fleet)
        x = average(trained, sizes)
    alone = [copy.deepcopy(x) for _ in range(4)]
    for _ in range(3):
        for i, module in enumerate(alone):
            train(module, i, fleet)
    torch.testing.assert_close(result, rows(alone), rtol=0, atol=1e-9)


def test_oracle_is_fedavg_inside_each_group() -> None:
    fleet, result = learned("oracle")
    centres = modules(fleet)[:2]
    for _ in range(6):
        for g in (0, 1):
            members = [i for i in range(4) if GROUPS[i] == g]
            trained = [copy.deepcopy(centres[g]) for _ in members]
            for i, module in zip(members, trained, strict=True):
                train(module, i, fleet)
            centres[g] = average(trained, [float(len(fleet.population.index["train"][i])) for i in members])
    torch.testing.assert_close(result, rows([centres[g] for g in GROUPS]), rtol=0, atol=1e-9)


def test_a_schedule_follows_the_rounds() -> None:
    fleet, result = learned("local", rounds=4, plan=PLAN | {"schedule": "linear"})
    alone = modules(fleet)
    for t in range(4):
        for i, module in enumerate(alone):
            train(module, i, fleet, lr=0.2 * (1 - t / 4))
    torch.testing.assert_close(result, rows(alone), rtol=0, atol=1e-9)
    assert Plan(steps=1, lr=0.2, schedule="linear", rounds=4).at(3).lr == pytest.approx(0.05)
