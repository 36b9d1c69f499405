"""What every algorithm promises when some clients lie: numbers, graphs, and peace for those who are away."""

import pytest
import torch

import builders
from contract import algorithm, rows, same, tensors
from coterie.algorithms import ALGORITHMS
from coterie.fleet.attacks import KINDS, Attack, Attacked
from coterie.fleet.participation import Participation, Stay
from coterie.fleet.stacked import StackedFleet

AWAY = 2


@pytest.mark.full
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_attack_leaves_numbers_and_the_absent_honest_as_they_were(name: str, kind: str) -> None:
    make, shape = builders.MODELS["batchnorm"]
    attack = Attack(kind, ("site-4", "site-5"))
    population = attack.on(builders.classes(make, shape, n=6, groups=(0, 0, 1, 1, 2, 2)))
    attacked = Attacked(StackedFleet(population, seed=3, dtype=torch.float64), attack)
    fleet = Participation(attacked, Stay(((population.keys[AWAY], 0, 2),)))
    algo = algorithm(name, population)
    state, kept = algo.init(fleet), None
    for t in range(4):
        if t == 2:
            kept = (memory(fleet), rows(fleet, algo, state)[AWAY])
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        assert torch.isfinite(info.graph).all()
        assert (info.graph >= 0).all()
    assert kept is not None
    assert same(memory(fleet), kept[0])
    if algo.absent_stays:
        assert torch.equal(rows(fleet, algo, state)[AWAY], kept[1]), "absent, and changed: absent_stays = False?"
    honest = torch.stack(rows(fleet, algo, state))[:4]
    assert torch.isfinite(honest).all()
    for tensor in tensors(state):
        assert not tensor.is_floating_point() or not tensor.isnan().any()


def memory(fleet: Participation) -> list[torch.Tensor]:
    """What the client that is away remembers."""
    return [v[AWAY].clone() for name, v in sorted(fleet.state().items()) if not name.startswith("ledger/")]
