"""Every registered algorithm against sites that only blocks of bytes reach: the simulator's numbers, and its ledger."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import builders
from contract import ROUNDS, algorithm, rows, run, same, tensors
from coterie.algorithms import ALGORITHMS
from coterie.data.population import Population
from coterie.fleet import wire
from coterie.fleet.attacks import Attack, Attacked
from coterie.fleet.loop import LoopFleet
from coterie.fleet.participation import Count, Participation
from coterie.fleet.remote import InProcess, RemoteFleet, Reply, declared
from coterie.sites.site import Limits, Site, part

NAMES = list(ALGORITHMS)
OPEN = Limits(per_round=100_000, per_batch=10_000, least_batch=1, own_rows=True)
PAYLOAD = ("models", "pull/rows", "drift/rows", "distil/targets")


def people(model: str = "mlp") -> Population:
    make, shape = builders.MODELS[model]
    return builders.classes(make, shape, n=6, groups=(0, 0, 1, 1, 2, 2))


def sites(population: Population, homes: list[list[int]], folder: Path | None = None) -> dict[str, Site]:
    """A site for each list of clients."""
    made = {}
    for i, clients in enumerate(homes):
        place = None if folder is None else folder / str(i)
        if place is not None:
            place.mkdir(exist_ok=True)
        made[f"node-{i}"] = Site(
            part(population, clients), bytes([i]), place, OPEN, dtype=torch.float64, share_seed=True, kept=ROUNDS + 1
        )
    return made


class Counting(InProcess):
    """Counts the bytes of rows, predictions and the like in both directions, as they really travel."""

    def __init__(self, here: Mapping[str, Callable[[bytes], bytes]]) -> None:
        super().__init__(here)
        self.down, self.up, self.phases = 0, 0, 0

    def exchange(self, blocks: Mapping[str, bytes]) -> Mapping[str, Reply]:
        replies = super().exchange(blocks)
        self.phases += 1
        for address, block in blocks.items():
            head, arrays = wire.unseal(block, 1 << 30)
            if head.get("watch") or head.get("hello") or "collect" in head:
                continue
            self.down += sum(v.nbytes for k, v in arrays.items() if k.partition("/")[2] in PAYLOAD)
            _, told = wire.unseal(replies[address].block, 1 << 30)
            kinds = {a["name"]: a["kind"] for a in head["asks"]}
            for name, value in told.items():
                ask, _, what = name.partition("/")
                if what in ("rows", "sums", "outputs") or (what == "loss" and kinds[ask] == "loss"):
                    self.up += value.nbytes
        return replies


def remote(population: Population, here: Mapping[str, Site]) -> RemoteFleet:
    transport = Counting({address: site.answer for address, site in here.items()})
    return RemoteFleet(declared(population), transport, seed=3, dtype=torch.float64, tell=print)


@pytest.mark.parametrize("model", ["mlp", "batchnorm"])
@pytest.mark.parametrize("name", NAMES)
def test_sites_give_the_simulators_numbers_and_move_what_its_ledger_says(name: str, model: str) -> None:
    population = people(model)
    algo = algorithm(name, population)
    outcomes = []
    alone = sites(population, [[i] for i in range(6)])
    shared = sites(population, [[4, 0], [1, 2, 5], [3]])
    for inner in (
        LoopFleet(population, seed=3, dtype=torch.float64),
        remote(population, alone),
        remote(population, shared),
    ):
        fleet = Participation(inner, Count(5))
        state, infos = run(fleet, algo, 3)
        graphs = torch.stack([i.graph for i in infos])
        outcomes.append((torch.stack(rows(fleet, algo, state)), graphs, fleet.ledger.totals()))
        if isinstance(inner, RemoteFleet) and inner.n == len(inner.transport.there()):
            sent = fleet.ledger.totals()["sent"]
            assert (inner.transport.down, inner.transport.up) == (sent["down"]["bytes"], sent["up"]["bytes"])  # type: ignore[attr-defined]
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome[0], outcomes[0][0], rtol=0, atol=1e-9)
        torch.testing.assert_close(outcome[1], outcomes[0][1], rtol=0, atol=1e-9)
        assert outcome[2] == outcomes[0][2]


@pytest.mark.parametrize("name", [n for n in NAMES if ALGORITHMS[n].mixed])
def test_sites_with_different_architectures(name: str) -> None:
    population = builders.classes([builders.mlp, builders.linear, builders.batchnorm], n=6, groups=(0, 0, 1, 1, 2, 2))
    algo = algorithm(name, population)
    both = []
    for inner in (
        LoopFleet(population, seed=3, dtype=torch.float64),
        remote(population, sites(population, [[0], [1, 2], [3], [5, 4]])),
    ):
        fleet = Participation(inner, Count(4))
        state, _ = run(fleet, algo)
        both.append(rows(fleet, algo, state))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_server_and_sites_may_stop_at_any_round_and_go_on_from_their_disks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.runs.files.os.fsync", lambda handle: None)  # nobody pulls the plug here
    population = people("batchnorm")
    homes = [[0, 1], [2, 3], [4, 5]]
    fleet = remote(population, sites(population, homes, tmp_path))
    algo = algorithm(name, population)
    state, kept = algo.init(fleet), []
    for t in range(ROUNDS):
        kept.append((state, {k: v.clone() for k, v in fleet.state().items()}))
        fleet.begin(t)
        state, _ = algo.round(fleet, state)
    expected = rows(fleet, algo, state)
    for start in (1, ROUNDS - 1):
        again = remote(population, sites(population, homes, tmp_path))  # new processes, the same disks
        algo.init(again)
        again.load(kept[start][1])
        resumed = kept[start][0]
        for t in range(start, ROUNDS):
            again.begin(t)
            algo.round(again, resumed)
            again.begin(t)
            resumed, _ = algo.round(again, resumed)
        assert same(tensors(resumed), tensors(state))
        assert same(rows(again, algo, resumed), expected)
        assert again.ledger.totals() == fleet.ledger.totals()


@pytest.mark.parametrize("kind", ["alie", "gaussian"])
@pytest.mark.parametrize("name", ["fedavg", "cobo", "meritfed"])
def test_attackers_at_sites_say_what_they_say_in_a_simulator(name: str, kind: str) -> None:
    attack = Attack(kind, "last third", strength=3.0)
    population = attack.on(people())
    algo = algorithm(name, population)
    here = remote(population, sites(population, [[4, 0], [1, 2, 5], [3]]))
    outcomes = []
    for inner in (LoopFleet(population, seed=3, dtype=torch.float64), here):
        fleet = Participation(Attacked(inner, attack), Count(5))
        state, infos = run(fleet, algo)
        outcomes.append((torch.stack(rows(fleet, algo, state)), infos[-1].graph, fleet.ledger.totals()))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0], rtol=0, atol=1e-8)
    torch.testing.assert_close(outcomes[1][1], outcomes[0][1], rtol=0, atol=1e-8)
    assert outcomes[1][2] == outcomes[0][2]
