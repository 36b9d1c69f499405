"""All-for-one against a plain loop, on gradients with known ratios, and the properties of its weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import classes, linear, mlp
from coterie.algorithms import make
from coterie.algorithms.allforone import AllForOne, ratios, sufficient
from coterie.asks import Gradient
from coterie.data.population import Client, Population, online, population
from coterie.data.synthetic import LeastSquares
from coterie.experiments import populations
from coterie.fleet.faults import Faulty
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Count, Participation, Stay
from coterie.fleet.stacked import StackedFleet

N, STEPS = 5, 12


def taught(n: int = N) -> Population:
    """Clients with different amounts of data; the first three have one teacher, the others another."""
    g = torch.Generator().manual_seed(3)
    teachers = torch.randn(2, 6, 3, generator=g)
    clients = []
    for i in range(n):
        x = torch.randn(24 + 9 * i, 6, generator=g)
        clients.append(Client(f"c{i}", (x, (x @ teachers[int(i > 2)]).argmax(1))))
    return population(clients, model=mlp, task="classification")


def gradient(row: Tensor, client: int, people: Population) -> Tensor:
    """Of the mean loss on all the client has."""
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    loss = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def plain(algo: AllForOne, start: Tensor, people: Population, phi: Any, n_k: list[float]) -> Any:
    """The algorithm, one client and one pair after the other; returns models, the last ratios and weights."""
    theta = [row.clone() for row in start]
    momentum = [torch.zeros_like(row) for row in start]
    r: list[list[float]] = []
    alpha: list[list[float]] = []
    for t in range(STEPS):
        if t % algo.refresh == 0:
            r, alpha = [], []
            for i in range(N):
                mine = gradient(theta[i], i, people)
                row = []
                for k in range(N):
                    other = gradient(theta[i], k, people)
                    row.append(max(0.0, 1 - float((other - mine) @ (other - mine)) / float(mine @ mine)))
                r.append(row)
                below = sum(n * phi(x) * (1.0 if algo.normalised else x) for n, x in zip(n_k, row, strict=True))
                alpha.append([n * phi(x) / below for n, x in zip(n_k, row, strict=True)])
        old = [row.clone() for row in theta]
        for i in range(N):
            g = sum(alpha[i][k] * gradient(old[i], k, people) for k in range(N) if alpha[i][k])
            g = g + algo.weight_decay * old[i]
            momentum[i] = algo.momentum * momentum[i] + g
            lr = algo.c / (algo.mu * (t + 1)) if algo.step == "decreasing" else algo.lr
            if algo.beta is not None:
                lr = min(lr, 1 / (algo.beta * sum(alpha[i])))
            theta[i] = old[i] - lr * momentum[i]
    return torch.stack(theta), torch.tensor(r, dtype=torch.float64), torch.tensor(alpha, dtype=torch.float64)


def run(fleet: Any, algo: AllForOne, rounds: int) -> tuple[Any, list[Any]]:
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def binary(x: float) -> float:
    return 0.1 if x >= 0.1 else 0.0


@pytest.mark.parametrize(
    ("settings", "phi", "by_data"),
    [
        ({}, binary, True),
        ({"normalised": False}, binary, True),
        ({"criterion": "continuous", "normalised": False, "refresh": 3}, float, True),
        ({"criterion": "continuous", "momentum": 0.9, "weight_decay": 0.01, "sigma": "equal"}, float, False),
        ({"criterion": lambda x: x**2, "refresh": 1}, lambda x: x**2, True),
        ({"step": "decreasing", "mu": 20.0, "beta": 8.0, "normalised": False}, binary, True),
    ],
    ids=["binary", "definition 1", "continuous", "momentum and decay", "given", "decreasing"],
)
@pytest.mark.parametrize("fleet_kind", [StackedFleet, LoopFleet])
def test_twelve_steps_equal_a_plain_loop(settings: Any, phi: Any, by_data: bool, fleet_kind: Any) -> None:
    people = taught()
    fleet = fleet_kind(people, seed=2, dtype=torch.float64)
    algo = AllForOne(**({"lr": 0.2, "batch": None, "b_alpha": None, "refresh": 4, "shared": False} | settings))
    n_k = [float(s) for s in fleet.sizes("train")] if by_data else [1.0] * N
    state, infos = run(fleet, algo, STEPS)
    theta, r, alpha = plain(algo, fleet.initial(False), people, phi, n_k)
    torch.testing.assert_close(state.r, r, rtol=0, atol=1e-9)
    torch.testing.assert_close(infos[-1].graph, alpha / alpha.sum(1, keepdim=True), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.x, theta, rtol=0, atol=1e-9)
    assert 0 < int((r == 0).sum()) < N * N - N  # some listen to each other, some do not


def at_points(points: Tensor) -> Population:
    """R_i(θ) = ‖θ − μ_i‖²/d: gradients that are known."""
    one = torch.ones(1, 1, dtype=torch.float64)
    clients = [Client(f"c{i}", (one, p[None])) for i, p in enumerate(points)]
    return population(clients, model=lambda: nn.Linear(1, points.shape[1], bias=False), task="regression")


POINTS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]], dtype=torch.float64)


def test_ratios_of_handmade_gradients_are_the_known_ones() -> None:
    fleet = StackedFleet(at_points(POINTS), seed=0, dtype=torch.float64)
    algo = AllForOne(batch=1, b_alpha=1, criterion="continuous", refresh=1, lr=0.0)
    start = torch.tensor([[4.0, 0.0], [1.0, 2.0], [0.0, 2.0], [3.0, -1.0]], dtype=torch.float64)  # the third is done
    state = algo.init(fleet)
    fleet.begin(0)
    state, info = algo.round(fleet, type(state)(start, *list(vars(state).values())[1:]))
    squares = ((POINTS[:, None] - POINTS) ** 2).sum(2)
    own = ((start - POINTS) ** 2).sum(1)
    expected = torch.eye(4, dtype=torch.float64)
    for i in range(4):
        for k in range(4):
            if i != k and own[i] > 0:
                expected[i, k] = max(0.0, float(1 - squares[i, k] / own[i]))
    torch.testing.assert_close(state.r, expected, rtol=0, atol=1e-12)
    assert torch.equal(info.graph[2], torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64))


def test_the_binary_test_is_at_least_lambda_and_above_it_in_the_authors_code() -> None:
    ratio = torch.tensor([0.0, 0.1 - 1e-12, 0.1, 0.1 + 1e-12, 1.0], dtype=torch.float64)
    assert make("allforone-bin").phi(ratio).tolist() == [0, 0, 0.1, 0.1, 0.1]
    assert make("allforone-bin-reference").phi(ratio).tolist() == [0, 0, 0, 0.1, 0.1]


def some_ratios(n: int = 6) -> Tensor:
    r = torch.rand(n, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    r[r < 0.3] = 0
    return r.fill_diagonal_(1)


@pytest.mark.parametrize("criterion", ["binary", "continuous", lambda x: x**3])
@pytest.mark.parametrize("sigma", ["equal", "batch", "data", (1.0, 2.0, 0.5, 3.0, 1.5, 0.7)])
def test_weights_are_those_of_definition_1(criterion: Any, sigma: Any) -> None:
    people = classes(mlp, n=6, size=10, ragged=9)
    fleet = StackedFleet(people, seed=0, dtype=torch.float64)
    algo = AllForOne(criterion=criterion, sigma=sigma, batch=30, lam=0.2)
    state = algo.init(fleet)
    r = some_ratios()
    push, sums = algo.weights(fleet, type(state)(**{**vars(state), "r": r}))
    _, psi = AllForOne(**{**vars(algo), "normalised": False}).weights(fleet, type(state)(**{**vars(state), "r": r}))
    size = fleet.sizes("train").double()
    one_over = {"equal": torch.ones(6).double(), "batch": size.clamp(max=30), "data": size}
    precision = one_over[sigma] if isinstance(sigma, str) else torch.tensor(sigma, dtype=torch.float64) ** -2
    effective = 1 / (precision * r * algo.phi(r)).sum(1)
    alpha = push / psi.sum(1, keepdim=True)
    torch.testing.assert_close(alpha, algo.phi(r) * precision * effective[:, None], rtol=0, atol=1e-12)
    torch.testing.assert_close((alpha * r).sum(1), torch.ones(6).double(), rtol=0, atol=1e-12)
    assert (alpha.sum(1) >= 1 - 1e-12).all()
    assert ((alpha**2 / precision).sum(1) <= effective + 1e-12).all()  # appendix B.2: the step's variance
    assert torch.equal(sums, push)  # normalised: what it is divided by is its own sum


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("allforone-bin-reference", lambda ratio, samples: samples if ratio > 0.1 else 0.0),
        ("allforone-cont-reference", lambda ratio, samples: ratio),
    ],
)
def test_weights_of_the_reference_are_those_of_the_authors_code(name: str, rule: Any) -> None:
    fleet = StackedFleet(classes(mlp, n=6, size=10, ragged=9), seed=0, dtype=torch.float64)
    algo = make(name, {"batch": 4})  # fewer than anyone has: their code weighs by all the data
    r = some_ratios()
    r[0, 1] = 0.1
    push, sums = algo.weights(fleet, type(state := algo.init(fleet))(**{**vars(state), "r": r}))
    for i, n_i in enumerate(push / sums.sum(1, keepdim=True)):
        raw = [rule(float(r[i, k]), float(fleet.sizes("train")[k])) for k in range(6)]
        assert n_i.tolist() == pytest.approx([each / sum(raw) for each in raw], abs=1e-12)


@pytest.mark.parametrize(
    "settings", [{}, {"criterion": "continuous"}, {"lam": 1.0, "normalised": False}, {"peers": 1, "sketch": 3}], ids=str
)
def test_one_client_takes_plain_steps(settings: Any) -> None:
    people = taught(1)
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    algo = AllForOne(**({"lr": 0.2, "batch": None, "b_alpha": None, "refresh": 2, "momentum": 0.9} | settings))
    state, infos = run(fleet, algo, 5)
    x, u = fleet.initial()[0], torch.zeros(fleet.d, dtype=torch.float64)
    for _ in range(5):
        u = 0.9 * u + gradient(x, 0, people)
        x = x - 0.2 * u
    torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-12)
    assert infos[-1].graph.tolist() == [[1.0]]


def test_m_batches_are_averaged_and_independent() -> None:
    people = classes(mlp, n=4, size=40, ragged=3)
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    algo = AllForOne(criterion="continuous", b_alpha=6, m=3)
    state = algo.init(fleet)
    x = fleet.initial(False)
    fleet.begin(2)
    state, probes = algo.measure(fleet, type(state)(**{**vars(state), "x": x}), fleet.everyone)
    assert probes == 16
    fleet.begin(2)
    i, k, j = (t.flatten() for t in torch.meshgrid(torch.arange(4), torch.arange(4), torch.arange(3), indexing="ij"))
    rows = fleet.ask(Gradient(k, x, 6, at=i, draw=j, track=False)).rows.view(4, 4, 3, -1)
    assert not torch.allclose(rows[0, 1, 0], rows[0, 1, 1])
    mean = rows.mean(2)
    for a in range(4):
        for b in range(4):
            z_ik, z_i = (mean[a, a] - mean[a, b]).square().sum(), mean[a, a].square().sum()
            assert float(state.r[a, b]) == pytest.approx(max(0.0, 1 - float(z_ik / z_i)), abs=1e-9)


def test_a_sketch_keeps_ratios() -> None:
    g = torch.Generator().manual_seed(0)
    slope = torch.randn(6, 2, generator=g)
    inputs = [torch.randn(40, 6, generator=g) for _ in range(4)]
    clients = [Client(f"c{i}", (x, x @ slope * (1, 1, 0.8, -1)[i])) for i, x in enumerate(inputs)]
    people = population(
        clients, model=lambda: nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 2)), task="regression"
    )
    fleet = StackedFleet(people, seed=5, dtype=torch.float64)
    measured = {}
    for sketch in (None, 1500):
        algo = AllForOne(criterion="continuous", b_alpha=None, sketch=sketch)
        state = algo.init(fleet)
        fleet.begin(1)
        measured[sketch] = algo.measure(fleet, state, fleet.everyone)[0].r
    assert not torch.equal(measured[None], measured[1500])
    assert measured[None][0, 1] > 0.5
    assert (measured[None] - measured[1500]).abs().max() < 0.15
    assert fleet.ledger.totals()["sent"]["up"]["numbers"] == 16 * 1500  # of the second round alone: begun afresh


def quadratics(n: int = 12, groups: int = 2) -> Population:
    """Clients around as many centres as there are groups, with noise."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(groups, 4, generator=g)
    clients = []
    for i in range(n):
        y = centres[i % groups] + 0.5 * torch.randn(40, 4, generator=g)
        clients.append(Client(f"c{i:02d}", (torch.ones(40, 1), y)))
    members = [i % groups for i in range(n)]
    return population(clients, model=lambda: nn.Linear(1, 4, bias=False), task="regression", groups=members)


