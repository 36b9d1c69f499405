"""What attackers say, against plain formulas on what honest clients say; who they are; and that nobody else changes."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import batchnorm, classes, linear, mlp
from coterie.algorithms import make
from coterie.asks import Answer, Ask, Compress, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict, Pull
from coterie.data.population import Population
from coterie.errors import SettingError
from coterie.experiments import populations
from coterie.fleet import seeds
from coterie.fleet.attacks import KINDS, LIES, Attack, Attacked
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Schedule, Stay
from coterie.fleet.stacked import StackedFleet

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]
LIARS = ("site-1", "site-3")
BAD = [1, 3]
GOOD = [0, 2, 4]
PLAN = Plan(steps=3, batch=5, lr=0.1, momentum=0.9)


def people(model: Any = mlp, **settings: Any) -> Population:
    return classes(model, n=5, **settings)


def pair(
    kind: type[Fleet], attack: Attack, population: Population | None = None, **options: Any
) -> tuple[Fleet, Fleet]:
    """A fleet under attack and one without, at round 3."""
    population = population or people()
    honest = kind(population, seed=2, dtype=torch.float64, **options)
    attacked = Attacked(kind(attack.on(population), seed=2, dtype=torch.float64, **options), attack)
    for fleet in (honest, attacked):
        fleet.begin(3)
    return attacked, honest


def scattered(fleet: Fleet) -> Tensor:
    return fleet.initial(shared=False) * 1.5


def values(ask: Ask, answer: Answer) -> Tensor:
    return {"loss": answer.loss, "predict": answer.outputs}.get(ask.kind, answer.rows)


# everyone is asked about one model, so all honest answers are about that of the attackers
TOGETHER: dict[str, Callable[[Fleet], Ask]] = {
    "gradient": lambda f: Gradient(f.everyone, f.initial()[0], 4),
    "sketch": lambda f: Gradient(f.everyone, f.initial()[0], 4, sketch=6),
    "update": lambda f: Fit(f.everyone, f.initial()[0], PLAN),
    "loss": lambda f: Loss(f.everyone, f.initial()[0], 4),
    "predict": lambda f: Predict(f.everyone, f.initial()[0] * 2),
}
FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bit_flip": lambda own, honest: -own,
    "ipm": lambda own, honest: -0.1 * sum(honest) / 3,
    "alie": lambda own, honest: sum(honest) / 3 - 100 * (sum((h - sum(honest) / 3) ** 2 for h in honest) / 2) ** 0.5,
    "mimic": lambda own, honest: honest[2],
    "free_rider": lambda own, honest: 0 * own,
}


@pytest.mark.parametrize("kind", FLEETS)
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("attack", FORMULAS)
def test_attackers_say_what_the_formula_says(attack: str, name: str, kind: type[Fleet]) -> None:
    if (name, attack) == ("sketch", "alie"):
        pytest.skip("deviations are of the gradients' coordinates, not of sketches: see below")
    attacked, honest = pair(kind, Attack(attack, LIARS))
    ask = TOGETHER[name](honest)
    told, true = attacked.ask(ask), honest.ask(ask)
    assert told.ok.all()
    said, own = values(ask, told), values(ask, true)
    torch.testing.assert_close(said[GOOD], own[GOOD], rtol=0, atol=1e-12 if name == "sketch" else 0)
    for liar in BAD:
        expected = FORMULAS[attack](own[liar], own[GOOD])
        torch.testing.assert_close(said[liar], expected, rtol=1e-10, atol=1e-12)
        assert attack == "free_rider" or said[liar].any()
    if name in ("gradient", "update"):
        assert torch.equal(told.loss, true.loss)  # the free loss beside rows
    assert attacked.ledger.totals() == honest.ledger.totals()


@pytest.mark.parametrize("kind", FLEETS)
def test_a_sketched_lie_is_the_sketch_of_the_lie(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("alie", LIARS))
    x = honest.initial()[0]
    rows = honest.ask(Gradient(honest.everyone, x, None)).rows
    lie = rows[GOOD].mean(0) - 100 * rows[GOOD].std(0)
    told = attacked.ask(Gradient(attacked.everyone, x, None, sketch=4000)).rows  # hardly two numbers share a bucket
    torch.testing.assert_close(told[1] @ told[1], lie @ lie, rtol=0.2, atol=0)
    torch.testing.assert_close(told[1] @ told[0], lie @ rows[0], rtol=0, atol=0.2 * float(lie.norm() * rows[0].norm()))
    assert torch.equal(told[1], told[3])


@pytest.mark.parametrize("kind", FLEETS)
def test_noise_is_normal_and_keyed_by_client_round_ask_and_draw(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("gaussian", LIARS, strength=3.0), people(mlp))
    x = honest.initial()[0]
    many = torch.tensor([1, 3, 1, 1])
    ask = Gradient(many, x, 4, draw=torch.tensor([0, 0, 0, 7]), track=False)
    first, second = attacked.ask(ask, ask)
    one, other, same, drawn = first.rows / 3
    assert torch.equal(one, same)
    noise = torch.cat([one, other, drawn, second.rows[0] / 3])
    assert len(noise.unique()) == 4 * honest.d
    attacked.begin(4)
    later = attacked.ask(ask).rows / 3
    everything = torch.cat([noise, later[0], later[1]])
    assert abs(float(everything.mean())) < 0.15  # of 6 × 83 numbers
    assert abs(float(everything.std()) - 1) < 0.15
    attacked.begin(4)
    assert torch.equal(attacked.ask(ask).rows / 3, later)


def test_noise_depends_on_neither_order_nor_chunk_nor_fleet() -> None:
    attack, outcomes = Attack("gaussian", LIARS), []
    order = [3, 0, 4, 1, 2]
    for build in (
        lambda p: StackedFleet(p, seed=2, dtype=torch.float64),
        lambda p: StackedFleet(p, seed=2, dtype=torch.float64, chunk=2),
        lambda p: LoopFleet(p, seed=2, dtype=torch.float64),
        lambda p: StackedFleet(p.reordered(order), seed=2, dtype=torch.float64),
    ):
        fleet = Attacked(build(attack.on(people())), attack)
        fleet.begin(1)
        rows = fleet.ask(Fit(fleet.everyone, fleet.initial()[0], PLAN)).rows
        outcomes.append(dict(zip(fleet.keys, rows, strict=True)))
    for outcome in outcomes[1:]:
        for key, row in outcome.items():
            torch.testing.assert_close(row, outcomes[0][key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
@pytest.mark.parametrize("attack", LIES)
def test_sums_and_inner_products_are_made_of_lies(attack: str, kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack(attack, LIARS))
    clients, at = torch.tensor([0, 1, 2, 3, 4, 1]), torch.tensor([0, 0, 0, 0, 0, 1])
    x = scattered(honest)
    common = {"at": at, "track": False}
    rows = attacked.ask(Gradient(clients, x, 4, **common)).rows
    attacked.begin(3)
    weights = torch.linspace(0.2, 1.2, 6, dtype=torch.float64)
    total = attacked.ask(
        Gradient(clients, x, 4, give="sum", into=torch.tensor([0, 1, 0, 0, 1, 1]), weights=weights, **common)
    )
    sums = torch.stack([sum(weights[p] * rows[p] for p in group) for group in ([0, 2, 3], [1, 4, 5])])
    torch.testing.assert_close(total.sums, sums, rtol=1e-10, atol=1e-10)
    attacked.begin(3)
    gram = attacked.ask(Gradient(clients, x, 4, give="gram", group=torch.tensor([0, 0, 1, 1, 1, 0]), **common)).gram
    for number, group in enumerate(([0, 1, 5], [2, 3, 4])):
        torch.testing.assert_close(gram[number], rows[group] @ rows[group].T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", FLEETS)
def test_those_who_answer_about_the_same_model_are_imitated_else_everyone(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("ipm", LIARS, strength=1.0))
    clients = torch.tensor([0, 2, 1, 4, 3, 1, 3])
    at = torch.tensor([[0, 1], [1, 0], [1, 0], [2, 2], [2, 2], [3, 4], [0, 0]])  # 0–1, 2 alone, two nobody else has
    ask = Gradient(clients, scattered(honest), 4, at=at, track=False, draw=torch.arange(7))
    told, true = attacked.ask(ask).rows, honest.ask(ask).rows
    expected = true.clone()
    expected[2] = -(true[0] + true[1]) / 2
    expected[4] = -true[3]
    expected[5] = expected[6] = -(true[0] + true[1] + true[3]) / 3
    torch.testing.assert_close(told, expected, rtol=0, atol=1e-12)
    alone = Gradient(torch.tensor([1, 3]), scattered(honest)[:2], 4, track=False)
    assert torch.equal(attacked.ask(alone).rows, honest.ask(alone).rows)  # nobody to imitate


@pytest.mark.parametrize("kind", FLEETS)
def test_of_one_honest_answer_there_is_no_deviation_and_all_means_all(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("alie", ("site-0", "site-1", "site-3", "site-4"), strength=5.0))
    ask = Gradient(honest.everyone, honest.initial()[0], 4)
    told, true = attacked.ask(ask).rows, honest.ask(ask).rows
    torch.testing.assert_close(told, true[2].expand(5, -1), rtol=0, atol=1e-12)
    everyone, honest = pair(kind, Attack("alie", LIARS, strength=5.0, among="all"))
    told, true = everyone.ask(ask).rows, honest.ask(ask).rows
    mean = sum(true) / 5
    expected = mean - 5 * (sum((v - mean) ** 2 for v in true) / 4) ** 0.5
    torch.testing.assert_close(told[BAD], expected.expand(2, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
def test_a_victim_is_copied_while_it_is_there(kind: type[Fleet]) -> None:
    attack = Attack("mimic", LIARS, victim="site-0")
    attacked, honest = pair(kind, attack)
    away = Participation(attacked, Stay((("site-0", 9, None),)))
    ask = Fit(honest.everyone, honest.initial()[0], PLAN)
    true = honest.ask(ask).rows
    assert torch.equal(attacked.ask(ask).rows[BAD], true[[0, 0]])
    away.begin(3)
    told = away.ask(ask)
    assert told.why == ["absent", "ok", "ok", "ok", "ok"]
    torch.testing.assert_close(told.rows[BAD], true[[4, 4]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
@pytest.mark.parametrize("attack", FORMULAS)
def test_of_a_model_the_update_is_lied_about(attack: str, kind: type[Fleet]) -> None:
    """A model that is sent whole is where it began plus the lie; columns that do not move are the truth."""
    columns = torch.tensor([0, 3, 5, 80])
    for how in ({}, {"columns": columns}):
        attacked, honest = pair(kind, Attack(attack, LIARS))
        x = scattered(honest)
        whole, part = (f.ask(Fit(f.everyone, x, PLAN, give="rows", **how)).rows for f in (attacked, honest))
        update = part - x
        for liar in BAD:
            torch.testing.assert_close(
                whole[liar], x[liar] + FORMULAS[attack](update[liar], update[GOOD]), rtol=1e-9, atol=1e-9
            )
        assert torch.equal(whole[GOOD], part[GOOD])
    attacked, honest = pair(kind, Attack("gaussian", LIARS))
    moved = attacked.ask(Fit(attacked.everyone, x, PLAN, columns=columns)).rows[1]
    assert moved.nonzero().flatten().tolist() == columns.tolist()


@pytest.mark.parametrize("kind", FLEETS)
def test_what_stays_at_the_client_and_what_an_observer_sees_is_true(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("gaussian", LIARS), people(batchnorm))
    for fleet in (attacked, honest):
        fleet.ask(
            Fit(fleet.everyone, Own("personal"), PLAN, give="nothing", pull=Pull(fleet.initial()[0])),
            Fit(fleet.everyone, fleet.initial()[0], replace(PLAN, keep_optimiser=True), keep="other"),
            Gradient(fleet.everyone, fleet.initial()[0], 4, sampling="epoch"),
        )
    for slot in ("personal", "other"):
        for a, b in zip(attacked.reveal(Own(slot)), honest.reveal(Own(slot)), strict=True):
            assert torch.equal(a, b)
    for name, value in honest.state().items():
        assert torch.equal(attacked.state()[name], value), name
    look = Evaluate(honest.everyone, scattered(honest))
    for metric, value in honest.watch(look).metrics.items():
        assert torch.equal(attacked.watch(look).metrics[metric], value)
    told, true = attacked.ask(look).metrics, honest.ask(look).metrics
    assert all(torch.equal(told[metric], true[metric]) for metric in true)
    said = attacked.ask(Fit(attacked.everyone, Own("personal"), Plan(steps=0), give="rows", track=False)).rows
    assert torch.equal(said[GOOD], torch.stack(honest.reveal(Own("personal")))[GOOD])
    assert not torch.equal(said[1], honest.reveal(Own("personal"))[1])  # sent, its own model is lied about


@pytest.mark.parametrize("kind", FLEETS)
def test_asks_without_attackers_pass_as_they_are(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("gaussian", LIARS))
    seen: list[Ask] = []
    inner = attacked.inner._answer  # type: ignore[attr-defined]
    attacked.inner._answer = lambda ask, place: seen.append(ask) or inner(ask, place)  # type: ignore[attr-defined]
    good = torch.tensor(GOOD)
    ask = Gradient(good, scattered(honest), 4, at=good, give="sum", into=torch.zeros(3, dtype=torch.long))
    assert torch.equal(attacked.ask(ask).sums, honest.ask(ask).sums)
    assert seen == [ask]


@pytest.mark.parametrize("kind", FLEETS)
def test_an_attacker_whose_own_training_diverged_lies_on(kind: type[Fleet]) -> None:
    attacked, honest = pair(kind, Attack("ipm", LIARS))
    x = honest.initial().clone()
    x[BAD] = torch.inf
    told = attacked.ask(Gradient(attacked.everyone, x, 4))
    true = honest.ask(Gradient(honest.everyone, x, 4))
    assert true.why == ["ok", "not finite", "ok", "not finite", "ok"]
    assert told.ok.all()
    torch.testing.assert_close(told.rows[1], -0.1 * true.rows[GOOD].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FLEETS)
def test_what_is_compressed_is_compressed_again(kind: type[Fleet]) -> None:
    how = Compress("topk", share=0.1)
    attacked, honest = pair(kind, Attack("gaussian", LIARS))
    ask = Gradient(honest.everyone, honest.initial()[0], 4, compress=how)
    told, true = attacked.ask(ask), honest.ask(ask)
    assert ((told.rows != 0).sum(1) <= how.kept(honest.d)).all()
    assert torch.equal(told.rows[GOOD], true.rows[GOOD])
    assert attacked.ledger.totals() == honest.ledger.totals()


@pytest.mark.parametrize("kind", FLEETS)
def test_flipped_labels_are_labels_flipped_by_hand(kind: type[Fleet]) -> None:
    population = people(linear)
    targets = population.targets.clone()
    for c in BAD:
        for split in population.index:
            targets[population.index[split][c]] = 2 - population.targets[population.index[split][c]]
    twin = kind(replace(population, targets=targets), seed=2, dtype=torch.float64)
    attack = Attack("label_flip", LIARS)
    fleet = kind(attack.on(population), seed=2, dtype=torch.float64)
    again = kind(attack.on(attack.on(population)), seed=2, dtype=torch.float64)
    plain = kind(population, seed=2, dtype=torch.float64)
    answers = []
    for f in (fleet, twin, again, plain):
        f.begin(0)
        answers.append(f.ask(Gradient(f.everyone, f.initial()[0], None)))
    assert torch.equal(answers[0].rows, answers[1].rows)
    assert torch.equal(answers[2].rows, answers[3].rows)  # twice is not at all
    assert not torch.equal(answers[0].rows[1], answers[3].rows[1])


def test_seeds_under_attack_side_by_side_are_those_alone() -> None:
    attack, told = Attack("alie", "last third"), {}
    dealt = [attack.on(people(seed=s)) for s in (0, 1)]
    views = seeds.together(dealt, [0, 1], dtype=torch.float64)

    def run(fleet: Fleet) -> tuple[Any, Any]:
        algo = make("fedavg", {"plan": {"steps": 2, "batch": 5}})
        state = algo.init(fleet)
        for t in range(3):
            fleet.begin(t)
            state, _ = algo.round(fleet, state)
        return state.x, fleet.ledger.totals()

    def side(number: int) -> None:
        told[number] = run(Attacked(views[number], attack))
        views[number].close()

    threads = [threading.Thread(target=side, args=(i,)) for i in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for seed in (0, 1):
        alone = run(Attacked(StackedFleet(dealt[seed], seed=seed, dtype=torch.float64), attack))
        torch.testing.assert_close(told[seed][0], alone[0], rtol=0, atol=1e-9)
        assert told[seed][1] == alone[1]


# ---- with algorithms -------------------------------------------------------------------------------------------------


def learn(name: str, attack: Attack, population: Population, kind: type[Fleet] = StackedFleet, rounds: int = 4) -> Any:
    settings: dict[str, Any] = {"plan": {"steps": 2, "batch": 5}} if name == "fedavg" else {"batch": 5, "lr": 0.1}
    gone = Schedule((("site-0", "site-1", "site-2", "site-3", "site-4"), ("site-0", "site-1", "site-3")))
    fleet = Participation(Attacked(kind(attack.on(population), seed=2, dtype=torch.float64), attack), gone)
    algo = make(name, settings)
    state, kept, infos = algo.init(fleet), [], []
    for t in range(rounds):
        kept.append({k: v.clone() for k, v in fleet.state().items() if not k.startswith("ledger/")})
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    kept.append({k: v.clone() for k, v in fleet.state().items() if not k.startswith("ledger/")})
    return fleet, algo.personal(state), infos, kept


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
@pytest.mark.parametrize("name", ["fedavg", "meritfed", "meritfed-all"])
def test_nothing_is_not_finite_and_the_honest_who_are_absent_stay(name: str, kind: str) -> None:
    attack = Attack(kind, LIARS)
    fleet, models, infos, kept = learn(name, attack, people(batchnorm))
    assert torch.isfinite(models).all()
    assert all(torch.isfinite(info.graph).all() for info in infos)
    for t in (1, 3):  # sites 2 and 4 are away
        for entry, value in kept[t].items():
            assert torch.equal(value[[2, 4]], kept[t + 1][entry][[2, 4]]), entry
        assert infos[t].ok.tolist() == [True, True, False, True, False]
    loop, again, _, _ = learn(name, attack, people(batchnorm), LoopFleet)
    torch.testing.assert_close(models, again, rtol=1e-9, atol=1e-9)
    assert fleet.ledger.totals() == loop.ledger.totals()


@pytest.mark.parametrize("kind", ["gaussian", "mimic", "label_flip"])
def test_permuting_the_clients_permutes_the_outcome_of_an_attack(kind: str) -> None:
    order = [3, 0, 4, 1, 2]
    attack = Attack(kind, LIARS)
    plain, permuted = (learn("meritfed-all", attack, p)[1] for p in (people(), people().reordered(order)))
    torch.testing.assert_close(permuted, plain[order], rtol=0, atol=1e-9)


# ---- who attacks -----------------------------------------------------------------------------------------------------

CHOICES: list[tuple[Any, list[str]]] = [
    ("last third", ["site-4"]),
    ("last half", ["site-3", "site-4"]),
    ("last 3", ["site-2", "site-3", "site-4"]),
    (2, ["site-3", "site-4"]),
    (0.6, ["site-2", "site-3", "site-4"]),
    (0.01, ["site-4"]),
    ("site-2", ["site-2"]),
    ("site-0, site-3", ["site-0", "site-3"]),
    (("site-3", "site-1"), ["site-1", "site-3"]),
]


@pytest.mark.parametrize(("given", "keys"), CHOICES, ids=str)
def test_attackers_are_chosen_by_name_number_or_share(given: Any, keys: list[str]) -> None:
    assert list(Attack("bit_flip", given).on(people()).attackers) == keys


def test_of_several_pools_each_has_its_attackers() -> None:
    dealt = replace(people(), pools=(0, 1, 0, 1, 1), helped=("site-0", "site-1"))
    assert Attack("bit_flip", "last third").on(dealt).attackers == ("site-2", "site-4")
    with pytest.raises(SettingError, match="'site-1' is the target and cannot attack"):
        Attack("bit_flip", "site-1").on(dealt)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("no attack is called 'ali': did you mean alie", {"kind": "ali"}),
    ("6 attackers were asked for, and there are 5 clients", {"kind": "ipm", "clients": 6}),
    ("5 attackers were asked for, and there are 5 clients, one of them honest", {"kind": "ipm", "clients": 5}),
    ("7 attackers were asked for", {"kind": "ipm", "clients": "last 7"}),
    ("at least one attacker, not 0", {"kind": "ipm", "clients": 0}),
    ("a share of attackers is above 0 and below 1, not 1.5", {"kind": "ipm", "clients": 1.5}),
    ("clients names nobody", {"kind": "ipm", "clients": ()}),
    ("'site-9' is no client: did you mean site-", {"kind": "ipm", "clients": "site-9"}),
    ("'last thrid' is no client: did you mean last third", {"kind": "ipm", "clients": "last thrid"}),
    ("all 5 clients would be attackers", {"kind": "ipm", "clients": tuple(f"site-{i}" for i in range(5))}),
    ("strength goes with ipm, alie, gaussian, not with mimic", {"kind": "mimic", "strength": 1.0}),
    ("strength must be a number above 0", {"kind": "alie", "strength": -1.0}),
    ("among goes with ipm and alie", {"kind": "gaussian", "among": "all"}),
    ("victim goes with mimic", {"kind": "ipm", "victim": "site-0"}),
    ("the victim 'site-4' is no honest client", {"kind": "mimic", "victim": "site-4"}),
]


@pytest.mark.parametrize(("words", "settings"), WRONG, ids=[words for words, _ in WRONG])
def test_what_is_no_attack_is_refused_in_a_sentence(words: str, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=words):
        Attack(**settings).on(people())


def test_labels_are_flipped_only_where_there_are_classes() -> None:
    means = populations.make({"kind": "synthetic", "name": "linear", "train": 20, "online": False}, 0)
    with pytest.raises(SettingError, match="label_flip needs samples with classes, and these clients learn regression"):
        Attack("label_flip").on(means)
    assert len(Attack("alie").on(means).attackers) == means.n // 3
    with pytest.raises(SettingError, match="this population names no attackers"):
        Attacked(StackedFleet(people()), Attack("ipm"))
