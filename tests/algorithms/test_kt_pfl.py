"""KT-pFL against a plain loop with torch's own gradient of (8), and where the coefficients go."""

import pytest
import torch
from torch import Tensor

from builders import classes, linear, mlp
from coterie.algorithms import make
from coterie.algorithms.kt_pfl import KTpFL
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet
from coterie.graph.projections import simplex
from plain import descend, flat, learn, loss, modules

PLAN = {"steps": 3, "batch": None, "lr": 0.2}  # whole splits: nothing is drawn
SETTINGS = {"plan": PLAN, "distil": {"steps": 2, "batch": None, "lr": 0.4}, "lam": 1.5, "rho": 0.05, "c_lr": 2.0}


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1).mean()


def objective(c: Tensor, s: Tensor, data: Tensor, known: list[int]) -> Tensor:
    """What (8) descends: of those known, their share of the data times KL, and the pull to 1/N."""
    total = torch.zeros((), dtype=torch.float64)
    for n in known:
        mixed = torch.stack([c[n, m] * s[m] for m in known]).sum(0) / torch.stack([c[n, m] for m in known]).sum()
        total = total + 1.5 * data[n] * kl(mixed, s[n])
    return total + 0.05 * (c - 1 / len(c)).square().sum()


@pytest.mark.parametrize("late", [None, 2])
def test_it_follows_a_plain_loop(late: int | None) -> None:
    people, rounds, heat = classes([mlp, linear]), 5, 2.0
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    rules = [] if late is None else [Stay(((fleet.keys[late], 2, None),))]
    everyone = modules(fleet)
    rows, state, infos = learn(Participation(fleet, *rules), "kt_pfl", rounds, temperature=heat, **SETTINGS)
    x = people.public["public"].double()
    data = torch.tensor([float(len(r)) for r in people.index["train"]], dtype=torch.float64)
    data = data / data.sum()
    c, s = torch.full((4, 4), 0.25, dtype=torch.float64), torch.zeros(4, 13, 3, dtype=torch.float64)
    known: list[int] = []
    for t in range(rounds):
        there = [i for i in range(4) if i != late or t >= 2]
        now = s.clone()
        for i in there:
            if known:
                mixed = sum(c[i, m] * s[m] for m in known) / sum(c[i, m] for m in known)
                descend(everyone[i], lambda m, q=mixed: 1.5 * kl(q, (m(x) / heat).softmax(-1)), 2, 0.4)
            descend(everyone[i], loss(people, i), 3, 0.2)
            now[i] = (everyone[i](x).detach() / heat).softmax(-1)
        s, known = now, sorted({*known, *there})
        free = c.clone().requires_grad_()
        (slope,) = torch.autograd.grad(objective(free, s, data, known), free)
        moved = simplex(c - 2.0 * slope)
        c = torch.stack([moved[i] if i in there else c[i] for i in range(4)])
        assert infos[t].graph[:, [i for i in range(4) if i not in known]].sum() == 0
    for row, model in zip(rows, everyone, strict=True):
        torch.testing.assert_close(row, flat(model), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.c, c, rtol=0, atol=1e-9)
    assert not torch.allclose(c, torch.full_like(c, 0.25), atol=0.01)  # the coefficients did move


def beliefs() -> Tensor:
    """Two of one mind, two of another, who differ a little among themselves."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, 3, generator=g, dtype=torch.float64).repeat_interleave(2, 0) * 2
    return (logits + 0.3 * torch.randn(4, 50, 3, generator=g, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize(("rule", "gap"), [("paper", 0.1), ("reference", 0.0)])
def test_those_of_one_mind_find_each_other(rule: str, gap: float) -> None:
    algo = make("kt_pfl", {"rule": rule, "rho": 0.05, "c_lr": 2.0})
    assert isinstance(algo, KTpFL)
    c, everyone = torch.full((4, 4), 0.25, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    for _ in range(100):
        c = algo.moved(c, beliefs(), everyone, torch.full((4,), 0.25, dtype=torch.float64))
    torch.testing.assert_close(c.sum(1), torch.ones(4, dtype=torch.float64))
    inside = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()
    assert c[inside].min() > c[~inside].max() + gap


def test_with_nothing_but_the_pull_the_coefficients_are_equal() -> None:
    algo = make("kt_pfl", {"lam": 0.0, "rho": 1.0, "c_lr": 0.5})
    assert isinstance(algo, KTpFL)
    c = simplex(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    everyone, data = torch.ones(4, dtype=torch.bool), torch.full((4,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(algo.moved(c, beliefs(), everyone, data), torch.full_like(c, 0.25))


def test_the_reference_rule_is_the_gradient_of_squares_with_a_sized_step_and_a_softmax() -> None:
    algo = make("kt_pfl-reference", {"rho": 0.7})
    assert isinstance(algo, KTpFL)
    start = simplex(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    s = beliefs()
    for n in range(4):
        row = start[n].clone().requires_grad_()
        fit = (s[n] - torch.einsum("m,mpc->pc", row, s)).square().mean() + 0.7 * (row - 0.25).square().mean()
        fit.backward()
        assert row.grad is not None
        size, rate = float(row.grad.abs().sum()) / 4, 1.0
        for _ in range(5):
            if size > 0.01:
                size, rate = size / 5, rate / 5
            if size < 0.01:
                size, rate = size * 5, rate * 5
        expected = (5 * (row.detach() - rate * row.grad)).softmax(0)
        moved = algo.moved(start, s, torch.ones(4, dtype=torch.bool), torch.full((4,), 0.25, dtype=torch.float64))
        torch.testing.assert_close(moved[n], expected, rtol=0, atol=1e-12)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be a number above 0"):
        make("kt_pfl", {"temperature": 0.0})
    with pytest.raises(ValueError, match="rho must be a number at least 0"):
        make("kt_pfl", {"rho": -1.0})