@pytest.mark.parametrize(
    "settings", [{}, {"criterion": "continuous"}, {"sigma": "online", "m": 2}, {"sketch": 4}], ids=str
)
def test_the_own_group_is_found_and_then_left(settings: Any) -> None:
    people = quadratics(8)
    fleet = StackedFleet(people, seed=1, dtype=torch.float64)
    algo = AllForOne(**({"lr": 0.2, "batch": 10, "b_alpha": 20, "refresh": 5, "theory": True} | settings))
    _, infos = run(fleet, algo, 100)
    group = torch.tensor(people.groups)
    same = group[:, None] == group
    early = infos[6].graph
    assert early[same].mean() > 0.18
    assert early[~same].max() < 0.02
    late = torch.stack([info.extra["collaborators"].double() for info in infos[-40:]]).mean()
    assert late < infos[6].extra["collaborators"].double().mean() - 1  # where gradients are noise, everyone is alone


@pytest.mark.parametrize(("refresh", "turns"), [(4, [0, 4, 8]), ("log", [0, 1, 2, 4, 8]), ("epoch", [0, 5, 10])])
def test_refreshes_follow_their_schedule(refresh: Any, turns: list[int]) -> None:
    fleet = StackedFleet(classes(linear, n=3, size=20, ragged=10), seed=0)  # batches of 7: 3, 5 and 6 a pass
    _, infos = run(fleet, AllForOne(batch=7, b_alpha=5, refresh=refresh), 11)
    if refresh == "epoch":
        turns = [0, 4, 8]  # ⌊(3 + 5 + 6)/3⌋ steps
    assert [t for t, info in enumerate(infos) if info.extra["refresh"]] == turns


