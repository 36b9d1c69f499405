"""MeritFed against plain loops, its extensions against what they must equal, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from builders import classes, mlp
from coterie.algorithm import Info
from coterie.algorithms import make
from coterie.algorithms.meritfed import mirrored
from coterie.asks import Gradient
from coterie.data.population import Client, Population, population
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

WHOLE = {"batch": None, "lr": 0.3, "alpha": 2.0, "steps": 4}  # whole splits: nothing is drawn


def gradient(row: Tensor, i: int, people: Population, split: str = "train") -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    loss = value(module, i, people, split)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def value(module: nn.Module, i: int, people: Population, split: str) -> Tensor:
    held = people.index[split][i]
    return nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])


def loss_at(row: Tensor, i: int, people: Population, split: str = "validation") -> float:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    with torch.no_grad():
        return float(value(module, i, people, split))


def learn(fleet: Fleet, name: str, rounds: int = 6, **settings: Any) -> tuple[Any, list[Info], Any]:
    algo = make(name, WHOLE | settings if name.startswith("meritfed") else settings)
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos, algo


def fleet_of(people: Population, kind: Any = StackedFleet) -> Fleet:
    return kind(people, seed=2, dtype=torch.float64)


# ---- plain loops -----------------------------------------------------------------------------------------------------


def plain_meritfed(
    people: Population, x: Tensor, rounds: int, lr: float, alpha: float, steps: int, *, average: bool = False,
    cool: int | None = None, split: str = "validation", directions: Any = None, width: float = 0.1, target: int = 0,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Algorithm 1, one client after the other, weights as plain numbers. With `directions` in the zeroth order."""
    n = len(people.keys)
    w = [1 / n] * n
    for r in range(rounds):
        g = [gradient(x, i, people) for i in range(n)]
        a = alpha / 10 if cool is not None and r > cool else alpha
        for t in range(steps):

            def at(weights: list[float]) -> Tensor:
                return x - lr * sum(weights[i] * g[i] for i in range(n))  # noqa: B023

            if directions is None:
                h = gradient(at(w), target, people, split)
                factor = [math.exp(a * lr * float(h @ g[i])) for i in range(n)]
            else:
                e = directions(r, t)
                e = [v / math.sqrt(sum(u * u for u in e)) for v in e]
                up = loss_at(at([w[i] + width * e[i] for i in range(n)]), target, people, split)
                down = loss_at(at([w[i] - width * e[i] for i in range(n)]), target, people, split)
                factor = [math.exp(-a * n * (up - down) / (2 * width) * e[i]) for i in range(n)]
            total = sum(w[i] * factor[i] for i in range(n))
            u = [w[i] * factor[i] / total for i in range(n)]
            w = [w[i] * t / (t + 1) + u[i] / (t + 1) for i in range(n)] if average else u
        x = x - lr * sum(w[i] * g[i] for i in range(n))
    return x, w


@pytest.mark.parametrize("kind", [StackedFleet, LoopFleet])
@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({}, {}),
        ({"average": True}, {"average": True}),
        ({"cool": 2, "alpha": 20.0}, {"cool": 2, "alpha": 20.0}),
        ({"data": "train", "targets": ("site-2",)}, {"split": "train", "target": 2}),
    ],
    ids=["plain", "averaged", "cooled", "own training data"],
)
def test_first_order_equals_a_plain_loop(settings: Any, reference: Any, kind: Any) -> None:
    people, rounds = classes(), 6
    fleet = fleet_of(people, kind)
    state, infos, _ = learn(fleet, "meritfed", rounds, **settings)
    x, w = plain_meritfed(people, fleet.initial()[0], rounds, **({"lr": 0.3, "alpha": 2.0, "steps": 4} | reference))
    torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-9)
    torch.testing.assert_close(infos[-1].graph[0], torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-9)
    assert max(w) - min(w) > 0.05  # weights have moved


