"""A site answers what it allows, once, from the version it should; what goes wrong at one site harms no other."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import batchnorm, classes, mlp
from coterie.algorithms import make
from coterie.asks import (
    ABSENT,
    LATE,
    MALFORMED,
    NONFINITE,
    OK,
    REFUSED,
    Compress,
    Evaluate,
    Fit,
    Gradient,
    Loss,
    Own,
    Plan,
    Predict,
    Pull,
)
from coterie.errors import AskError, SettingError
from coterie.fleet import wire
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.remote import InProcess, RemoteFleet, Reply, declared
from coterie.sites.site import ClipAndNoise, Leaving, Limits, Scope, Site, part

PEOPLE = classes(mlp)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here, and flushing takes longer than everything else."""
    monkeypatch.setattr("coterie.runs.files.os.fsync", lambda handle: None)


OPEN = Limits(per_round=10_000, per_batch=1000, least_batch=1, own_rows=True)
SGD = Plan(steps=3, batch=6, lr=0.1, momentum=0.9, keep_optimiser=True, sampling="epoch")


def site(client: int, folder: Path | None = None, **settings: Any) -> Site:
    given = {"limits": OPEN, "dtype": torch.float64, "share_seed": True} | settings
    return Site(part(PEOPLE, [client]), bytes([client]), folder, **given)


