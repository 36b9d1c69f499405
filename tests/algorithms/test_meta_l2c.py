"""meta-L2C: models move along its weights, the encoder's slope is that of validation losses, and likes find likes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithms import make
from coterie.algorithms.meta_l2c import attention, slope_of
from coterie.data.population import Client, Population, population
from coterie.fleet.stacked import StackedFleet
from coterie.graph import encoder

N, RATE = 5, 0.2


def run(fleet: Any, algo: Any, rounds: int) -> tuple[Any, list[Any]]:
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def loss(row: Tensor, client: int, people: Population, split: str) -> Tensor:
    module = mlp().double()
    names = [name for name, _ in module.named_parameters()]
    shapes = [p.shape for p in module.parameters()]
    parts = row.split([s.numel() for s in shapes])
    state = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
    held = people.index[split][client]
    out = torch.func.functional_call(module, state, (people.inputs[held].double(),))
    return nn.functional.cross_entropy(out, people.targets[held])


def trained(row: Tensor, client: int, people: Population) -> Tensor:
    row = row.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(row, client, people, "train"), row)
    return (row - RATE * slope).detach()


def test_a_round_equals_a_plain_loop_and_the_slope_is_that_of_validation_losses() -> None:
    people = classes(mlp, n=N, size=24, ragged=0)
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    algo = make("meta_l2c", {"plan": {"steps": 1, "batch": 24, "lr": RATE}, "lr": 0.1, "weight_decay": 0.0})
    first = algo.init(fleet)
    fleet.begin(0)
    state, info = algo.round(fleet, first)
    x = fleet.initial()
    after = torch.stack([trained(row, i, people) for i, row in enumerate(x)])
    alike = encoder.sketch(after - x, fleet.spans)
    every = torch.ones(N, N, dtype=torch.bool)

    def total(phi: Tensor) -> Tensor:  # the validation losses after mixing, with nothing left out
        w = attention(phi, alike, every)
        return sum(
            loss(x[i] - sum(w[i, j] * (x[j] - after[j]) for j in range(N)), i, people, "validation") for i in range(N)
        )

    phi = first.encoder["phi"].clone().requires_grad_()
    (exact,) = torch.autograd.grad(total(phi), phi)
    w = attention(first.encoder["phi"], alike, every)
    tried = x + w @ (after - x)
    slopes = []
    for i in range(N):
        row = tried[i].clone().requires_grad_()
        slopes.append(torch.autograd.grad(loss(row, i, people, "validation"), row)[0])
    found = slope_of(first.encoder["phi"], alike, every, torch.stack(slopes) @ (after - x).T)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-12)

    moved = state.encoder["phi"] - first.encoder["phi"]  # Adam's first step
    strong = exact.abs() > 1e-5
    torch.testing.assert_close(moved[strong], -0.1 * exact[strong].sign(), rtol=1e-2, atol=0)
    w = attention(state.encoder["phi"], alike, every)
    torch.testing.assert_close(info.graph, w, rtol=0, atol=1e-9)
    expected = torch.stack([x[i] - sum(w[i, j] * (x[j] - after[j]) for j in range(N)) for i in range(N)])
    torch.testing.assert_close(state.x, expected, rtol=0, atol=1e-9)


def test_likes_find_likes_and_the_cut_keeps_them() -> None:
    g = torch.Generator().manual_seed(0)
    slopes = 2 * torch.randn(3, 6, 1, generator=g)
    clients = []
    for i in range(9):
        x = torch.randn(60, 6, generator=g)
        y = x @ slopes[i % 3] + 0.5 * torch.randn(60, 1, generator=g)
        clients.append(Client(f"c{i}", (x[:20], y[:20]), (x[20:], y[20:])))
    people = population(clients, model=lambda: nn.Linear(6, 1), task="regression", groups=[i % 3 for i in range(9)])
    fleet = StackedFleet(people, seed=1)
    plan = {"steps": 5, "batch": 20, "lr": 0.03}
    state, infos = run(
        fleet, make("meta_l2c", {"plan": plan, "lr": 0.1, "updates": 3, "budget": 0.25, "warmup": 8}), 12
    )
    assert fleet.phases == 4
    group = torch.tensor(people.groups)
    same = group[:, None] == group
    w = infos[7].graph
    off = ~torch.eye(9, dtype=torch.bool)
    assert w[same & off].mean() > 3 * w[~same].mean()
    assert torch.equal(state.mask, same)
    assert torch.equal(infos[-1].graph > 0, state.mask)
    assert int(infos[-1].extra["links"]) == 18


@pytest.mark.parametrize("bad", [{"budget": 0.0}, {"updates": 0}, {"warmup": 0}, {"lr": -0.1}])
def test_settings_without_meaning_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="meta_l2c"):
        make("meta_l2c", bad)


@pytest.mark.parametrize("name", ["scool-sbm", "meta_l2c"])
def test_who_skips_the_round_of_the_cut_makes_it_in_the_next(name: str) -> None:
    """A forecast tries some rounds only; the cut is made once, whenever it is due."""
    fleet = StackedFleet(classes(mlp, n=6), dtype=torch.float64)
    algo = make(name, {"plan": {"steps": 1, "batch": 4, "lr": 0.1}, "budget": 0.2, "warmup": 3})
    state = algo.init(fleet)
    kept = []
    for t in (0, 1, 7, 8):
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
        kept.append(state.mask.clone())
    assert kept[1].all()
    assert (kept[2].sum(1) == 2).all()  # oneself and one of five
    assert torch.equal(kept[3], kept[2])