def test_a_newcomer_measures_when_it_comes_and_the_absent_keep_their_ratios() -> None:
    people = quadratics(6)
    late, gone = people.keys[1], people.keys[2]
    fleet = Participation(StackedFleet(people, seed=1, dtype=torch.float64), Stay(((late, 3, None), (gone, 0, 5))))
    algo = AllForOne(lr=0.02, batch=10, b_alpha=20, refresh=8)
    state, infos = run(fleet, algo, 3)
    alone = torch.eye(6, dtype=torch.float64)[1]
    assert torch.equal(state.r[1], alone)
    assert torch.equal(state.r[:, 1], alone)
    measured = state.r[2].clone()
    for t in range(3, 10):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    assert [int(i.extra["probes"]) for i in infos] == [25, 0, 0, 6, 0, 0, 0, 0, 20, 0]
    assert state.r[1, 3] > 0.5
    assert torch.equal(state.r[2], measured)
    assert int(infos[-1].extra["pairs"]) < int(infos[2].extra["pairs"]) + 5


def test_peers_bound_the_cost_and_prefer_those_that_helped() -> None:
    people = quadratics(30)
    fleet = StackedFleet(people, seed=1, dtype=torch.float64)
    algo = AllForOne(lr=0.0, batch=40, b_alpha=40, refresh=1, peers=6)
    state, infos = run(fleet, algo, 40)
    assert all(int(i.extra["probes"]) == 30 * 7 for i in infos)
    assert all(int(i.extra["pairs"]) <= 30 * 6 for i in infos)
    assert (state.listed.sum(1) == 7).all()
    group = torch.tensor(people.groups)
    same = (group[:, None] == group) & ~torch.eye(30, dtype=torch.bool)
    chosen = torch.zeros(30, 30)
    for t in range(40, 80):
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
        chosen += state.listed
    inside = float(chosen[same].sum() / (chosen.sum() - chosen.diagonal().sum()))
    assert 0.6 < inside < 0.9  # 14 of 29 would be 0.48 at random; the half that explores keeps it below one


