"""CoBo against a plain loop on a given list of pairs, its schedules, domains and extensions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import classes, linear, mlp
from coterie.algorithms import make
from coterie.algorithms.cobo import CoBo
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Count, Participation, Stay
from coterie.fleet.stacked import StackedFleet
from coterie.graph.projections import simplex

N, STEPS = 4, 50


def full(n: int = N) -> Population:
    """Clients whose batches of 24 are all their data, in some order: nothing depends on what is drawn."""
    return classes(mlp, n=n, size=24, ragged=0)


class Given(CoBo):
    """CoBo on a list of pairs for each iteration."""

    listed: list[list[tuple[int, int]]]

    def pairs(self, fleet: Fleet) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(self.listed[fleet.t], dtype=torch.long).reshape(-1, 2)
        return chosen[:, 0], chosen[:, 1]


def given(**settings: Any) -> Given:
    g = torch.Generator().manual_seed(1)
    every = [(i, j) for i in range(N) for j in range(i + 1, N)]
    algo = Given(batch=24, lr=0.1, rho=0.3, gamma=0.4, rounds=STEPS, **settings)
    listed = [[p for p in every if torch.rand((), generator=g) < 0.4] for _ in range(STEPS)]
    object.__setattr__(algo, "listed", listed)
    return algo


def gradient(row: Tensor, client: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    loss = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def plain(
    algo: Given, start: Tensor, people: Population, *, beta: float = 0.0, warm: int = 1, late: bool = False
) -> Any:
    """Algorithm 1, one client and one pair after the other."""
    x = [row.clone() for row in start]
    w = [[1.0] * N for _ in range(N)]
    m: list[Any] = [None] * N
    for t in range(STEPS):

        def select() -> None:
            for i, j in algo.listed[t]:  # noqa: B023
                z = (x[i] + x[j]) / 2
                score = float(gradient(z, i, people) @ gradient(z, j, people))
                w[i][j] = w[j][i] = min(1.0, max(0.0, w[i][j] + algo.gamma * score))

        if not late:
            select()
        old = [row.clone() for row in x]
        for i in range(N):
            g = gradient(old[i], i, people)
            if beta:
                m[i] = g if t < warm else beta * m[i] + (1 - beta) * g
                g = m[i]
            pull = sum(w[i][k] * (old[i] - old[k]) for k in range(N) if k != i)
            x[i] = old[i] - algo.lr * (g + algo.rho * pull)
        if late:
            select()
    off = [[w[i][j] for j in range(N)] for i in range(N)]
    return torch.stack(x), torch.tensor(off, dtype=torch.float64)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({}, {}),
        ({"momentum": 0.9}, {"beta": 0.9}),
        (
            {"momentum": 0.9, "warmup": 2, "select_first": False, "shared": False},
            {"beta": 0.9, "warm": 2, "late": True},
        ),
    ],
    ids=["paper", "moving average", "as the code"],
)
@pytest.mark.parametrize("fleet_kind", [StackedFleet, LoopFleet])
def test_fifty_iterations_equal_a_plain_loop(settings: Any, reference: Any, fleet_kind: Any) -> None:
    people = full()
    fleet = fleet_kind(people, seed=2, dtype=torch.float64)
    algo = given(**settings)
    state = algo.init(fleet)
    x, w = plain(algo, fleet.initial(algo.shared), people, **reference)
    for t in range(STEPS):
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
    torch.testing.assert_close(state.x, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(state.w, w, rtol=0, atol=1e-9)
    assert 0 < float((state.w < 1).double().mean()) < 1  # some weights moved, some did not


def run(fleet: Any, algo: CoBo, rounds: int) -> tuple[Any, list[Any]]:
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def test_no_pull_is_local_training() -> None:
    people = full()
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    state, _ = run(fleet, CoBo(lr=0.1, rho=0.0, batch=24, schedule="all"), 10)
    x = fleet.initial()
    for _ in range(10):
        x = torch.stack([row - 0.1 * gradient(row, i, people) for i, row in enumerate(x)])
    torch.testing.assert_close(state.x, x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", lambda t: 3 / 8),
        ("time", lambda t: min(1, 3 / (t + 1))),
        ("mixed", lambda t: 3 / 8 if t < 4 else min(1, 3 / (t + 1))),
        ("power", lambda t: 3 / 8 if t <= 4 else t**-0.5),
        ("all", lambda t: 1.0),
    ],
)
def test_pairs_are_drawn_with_the_probability_of_the_schedule(schedule: Any, expected: Any) -> None:
    algo = CoBo(schedule=schedule, c=3.0, switch=4, rounds=2000)
    fleet = StackedFleet(classes(linear, n=8), seed=0)
    for t in (0, 3, 4, 9, 40):
        assert algo.chance(t, 8) == pytest.approx(expected(t))
    drawn = dict.fromkeys((3, 9), 0)
    for t in drawn:
        for seed in range(400):
            fleet.seed, fleet.t = seed, t
            drawn[t] += len(algo.pairs(fleet)[0])
        p, trials = expected(t), 400 * 28
        assert abs(drawn[t] / trials - p) <= 4 * math.sqrt(p * (1 - p) / trials)


def test_the_simplex_scores_the_diagonal_with_two_batches_and_keeps_rows_on_it() -> None:
    fleet = StackedFleet(classes(mlp, n=N), seed=3, dtype=torch.float64)
    algo = CoBo(lr=0.1, gamma=0.5, batch=6, schedule="all", domain="simplex")
    state, infos = run(fleet, algo, 8)
    assert int(infos[0].extra["pairs"]) == N * (N + 1) // 2
    torch.testing.assert_close(state.w.sum(1), torch.ones(N, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (state.w >= 0).all()
    assert not torch.allclose(state.w, state.w.T)
    fleet.begin(8)
    i, j = algo.pairs(fleet)
    probe = fleet.ask(algo.probe(fleet, fleet.initial(), i, j))
    mine = [k for k in range(len(i)) if i[k] == j[k]]
    for k in mine:  # two batches of one client: neither equal nor unrelated
        gram = probe.gram[k]
        assert gram[0, 1] < (gram[0, 0] * gram[1, 1]).sqrt() * 0.9999


def test_any_projection_is_a_domain() -> None:
    """Rows that sum to at most a half: a scaled corner of the simplex, projected onto by hand."""

    def corner(w: Tensor) -> Tensor:
        w = w.clamp(min=0)
        return torch.where(w.sum(1, keepdim=True) <= 0.5, w, simplex(2 * w) / 2)

    fleet = StackedFleet(classes(mlp, n=N), seed=3, dtype=torch.float64)
    algo = CoBo(lr=0.1, gamma=0.5, batch=6, schedule="all", domain=corner)
    state = algo.init(fleet)
    assert torch.allclose(state.w, torch.full((N, N), 0.5 / N, dtype=torch.float64))
    state, infos = run(fleet, algo, 6)
    assert int(infos[0].extra["pairs"]) == N * (N + 1) // 2
    assert (state.w.sum(1) <= 0.5 + 1e-12).all()
    assert state.w.std() > 0.01


def opposites(n: int = 6) -> Population:
    """Half the clients fit one line, half its opposite."""
    g = torch.Generator().manual_seed(0)
    slope = torch.randn(5, 1, generator=g)
    clients = []
    for i in range(n):
        x = torch.randn(40, 5, generator=g)
        clients.append(
            Client(f"c{i}", (x, x @ slope * (1 if i < n // 2 else -1) + 0.1 * torch.randn(40, 1, generator=g)))
        )
    return population(clients, model=lambda: nn.Linear(5, 1), task="regression", groups=[2 * i // n for i in range(n)])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"domain": "simplex"},
        {"momentum": 0.9},
        {"local_steps": 5, "lr": 0.02},
        {"sketch": 4},
        {"schedule": "constant"},
    ],
    ids=str,
)
def test_two_groups_are_found(settings: Any) -> None:
    people = opposites()
    fleet = StackedFleet(people, seed=1)
    algo = CoBo(**({"lr": 0.05, "rho": 0.1, "gamma": 0.05, "batch": 20, "schedule": "all"} | settings))
    _, infos = run(fleet, algo, 60)
    w, group = infos[-1].graph, torch.tensor(people.groups)
    same = group[:, None] == group
    off = ~torch.eye(6, dtype=torch.bool)
    assert w[same & off].mean() > w[~same].mean() + 0.1
    assert w[~same].mean() < 0.05


def test_newcomers_enter_with_weight_one_and_those_who_left_pull_nobody() -> None:
    people = opposites()
    late, gone = people.keys[1], people.keys[2]
    inner = StackedFleet(people, seed=1, dtype=torch.float64)
    fleet = Participation(inner, Stay(((late, 10, None), (gone, 0, 10))))
    algo = CoBo(lr=0.05, rho=0.1, gamma=0.05, batch=20, schedule="all")
    state, _ = run(fleet, algo, 10)
    first = inner.initial()[1]
    assert torch.equal(state.x[1], first)
    assert (state.w[1] == 1).all()
    left = state.x[2].clone()
    for t in range(10, 14):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
    assert torch.equal(state.x[2], left)
    assert not torch.equal(state.x[1], first)
    assert bool(info.ok[1])
    assert not bool(info.ok[2])
    assert state.w[1, 3:].max() < 1  # the newcomer meets the other group, and is scored


def test_absent_clients_are_not_paired() -> None:
    fleet = Participation(StackedFleet(classes(linear, n=8), seed=0), Count(3))
    algo = CoBo(batch=5, schedule="all")
    fleet.begin(0)
    i, j = algo.pairs(fleet)
    assert len(i) == 3
    assert fleet.present[i].all()
    assert fleet.present[j].all()


def test_several_steps_go_out_with_the_selection_as_one_phase() -> None:
    fleet = StackedFleet(opposites(), seed=1, dtype=torch.float64)
    algo = CoBo(lr=0.02, rho=0.5, batch=40, local_steps=4, schedule="all", gamma=0.0)
    state, _ = run(fleet, algo, 1)
    assert fleet.phases == 1
    x = fleet.initial()
    held = fleet.population.index["train"]
    data = [(fleet.population.inputs[h].double(), fleet.population.targets[h].double()) for h in held]
    centre = [(x.sum(0) - x[i]) / 5 for i in range(6)]
    rows = x.clone()
    for i, (inputs, targets) in enumerate(data):
        for _ in range(4):  # ρ Σ_k w_ik (x − x_k) = ρ·5·(x − mean of the others), all weights one
            weight, bias = rows[i][:5], rows[i][5]
            error = inputs @ weight + bias - targets[:, 0]
            g = torch.cat([2 * (inputs.T @ error) / len(inputs), 2 * error.mean()[None]])
            rows[i] = rows[i] - 0.02 * (g + 0.5 * 5 * (rows[i] - centre[i]))
    torch.testing.assert_close(state.x, rows, rtol=0, atol=1e-9)


def test_the_quantities_of_the_theory_on_quadratics_equal_their_closed_forms() -> None:
    """Example 2 in one dimension: f_i(x) = a_i/2·(x − μ_k)², as regression of √a_i·x on √a_i·μ (twice the loss)."""
    a, mu, group = [1.0, 2.0, 1.5, 4.0], [0.0, 0.0, 4.0, 4.0], (0, 0, 1, 1)
    clients = []
    for i in range(4):
        root = torch.tensor(a[i] / 2, dtype=torch.float64).sqrt()
        clients.append(Client(f"c{i}", (root[None, None], (root * mu[i])[None, None])))
    people = population(clients, model=lambda: nn.Linear(1, 1, bias=False), task="regression", groups=group)
    fleet = StackedFleet(people, seed=0, dtype=torch.float64)
    algo = make("cobo", {"batch": 1, "lr": 0.05, "schedule": "all", "theory": True}, rounds=10, groups=group)
    state = algo.init(fleet)
    fleet.begin(0)
    x = state.x[:, 0]
    state, info = algo.round(fleet, state)
    m = max(((a[i] - a[j]) / (a[i] + a[j])) ** 2 for i, j in ((0, 1), (2, 3)))
    assert float(info.extra["m_squared"]) == pytest.approx(m, abs=1e-9)
    z = [(x[i] + x[j]) / 2 for i in range(4) for j in range(4)]
    across = [(i, j) for i in range(4) for j in range(i + 1, 4) if group[i] != group[j]]
    squares = [sum((a[k] * (float(z[4 * i + j]) - mu[k])) ** 2 for k in (i, j)) for i, j in across]
    assert float(info.extra["zeta_squared"]) == pytest.approx(min(squares), abs=1e-9)
    for (i, j), value in zip(
        across, squares, strict=True
    ):  # the erratum of Example 2: (a² + b²), not its square, and ≥
        assert value >= a[i] ** 2 * a[j] ** 2 / (a[i] ** 2 + a[j] ** 2) * (mu[i] - mu[j]) ** 2 - 1e-9
    inside = [(0, 1), (2, 3)]
    mean = sum(sum(a[k] * (float(z[4 * i + j]) - mu[k]) for k in (i, j)) ** 2 for i, j in inside) / 4 / 2
    assert float(info.extra["midpoint_gradient"]) == pytest.approx(mean, abs=1e-9)
    pulled = (
        sum(float((state.x[i] - state.x[j]).pow(2).sum()) for i, j in inside) / 4
    )  # of all 8 ordered pairs, 4 are i ≠ j
    assert float(info.extra["consensus"]) == pytest.approx(pulled, abs=1e-9)


def test_pairs_that_did_not_answer_say_nothing_of_the_theory() -> None:
    algo = CoBo(theory=True, groups=(0, 0, 0, 1, 1, 1))
    i, j = torch.triu_indices(6, 6, 1)
    ends = torch.randn(15, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram, both = ends @ ends.mT, torch.arange(15) % 3 > 0
    told = algo.collaborativeness(i, j, torch.where(both[:, None, None], gram, 0), both)
    there = algo.collaborativeness(i[both], j[both], gram[both], both[both])
    assert {k: float(v) for k, v in told.items()} == pytest.approx({k: float(v) for k, v in there.items()})
    nobody = algo.collaborativeness(i, j, gram, torch.zeros(15, dtype=torch.bool))
    assert all(v.isnan() for v in nobody.values())


def test_the_reference_preset_is_what_the_published_code_does() -> None:
    algo = make("cobo-reference", rounds=40_000)
    told = {"lr": 0.1, "rho": 0.05, "gamma": 0.01, "batch": 128, "momentum": 0.9, "warmup": 2}
    assert {name: getattr(algo, name) for name in told} == told
    assert not algo.shared
    assert not algo.select_first
    chances = [algo.chance(t, 8) for t in (0, 800, 801, 39_999)]
    assert chances == pytest.approx([0.25, 0.25, 801**-0.5, 39_999**-0.5])


def test_theory_must_be_told_the_groups() -> None:
    with pytest.raises(ValueError, match="true group"):
        CoBo(theory=True).init(StackedFleet(classes(linear, n=3), seed=0))


@pytest.mark.parametrize(
    "bad",
    [
        {"momentum": 1.0},
        {"lr": -1.0},
        {"gamma": math.nan},
        {"rho": math.inf},
        {"sketch": 0},
        {"warmup": -1},
        {"rounds": 0},
        {"lr_schedule": "sometimes"},
        {"local_steps": 3, "select_first": False},
        {"local_steps": 3, "momentum": 0.9},
        {"schedule": "often"},
        {"domain": "sphere"},
        {"bach": 3},
    ],
)
def test_settings_without_meaning_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="cobo"):
        make("cobo", bad)
