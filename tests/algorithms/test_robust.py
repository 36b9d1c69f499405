"""Robust rules against plain loops, numpy, scipy and closed forms, and against attackers as far away as floats go."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import trim_mean
from torch import Tensor

from builders import classes
from coterie.algorithms import make
from coterie.algorithms.robust import Robust
from coterie.asks import Gradient
from coterie.errors import SettingError
from coterie.fleet.attacks import Attack, Attacked
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

RULES = ["krum", "multi_krum", "trimmed_mean", "median", "geometric_median"]


def rows(m: int = 9, d: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(rule: str, g: Tensor, f: int = 2) -> tuple[Tensor, Tensor]:
    """Shares and result."""
    return Robust(rule=rule, byzantine=f).rule_of(g, torch.linspace(0, 1, len(g), dtype=torch.float64))


def scores(g: np.ndarray[Any, Any], f: int) -> list[float]:
    """Krum's scores, one row after the other."""
    found = []
    for i in range(len(g)):
        distances = sorted(sum((a - b) ** 2 for a, b in zip(g[i], g[j], strict=True)) for j in range(len(g)) if j != i)
        found.append(sum(distances[: len(g) - f - 2]))
    return found


def distances(g: np.ndarray[Any, Any], z: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(((g - z) ** 2).sum(1)).sum())