@pytest.mark.parametrize("kind", [StackedFleet, LoopFleet])
def test_zeroth_order_equals_a_plain_loop_and_the_target_sees_no_gradient(kind: Any) -> None:
    people, rounds, steps = classes(), 6, 4
    fleet = fleet_of(people, kind)
    twin = fleet_of(people)

    def directions(r: int, t: int) -> list[float]:
        twin.begin(r)
        u = twin.uniform(f"direction {t}", twin.everyone)
        return [math.sqrt(2) * float(torch.erfinv(2 * (v + 2.0**-54) - 1)) for v in u]

    state, infos, _algo = learn(fleet, "meritfed-zo", rounds, alpha=5.0)
    x, w = plain_meritfed(people, fleet.initial()[0], rounds, 0.3, 5.0, steps, directions=directions)
    torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-8)
    torch.testing.assert_close(infos[-1].graph[0], torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-8)
    d, bytes_each = fleet.d, 8
    sent = fleet.ledger.sent
    assert set(sent) == {"gradient", "loss"}
    # everyone, the target included, is sent x and returns its own gradient, once a round: d numbers each way
    assert (sent["gradient"] == [[rounds * d, rounds * d * bytes_each] * 2] * 4).all()
    # the target alone is sent two points a step, and returns two losses: whatever else reached it would be here
    points, losses = rounds * steps * 2 * d, rounds * steps * 2
    assert sent["loss"][0].tolist() == [losses, losses * bytes_each, points, points * bytes_each]
    assert not sent["loss"][1:].any()


def test_in_the_first_order_the_target_pays_a_gradient_a_step() -> None:
    fleet = fleet_of(classes())
    learn(fleet, "meritfed", 1)
    assert fleet.ledger.sent["gradient"][:, 0].tolist() == [5 * fleet.d] + [fleet.d] * 3


def test_directions_are_uniform_on_the_sphere() -> None:
    """The mean of e eᵀ over the unit sphere of R^n is I/n, and the estimate of a slope is unbiased."""
    fleet = fleet_of(classes())
    slope = torch.tensor([0.3, -1.0, 0.5, 0.2], dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for t in range(4000):
        fleet.begin(t)
        e = torch.special.ndtri(fleet.uniform("direction 0", fleet.everyone) + 2.0**-54)
        e = e / e.norm()
        total += 4 * (slope @ e) * e
    torch.testing.assert_close(total / 4000, slope, rtol=0, atol=0.08)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))


def test_fedadp_equals_a_plain_loop() -> None:
    people, lr, rounds = classes(), 0.3, 6
    fleet = fleet_of(people)
    state, infos, _ = learn(fleet, "fedadp", rounds, lr=lr, batch=None)
    x = fleet.initial()[0]
    for _ in range(rounds):
        g = [gradient(x, i, people) for i in range(4)]
        angles = [math.acos(max(-1.0, min(1.0, cosine(v, g[0])))) for v in g]
        scores = [5 * (1 - math.exp(-math.exp(-5 * (a - 1)))) for a in angles]
        w = [math.exp(s) / sum(math.exp(q) for q in scores) for s in scores]
        x = x - lr * sum(w[i] * g[i] for i in range(4))
    torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-9)
    torch.testing.assert_close(infos[-1].graph[2], torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-9)


def test_tawt_equals_a_plain_loop() -> None:
    people, lr, rounds = classes(), 0.02, 7
    fleet = fleet_of(people)
    state, infos, _ = learn(fleet, "tawt", rounds, lr=lr, batch=None)
    x, w = fleet.initial()[0], [0.25] * 4
    for t in range(rounds):
        g = [gradient(x, i, people) for i in range(4)]
        if t % 2 == 1:
            new = [w[i] * math.exp(100 * lr * cosine(g[i], g[0])) for i in range(4)]
            w = [v / sum(new) for v in new]
        x = x - lr * sum(w[i] * g[i] for i in range(4))
        torch.testing.assert_close(infos[t].graph[0], torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-9)
    assert w[0] > 0.5