def test_variances_are_estimated_online() -> None:
    """g = 2x⟨x, δ⟩ with x ~ N(0, I): the variance of one sample's gradient is 4(d + 1)‖δ‖²."""
    source = LeastSquares(clients=6, dimension=3, centres=1, spread=0.0)
    people = populations.make(
        {"kind": "synthetic", "name": "least-squares", "clients": 6, "dimension": 3, "centres": 1}, 0
    )
    fleet = StackedFleet(online(people, source), seed=0, dtype=torch.float64)
    algo = AllForOne(batch=2, b_alpha=4, m=8, sigma="online", decay=0.98)
    state = algo.init(fleet)
    for t in range(150):
        fleet.begin(t)
        state, _ = algo.measure(fleet, state, fleet.everyone)
    away = (fleet.initial()[0] - source.truth()[0]).square().sum()
    torch.testing.assert_close(state.spread, (4 * 4 * away).expand(6).clone(), rtol=0.25, atol=0)
    torch.testing.assert_close(algo.variances(fleet, state), state.spread / 2)


def test_variances_of_small_clients_are_those_of_their_samples() -> None:
    """Batches drawn without replacement differ less than independent ones, and not at all where they are everything."""
    b_alpha, g = 32, torch.Generator().manual_seed(0)
    clients = []
    for i, n in enumerate((33, 48, 64, 90, 20, 300)):  # of 20, b_α takes all and 12 of them again
        clients.append(Client(f"c{i}", (torch.ones(n, 1), 3 + (1 + i) * torch.randn(n, 4, generator=g))))
    clients.append(Client("whole", (torch.ones(b_alpha, 1), 3 + torch.randn(b_alpha, 4, generator=g))))
    people = population(clients, model=lambda: nn.Linear(1, 4, bias=False), task="regression")
    fleet = StackedFleet(people, seed=3, dtype=torch.float64)
    algo = AllForOne(batch=8, b_alpha=b_alpha, m=12, sigma="online", decay=0.9)
    state = algo.init(fleet)
    for t in range(60):
        fleet.begin(t)
        state, _ = algo.measure(fleet, state, fleet.everyone[:1])
    rows = [people.targets[people.index["train"][i]].double() for i in range(7)]
    truth = torch.stack([(y / 2).var(0, correction=1).sum() for y in rows])  # the gradient is (θ − y)/2 for each sample
    torch.testing.assert_close(state.spread[:-1], truth[:-1], rtol=0.2, atol=0)
    assert float(state.spread[-1]) == 0
    assert float(algo.variances(fleet, state)[-1]) == pytest.approx(float(state.spread[:-1].mean()) / 8)


