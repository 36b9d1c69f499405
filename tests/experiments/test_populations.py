"""What the `[population]` table makes of tables, volumes and natural owners."""

from typing import Any

import numpy as np
import pytest
import torch

from coterie.data import sources
from coterie.data.dataset import Dataset
from coterie.experiments import populations


@pytest.fixture
def wards(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A table with gaps from two owners, without test rows."""
    rng = np.random.default_rng(0)
    table = rng.normal([[5.0, -100.0, 3.0]], [[2.0, 10.0, 0.0]], (60, 3))
    table[40:] += [[7.0, 50.0, 0.0]]
    table[::9, 1] = np.nan
    owner = np.repeat([0, 1], [40, 20])
    ill = rng.integers(0, 2, 60)
    found = Dataset("wards", table, ill, 60, ("well", "ill"), owner, {"owners": ["North", "South"]})
    monkeypatch.setattr(sources, "load", lambda name, **_: found)
    return found


def made(**changes: Any) -> Any:
    given = {
        "data": "wards",
        "partition": {"name": "cluster_split", "test": 0.25, "validation": 0.2},
        "model": {"name": "linear", "inputs": 3, "outputs": 1},
        "task": "binary",
        "table": "federated",
    }
    return populations.make(given | changes, 3)


def test_clients_with_owners_are_called_by_them(wards: Dataset) -> None:
    assert made().keys == ("North", "South")
    several = {"name": "cluster_split", "clients_per_owner": 2, "test": 0.25}
    assert made(partition=several).keys == ("North-0", "North-1", "South-0", "South-1")


@pytest.mark.parametrize("by", ["federated", "client"])
def test_tables_are_scaled_by_training_rows_only(wards: Dataset, by: str) -> None:
    people = made(table=by)
    train = people.index["train"]
    for rows in [torch.cat(train)] if by == "federated" else train:
        x = people.inputs[rows].double()
        gaps = np.isnan(wards.inputs[rows.numpy()])
        assert x.isfinite().all()
        assert (x[torch.from_numpy(gaps)].abs() < 1e-6).all()
        torch.testing.assert_close(x.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(x[:, 0].std(correction=0), torch.tensor(1.0).double(), rtol=0, atol=1e-5)
    held_out = torch.cat(people.index["test"])
    assert float(people.inputs[held_out].double().mean(0).abs().max()) > 1e-3  # theirs are not what it was fitted on


def test_volumes_are_dealt_to_their_hospitals_anew_for_each_seed() -> None:
    given = {
        "data": {"name": "volumes", "shape": [4, 8, 4], "train": [4, 3, 2], "test": [1, 2, 1]},
        "partition": {"name": "cluster_split", "validation": 0.3},
        "model": {"name": "unet3d", "width": 1},
        "task": {"name": "segmentation", "criterion": "dice"},
    }
    people = populations.make(given, 0)
    assert people.keys == ("Guys", "HH", "IOP")
    assert (people.sizes("train") + people.sizes("validation")).tolist() == [4, 3, 2]
    assert people.sizes("test").tolist() == [1, 2, 1]
    assert not torch.equal(people.inputs, populations.make(given, 1).inputs)
    assert torch.equal(people.inputs, populations.make(given, 0).inputs)