def best_point(g: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The geometric median by a general minimiser, from the mean."""
    found = minimize(lambda z: distances(g, z), g.mean(0), method="BFGS", options={"gtol": 1e-10, "maxiter": 2000})
    return np.asarray(found.x)


@pytest.mark.parametrize("m", [8, 9])
@pytest.mark.parametrize("f", [0, 1, 2, 3])
def test_krum_takes_the_rows_with_the_nearest_neighbours(m: int, f: int) -> None:
    for seed in range(5):
        g = rows(m, seed=seed)
        order = np.argsort(scores(g.numpy(), f))
        w, z = told("krum", g, f)
        assert w.nonzero().flatten().tolist() == [order[0]]
        torch.testing.assert_close(z, g[order[0]], rtol=0, atol=1e-12)
        w, z = told("multi_krum", g, f)
        assert sorted(w.nonzero().flatten().tolist()) == sorted(order[: m - f])
        torch.testing.assert_close(z, g[torch.tensor(order[: m - f].copy())].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", [8, 9])
def test_coordinates_are_trimmed_as_scipy_and_numpy_do(m: int) -> None:
    g = rows(m)
    for f in range(4):
        w, z = told("trimmed_mean", g, f)
        torch.testing.assert_close(z, torch.tensor(trim_mean(g.numpy(), (f + 0.01) / m, axis=0)), rtol=0, atol=1e-12)
        shares = [sum(int(f <= sorted(g[:, k]).index(g[i, k]) < m - f) for k in range(7)) for i in range(m)]
        torch.testing.assert_close(w, torch.tensor(shares, dtype=torch.float64) / sum(shares), rtol=0, atol=1e-12)
    w, z = told("median", g)
    torch.testing.assert_close(z, torch.tensor(np.median(g.numpy(), axis=0)), rtol=0, atol=1e-12)
    torch.testing.assert_close(w.sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("m", [5, 8, 13])
def test_the_geometric_median_has_the_least_sum_of_distances(m: int) -> None:
    for seed in range(3):
        g = rows(m, 4, seed)
        w, z = told("geometric_median", g)
        best = best_point(g.numpy())
        assert distances(g.numpy(), z.numpy()) <= distances(g.numpy(), best) * (1 + 1e-9)
        torch.testing.assert_close(z, torch.tensor(best), rtol=0, atol=1e-4)
        pull = (g - z) / (g - z).norm(dim=1, keepdim=True)
        assert float(pull.sum(0).norm()) < 1e-4  # every row pulls with the same force
        torch.testing.assert_close(w @ g, z, rtol=0, atol=1e-12)


def test_of_a_triangle_it_is_fermats_point_and_of_a_majority_the_majoritys() -> None:
    """Its sides are seen from it under 120 degrees; three equal rows of five outweigh any two."""
    corners = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.7, 1.5]], dtype=torch.float64)
    _, z = told("geometric_median", corners)
    rays = [c - z for c in corners]
    for a in range(3):
        cosine = float(rays[a] @ rays[a - 1] / (rays[a].norm() * rays[a - 1].norm()))
        assert math.degrees(math.acos(cosine)) == pytest.approx(120, abs=0.01)
    g = rows(5, 3)
    g[1] = g[2] = g[0]
    w, z = told("geometric_median", g)
    torch.testing.assert_close(z, g[0], rtol=0, atol=1e-3)
    w, z = told("geometric_median", g[:1].expand(6, -1))
    torch.testing.assert_close(z, g[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(w, torch.full((6,), 1 / 6, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1e3, 1e8, 1e16, 1e30])
@pytest.mark.parametrize("rule", RULES)
def test_attackers_go_nowhere_however_far_they_are(rule: str, far: float, dtype: torch.dtype) -> None:
    g, f = rows(11, 20).to(dtype), 5 if rule in ("median", "geometric_median", "trimmed_mean") else 4
    honest = g[:-f].clone()
    for lie in (torch.full((20,), far, dtype=dtype), far * rows(1, 20, 5)[0].to(dtype)):
        g[-f:] = lie
        w, z = told(rule, g, f)
        centre, spread = honest.mean(0), (honest - honest.mean(0)).norm(dim=1).max()
        assert float((z - centre).norm()) <= 3 * float(spread)
        if rule in ("krum", "multi_krum"):
            assert not w[-f:].any()
            order = np.argsort(scores(g.double().numpy(), f)) if far <= 1e3 else None
            assert order is None or w.nonzero().flatten().tolist() == sorted(order[: int((w > 0).sum())])
        if rule == "geometric_median":
            torch.testing.assert_close(w[-f:], torch.zeros(f, dtype=torch.float64), rtol=0, atol=10 / far)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_goes_along_when_rows_are_moved_scaled_or_reordered(rule: str) -> None:
    g, shift = rows(), rows(1)[0]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    chance = torch.linspace(0, 1, 9, dtype=torch.float64)
    algo = Robust(rule=rule, byzantine=2)
    w, z = algo.rule_of(g, chance)
    for a, b in ((2.5, shift), (1e-6, 0 * shift), (1e6, shift)):
        moved, there = algo.rule_of(a * g + b, chance)
        torch.testing.assert_close(there, a * z + b, rtol=1e-6, atol=a * 1e-6)
        torch.testing.assert_close(moved, w, rtol=0, atol=1e-6)
    moved, there = algo.rule_of(g[order], chance[order])
    torch.testing.assert_close(there, z, rtol=0, atol=1e-9)
    torch.testing.assert_close(moved, w[order], rtol=0, atol=1e-9)


STEPS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "krum": lambda g: g[int(np.argmin(scores(g, 1)))],
    "multi_krum": lambda g: g[np.argsort(scores(g, 1))[:-1]].mean(0),
    "trimmed_mean": lambda g: np.sort(g, 0)[1:-1].mean(0),
    "median": lambda g: np.median(g, axis=0),
    "geometric_median": best_point,
}


@pytest.mark.parametrize("kind", [StackedFleet, LoopFleet])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_is_its_rule_round_after_round_with_who_is_there(rule: str, kind: Any) -> None:
    people = classes(lambda: torch.nn.Linear(6, 3), n=7)
    attack = Attack("bit_flip", "site-6")
    fleet = Participation(
        Attacked(kind(attack.on(people), seed=2, dtype=torch.float64), attack), Stay((("site-3", 0, 2),))
    )
    twin = kind(people, seed=2, dtype=torch.float64)
    algo = make("robust", {"rule": rule, "lr": 0.3, "batch": 5})
    state, x = algo.init(fleet), fleet.initial()[0]
    for t in range(4):
        fleet.begin(t)
        twin.begin(t)
        state, info = algo.round(fleet, state)
        g = twin.ask(Gradient(twin.everyone, x, 5, sampling="epoch")).rows.numpy()
        g[6] *= -1
        here = [0, 1, 2, 3, 4, 5, 6] if t < 2 else [0, 1, 2, 4, 5, 6]
        x = x - 0.3 * torch.tensor(STEPS[rule](g[here]))
        torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-5 if rule == "geometric_median" else 1e-9)
        x = state.x[0]
        assert info.graph[0, 3] == 0 or t < 2
        torch.testing.assert_close(info.graph.sum(1), torch.ones(7, dtype=torch.float64))


WRONG = {
    "krum with 5 attackers needs at least 8 clients, and there are 7": {"rule": "krum", "byzantine": 5},
    "trimmed_mean with 4 attackers needs at least 9": {"rule": "trimmed_mean", "byzantine": 4},
    "byzantine must be a whole number of at least 0": {"byzantine": -1},
    "iterations must be a whole number": {"iterations": 0},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_no_rule_can_do_is_refused(words: str) -> None:
    with pytest.raises(SettingError, match=words):
        make("robust", WRONG[words]).init(StackedFleet(classes(n=7)))