@pytest.mark.parametrize("criterion", ["binary", "continuous", "cluster"])
def test_whoever_is_absent_has_a_graph_and_no_variance(criterion: str) -> None:
    people = classes(mlp, n=4, size=700)
    fleet = Participation(StackedFleet(people, seed=0), Stay(((people.keys[1], 1, 2), (people.keys[2], 3, None))))
    algo = make("allforone", {"criterion": criterion, "batch": 512, "b_alpha": 16, "theory": True}, groups=(0, 1, 0, 1))
    _, infos = run(fleet, algo, 3)
    for t, info in enumerate(infos):
        torch.testing.assert_close(info.graph.sum(1), torch.ones(4, dtype=torch.float64))
        there = torch.tensor([True, t == 1, False, True])
        assert torch.equal(info.extra["effective_variance"] > 0, there)
        assert torch.equal(info.extra["collaborators"] > 0, there)


def test_told_weights_are_uniform_in_the_cluster_and_in_the_known_ball() -> None:
    people = quadratics(6, 3)
    fleet = StackedFleet(people, seed=1, dtype=torch.float64)
    oracle = make("allforone-oracle", {"batch": 40}, groups=people.groups)
    _, infos = run(fleet, oracle, 2)
    group = torch.tensor(people.groups)
    assert torch.equal(infos[-1].graph, (group[:, None] == group).double() / 2)
    assert int(infos[-1].extra["refresh"]) == 0
    b = [[abs(i - k) * 0.1 for k in range(6)] for i in range(6)]
    even = make("allforone", {"criterion": "even", "b": b, "mu": 2.0, "precision": 0.011, "batch": 40})
    _, infos = run(StackedFleet(people, seed=1, dtype=torch.float64), even, 1)
    near = (torch.tensor(b).double() ** 2 < 2 * 2.0 * 0.011).double()  # within 0.2097: two steps either way
    torch.testing.assert_close(infos[-1].graph, near / near.sum(1, keepdim=True))
    assert near[0].tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("settings", [{}, {"normalised": False, "criterion": "continuous"}], ids=str)