def test_sgd_full_ideal_and_random_weigh_as_they_say() -> None:
    people = classes(n=6, groups=(0, 1, 0, 1, 1, 1))
    fleet = fleet_of(people)
    start = fleet.initial()[0]
    g = torch.stack([gradient(start, i, people) for i in range(6)])
    for name, settings, expected in (
        ("sgd_full", {}, g.mean(0)),
        ("sgd_ideal", {"groups": people.groups}, g[[0, 2]].mean(0)),
    ):
        fleet.reset()
        state, infos, _ = learn(fleet, name, 1, lr=0.1, batch=None, **settings)
        torch.testing.assert_close(state.x[0], start - 0.1 * expected, rtol=0, atol=1e-12)
    fleet.reset()
    state, infos, _algo = learn(fleet, "sgd_random", 30, batch=None, clients=2)
    drawn = torch.stack([info.graph[0] for info in infos])
    assert ((drawn == 0.5).sum(1) == 2).all()
    assert (drawn.sum(0) > 0).all()  # everyone's turn comes
    assert fleet.ledger.totals()["sent"]["up"]["numbers"] == 30 * 2 * fleet.d


# ---- the simplex, and δ ----------------------------------------------------------------------------------------------


def test_weights_stay_on_the_simplex_however_wild_the_exponents() -> None:
    g = torch.Generator().manual_seed(0)
    some = torch.tensor([[True, True, False, True, True]] * 3)
    for scale in (1e-9, 1.0, 1e3, 1e200, 1e308):
        w = torch.rand(3, 5, generator=g, dtype=torch.float64) * some
        w[0, 0] = 0
        w = w / w.sum(1, keepdim=True)
        new = mirrored(w, torch.randn(3, 5, generator=g, dtype=torch.float64) * scale, some)
        assert torch.isfinite(new).all()
        assert (new >= 0).all()
        assert (new[~some] == 0).all()
        assert new[0, 0] == 0  # what is zero stays zero
        torch.testing.assert_close(new.sum(1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)


def means(targets: list[list[float]], spread: float = 0.0, samples: int = 4) -> Population:
    """Clients whose loss is the mean squared distance to their own point (or points around it)."""
    g = torch.Generator().manual_seed(0)
    clients = []
    for i, point in enumerate(targets):
        y = torch.tensor(point, dtype=torch.float64) + spread * torch.randn(3 * samples, len(point), generator=g)
        x = torch.ones(3 * samples, 1, dtype=torch.float64)
        parts = [(x[a : a + samples], y[a : a + samples]) for a in (0, samples, 2 * samples)]
        clients.append(Client(f"c{i}", *parts))
    return population(clients, model=lambda: nn.Linear(1, len(targets[0]), bias=False), task="regression")


def test_delta_bounds_the_accuracy_of_the_inner_problem_and_steps_lower_it() -> None:
    people = means([[0.0, 0.0], [0.4, 0.1], [-0.3, 0.5], [2.0, 2.0]], spread=0.3)
    deltas = []
    for steps in (0, 3, 30):
        fleet = fleet_of(people)
        fleet.begin(0)
        algo = make("meritfed", {"batch": None, "lr": 0.5, "alpha": 4.0, "steps": steps, "delta": True})
        state = algo.init(fleet)
        g = torch.stack(list(fleet.ask(Gradient(fleet.everyone, state.x[0], None)).rows))
        _new, info = algo.round(fleet, state)
        held = people.targets[people.index["validation"][0]]

        def phi(w: Any) -> float:
            y = state.x[0] - 0.5 * torch.tensor(w, dtype=torch.float64) @ g  # noqa: B023
            return float((y - held).square().mean())  # noqa: B023

        best = minimize(
            phi, [0.25] * 4, bounds=[(0, 1)] * 4, constraints={"type": "eq", "fun": lambda w: sum(w) - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        accuracy = phi(info.graph[0].tolist()) - best.fun
        delta = float(info.extra["delta"][0])
        assert -1e-9 < accuracy <= delta + 1e-9
        deltas.append(delta)
        assert fleet.phases == 1 + 1 + steps  # the observer is no phase
    assert deltas[0] > 2 * deltas[1] > 4 * deltas[2] > 0


def test_weight_goes_to_those_who_help() -> None:
    people = means([[0.0] * 5] * 3 + [[3.0] * 5] * 3, spread=1.0, samples=40)
    fleet = StackedFleet(people, seed=0)
    state, infos, _ = learn(fleet, "meritfed", 60, lr=0.5, alpha=5.0)
    assert float(infos[-1].graph[0, 3:].sum()) < 0.05
    assert float(state.x.square().sum()) < 0.3


# ---- what goes beyond the paper --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["first", "zeroth"])
def test_all_as_targets_is_everyone_as_the_only_target(order: str) -> None:
    people = classes()
    together, infos, _algo = learn(fleet_of(people), "meritfed-all", order=order)
    for i, key in enumerate(people.keys):
        alone, told, _ = learn(fleet_of(people), "meritfed", order=order, targets=(key,))
        torch.testing.assert_close(together.x[i], alone.x[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(infos[-1].graph[i], told[-1].graph[0], rtol=0, atol=1e-9)


def test_all_as_targets_on_shared_gradients_equals_a_plain_loop() -> None:
    people, lr, alpha, rounds = classes(), 0.3, 2.0, 5
    fleet = fleet_of(people)
    state, infos, algo = learn(fleet, "meritfed-shared", rounds)
    x, w = [row.clone() for row in fleet.initial()], [[0.25] * 4 for _ in range(4)]
    for _ in range(rounds):
        centre = sum(x) / 4
        g = [gradient(centre, i, people) for i in range(4)]
        for k in range(4):
            for _ in range(4):
                h = gradient(x[k] - lr * sum(w[k][i] * g[i] for i in range(4)), k, people, "validation")
                new = [w[k][i] * math.exp(alpha * lr * float(h @ g[i])) for i in range(4)]
                w[k] = [v / sum(new) for v in new]
        x = [x[k] - lr * sum(w[k][i] * g[i] for i in range(4)) for k in range(4)]
    torch.testing.assert_close(algo.personal(state), torch.stack(x), rtol=0, atol=1e-9)
    torch.testing.assert_close(infos[-1].graph, torch.tensor(w, dtype=torch.float64), rtol=0, atol=1e-9)
    assert fleet.ledger.sent["gradient"][:, 0].tolist() == [rounds * 5 * fleet.d] * 4  # its own one, and four h


@pytest.mark.parametrize(
    ("settings", "optimiser"),
    [
        ({"momentum": 0.7}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.7)),
        (
            {"optimiser": "adam", "betas": (0.8, 0.9), "eps": 1e-6},
            lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.8, 0.9), eps=1e-6),
        ),
    ],
    ids=["momentum", "adam"],
)
def test_the_servers_optimiser_is_torchs(settings: Any, optimiser: Any) -> None:
    people = classes()
    fleet = fleet_of(people)
    state, _, _ = learn(fleet, "meritfed", 5, steps=0, **settings)  # without mirror steps: the mean gradient
    x = fleet.initial()[0].clone().requires_grad_()
    chosen = optimiser([x])
    for _ in range(5):
        x.grad = torch.stack([gradient(x.detach(), i, people) for i in range(4)]).mean(0)
        chosen.step()
    torch.testing.assert_close(state.x[0], x.detach(), rtol=0, atol=1e-9)


def test_local_steps_are_pseudo_gradients() -> None:
    people = classes()
    fleet = fleet_of(people)
    state, _, _ = learn(fleet, "meritfed", 3, steps=0, local_steps=2, local_lr=0.1)
    x = fleet.initial()[0]
    for _ in range(3):
        ends = []
        for i in range(4):
            y = x
            for _ in range(2):
                y = y - 0.1 * gradient(y, i, people)
            ends.append(y)
        x = sum(ends) / 4  # x − γ · mean of (x − x_i)/γ
    torch.testing.assert_close(state.x[0], x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("compress", "numbers"),
    [
        ({"kind": "topk", "share": 0.25}, lambda d: 2 * round(0.25 * d)),
        ({"kind": "quantise", "bits": 4}, lambda d: math.ceil(d * 4 / 64) + 1),
        ({"kind": "sketch", "share": 0.5}, lambda d: round(0.5 * d)),
    ],
    ids=["topk", "quantise", "sketch"],
)
@pytest.mark.parametrize("local_steps", [1, 2])
def test_compressed_gradients_travel_smaller_and_still_train(compress: Any, numbers: Any, local_steps: int) -> None:
    outcomes = []
    for kind in (StackedFleet, LoopFleet):
        fleet = fleet_of(classes(), kind)
        state, _infos, _ = learn(fleet, "meritfed", 15, compress=compress, local_steps=local_steps, steps=0)
        outcomes.append(state.x)
        before, after = (
            sum(loss_at(row, i, classes(), "train") for i in range(4)) for row in (fleet.initial()[0], state.x[0])
        )
        assert after < before - 0.05
        own = fleet.ledger.sent["gradient" if local_steps == 1 else "fit"][1]
        assert own[0] == 15 * numbers(fleet.d)
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=1e-9)


def test_absent_clients_keep_their_weight_and_the_others_divide_theirs() -> None:
    people = classes()
    fleet = Participation(fleet_of(people), Stay((("site-3", 0, 2), ("site-0", 0, 4))))
    state, _infos, algo = learn(fleet, "meritfed", 2)
    before = state.w
    fleet.begin(2)
    state, info = algo.round(fleet, state)
    assert state.w[0, 3] == before[0, 3]
    assert not torch.equal(state.w[0, :3], before[0, :3])
    torch.testing.assert_close(state.w.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert info.graph[0, 3] == 0
    torch.testing.assert_close(info.graph.sum(1), torch.ones(4, dtype=torch.float64))
    fleet.begin(4)  # the target is away: the others go on with the weights there are
    after, info = algo.round(fleet, state)
    torch.testing.assert_close(after.w, state.w, rtol=0, atol=1e-15)
    torch.testing.assert_close(info.graph[0, 1:3], state.w[0, 1:3] / state.w[0, 1:3].sum())
    assert not torch.equal(after.x, state.x)
    assert int(info.extra["passes"]) == 0


def test_with_everyone_a_target_an_absent_ones_model_stays() -> None:
    people = classes()
    for name in ("meritfed-all", "meritfed-shared"):
        fleet = Participation(fleet_of(people), Stay((("site-1", 0, 2),)))
        state, _, algo = learn(fleet, name, 2, momentum=0.5)
        fleet.begin(2)
        after, info = algo.round(fleet, state)
        for field in ("x", "w", "m"):
            assert torch.equal(getattr(after, field)[1], getattr(state, field)[1])
            assert not torch.equal(getattr(after, field)[0], getattr(state, field)[0])
        assert torch.equal(info.graph[1], torch.eye(4, dtype=torch.float64)[1])


@pytest.mark.parametrize("name", ["meritfed", "meritfed-zo", "sgd_full", "fedadp", "tawt", "robust-median"])
def test_two_pools_in_one_fleet_are_two_fleets(name: str) -> None:
    """Side by side, each target with its own clients and its own α, nothing of the one reaches the other."""
    people = classes(n=6)
    pools = (0, 1, 0, 1, 1, 0)
    alphas = (2.0, 5.0)
    own = {"batch": None, "lr": 0.3}
    settings = own | ({"steps": 3} if name.startswith("meritfed") else {})
    many = {"alpha": alphas} if name.startswith("meritfed") else {}
    both, infos, _ = learn(fleet_of(people), name, 5, targets=("site-0", "site-1"), pools=pools, **settings, **many)
    for k in range(2):
        members = [i for i in range(6) if pools[i] == k]
        part = people.reordered(members)
        few = {"alpha": alphas[k]} if many else {}
        alone, told, _ = learn(fleet_of(part), name, 5, **settings, **few)
        torch.testing.assert_close(both.x[k], alone.x[0], rtol=0, atol=1e-9)
        row = infos[-1].graph[members[0]]
        torch.testing.assert_close(row[members], told[-1].graph[0], rtol=0, atol=1e-9)
        assert not row[[i for i in range(6) if pools[i] != k]].any()


def test_fresh_samples_are_new_ones_in_every_step() -> None:
    fleet = fleet_of(classes(size=40))
    asked: list[Tensor] = []
    inner = fleet._gradient

    def listening(ask: Gradient, place: int) -> Any:
        answer = inner(ask, place)
        if ask.memory == "mirror":
            asked.append(answer.loss)
        return answer

    fleet._gradient = listening  # type: ignore[method-assign]
    learn(fleet, "meritfed", 2, data="fresh", mirror_batch=5, alpha=0.0)
    assert len(torch.cat(asked).unique()) == 8  # weights stand still within a round: only the samples differ


# ---- what is refused -------------------------------------------------------------------------------------------------

WRONG = {
    "start must be on the simplex": {"start": (0.5, 0.6, 0.0, 0.0)},
    "start must be on the simplex: ": {"start": (1.5, -0.5, 0.0, 0.0)},
    "start gives 2 weights for 4 clients": {"start": (0.5, 0.5)},
    "the target 'site-9' is no client": {"targets": ("site-9",)},
    "alpha has 2 values for 1 targets": {"alpha": (1.0, 2.0)},
    "there are 2 targets: say with `pools`": {"targets": ("site-0", "site-1")},
    "pools must give each of 4 clients": {"targets": ("site-0", "site-1"), "pools": (0, 1)},
    "every target must be in its own pool": {"targets": ("site-0", "site-1"), "pools": (1, 0, 0, 0)},
    "fresh samples have no end": {"data": "fresh"},
    "lr must be a number above 0": {"lr": 0.0},
    "momentum goes with sgd": {"momentum": 0.9, "optimiser": "adam"},
    "steps must be a whole number of at least 0": {"steps": -1},
    "local_lr must be a number above 0": {"local_lr": 0.0, "local_steps": 2},
    "compress.share must be above 0": {"compress": {"kind": "topk", "share": 0.0}},
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_settings_are_refused_in_a_sentence(words: str) -> None:
    with pytest.raises(SettingError, match=words.replace("(", "\\(")):
        make("meritfed", WRONG[words]).init(fleet_of(classes()))


@pytest.mark.parametrize(("name", "setting"), [("tawt", "rate"), ("fedadp", "steepness")])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_rule_that_would_follow_the_wrong_way_is_refused(name: str, setting: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"{setting} must be a number at least 0"):
        make(name, {setting: value})


def test_no_validation_data_and_too_many_clients_are_refused() -> None:
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    bare = population([Client("a", (x, y), None, (x, y)), Client("b", (x, y), (x, y), (x, y))], model=mlp())
    with pytest.raises(SettingError, match="'a' has no validation data"):
        make("meritfed").init(StackedFleet(bare))
    make("meritfed", {"data": "train"}).init(StackedFleet(bare))
    make("meritfed", {"targets": ("b",)}).init(StackedFleet(bare))
    with pytest.raises(SettingError, match="'a' has no validation data"):
        make("meritfed-all").init(StackedFleet(bare))
    with pytest.raises(SettingError, match="3 clients a round were asked for, and there are 2"):
        make("sgd_random", {"clients": 3}).init(StackedFleet(bare))
    with pytest.raises(SettingError, match="true group of each of 2 clients"):
        make("sgd_ideal").init(StackedFleet(bare))
