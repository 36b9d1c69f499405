"""COMET against a plain loop, the closed form of its toy, the Bayes estimate, and its formulas of traffic."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from builders import batchnorm, classes, linear, mlp
from coterie.algorithm import Info
from coterie.algorithms.comet import COMET, _clearest
from coterie.algorithms.local import Local
from coterie.asks import Coarse, Evaluate, Own, Plan
from coterie.data.population import Client, Population, population
from coterie.errors import AskError, DataError, ModelError, SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Count, Fraction, Participation, Stay
from coterie.fleet.remote import InProcess, RemoteFleet, declared
from coterie.fleet.stacked import StackedFleet
from coterie.sites.site import Limits, Site, part

PUBLIC, CLASSES = 13, 3
WHOLE = Plan(steps=3, batch=None, lr=0.3)  # whole splits: nothing is drawn


def learn(fleet: Fleet, rounds: int, **settings: Any) -> tuple[list[Tensor], Any, list[Info]]:
    algo = COMET(**({"plan": WHOLE, "public_batch": PUBLIC} | settings))
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return [row.clone() for row in fleet.reveal(algo.personal(state))], state, infos


# ---- a plain loop ----------------------------------------------------------------------------------------------------


def best_means(points: Tensor, c: int) -> list[Tensor]:
    """The means of the division into at most c parts with the least squared distances, found by trying all."""

    def means(labels: tuple[int, ...]) -> list[Tensor]:
        return [points[[i for i, own in enumerate(labels) if own == j]].mean(0) for j in sorted(set(labels))]

    def cost(labels: tuple[int, ...]) -> float:
        return sum(float(min(((p - m) ** 2).sum() for m in means(labels))) for p in points)

    return means(min(itertools.product(range(c), repeat=len(points)), key=cost))


def predicted(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(x).softmax(1)


def trained(model: nn.Module, x: Tensor, y: Tensor, public: Tensor, target: Tensor, lam: float) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        model.train()
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        kept = copy.deepcopy(dict(model.named_buffers()))
        gap = ((target - model(public).softmax(1)) ** 2).sum(1).mean()
        (loss + lam * gap).backward()
        for name, value in model.named_buffers():
            value.copy_(kept[name])
        optimiser.step()


@pytest.mark.parametrize("build", [LoopFleet, StackedFleet], ids=["loop", "stacked"])
@pytest.mark.parametrize("models", [mlp, [batchnorm, linear]], ids=["mlp", "batchnorm and linear"])
def test_models_follow_a_plain_loop(build: Any, models: Any) -> None:
    people = classes(models, n=6)
    fleet = build(people, seed=3, dtype=torch.float64)
    lam = (0.5, 1.0, 2.0, 4.0, 0.0, 8.0)
    got, _, infos = learn(fleet, 4, c=2, m=4, lam=lam, shared=False)

    fresh = build(people, seed=3, dtype=torch.float64)
    own = [fresh.module(i, row) for i, row in enumerate(fresh.reveal(COMET(shared=False).model))]
    public = people.public["public"].double()
    fresh.begin(0)  # who is asked first is drawn with the fleet's keys
    algo = COMET(m=4, c=2, shared=False)
    heard = algo.first(fresh, algo.init(fresh)).heard
    outputs = torch.stack([predicted(own[k], public) for k in heard])
    for info in infos:
        centroids = best_means(outputs, 2)
        chosen = info.ok.nonzero().flatten().tolist()
        assert len(chosen) == 4
        for k in chosen:
            mine = predicted(own[k], public)
            nearest = min(centroids, key=lambda c: float(((c - mine) ** 2).sum()))
            rows = people.index["train"][k]
            trained(own[k], people.inputs[rows].double(), people.targets[rows], public, nearest, lam[k])
        outputs = torch.stack([predicted(own[k], public) for k in chosen])
    for k, row in enumerate(got):
        expected = nn.utils.parameters_to_vector(own[k].parameters()).detach()
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-9)


# ---- the linear toy --------------------------------------------------------------------------------------------------


def toy(noise: float = 0.5) -> tuple[Population, Tensor]:
    """Three linear clients of Figure 2, smaller: two alike, one far away; and the model each finds alone."""
    g = torch.Generator().manual_seed(5)
    theta = torch.tensor([[3.0, -2.0]], dtype=torch.float64)
    truth = [theta + 0.2, theta - 0.3, theta + torch.tensor([[30.0, 20.0]])]
    clients, alone = [], []
    for i, w in enumerate(truth):
        x = torch.rand(12 + 3 * i, 2, generator=g, dtype=torch.float64) * 2 - 1
        y = x @ w.T + noise * torch.randn(len(x), 1, generator=g, dtype=torch.float64)
        clients.append(Client(f"c{i}", (x, y), (x, y), (x, y)))
        alone.append(torch.linalg.lstsq(x, y).solution.flatten())
    public = {"public": torch.rand(PUBLIC, 2, generator=g, dtype=torch.float64) * 2 - 1}
    people = population(clients, model=lambda: nn.Linear(2, 1, bias=False), task="regression", public=public)
    return people, torch.stack(alone)


LONG = Plan(steps=170, batch=None, lr=0.4)


@pytest.mark.parametrize("build", [LoopFleet, StackedFleet], ids=["loop", "stacked"])
@pytest.mark.parametrize(("c", "groups"), [(1, [[0, 1, 2]] * 3), (2, [[0, 1], [0, 1], [2]])])
def test_the_toy_ends_at_its_closed_form(build: Any, c: int, groups: list[list[int]]) -> None:
    people, alone = toy()
    lam = 3.0
    got, _, _ = learn(build(people, seed=0, dtype=torch.float64), 2, plan=LONG, c=c, lam=lam, warmup=1)
    p = people.public["public"]
    second = p.T @ p / len(p)
    for k, row in enumerate(got):
        x = people.inputs[people.index["train"][k]]
        private = x.T @ x / len(x)
        mean = alone[groups[k]].mean(0)
        closed = torch.linalg.solve(private + lam * second, private @ alone[k] + lam * second @ mean)  # (14)
        torch.testing.assert_close(row, closed, rtol=0, atol=1e-8)
    near = torch.tensor([[3.2, -1.8], [2.7, -2.3]], dtype=torch.float64)
    off = (torch.stack(got)[:2] - near).norm(dim=1)
    assert (
        bool((off < 1).all()) if c == 2 else bool((off > 5).all())
    )  # Figure 2: without clusters they are dragged away


def test_the_gradient_of_the_objective_falls_to_zero() -> None:
    people, _ = toy()
    fleet = StackedFleet(people, seed=0, dtype=torch.float64)
    algo = COMET(plan=Plan(steps=1, batch=None, lr=0.3), c=2, lam=2.0, public_batch=PUBLIC)
    state, norms = algo.init(fleet), []
    p = people.public["public"]
    for t in range(100):
        fleet.begin(t)
        before = torch.stack(fleet.reveal(algo.model))
        state, info = algo.round(fleet, state)
        if t:
            alpha, each = info.graph, []
            outputs = p @ before.T  # P × clients: what was sent after the round before
            for k in range(3):
                rows = people.index["train"][k]
                x, y = people.inputs[rows], people.targets[rows].flatten()
                gap = p @ before[k] - outputs @ alpha[k]
                each.append(2 * x.T @ (x @ before[k] - y) / len(x) + 2 * 2.0 * p.T @ gap / len(p))
            norms.append(torch.stack(each).norm(dim=1).max())
    assert float(norms[-1]) < 1e-6 * float(norms[0])
    assert all(later < earlier for earlier, later in itertools.pairwise(norms[::9]))


def test_known_variances_give_the_bayes_estimate() -> None:
    variances, error, n = (0.5, 1.0, 4.0, 9.0), 0.7, 4
    found = torch.randn(n, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # minimise Σ (ŵ_i − w_i)²/e + (w_i − θ)²/v_i² over all w and θ, whose prior is flat
    v = torch.tensor(variances, dtype=torch.float64)
    h = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    h[range(n), range(n)] = 1 / error + 1 / v
    h[n, :n] = h[:n, n] = -1 / v
    h[n, n] = (1 / v).sum()
    bayes = torch.linalg.solve(h, torch.cat([found / error, torch.zeros(1, 1, dtype=torch.float64)]))[:n]
    algo = COMET(c=1, lam=1.0, variances=variances, error=error)
    fleet = StackedFleet(classes(n=n), dtype=torch.float64)
    state = algo.init(fleet)
    state = type(state)(torch.arange(n), found[:, None], state.apart, state.worth)
    alpha, lam = algo.centroids(fleet, state), algo.weights(fleet, state)
    target = alpha @ found
    torch.testing.assert_close((found + lam[:, None] * target) / (1 + lam[:, None]), bayes, rtol=0, atol=1e-12)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def test_the_ledger_counts_as_the_paper_does() -> None:
    fleet = StackedFleet(classes(n=6), seed=1)
    rounds, m, c, each = 5, 4, 3, PUBLIC * CLASSES
    learn(fleet, rounds, m=m, c=c)
    totals = fleet.ledger.totals()
    broadcast = totals["broadcast"]["up"]["numbers"] + totals["broadcast"]["down"]["numbers"]
    assert broadcast == rounds * each * (m + c) + m * each
    assert totals["sent"]["up"]["numbers"] == rounds * each * m + m * each
    assert totals["sent"]["down"]["numbers"] == rounds * each * m * c


def test_while_everyone_warms_up_nothing_travels_but_the_last_outputs() -> None:
    fleet = StackedFleet(classes(n=4), seed=1)
    for adaptive in (False, True):
        fleet.reset()
        _, state, _ = learn(fleet, 3, c=2, warmup=3, adaptive=adaptive)
        assert fleet.ledger.totals()["sent"]["up"]["numbers"] == 4 * PUBLIC * CLASSES
        assert fleet.ledger.totals()["sent"]["down"]["numbers"] == 0
        assert len(state.heard) == 4


def rounded(p: np.ndarray, bits: int | None, top: int | None) -> np.ndarray:
    out = np.zeros_like(p)
    for at in np.ndindex(p.shape[:-1]):
        keep = np.argsort(-p[at])[:top]
        kept = p[at][keep] if bits is None else np.floor(p[at][keep] * (2**bits - 1) + 0.5) / (2**bits - 1)
        rest = max(0.0, 1 - kept.sum()) / max(1, p.shape[-1] - len(keep))
        out[at] = rest
        out[at][keep] = kept
    return out


@pytest.mark.parametrize(
    ("how", "size"),
    [
        (Coarse(bits=8), PUBLIC * CLASSES),
        (Coarse(bits=4), -(-PUBLIC * CLASSES // 2)),
        (Coarse(top=2), PUBLIC * 2 * 8 + -(-PUBLIC * 2 * 2 // 8)),
        (Coarse(bits=6, top=1), -(-PUBLIC * 6 // 8) + -(-PUBLIC * 2 // 8)),
    ],
    ids=str,
)
def test_coarse_predictions_travel_in_the_bytes_that_are_charged(how: Coarse, size: int) -> None:
    people = classes(n=4)
    settings: dict[str, Any] = {"c": 2, "coarse": how, "shared": False}
    outcomes = []
    own = Limits(per_round=1000, per_batch=1000, least_batch=1, own_rows=True)
    sites = {
        f"node-{i}": Site(part(people, [i]), bytes([i]), None, own, dtype=torch.float64, share_seed=True)
        for i in range(4)
    }
    transport = InProcess({name: site.answer for name, site in sites.items()})
    for fleet in (
        LoopFleet(people, dtype=torch.float64),
        StackedFleet(people, dtype=torch.float64),
        RemoteFleet(declared(people), transport, dtype=torch.float64),
    ):
        rows, state, _ = learn(fleet, 3, **settings)
        outcomes.append((torch.stack(rows), fleet.ledger.totals()["sent"]))
        charged = 8 * -(-size // 8)  # whole numbers of eight bytes
        assert fleet.ledger.totals()["sent"]["up"]["bytes"] == (3 + 1) * 4 * charged
        assert fleet.ledger.totals()["sent"]["down"]["bytes"] == 3 * 4 * 2 * charged
        again = rounded(state.outputs.numpy(), how.bits, how.top)
        torch.testing.assert_close(state.outputs, torch.tensor(again), rtol=0, atol=1e-12)  # as it was rounded already
    for rows, sent in outcomes[1:]:
        torch.testing.assert_close(rows, outcomes[0][0], rtol=0, atol=1e-9)
        assert sent == outcomes[0][1]
    plain = torch.stack(learn(StackedFleet(people, dtype=torch.float64), 3, **settings | {"coarse": None})[0])
    assert 0 < float((plain - outcomes[0][0]).abs().max()) < 0.5


# ---- who, how many, how much -----------------------------------------------------------------------------------------


def test_clients_are_drawn_by_their_share_of_the_data_and_never_twice() -> None:
    fleet = StackedFleet(classes(n=5, size=10, ragged=20))
    algo = COMET(m=3)
    size, times = fleet.sizes().double(), 3000
    first, seen = torch.zeros(5), torch.zeros(5)
    for t in range(times):
        fleet.begin(t)
        who = algo.drawn(fleet, "selected", size)
        assert len(set(who.tolist())) == 3
        first[who[0]] += 1
        seen[who] += 1
    p = size / size.sum()
    assert float((first / times - p).abs().max()) < 3.5 * 0.5 / times**0.5
    second = [sum(float(p[j] * p[k] / (1 - p[j])) for j in range(5) if j != k) for k in range(5)]
    third = [
        sum(float(p[i] * p[j] / (1 - p[i]) * p[k] / (1 - p[i] - p[j])) for i in range(5) for j in range(5)
            if len({i, j, k}) == 3) for k in range(5)
    ]  # fmt: skip
    expected = p + torch.tensor(second) + torch.tensor(third)
    assert float((seen / times - expected).abs().max()) < 3.5 * 0.5 / times**0.5


def permuted(each: int = 4, size: int = 30, seed: int = 0) -> Population:
    """Two groups that see the same clouds under opposite labels."""
    g = torch.Generator().manual_seed(seed)
    middle = torch.randn(CLASSES, 6, generator=g) * 1.5
    clients = []
    for i in range(2 * each):
        y = torch.randint(0, CLASSES, (size + 60,), generator=g)
        x = middle[y] + torch.randn(len(y), 6, generator=g)
        y = y if i % 2 else (y + 1) % CLASSES
        clients.append(
            Client(f"c{i}", *((x[a:b], y[a:b]) for a, b in ((0, size), (size, size + 20), (size + 20, None))))
        )
    y = torch.randint(0, CLASSES, (60,), generator=g)
    public = {"public": middle[y] + torch.randn(60, 6, generator=g)}
    return population(clients, model=mlp, groups=[i % 2 for i in range(2 * each)], public=public)


def test_clusters_are_the_true_groups_and_a_newcomer_finds_its_own() -> None:
    people = permuted()
    late = people.keys[5]
    fleet = Participation(StackedFleet(people), Stay(((late, 12, None),)))
    _, _, infos = learn(fleet, 16, plan=Plan(steps=10, batch=15, lr=0.3), c="silhouette", most=4, public_batch=30)
    group = torch.tensor([i % 2 for i in range(8)])
    last = infos[-1].extra["cluster"]
    assert infos[-1].extra["clusters"] == 2
    assert bool((last >= 0).all())
    assert torch.equal(last[:, None] == last, group[:, None] == group)
    assert int(infos[11].extra["cluster"][5]) == -1
    assert torch.equal(infos[11].graph[5], torch.eye(8, dtype=torch.float64)[5])


@pytest.mark.parametrize("true", [1, 2, 4])
def test_silhouettes_find_how_many_clouds_there_are(true: int) -> None:
    g = torch.Generator().manual_seed(0)
    points = torch.randn(12, 50, generator=g, dtype=torch.float64) + 3 * torch.randn(
        true, 50, generator=g, dtype=torch.float64
    ).repeat(12 // true, 1)
    label = _clearest(points, torch.arange(12), 6, 0)
    assert len(label.unique()) == true
    assert torch.equal(label[:, None] == label, (torch.arange(12) % true)[:, None] == torch.arange(12) % true)


def test_an_adaptive_pull_is_left_where_it_hurts_and_taken_where_it_helps() -> None:
    plan = Plan(steps=10, batch=3, lr=0.2, sampling="epoch")

    def score(fleet: Fleet, model: Any) -> float:
        return float(fleet.watch(Evaluate(fleet.everyone, model)).metrics["accuracy"].mean())

    fleet = StackedFleet(permuted(each=6, size=4), dtype=torch.float64)
    local = Local(plan)
    for t in range(15):
        fleet.begin(t)
        local.round(fleet, local.init(fleet))
    alone, rows = score(fleet, local.personal(local.init(fleet))), torch.stack(fleet.reveal(Own("model")))
    pulled, scores = {}, {}
    for c in (1, 2):  # c = 1: towards those who have the opposite labels
        algo = COMET(plan, c=c, lam=2.0, public_batch=60, adaptive=True)
        fleet.reset()
        state, ever = algo.init(fleet), torch.zeros(12, dtype=torch.bool)
        for t in range(15):
            fleet.begin(t)
            ever |= algo.trusted(state)
            state, info = algo.round(fleet, state)
            helped = (info.graph != torch.eye(12, dtype=torch.float64)).any(1)
        own = torch.stack(fleet.reveal(algo.model))
        same = (own - rows).abs().amax(1) < 1e-9
        assert torch.equal(same, ~ever)  # whoever was never pulled is where training alone led, and nobody else
        pulled[c], scores[c] = float(helped.double().mean()), score(fleet, algo.model)
        hurt = score(fleet, Own("pulled")) - alone
        assert hurt < -0.1 if c == 1 else hurt > 0.1
    assert pulled[1] < 0.2
    assert pulled[2] > 0.8
    assert scores[1] > alone - 0.02
    assert scores[2] > alone + 0.1


def test_who_is_pulled_follows_its_own_and_everyones_running_mean() -> None:
    algo, fleet = COMET(lam=3.0, adaptive=True), StackedFleet(classes(n=3))
    state = algo.init(fleet)
    outputs = torch.eye(3, dtype=torch.float64)[:, :, None].expand(3, 3, 2)
    state = type(state)(torch.arange(3), outputs, state.apart, state.worth)
    assert not bool(algo.trusted(state).any())  # before anything was seen nobody is
    worth = [0.0, 0.0, 0.0]
    for gain in ([0.5, -0.1, -0.2], [0.0, 0.0, 0.1], [-1.0, -0.3, 0.4]):
        state = algo.learned(state, torch.tensor([0, 0, 1]), torch.tensor(gain, dtype=torch.float64))
        worth = [0.8 * old + 0.2 * new for old, new in zip(worth, gain, strict=True)]
        mean = sum(worth) / 3
        error = (sum((own - mean) ** 2 for own in worth) / 3 / 3) ** 0.5
        assert state.worth.tolist() == pytest.approx(worth)
        assert algo.trusted(state).tolist() == [own + 2 * (mean - error) > 0 for own in worth]
    assert state.apart.tolist() == pytest.approx([4 / 3, 4 / 3, 2 * (1 + 1 / 4 + 1 / 4) / 3])  # the other; the mean


def test_an_adaptive_pull_is_the_same_on_both_fleets_and_costs_what_the_docstring_says() -> None:
    outcomes, n, each = [], 8, 60 * CLASSES
    for build in (LoopFleet, StackedFleet):
        fleet = build(permuted(size=5), seed=2, dtype=torch.float64)
        algo = COMET(Plan(steps=6, batch=5, lr=0.3), c=2, lam=2.0, public_batch=60, adaptive=True)
        state, down, up, pulled = algo.init(fleet), 0, n * each, []
        for t in range(5):
            fleet.begin(t)
            pulled.append(bool(algo.trusted(state).any()))
            state, _ = algo.round(fleet, state)
            down += n * 2 * each * (1 + pulled[-1])
            up += n * each + 2 * n
        sent = fleet.ledger.totals()["sent"]
        assert (sent["up"]["numbers"], sent["down"]["numbers"]) == (up, down)
        assert not pulled[0]
        assert pulled[-1]
        outcomes.append((torch.stack(fleet.reveal(algo.model)), state))
    (rows, state), (others, other) = outcomes
    torch.testing.assert_close(rows, others, rtol=0, atol=1e-9)
    torch.testing.assert_close(state.worth, other.worth, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.apart, other.apart, rtol=0, atol=1e-9)


def test_a_far_client_is_pulled_less_and_nobody_more_than_by_lam() -> None:
    algo, fleet = COMET(lam=3.0, adaptive=True), StackedFleet(classes(n=4))
    state = algo.init(fleet)
    apart = torch.tensor([0.1, 0.2, 0.4, 0.0], dtype=torch.float64)
    lam = algo.weights(fleet, type(state)(state.heard, state.outputs, apart, state.worth))
    harmonic = 3 / (1 / 0.1 + 1 / 0.2 + 1 / 0.4)  # above the first, below the others
    assert lam.tolist() == pytest.approx([3, 3 * harmonic / 0.2, 3 * harmonic / 0.4, 3])  # of the last nothing is known


# ---- bad input -------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Linear(6, 4)


def test_what_cannot_work_is_refused_in_one_sentence() -> None:
    people = classes(n=4)
    made = StackedFleet(people)
    x, y = people.inputs[:12], people.targets[:12]
    client = [Client("a", (x, y), (x, y), (x, y), model=mlp), Client("b", (x, y), (x, y), (x, y), model=linear)]
    with pytest.raises(AskError, match="no public inputs called 'public': there are none"):
        COMET().init(StackedFleet(population(client, task="classification")))
    with pytest.raises(ModelError, match=r"client 'a' cannot take the public inputs 'public', of shape \(5,\)"):
        COMET().init(StackedFleet(population(client, public={"public": torch.zeros(9, 5)})))
    with pytest.raises((ModelError, DataError), match=r"client 'b': outputs have shape \(\d+, 4\); 3 classes need"):
        population([client[0], Client("b", (x, y), model=wide)], public={"public": torch.zeros(9, 6)})
    with pytest.raises(SettingError, match="c must be a whole number from 1 to 2, not 3"):
        COMET(m=2, c=3)
    with pytest.raises(SettingError, match="from 1 to 4, not 5"):
        COMET(c=5).init(made)
    with pytest.raises(
        SettingError, match="c, centroids of the clients of a round, must be a whole number from 1 to 2"
    ):
        COMET(c=3).init(Participation(made, Count(2)))
    with pytest.raises(SettingError, match="from 1 to 2, not 3"):
        COMET(c=3).init(Participation(made, Stay(()), Fraction(0.5)))
    with pytest.raises(SettingError, match="m, clients a round, must be a whole number from 1 to 4, not 9"):
        COMET(m=9).init(made)
    with pytest.raises(SettingError, match="lam has 2 entries for 4 clients"):
        COMET(lam=(1.0, 2.0)).init(made)
    with pytest.raises(SettingError, match="set c = 1"):
        COMET(variances=(1.0,) * 4)
    with pytest.raises(SettingError, match="lam must be a number at least 0"):
        COMET(lam=-1.0)
    with pytest.raises(SettingError, match="judged on validation data, and client 'b' has none"):
        COMET(adaptive=True, c=1).init(
            StackedFleet(population([client[0], Client("b", (x, y), model=linear)], public={"public": x}))
        )
    with pytest.raises(AskError, match="probabilities of classes"):
        learn(StackedFleet(toy()[0]), 1, c=1, coarse=Coarse(bits=8))
