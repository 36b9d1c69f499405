"""SCooL's loop: models move as plain loops say, neighbours are kept and counted, and priors are swapped."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from builders import classes, mlp
from coterie.algorithms import make
from coterie.algorithms.scool import SCooL
from coterie.data.population import SPLITS, Client, Population, population
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Count, Participation, Stay
from coterie.fleet.stacked import StackedFleet
from coterie.graph.communities import adjusted_rand, communities
from coterie.graph.priors import PRIORS, Prior
from coterie.runs.packing import pack, unpack

N, RATE, STEPS = 5, 0.2, 3


def full(n: int = N) -> Population:
    """Clients whose batches of 24 are all their data: nothing depends on what is drawn."""
    return classes(mlp, n=n, size=24, ragged=0)


def scool(**settings: Any) -> SCooL:
    made = make("scool", {"plan": {"steps": STEPS, "batch": 24, "lr": RATE}, "batch": 24, **settings}, rounds=10)
    assert isinstance(made, SCooL)
    return made


def run(fleet: Any, algo: Any, rounds: int) -> tuple[Any, list[Any]]:
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def loss(row: Tensor, client: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row, module.parameters())
    held = people.index["train"][client]
    return nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])


def gradient(row: Tensor, client: int, people: Population) -> Tensor:
    module = mlp().double()
    nn.utils.vector_to_parameters(row.clone(), module.parameters())
    held = people.index["train"][client]
    value = nn.functional.cross_entropy(module(people.inputs[held].double()), people.targets[held])
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(module.parameters()))])


def trained(row: Tensor, client: int, people: Population) -> Tensor:
    for _ in range(STEPS):
        row = row - RATE * gradient(row, client, people)
    return row


def likelihoods(rows: list[Tensor], people: Population) -> Tensor:
    return -torch.tensor([[loss(row, j, people).item() for j in range(N)] for row in rows], dtype=torch.float64)


# ---- against plain loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m_step", ["normalised", "printed"])
@pytest.mark.parametrize("fleet_kind", [StackedFleet, LoopFleet])
def test_models_move_along_the_graph_as_a_plain_loop_says(m_step: str, fleet_kind: Any) -> None:
    people = full()
    fleet = fleet_kind(people, seed=2, dtype=torch.float64)
    algo = scool(m_step=m_step, temperature=0.3, baseline=1.0, lam=0.05, settings={"learn": False})
    state, _ = run(fleet, algo, 2)
    x = list(fleet.initial())
    again = fleet_kind(people, seed=2, dtype=torch.float64)
    _, beliefs = algo._prior.init(again)
    odds = (torch.log(beliefs["b"] + 1e-6) - torch.log(1 - beliefs["b"] + 1e-6)).numpy()
    for t in range(2):
        after = [trained(row, i, people) for i, row in enumerate(x)]
        log_p = (1.0 + likelihoods(after, people)) / 0.3
        again.begin(t)
        _, beliefs = algo._prior.e_step(state.w, beliefs, _evidence(algo, again, log_p))
        omega = beliefs["omega"].numpy()
        moved = []
        for i in range(N):
            w = [1 / (1 + math.exp(-float(log_p[i, j]) - float(omega[i] @ odds @ omega[j]))) for j in range(N)]
            if m_step == "printed":
                w[i] = 1.0
            else:
                w = [v / sum(w) for v in w]
            step = sum(w[j] * (x[j] - after[j]) for j in range(N))
            moved.append(x[i] - step - RATE * 0.05 * x[i])
        x = moved
    torch.testing.assert_close(state.x, torch.stack(x), rtol=0, atol=1e-9)


def _evidence(algo: SCooL, fleet: Any, log_p: Tensor) -> Any:
    from coterie.graph.priors import Evidence

    every = torch.ones(N, N, dtype=torch.bool)
    return Evidence(log_p, every, every, algo.temperature, lambda: fleet.initial(), fleet)


@pytest.mark.parametrize("m_step", ["normalised", "printed"])
def test_exact_cross_gradients_equal_a_plain_loop(m_step: str) -> None:
    people = full()
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    algo = scool(prior="attention", cross_gradients="exact", m_step=m_step, temperature=0.5, lam=0.05)
    state, infos = run(fleet, algo, 1)
    assert fleet.phases == 2 + STEPS
    start = fleet.initial()
    w = infos[0].graph  # a row of attention sums to one already
    assert w.sum(1).numpy() == pytest.approx(1)
    x = list(start)
    for _ in range(STEPS):
        moved = []
        for i in range(N):
            weight = [1.0 if j == i and m_step == "printed" else float(w[i, j]) for j in range(N)]
            slope = sum(weight[j] * gradient(x[i], j, people) for j in range(N))
            moved.append(x[i] - RATE * (slope + 0.05 * x[i]))
        x = moved
    torch.testing.assert_close(state.x, torch.stack(x), rtol=0, atol=1e-9)
    assert bool(infos[0].ok.all())


def test_the_likelihood_is_the_trained_models_loss_on_the_others_data() -> None:
    people = full()
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    state, _ = run(fleet, scool(), 1)
    after = [trained(row, i, people) for i, row in enumerate(fleet.initial())]
    torch.testing.assert_close(state.loss, -likelihoods(after, people), rtol=0, atol=1e-9)
    assert bool(state.known.all())


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"topology": "ring"}, {}), ({"topology": "group_ring", "options": {"neighbours": 4}}, {"neighbours": 4})],
)
def test_a_known_graph_gives_d_psgd(settings: dict[str, Any], options: dict[str, Any]) -> None:
    people = full(6)
    fleet = StackedFleet(people, seed=2, dtype=torch.float64)
    state, infos = run(fleet, scool(prior="dirac", settings=settings), 4)
    w, x = infos[0].graph, fleet.initial()
    assert torch.equal(w, w.T)
    assert fleet.phases == 1
    assert int(infos[0].extra["pairs"]) == 0
    assert int(infos[0].extra["links"]) == int((w > 0).sum()) - 6
    for _ in range(4):  # (16), the local update in the place of one gradient
        x = torch.stack([sum(w[i, j] * x[j] for j in range(6)) + trained(x[i], i, people) - x[i] for i in range(6)])
    torch.testing.assert_close(state.x, x, rtol=0, atol=1e-9)


def test_without_others_data_in_the_likelihood_the_block_model_trains_locally() -> None:
    fleet = StackedFleet(full(), seed=2, dtype=torch.float64)
    state, _ = run(fleet, scool(likelihood="own"), 3)
    expected = torch.stack(
        [trained(trained(trained(r, i, full()), i, full()), i, full()) for i, r in enumerate(fleet.initial())]
    )
    torch.testing.assert_close(state.x, expected, rtol=0, atol=1e-9)


def test_a_part_of_ones_own_moves_by_ones_own_update() -> None:
    people = full()
    for cross in ("first-order", "exact"):
        fleet = StackedFleet(people, seed=2, dtype=torch.float64)
        state, _ = run(fleet, scool(own="head", cross_gradients=cross), 1)
        head = torch.zeros(fleet.d, dtype=torch.bool)
        head[fleet.columns("head")] = True
        alone = torch.stack([trained(row, i, people) for i, row in enumerate(fleet.initial())])
        assert (state.x[:, ~head] - alone[:, ~head]).abs().max() > 1e-4
        if cross == "first-order":  # else one's own part has seen another body after the first step
            torch.testing.assert_close(state.x[:, head], alone[:, head], rtol=0, atol=1e-9)
        whole, _ = run(StackedFleet(people, seed=2, dtype=torch.float64), scool(cross_gradients=cross), 1)
        assert (whole.x[:, head] - state.x[:, head]).abs().max() > 1e-4
        if cross == "first-order":
            torch.testing.assert_close(whole.x[:, ~head], state.x[:, ~head], rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Directed(Prior):
    """Everyone listens to the first and the third on around a circle: a graph with eigenvalues below zero."""

    def init(self, clients: Any) -> tuple[Tensor, dict[str, Tensor]]:
        own = torch.eye(clients.n, dtype=torch.float64)
        return (own + own.roll(1, 1) + own.roll(3, 1)) / 3, {}

    def e_step(self, w: Tensor, beliefs: Any, evidence: Any) -> tuple[Tensor, Any]:
        return w, beliefs

    def elbo(self, w: Tensor, beliefs: Any, evidence: Any) -> Tensor:
        return torch.zeros(())


def test_first_order_updates_push_models_apart_where_w_has_eigenvalues_below_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, rounds, rate = 6, 10, 0.1
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))
    part = (inputs, torch.zeros(24, 1))  # everyone's: the best model is zero
    people = population(
        [Client(f"c{i}", part, part) for i in range(n)], model=lambda: nn.Linear(3, 1), task="regression"
    )
    monkeypatch.setitem(PRIORS, "directed", Directed)
    design = torch.cat([inputs, torch.ones(24, 1)], 1).double()
    slope = 2 * design.T @ design / 24
    alternate = torch.tensor([1.0, -1] * 3, dtype=torch.float64)  # W's eigenvector of −1/3
    grown = {}
    for cross in ("first-order", "exact"):
        fleet = StackedFleet(people, seed=0, dtype=torch.float64)
        plan = {"steps": 1, "batch": 24, "lr": rate}
        algo = scool(prior="directed", cross_gradients=cross, plan=plan, shared=False, budget=None)
        state, _ = run(fleet, algo, rounds)
        start = x = fleet.initial(shared=False)
        w = Directed().init(fleet)[0]
        for _ in range(rounds):
            x = x - rate * (w @ x if cross == "first-order" else x) @ slope
        torch.testing.assert_close(state.x, x, rtol=0, atol=1e-9)
        grown[cross] = float((alternate @ state.x).norm() / (alternate @ start).norm())
    assert grown["first-order"] > 1.2
    assert grown["exact"] < 0.6


# ---- who talks to whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "kept"), [(0.1, 1), (0.3, 3), (0.34, 4), (1.0, 9)])
def test_after_the_cut_everyone_exchanges_with_its_heaviest_only(budget: float, kept: int) -> None:
    n = 10
    fleet = StackedFleet(classes(mlp, n=n), seed=1, dtype=torch.float64)
    algo = scool(warmup=2, budget=budget, batch=6, plan={"steps": 2, "batch": 6, "lr": 0.1})
    state, sent = algo.init(fleet), [0]
    for t in range(4):
        fleet.begin(t)
        before = state
        state, info = algo.round(fleet, state)
        sent.append(fleet.ledger.totals()["sent"]["down"]["numbers"])
        neighbours = kept if t >= 2 else n - 1
        assert int(info.extra["pairs"]) == n * (neighbours + 1)
        assert int(info.extra["links"]) == n * neighbours
        assert sent[-1] - sent[-2] == fleet.d * (n + n * (neighbours + 1))
        if t == 1:
            weight = state.w.fill_diagonal_(2.0)
            top = weight.argsort(1, descending=True)[:, : kept + 1]
            assert torch.equal(state.mask, torch.zeros(n, n, dtype=torch.bool).scatter(1, top, True))
        if t >= 2:
            assert torch.equal(state.mask, before.mask)
            assert torch.equal(info.graph > 0, state.mask)
            assert torch.equal(state.loss[~state.mask], before.loss[~state.mask])


def test_peers_make_a_round_linear_and_everyone_is_met_in_time() -> None:
    n, k = 12, 3
    fleet = StackedFleet(classes(mlp, n=n), seed=1, dtype=torch.float64)
    algo = scool(peers=k, budget=None, batch=6, plan={"steps": 1, "batch": 6, "lr": 0.1})
    state, infos = run(fleet, algo, 12)
    assert {int(i.extra["pairs"]) for i in infos} == {n * (k + 1)}
    assert int((infos[0].graph > 0).sum()) == n * (k + 1)
    met = state.known.double().mean()
    assert 0.85 < float(met) < 1.01  # 1 − (1 − 3/11)^12 = 0.98
    with pytest.raises(ValueError, match="peers"):
        scool(peers=12).init(fleet)


def test_who_is_away_is_neither_measured_nor_heard_and_what_was_measured_stays() -> None:
    people = classes(mlp, n=6)
    away = 2
    fleet = Participation(StackedFleet(people, seed=1, dtype=torch.float64), Stay(((people.keys[away], 0, 1),)))
    algo = scool(batch=6, plan={"steps": 2, "batch": 6, "lr": 0.1})
    state, _ = run(fleet, algo, 1)
    fleet.begin(1)
    after, info = algo.round(fleet, state)
    assert int(info.extra["pairs"]) == 25
    assert torch.equal(after.loss[away], state.loss[away])
    assert torch.equal(after.loss[:, away], state.loss[:, away])
    assert not torch.equal(after.loss[0], state.loss[0])
    assert torch.equal(after.x[away], state.x[away])


# ---- priors ----------------------------------------------------------------------------------------------------------

VARIANTS = [
    "scool-sbm",
    "scool-attention",
    "scool-mmsbm",
    "scool-dirac",
    "scool-sbm-reference",
    "scool-attention-reference",
]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_permutes_with_its_clients_and_resumes(name: str) -> None:
    people = classes(mlp, n=6, groups=(0, 0, 1, 1, 2, 2))
    order = [3, 0, 5, 1, 4, 2]
    settings = {"plan": {"steps": 2, "batch": 6, "lr": 0.1}, "batch": 6, "warmup": 3, "peers": 3}
    algo = make(name, settings, rounds=5)
    outcomes = []
    for who in (people, people.reordered(order)):
        fleet = Participation(StackedFleet(who, seed=3, dtype=torch.float64), Count(5))
        outcomes.append(run(fleet, algo, 5))
    (state, infos), (other, permuted) = outcomes
    torch.testing.assert_close(other.x, state.x[order], rtol=0, atol=1e-9)
    torch.testing.assert_close(permuted[-1].graph, infos[-1].graph[order][:, order], rtol=0, atol=1e-9)

    fleet = Participation(StackedFleet(people, seed=3, dtype=torch.float64), Count(5))
    again, _ = run(fleet, algo, 3)
    tree, tensors = pack(again)
    memory = fleet.state()
    fresh = Participation(StackedFleet(people, seed=3, dtype=torch.float64), Count(5))
    fresh.load(memory)
    again = unpack(tree, tensors, type(again), torch.device("cpu"))
    for t in (3, 4):
        fresh.begin(t)
        again, _ = algo.round(fresh, again)
    assert torch.equal(again.x, state.x)
    assert set(again.beliefs) == set(state.beliefs)
    assert all(torch.equal(again.beliefs[k], v) for k, v in state.beliefs.items())


def opposites(n: int = 9) -> Population:
    """Three kinds of clients that fit different lines."""
    g = torch.Generator().manual_seed(0)
    slopes = 2 * torch.randn(3, 6, 1, generator=g)
    clients = []
    for i in range(n):
        x = torch.randn(60, 6, generator=g)
        clients.append(Client(f"c{i}", (x[:40], x[:40] @ slopes[i % 3]), (x[40:50], x[40:50] @ slopes[i % 3])))
    return population(clients, model=lambda: nn.Linear(6, 1), task="regression", groups=[i % 3 for i in range(n)])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("scool-sbm", {"settings": {"communities": 3}, "baseline": 2.0}),
        ("scool-sbm", {"settings": {"communities": 3}}),  # the paper's: links fade, proportions stay
        ("scool-mmsbm", {"settings": {"communities": 3}, "baseline": 2.0}),
        ("scool-attention", {}),
        ("scool-attention-reference", {}),
        ("scool-sbm-reference", {}),
        ("scool-sbm", {"settings": {"communities": 3}, "baseline": 2.0, "peers": 3, "budget": None}),
        ("scool-attention", {"settings": {"models": True}, "cross_gradients": "exact"}),
    ],
    ids=str,
)
def test_three_kinds_of_clients_are_found(name: str, settings: Any) -> None:
    people = opposites()
    fleet = StackedFleet(people, seed=1)
    table = {"plan": {"steps": 10, "batch": 20, "lr": 0.05}, "batch": 40, "temperature": 0.5, "budget": 0.25}
    _, infos = run(fleet, make(name, table | settings, rounds=15), 15)
    found = communities(infos[-1].graph, 3)
    assert adjusted_rand(found, people.groups) == 1  # type: ignore[arg-type]
    assert all(torch.isfinite(info.extra["elbo"]) for info in infos)


def test_the_prior_of_the_documentation_works() -> None:
    text = (Path(__file__).parents[2] / "docs" / "priors.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(block.splitlines()) < 60
    names: dict[str, Any] = {"__name__": "docs"}
    try:
        exec(block, names)
        people = classes(mlp, n=4)
        sites = population(
            [
                Client(key, *[(people.inputs[r], people.targets[r]) for r in (people.index[s][i] for s in SPLITS)])
                for i, key in enumerate(names["PLACES"])
            ],
            model=mlp,
        )
        fleet = StackedFleet(sites, seed=0, dtype=torch.float64)
        done = coterie.train(
            "scool", fleet, rounds=4, prior="nearness", batch=10, plan={"steps": 2, "batch": 6, "lr": 0.1}
        )
        near, far = done.graph[0, 1], done.graph[0, 2]
        assert float(near) > 10 * float(far)
        prior = names["Nearness"]()
        w, beliefs = prior.init(fleet)
        seen = _evidence_of(fleet)
        before = prior.elbo(w, beliefs, seen)
        w, beliefs = prior.e_step(w, beliefs, seen)
        assert float(prior.elbo(w, beliefs, seen)) >= float(before)
        assert float(prior.elbo(w, prior.m_step(w, beliefs, seen), seen)) >= float(prior.elbo(w, beliefs, seen))
    finally:
        PRIORS.pop("nearness", None)


def _evidence_of(fleet: Any) -> Any:
    from coterie.graph.priors import Evidence

    every = torch.ones(fleet.n, fleet.n, dtype=torch.bool)
    log_p = -torch.rand(fleet.n, fleet.n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Evidence(log_p, every, every, 1.0, lambda: fleet.initial(), fleet)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_go_on_top_of_a_variants() -> None:
    algo = make("scool-sbm-reference", {"settings": {"sweeps": 3}})
    assert isinstance(algo, SCooL)
    assert algo.settings["reference"] is True
    assert algo.settings["sweeps"] == 3
    assert algo.settings["inside"] == 0.8  # completed by defaults, for the record


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prior": "smb"}, "did you mean sbm"),
        ({"settings": {"comunities": 3}}, "did you mean communities"),
        ({"budget": 0.0}, "above 0"),
        ({"budget": 1.5}, "at most 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"baseline": math.nan}, "baseline is a loss"),
        ({"baseline": math.inf}, "baseline is a loss"),
        ({"warmup": 0}, "warmup"),
        ({"peers": 0}, "peers"),
        ({"cross_gradients": "exact", "plan": {"epochs": 1}}, "plan.steps"),
        ({"cross_gradients": "exact", "plan": {"steps": 1, "momentum": 0.9}}, "plain SGD"),
    ],
)
def test_settings_without_meaning_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        make("scool", bad)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "bad", "says"),
    [
        ("scool-sbm", {"settings": {"communities": 6}}, "6 communities are more than 5 clients"),
        ("scool-sbm", {"own": "tail"}, "no parameter below 'tail'"),
        ("scool-dirac", {"settings": {"topology": "one_peer_exponential"}}, "dirac takes symmetric weights"),
    ],
)
def test_what_does_not_fit_the_clients_is_refused_at_once(name: str, bad: dict[str, Any], says: str) -> None:
    fleet = StackedFleet(full(), seed=0)
    with pytest.raises(ValueError, match=says):
        make(name, bad).init(fleet)