class Wire(InProcess):
    """Sites by address, with a place for accidents: `on_way` alters, drops or repeats what goes to a site."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        super().__init__({})
        self.here = dict(sites)
        self.on_way: Callable[[str, bytes, Callable[[bytes], bytes]], Reply | None] | None = None
        self.blocks: list[tuple[str, bytes]] = []

    def there(self) -> list[str]:
        return list(self.here)

    def exchange(self, blocks: Mapping[str, bytes]) -> Mapping[str, Reply]:
        replies = {}
        for address, block in blocks.items():
            self.blocks.append((address, block))
            answer = self.here[address].answer
            hello = wire.unseal(block, 1 << 30)[0].get("hello")
            reply = Reply(answer(block)) if hello or self.on_way is None else self.on_way(address, block, answer)
            if reply is not None:
                replies[address] = reply
        return replies


def fleet(folder: Path | None = None, **settings: Any) -> RemoteFleet:
    sites = {}
    for i in range(PEOPLE.n):
        place = None if folder is None else folder / str(i)
        if place is not None:
            place.mkdir(exist_ok=True)
        sites[f"node-{i}"] = site(i, place)
    made = RemoteFleet(declared(PEOPLE), Wire(sites), seed=4, dtype=torch.float64, **settings)
    made.begin(0)
    return made


def everything(each: Any) -> list[Any]:
    """Asks of every kind, whose answers depend on what clients remember."""
    x = LoopFleet(PEOPLE, seed=4, dtype=torch.float64).initial() * 1.1
    everyone = each.everyone
    return [
        *each.ask(Fit(everyone, Own("a"), SGD, give="rows"), Gradient(everyone, x, 5), Predict(everyone, Own("a"))),
        each.ask(Gradient([0, 1, 2, 3], x, 6, give="gram", group=[0, 0, 1, 1], track=False, sketch=7)),
        each.ask(Gradient([0, 1, 2, 3, 0], x[[0, 1, 2, 3, 1]], 6, give="sum", into=[0, 0, 1, 1, 1], track=False,
                          weights=torch.tensor([1.0, 2, 3, 4, 5]))),
        each.ask(Fit(everyone, x, SGD, columns=[1, 5, 7], give="update")),
        each.ask(Fit(everyone, x, SGD, columns=[1, 5, 7], give="rows")),
        *each.ask(Loss(everyone, Own("a"), 5), Evaluate(everyone, Own("a"))),
    ]  # fmt: skip


FIELDS = ("rows", "sums", "weight", "gram", "loss", "outputs")


def alike(one: list[Any], other: list[Any], atol: float = 1e-12) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.reason, b.reason)
        for name in FIELDS:
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=atol)
        for name, value in a.metrics.items():
            torch.testing.assert_close(value, b.metrics[name], rtol=0, atol=atol)


def test_every_kind_of_ask_is_answered_as_the_loop_answers_it() -> None:
    loop, remote = LoopFleet(PEOPLE, seed=4, dtype=torch.float64), fleet()
    for t in range(2):
        for each in (loop, remote):
            each.begin(t)
        alike(everything(remote), everything(loop))
    assert remote.ledger.totals() == loop.ledger.totals()
    alike([remote.watch(Loss(remote.everyone, Own("a")))], [loop.watch(Loss(loop.everyone, Own("a")))])
    for a, b in zip(remote.reveal(Own("a")), loop.reveal(Own("a")), strict=True):
        assert torch.equal(a, b)


# ---- the same message again, an old one, none ------------------------------------------------------------------------


def test_the_same_message_twice_is_answered_alike_and_trains_nothing_twice(tmp_path: Path) -> None:
    plain, twice = fleet(), fleet(tmp_path)
    transport: Any = twice.transport

    def again(address: str, block: bytes, answer: Callable[[bytes], bytes]) -> Reply:
        first, second = answer(block), answer(block)
        assert first == second
        return Reply(second)

    transport.on_way = again
    for t in range(3):
        for each in (plain, twice):
            each.begin(t)
        alike(everything(twice), everything(plain))
    for i in range(PEOPLE.n):
        lines = [json.loads(line) for line in (tmp_path / str(i) / "log.jsonl").read_text().splitlines()]
        assert len([line for line in lines if line.get("ask") == "fit" and line["round"] == 1]) == 6  # three, twice


def test_an_old_message_that_arrives_late_moves_nothing() -> None:
    plain, late = fleet(), fleet()
    everything(plain), everything(late)
    transport: Any = late.transport
    old = list(transport.blocks)
    for each in (plain, late):
        each.begin(1)
    for address, block in old:
        head, _ = wire.unseal(block, 1 << 30)
        reply, _ = wire.unseal(transport.here[address].answer(block), 1 << 30)
        if not head.get("hello") and head["phase"] < 5:
            assert "older" in reply["refused"]
    alike(everything(late), everything(plain))
    for address, block in old:  # and after the next round began, none of them
        reply, _ = wire.unseal(transport.here[address].answer(block), 1 << 30)
        assert "clients" in reply or "older" in reply["refused"]
    for each in (plain, late):
        each.begin(2)
    alike(everything(late), everything(plain))


def test_a_site_that_was_killed_comes_back_from_its_disk_at_any_phase(tmp_path: Path) -> None:
    plain, killed = fleet(), fleet(tmp_path)
    transport: Any = killed.transport

    def reborn(address: str, block: bytes, answer: Callable[[bytes], bytes]) -> Reply:
        answer(block)  # it answered, and died before anyone heard
        client = int(address[-1])
        transport.here[address] = site(client, tmp_path / str(client))
        return Reply(transport.here[address].answer(block))

    transport.on_way = reborn
    for t in range(3):
        for each in (plain, killed):
            each.begin(t)
        alike(everything(killed), everything(plain))


def test_a_site_forgets_what_it_did_for_an_answer_that_nobody_heard() -> None:
    """Training that was lost on its way never was: as if the site had been away."""
    lost, absent = fleet(), fleet()
    transport: Any = lost.transport
    gone = {(1, 1), (2, 2), (3, 1), (3, 2)}  # round and phase: of one message, of a second, and of all of a round

    def drop(address: str, block: bytes, answer: Callable[[bytes], bytes]) -> Reply | None:
        lose = address == "node-1" and (lost.t, lost.phases) in gone and not wire.unseal(block, 1 << 30)[0].get("watch")
        reply = answer(block)
        return None if lose else Reply(reply)

    transport.on_way = drop
    for t in range(5):
        found = []
        for each in (lost, absent):
            each.begin(t)
            for phase in (1, 2):
                if each is absent:
                    absent.present[1] = (t, phase) not in gone
                found.append(each.ask(Fit(each.everyone, Own("a"), SGD, give="rows")))
                found.append(each.watch(Fit(each.everyone, Own("a"), Plan(steps=0), give="rows")))
        half = len(found) // 2
        for one, other in zip(found[:half], found[half:], strict=True):
            assert torch.equal(one.rows, other.rows)
            assert torch.equal(one.ok, other.ok)


def test_what_is_measured_on_several_splits_is_one_message_and_its_rows_go_once() -> None:
    remote = fleet()
    transport: Any = remote.transport
    before = len(transport.blocks)
    x = remote.initial()
    asks = [Evaluate(remote.everyone, x, split) for split in ("train", "validation", "test")]
    together = remote.watch(*asks)
    sent = transport.blocks[before:]
    assert [address for address, _ in sent] == [f"node-{i}" for i in range(PEOPLE.n)]
    for _, block in sent:
        rows = [v for name, v in wire.unseal(block, 1 << 30)[1].items() if name.endswith("/models")]
        assert [v.shape for v in rows] == [(1, remote.d)]
    alike(list(together), [remote.watch(ask) for ask in asks])


def test_a_server_can_go_back_as_far_as_promised_and_is_told_where_it_cannot() -> None:
    first = fleet()
    expected = []
    for t in range(5):
        first.begin(t)
        expected.append(everything(first))
    for t in (3, 2, 4):
        again = RemoteFleet(declared(PEOPLE), first.transport, seed=4, dtype=torch.float64)
        again.load(first.state())
        for later in range(t, 5):
            again.begin(later)
            alike(everything(again), expected[later])
    told: list[str] = []
    gone = RemoteFleet(declared(PEOPLE), first.transport, seed=4, dtype=torch.float64, tell=told.append)
    gone.begin(1)
    answer = gone.ask(Loss(gone.everyone, Own("a")))
    assert (answer.reason == REFUSED).all()
    assert any("version before round 1 is gone" in line for line in told)


def test_a_site_that_was_away_when_the_server_went_back_still_has_the_right_version() -> None:
    """The server saw rounds 0 to 3; client 2 was away in rounds 1 and 2; the server goes back to round 2."""
    away = Stay((("site-2", 3, None),))
    outcomes = []
    for goes_back in (False, True):
        remote = fleet()
        each = Participation(remote, away)
        for t in (0, 1, 2, 3):
            if t == 0:
                remote.begin(0)
            else:
                each.begin(t)
            each.ask(Fit(each.everyone, Own("a"), SGD, give="rows"))
        if goes_back:
            remote.load(remote.state())
            for t in (2, 3):
                each.begin(t)
                last = each.ask(Fit(each.everyone, Own("a"), SGD, give="rows"))
            outcomes.append(last)
        else:
            outcomes.append(each.watch(Fit(each.everyone, Own("a"), Plan(steps=0), give="rows", track=False)))
    assert torch.equal(outcomes[0].rows, outcomes[1].rows)


def test_a_round_waits_while_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or rounds would go by with nobody in them."""
    told: list[str] = []
    remote = fleet(patience=3600.0, tell=told.append)
    transport: Any = remote.transport
    away, transport.here = transport.here, {}
    monkeypatch.setattr(
        "coterie.fleet.remote.time.sleep", lambda seconds: transport.here.update({"node-2": away["node-2"]})
    )
    remote.begin(1)
    assert remote.present.tolist() == [False, False, True, False]
    assert told[-1] == "round 1 waits: nobody is there"
    transport.here = {}
    monkeypatch.setattr("coterie.fleet.remote.time.sleep", lambda seconds: None)
    remote.patience = 1e-6
    with pytest.raises(AskError, match="0 of 1 clients are there"):
        remote.begin(2)