def test_an_answer_that_does_not_come_leaves_the_weights_of_the_others(settings: Any) -> None:
    people = quadratics(6)
    bad = people.keys[3]
    algo = AllForOne(lr=0.05, batch=40, b_alpha=40, refresh=2, **settings)
    faulty = Faulty(StackedFleet(people, seed=1, dtype=torch.float64), [bad])
    absent = Participation(StackedFleet(people, seed=1, dtype=torch.float64), Stay(((bad, 9, None),)))
    outcomes = [run(fleet, algo, 6)[0].x for fleet in (faulty, absent)]
    torch.testing.assert_close(*outcomes, rtol=0, atol=1e-9)
    alone = run(StackedFleet(people.reordered([0, 1, 2, 4, 5]), seed=1, dtype=torch.float64), algo, 6)[0].x
    torch.testing.assert_close(outcomes[1][[0, 1, 2, 4, 5]], alone, rtol=0, atol=1e-9)


def test_few_participants_step_with_whoever_is_there() -> None:
    people = quadratics(8)
    fleet = Participation(StackedFleet(people, seed=1, dtype=torch.float64), Count(1))
    _, infos = run(fleet, AllForOne(lr=0.05, batch=10, b_alpha=10, refresh=2), 12)
    assert all(int(i.extra["pairs"]) == 0 and int(i.ok.sum()) == 1 for i in infos)


