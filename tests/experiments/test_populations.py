"""Generated populations from an experiment file."""

import pytest
import torch

from coterie.asks import Fit, Plan
from coterie.data.synthetic import LeastSquares
from coterie.errors import SettingError
from coterie.experiments.populations import make
from coterie.fleet.stacked import StackedFleet


@pytest.mark.parametrize("online", [True, False])
def test_a_population_by_name_learns_its_truth(online: bool) -> None:
    given = {"kind": "synthetic", "name": "least-squares", "clients": 4, "dimension": 3, "online": online}
    people = make(given, seed=7)
    source = LeastSquares(seed=7, clients=4, dimension=3)
    assert people.groups == source.groups()
    assert (people.stream is not None) == online
    fleet = StackedFleet(people, seed=0, dtype=torch.float64)
    fleet.begin(0)
    rows = fleet.ask(Fit(fleet.everyone, fleet.initial(), Plan(steps=400, batch=4, lr=0.05), give="rows")).rows
    torch.testing.assert_close(rows, source.truth(), rtol=0, atol=1e-6)
    assert [len(people.index[s][0]) for s in ("train", "validation", "test")] == [90, 10, 200]


@pytest.mark.parametrize(("name", "n", "outputs"), [("mean-estimation", 150, 10), ("linear", 3, 1)])
def test_the_others_are_there(name: str, n: int, outputs: int) -> None:
    people = make({"kind": "synthetic", "name": name}, seed=0)
    assert (people.n, people.targets.shape[1]) == (n, outputs)


def test_a_wrong_name_or_setting_is_said() -> None:
    with pytest.raises(SettingError, match="did you mean least-squares"):
        make({"kind": "synthetic", "name": "least-square"}, seed=0)
    with pytest.raises(SettingError, match="did you mean dimension"):
        make({"kind": "synthetic", "name": "linear", "dimensions": 3}, seed=0)