# ---- what goes wrong at one site -------------------------------------------------------------------------------------


def spoiled(how: str) -> Callable[[bytes], Reply | None]:
    """An answer as a broken or hostile site gives it."""

    def alter(reply: bytes, change: Callable[[Tensor], Tensor]) -> Reply:
        head, arrays = wire.unseal(reply, 1 << 30)
        return Reply(wire.seal(head, {k: change(v) if v.is_floating_point() else v for k, v in arrays.items()}))

    return {
        "NaN": lambda r: alter(r, lambda v: torch.full_like(v, torch.nan)),
        "infinity": lambda r: alter(r, lambda v: v * torch.inf),
        "a wrong shape": lambda r: alter(r, lambda v: v[..., :1]),
        "a wrong type": lambda r: alter(r, lambda v: v.float()),
        "a huge array": lambda r: alter(r, lambda v: torch.zeros(600_000)),
        "garbage": lambda r: Reply(b"\x00" * 100),
        "nothing": lambda r: Reply(),
        "an empty block": lambda r: Reply(b""),
        "silence": lambda r: None,
        "loss of the node": lambda r: Reply(reason=ABSENT),
        "a refusal": lambda r: Reply(wire.seal({"refused": "no"})),
        "a refusal that is no text": lambda r: Reply(wire.seal({"refused": ["no"]})),
    }[how]  # type: ignore[return-value]