def test_steps_are_those_of_table_1() -> None:
    share, steps = torch.tensor([1.0, 4.0], dtype=torch.float64), torch.tensor([0, 9])
    assert AllForOne(lr=0.3, rounds=100).rate(7, steps, share).tolist() == [0.3, 0.3]
    assert AllForOne(lr=0.3, rounds=100, beta=2.0).rate(7, steps, share).tolist() == [0.3, 0.125]
    falling = AllForOne(step="decreasing", c=3.0, mu=2.0)
    assert falling.rate(9, steps, share).tolist() == pytest.approx([1.5, 0.15])
    horizon = AllForOne(step="horizon", mu=2.0, beta=0.01, excess=3.0, sufficient=0.5, rounds=100)
    expected = math.log(2 * 100 * 4 * 3.0 / (0.01 * 0.5)) / (2 * 100)
    assert horizon.rate(9, steps, share).tolist() == pytest.approx([expected] * 2)
    assert AllForOne(step="horizon", mu=2.0, beta=1e-9, rounds=1).rate(0, steps, share).tolist() == [0.5, 0.5]
    stepped = AllForOne(lr=1.0, lr_schedule="step:4:0.1", rounds=10)
    assert [float(stepped.rate(t, steps, share)[0]) for t in (3, 4, 8)] == pytest.approx([1, 0.1, 0.01])


def test_the_quantities_of_the_theory() -> None:
    people = quadratics(4)
    fleet = StackedFleet(people, seed=1, dtype=torch.float64)
    b = [[0.0, 0.1, 0.2, 9.0], [0.1, 0.0, 0.3, 9.0], [0.2, 0.3, 0.0, 9.0], [9.0, 9.0, 9.0, 0.0]]
    algo = make(
        "allforone", {"batch": 40, "b_alpha": 40, "theory": True, "b": b, "mu": 2.0, "precision": 0.01, "lr": 0.0}
    )
    state, infos = run(fleet, algo, 1)
    told = infos[0].extra
    assert torch.equal(told["collaborators"], (state.r >= 0.1).sum(1))
    psi = state.r * 0.1 * (state.r >= 0.1)
    torch.testing.assert_close(told["effective_variance"], 1 / (40 * psi).sum(1))
    # 1 − b²/(4·0.01): 0.75 for b = 0.1, 0 for b = 0.2; with b in place of b² nobody but oneself would be there
    assert told["sufficient_cluster"].tolist() == [2, 2, 1, 1]
    bounds = torch.tensor(b, dtype=torch.float64)
    assert sufficient(lambda x: x, bounds, 0.0, 2.0, 0.01)[0, 1] == pytest.approx(0.75**2)
    assert sufficient(lambda x: x, bounds, 0.5, 2.0, 0.01)[0, 1] == pytest.approx(0.25**2)


def test_ratios_never_leave_their_interval() -> None:
    rows = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[3] = 0
    rows[4, 1:] = rows[4, :1]
    r = ratios(rows @ rows.mT)
    assert (r >= 0).all()
    assert (r <= 1).all()
    assert (r[:, 0] == 1).all()
    assert (r[3, 1:] == 0).all()
    torch.testing.assert_close(r[4], torch.ones(5).double())


@pytest.mark.parametrize(
    "bad",
    [
        {"criterion": "binray"},
        {"criterion": lambda x: x + 0.1},
        {"criterion": lambda x: x * (1 - x)},
        {"criterion": lambda x: 2 * x},
        {"criterion": "even"},
        {"b": [[0.0, 1.0], [1.0]]},
        {"b": [[0.0, -1.0], [1.0, 0.0]]},
        {"b": [[0.0, math.nan], [1.0, 0.0]]},
        {"lam": 0.0},
        {"refresh": 0},
        {"refresh": "daily"},
        {"sigma": "online"},
        {"sigma": (1.0, 0.0)},
        {"step": "horizon"},
        {"step": "decreasing", "c": 1.0},
        {"peers": 0},
        {"momentum": 1.0},
    ],
    ids=lambda bad: next(iter(bad)),  # a function prints its address, which differs between the suite's processes
)
def test_settings_without_meaning_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="allforone"):
        make("allforone", bad)