REASON = {"NaN": NONFINITE, "infinity": NONFINITE, "silence": LATE, "loss of the node": ABSENT, "a refusal": REFUSED}
HOW = ("NaN", "infinity", "a wrong shape", "a wrong type", "a huge array", "garbage", "an empty block", "silence",
       "loss of the node", "a refusal", "a refusal that is no text")  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["cobo", "ditto", "fedavg"])
def test_one_broken_site_counts_as_absent_and_harms_nobody(name: str, how: str) -> None:
    rounds = 4
    settings = {"batch": 6, "schedule": "all"} if name == "cobo" else {"plan": {"steps": 2, "batch": 6}}
    algo = make(name, settings, rounds=rounds)
    broken, absent = fleet(), fleet()
    transport: Any = broken.transport
    transport.on_way = lambda address, block, answer: (
        spoiled(how)(answer(block)) if address == "node-1" and broken.t == 2 else Reply(answer(block))
    )
    gone = Participation(absent, Stay((("site-1", 0, 2),)))
    states = []
    for each, at_two in ((broken, broken), (absent, gone)):
        state = algo.init(each)
        for t in range(3):
            here = at_two if t == 2 else each
            here.begin(t)
            state, info = algo.round(here, state)
        assert not info.ok[1]
        transport.on_way = None
        states.append(each.reveal(algo.personal(state)))
    for i in (0, 2, 3):
        torch.testing.assert_close(states[0][i], states[1][i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", HOW)
def test_the_reason_is_told(how: str) -> None:
    remote = fleet()
    transport: Any = remote.transport
    transport.on_way = lambda address, block, answer: (
        spoiled(how)(answer(block)) if address == "node-1" else Reply(answer(block))
    )
    answer = remote.ask(Gradient(remote.everyone, remote.initial(), 6))
    assert answer.reason.tolist() == [OK, REASON.get(how, MALFORMED), OK, OK]
    assert not answer.rows[1].any()
    assert answer.rows[[0, 2, 3]].abs().sum(1).all()
    sent = remote.ledger.sent["gradient"]
    assert (sent[:, 2] == remote.d).all()
    assert sent[1, 0] == (remote.d if REASON.get(how) == NONFINITE else 0)  # what did not come was not sent


def test_an_answer_to_another_phase_does_not_fit() -> None:
    remote = fleet()
    transport: Any = remote.transport
    remote.ask(Loss(remote.everyone, remote.initial(), 6))
    old = transport.here["node-1"].answer(transport.blocks[-3][1])
    transport.on_way = lambda address, block, answer: Reply(old if address == "node-1" else answer(block))
    answer = remote.ask(Gradient(remote.everyone, remote.initial(), 6))
    assert answer.reason.tolist() == [OK, MALFORMED, OK, OK]
    remote.begin(1)
    answer = remote.ask(Loss(remote.everyone, remote.initial(), 6))
    assert answer.reason.tolist() == [OK, MALFORMED, OK, OK]  # right shape, and of an older opening


# ---- who speaks for whom ---------------------------------------------------------------------------------------------


def test_nobody_else_can_claim_a_client_and_its_own_site_comes_back_under_any_address() -> None:
    told: list[str] = []
    remote = fleet(tell=told.append)
    transport: Any = remote.transport
    own = transport.here.pop("node-1")
    transport.here["thief"] = replace(own, secret=b"thief")
    remote.begin(1)
    assert remote.present.tolist() == [True, False, True, True]
    assert any("belongs to another site" in line for line in told)
    transport.here["node-9"] = own
    remote.begin(2)
    assert remote.present.all()
    assert remote.ask(Loss(remote.everyone, Own("a"), 6)).ok.all()


@pytest.mark.parametrize("wrong", ["unknown client", "another model", "another experiment"])
def test_a_site_that_does_not_fit_is_not_taken_in(wrong: str) -> None:
    told: list[str] = []
    strange = {
        "unknown client": lambda: Site(replace(part(PEOPLE, [1]), keys=("stranger",)), b"x", dtype=torch.float64),
        "another model": lambda: Site(part(classes(batchnorm), [1]), b"x", dtype=torch.float64),
        "another experiment": lambda: Site(part(PEOPLE, [1]), b"x", dtype=torch.float64, experiment="else"),
    }[wrong]()
    remote = RemoteFleet(declared(PEOPLE), Wire({"a": strange, "b": site(0)}), dtype=torch.float64, tell=told.append)
    remote.begin(0)
    assert remote.present.tolist() == [True, False, False, False]
    assert len([line for line in told if "not taken in" in line]) == 1


def test_clients_that_are_away_have_no_metrics() -> None:
    remote = fleet()
    transport: Any = remote.transport
    del transport.here["node-2"]
    values = remote.watch(Evaluate(remote.everyone, remote.initial())).metrics["accuracy"]
    assert torch.isnan(values).tolist() == [False, False, True, False]


# ---- what a site allows ----------------------------------------------------------------------------------------------

ASKS: dict[str, tuple[Limits, Callable[[RemoteFleet], Any], str]] = {
    "kind": (replace(OPEN, kinds=("loss",)), lambda f: Gradient([0], f.initial()[:1], 6), "answers no gradient"),
    "small batch": (
        replace(OPEN, least_batch=8),
        lambda f: Gradient([0], f.initial()[:1], 7),
        "batch of 7 is too small",
    ),
    "few data": (replace(OPEN, least_batch=30), lambda f: Loss([0], f.initial()[:1]), "batch of 20 is too small"),
    "few to measure on": (
        replace(OPEN, least_batch=30),
        lambda f: Evaluate([0], f.initial()[:1], "train"),
        "batch of 20 is too small",
    ),
    "one batch": (
        replace(OPEN, per_batch=2),
        lambda f: Loss([0, 0, 0], f.initial()[:1] * torch.tensor([[1.0], [2.0], [3.0]]), 6),
        "3 models on one batch are too many",
    ),
    "a model leaves": (
        replace(OPEN, own_rows=False),
        lambda f: Fit([0], Own(), Plan(steps=0), give="rows"),
        "stays here",
    ),
    "a model leaves as what a strong pull made of it": (
        replace(OPEN, own_rows=False),
        lambda f: Fit([0], Own(), Plan(steps=1, lr=1e-3), pull=Pull(0 * f.initial()[:1], 1e6), give="update"),
        "stays here",
    ),
    "training": (replace(OPEN, most_steps=10), lambda f: Fit([0], Own(), Plan(steps=11), give="nothing"), "11 steps"),
    "too large": (
        replace(OPEN, message_mb=1),
        lambda f: Loss([0] * 3000, f.initial()[:1].repeat(3000, 1), 6),
        "too large",
    ),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_site_refuses_what_its_limits_do_not_allow(name: str, tmp_path: Path) -> None:
    limits, ask, why = ASKS[name]
    told: list[str] = []
    remote = fleet(tell=told.append)
    transport: Any = remote.transport
    transport.here["node-0"] = site(0, tmp_path, limits=limits)
    question = ask(remote)
    if hasattr(question, "track"):
        question = replace(question, track=False)
    assert (remote.ask(question).reason == REFUSED).all()
    assert any(why in line for line in told)
    assert why in (tmp_path / "log.jsonl").read_text()


def test_a_site_counts_what_it_answers_in_a_round_however_often_the_round_is_opened() -> None:
    remote = fleet()
    transport: Any = remote.transport
    transport.here["node-0"] = site(0, limits=replace(OPEN, per_round=3))
    ask = Loss([0], remote.initial()[0], 6)
    reasons = []
    for _ in range(5):
        remote.begin(7)
        reasons.append(int(remote.ask(ask).reason))
    assert reasons == [OK, OK, OK, REFUSED, REFUSED]
    remote.begin(8)
    assert int(remote.ask(ask).reason) == OK


def again(remote: RemoteFleet, place: int, **changes: Any) -> str:
    """Send the last message to node-0 once more, altered, and with its asks at another place; what it refused."""
    transport: Any = remote.transport
    head, arrays = wire.unseal(next(b for a, b in reversed(transport.blocks) if a == "node-0"), 1 << 30)
    head = json.loads(json.dumps(head | changes))
    for each in head["asks"]:
        each["place"] = place
    said, _ = wire.unseal(transport.here["node-0"].answer(wire.seal(head, arrays)), 1 << 30)
    return str(said.get("refused", ""))


def test_models_on_one_batch_are_counted_over_messages_and_however_a_round_is_opened() -> None:
    remote = fleet()
    transport: Any = remote.transport
    transport.here["node-0"] = site(0, limits=replace(OPEN, per_batch=2))
    first, other, third = (factor * remote.initial()[0] for factor in (1, 2, 3))
    assert remote.ask(Loss([0], first, 6)).ok.all()
    assert not again(remote, 0)  # the same question tells nothing new
    assert remote.ask(Loss([0], other, 6)).ok.all()  # at its own place, on its own batch
    assert not again(remote, 0, phase=3)  # on the first batch: the second model
    assert remote.ask(Loss([0], third, 6)).ok.all()
    assert "3 models on one batch" in again(remote, 0, phase=4)
    assert "3 models on one batch" in again(remote, 0, opening=remote.opening + 1, phase=1)
    assert "3 models on one batch" in again(remote, 0, watch=True)
    remote.begin(1)
    assert remote.ask(Loss([0], third, 6)).ok.all()
    assert "3 models on one batch" in again(remote, 0, round=0, opening=remote.opening + 1, phase=1)


def test_whoever_only_watches_is_counted_too_whatever_round_it_says() -> None:
    remote = fleet()
    transport: Any = remote.transport
    transport.here["node-0"] = site(0, limits=replace(OPEN, per_round=3))
    remote.watch(Loss([0], remote.initial()[0], 6))
    assert not again(remote, 0, round=5)
    assert not again(remote, 0, round=6)
    assert "more than the 3 models" in again(remote, 0, round=7)


def test_a_site_answers_for_nothing_that_the_experiment_does_not_say(tmp_path: Path) -> None:
    scope = Scope(("ditto", "cobo-reference"), (4,), rounds=10)

    def refused(run: str, seed: int = 4, t: int = 0) -> str:
        told: list[str] = []
        here = site(0, tmp_path, scope=scope, limits=replace(OPEN, studies=2))
        remote = RemoteFleet(declared(PEOPLE), Wire({"a": here}), seed=seed, dtype=torch.float64, run=run,
                             tell=told.append)  # fmt: skip
        remote.begin(t)
        if remote.present[0]:
            remote.ask(Loss([0], remote.initial()[0], 6))
        return " ".join(line for line in told if "refused" in line)

    assert not refused("one/ditto")
    assert not refused("one/cobo-reference", t=9)
    assert "no such algorithm" in refused("one/fedavg")
    assert "no such seed" in refused("one/ditto", seed=5)
    assert "has 10 rounds" in refused("one/ditto", t=11)
    assert not refused("two/ditto")
    assert "served 2 times" in refused("three/ditto")
    assert not refused("one/ditto", t=1)


def test_buffers_leave_only_where_a_site_lets_them() -> None:
    people = classes(batchnorm)
    for buffers in (True, False):
        told: list[str] = []
        here = Site(part(people, [0]), b"x", limits=replace(OPEN, buffers=buffers), dtype=torch.float64)
        remote = RemoteFleet(declared(people), Wire({"a": here}), dtype=torch.float64, tell=told.append)
        remote.begin(0)
        answer = remote.watch(Evaluate([0], remote.initial()[:1], buffers="averaged"))
        assert bool(answer.ok[0]) == buffers
        assert any("buffers" in line for line in told) != buffers


def test_the_log_says_who_asked_what_and_how_many_numbers_left(tmp_path: Path) -> None:
    remote = fleet(tmp_path)
    remote.ask(Gradient(remote.everyone, remote.initial(), 6, sketch=9))
    line = json.loads((tmp_path / "2" / "log.jsonl").read_text().splitlines()[-1])
    assert (line["ask"], line["give"], line["clients"], line["batch"]) == ("gradient", "rows", ["site-2"], 6)
    assert line["numbers"] == 9 + 2  # the sketch, the loss beside it, and whether it went well


def test_draws_are_the_sites_own_secret_unless_a_seed_is_shared() -> None:
    x = LoopFleet(PEOPLE, seed=4, dtype=torch.float64).initial()
    answers = []
    for secret in (None, b"one", b"one", b"two"):
        remote = fleet()
        if secret is not None:
            transport: Any = remote.transport
            for i in range(PEOPLE.n):
                transport.here[f"node-{i}"] = replace(site(i), secret=secret, share_seed=False)
        plain, sketch = remote.ask(Gradient(remote.everyone, x, 6), Gradient(remote.everyone, x, sketch=5))
        answers.append((plain.rows, sketch.rows, remote.reveal(Own("new"))))
    assert torch.equal(answers[1][0], answers[2][0])
    assert not torch.equal(answers[0][0], answers[1][0])
    assert not torch.equal(answers[1][0], answers[3][0])
    for _, sketch_rows, own in answers[1:]:  # whole splits have nothing to draw: sketches are everyone's
        assert torch.equal(sketch_rows, answers[0][1])
        assert all(torch.equal(a, b) for a, b in zip(own, answers[0][2], strict=True))


# ---- what leaves, altered --------------------------------------------------------------------------------------------


def guarded(guard: Any) -> RemoteFleet:
    remote = fleet()
    transport: Any = remote.transport
    for i in range(PEOPLE.n):
        transport.here[f"node-{i}"].guard = guard
    return remote


def test_clipping_and_noise_are_done_to_rows_before_they_are_summed() -> None:
    x = LoopFleet(PEOPLE, seed=4, dtype=torch.float64).initial()
    plain = fleet().ask(Gradient([0, 1, 2, 3], x, 6)).rows
    clip = float(plain.norm(dim=1).median())
    clipped = plain * (clip / plain.norm(dim=1, keepdim=True)).clamp(max=1)
    remote = guarded(ClipAndNoise(clip, 0.0, secret=b"1"))
    ask = Gradient([0, 1, 2, 3], x, 6)
    torch.testing.assert_close(remote.ask(ask).rows, clipped)
    remote = guarded(ClipAndNoise(clip, 0.0, secret=b"1"))
    summed = remote.ask(replace(ask, give="sum", into=torch.tensor([0, 0, 1, 1]), weights=torch.tensor([1.0, 2, 3, 4])))
    torch.testing.assert_close(summed.sums, torch.stack([clipped[0] + 2 * clipped[1], 3 * clipped[2] + 4 * clipped[3]]))
    fit = Fit([0, 1], x[:2], Plan(steps=2, batch=6))
    assert (guarded(ClipAndNoise(1e-3, 0.0, b"1")).ask(fit).rows.norm(dim=1) <= 1e-3 * (1 + 1e-12)).all()
    trained = guarded(ClipAndNoise(1e-3, 0.0, b"1")).ask(replace(fit, give="rows")).rows
    assert ((trained - x[:2]).norm(dim=1) <= 1e-3 * (1 + 1e-9)).all()
    noisy = [guarded(ClipAndNoise(clip, 0.5, secret)).ask(ask).rows - clipped for secret in (b"1", b"1", b"2")]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])
    assert abs(float(noisy[0].std()) / (0.5 * clip) - 1) < 0.1


def test_noise_is_as_large_as_said_and_tells_nothing_of_other_noise() -> None:
    guard = ClipAndNoise(2.0, 0.5, b"secret")
    x = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 1000
    what: Any = None
    z = guard.rows(what, x) - x
    nudged = x.clone()
    nudged[0, 7] += 1e-12  # another row: other noise everywhere, so a difference of two answers hides both
    other = guard.rows(what, nudged) - nudged
    assert torch.equal(z, guard.rows(what, x) - x)
    assert torch.equal(z[1], other[1])
    for a, b in ((z[0], other[0]), (z[0], z[1]), (z[0], ClipAndNoise(2.0, 0.5, b"else").rows(what, x)[0] - x[0])):
        assert abs(float(a.std()) - 1) < 0.02
        assert abs(float(a.mean())) < 0.02
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    share = (z[0].abs() < 1).double().mean()
    assert abs(float(share) - 0.6827) < 0.01  # of a normal distribution within one deviation


class Masks:
    """Masks that cancel in the sum of everyone who was asked: what a secure sum adds, made the simplest way."""

    def rows(self, what: Leaving, rows: Tensor) -> Tensor:
        return rows

    def sums(self, what: Leaving, sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        me, others = what.keys[0], sorted(set(what.among))
        for other in others:
            if other != me:
                g = torch.Generator().manual_seed(hash(tuple(sorted([me, other]))) % (1 << 31) + what.place)
                mask = 100 * torch.randn(sums.shape, generator=g, dtype=sums.dtype)
                sums = sums + mask if me < other else sums - mask
        return sums, weight


def test_masked_sums_hide_every_part_and_their_sum_is_right() -> None:
    x = LoopFleet(PEOPLE, seed=4, dtype=torch.float64).initial()
    ask = Gradient([0, 1, 2, 3], x, 6, give="sum", into=torch.zeros(4, dtype=torch.long))
    expected = fleet().ask(ask)
    remote = guarded(Masks())
    transport: Any = remote.transport
    parts = []

    def look(address: str, block: bytes, answer: Callable[[bytes], bytes]) -> Reply:
        reply = answer(block)
        parts.append(wire.unseal(reply, 1 << 30)[1]["0/sums"])
        return Reply(reply)

    transport.on_way = look
    got = remote.ask(ask)
    torch.testing.assert_close(got.sums, expected.sums, rtol=0, atol=1e-9)
    assert torch.equal(got.weight, expected.weight)
    assert all(part.abs().max() > 50 for part in parts)


def test_rounded_answers_are_cheaper_in_the_ledger_and_close() -> None:
    exact = fleet().ask(Gradient([0, 1], fleet().initial()[:2], 6)).rows
    for precision, size in (("bfloat16", 2), ("int8", 1)):
        remote = fleet(precision=precision)
        rows = remote.ask(Gradient([0, 1], remote.initial()[:2], 6)).rows
        assert float((rows - exact).abs().max()) < 0.01 * float(exact.abs().max())
        totals = remote.ledger.totals()["sent"]
        assert totals["up"] == {"numbers": 2 * remote.d, "bytes": 2 * remote.d * size}
        assert totals["down"]["bytes"] == 2 * remote.d * 8


@pytest.mark.parametrize("give", ["rows", "sum"])
@pytest.mark.parametrize("share_seed", [True, False])
@pytest.mark.parametrize(
    "how", [Compress("topk", 0.2), Compress("quantise", bits=3), Compress("quantise", bits=11), Compress("sketch", 0.5)]
)
def test_what_travels_compressed_arrives_as_in_the_loop_and_is_as_many_bytes_as_the_ledger_says(
    how: Compress, give: str, share_seed: bool
) -> None:
    loop, remote = LoopFleet(PEOPLE, seed=4, dtype=torch.float64), fleet()
    transport: Any = remote.transport
    for i in range(PEOPLE.n):
        transport.here[f"node-{i}"].share_seed = share_seed
    bytes_up = []

    def count(address: str, block: bytes, answer: Callable[[bytes], bytes]) -> Reply:
        reply = answer(block)
        arrays = wire.unseal(reply, 1 << 30)[1]
        bytes_up.append(sum(v.nbytes for k, v in arrays.items() if "/rows/" in k or "/sums/" in k))
        return Reply(reply)

    transport.on_way = count
    ask = Gradient(loop.everyone, loop.initial(), compress=how)  # whole splits: the same for every seed of draws
    if give == "sum":
        ask = replace(ask, give="sum", into=torch.tensor([1, 0, 0, 1]), weights=torch.tensor([1.0, 2, 3, 4]))
    loop.begin(0)
    alike([remote.ask(ask)], [loop.ask(ask)])
    up = remote.ledger.totals()["sent"]["up"]
    assert loop.ledger.totals()["sent"]["up"] == up
    assert up["bytes"] - 8 * PEOPLE.n < sum(bytes_up) <= up["bytes"]  # a row's last number may be partly filled
    fit = Fit(loop.everyone, loop.initial(), Plan(steps=2, batch=None, lr=0.1), compress=how)
    alike([remote.ask(fit)], [loop.ask(fit)])


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(SettingError, match="no ask 'theft'"):
        Limits(kinds=("theft",))
    with pytest.raises(SettingError, match="least_batch"):
        Limits(least_batch=0)
    with pytest.raises(SettingError, match="clip is above 0"):
        ClipAndNoise(0.0, 1.0, b"1")
    remote = fleet()
    transport: Any = remote.transport
    transport.here["node-3"] = site(3, limits=replace(OPEN, own_rows=False))
    with pytest.raises(AskError, match="stays at its site"):
        remote.reveal(Own("a"))
