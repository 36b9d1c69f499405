"""Public inputs: kept back from every client, or borrowed from another data set and scaled."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from coterie.data import sources
from coterie.data.dataset import Dataset
from coterie.data.public import borrow, fitted, keep_back
from coterie.errors import DataError, SettingError
from coterie.experiments import populations


def images(name: str, n: int, shape: tuple[int, ...], dtype: Any = np.uint8, seed: int = 0) -> Dataset:
    """Images of which no two are alike, with ten classes; a sixth of them are the publisher's test images."""
    x = np.random.default_rng(seed).integers(0, 256, (n, *shape))
    x = x.astype(np.uint8) if dtype == np.uint8 else (x / 255).astype(dtype)
    return Dataset(name, x, np.arange(n) % 10, n * 5 // 6, tuple("0123456789"))


def test_what_is_kept_back_nobody_holds_and_the_test_images_stay() -> None:
    whole = images("own", 240, (1, 6, 6))
    left, (inputs, labels) = keep_back(whole, 50, seed=3)
    assert (len(left.inputs), left.train, len(inputs)) == (190, 150, 50)
    assert np.array_equal(left.inputs[150:], whole.inputs[200:])
    joined = np.concatenate([left.inputs[:150], inputs]).reshape(200, -1)
    assert np.array_equal(np.unique(joined, axis=0), np.unique(whole.inputs[:200].reshape(200, -1), axis=0))
    for image, label in zip(inputs, labels, strict=True):
        (place,) = (whole.inputs == image).all((1, 2, 3)).nonzero()[0]
        assert label == whole.targets[place]
    assert not np.array_equal(keep_back(whole, 50, seed=4)[1][0], inputs)
    with pytest.raises(DataError, match="has 200 training samples; 200 cannot be kept back"):
        keep_back(whole, 200, seed=0)
    bordered = replace(whole, validation=60)  # the publisher's validation samples, the last of its training ones, stay
    left, _ = keep_back(bordered, 50, seed=3)
    assert np.array_equal(left.inputs[left.train - left.validation :], whole.inputs[140:])


def test_a_checkerboard_and_a_colour_survive_scaling() -> None:
    flat = torch.tensor([10, 20, 90], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert torch.equal(fitted(flat, (1, 8, 8), True), torch.full((1, 1, 8, 8), 40, dtype=torch.uint8))
    board = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).mul(255).to(torch.uint8)[None, None]
    small = fitted(board, (3, 4, 4), False)
    assert small.shape == (1, 3, 4, 4)
    torch.testing.assert_close(small[:, :, 1:3, 1:3], torch.full((1, 3, 2, 2), 0.5), rtol=0, atol=0.01)


def test_borrowed_images_have_the_shape_and_the_numbers_of_the_clients_own() -> None:
    for dtype in (np.uint8, np.float32):
        x, labels = borrow(images("other", 120, (3, 9, 9)), 30, images("own", 60, (1, 6, 6), dtype), seed=0)
        assert (x.shape, x.dtype, len(labels)) == ((30, 1, 6, 6), dtype, 30)
    table = Dataset("table", np.zeros((9, 4)), np.arange(9), 9)
    with pytest.raises(DataError, match="table has no images"):
        borrow(table, 3, images("own", 60, (1, 6, 6)), seed=0)
    with pytest.raises(DataError, match="other has 100 training samples, and 101 are asked for"):
        borrow(images("other", 120, (3, 9, 9)), 101, images("own", 60, (1, 6, 6)), seed=0)


def test_an_experiment_says_what_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"own": images("own", 240, (1, 6, 6)), "other": images("other", 120, (3, 9, 9), seed=1)}
    monkeypatch.setattr(sources, "load", lambda name, **_: known[name])
    given: dict[str, Any] = {
        "data": "own",
        "partition": {"name": "permuted_clusters", "clusters": 2, "clients_per_cluster": 3, "test": 12},
        "model": {"name": "mlp", "sizes": [36, 10]},
    }
    people = populations.make(given | {"public": {"samples": 20}}, 1)
    held = torch.cat([rows for split in people.index.values() for rows in split])
    private = people.inputs[held].flatten(1)
    for image in people.public["public"].flatten(1):
        assert not bool((private == image).all(1).any())
    assert len(people.public_labels["public"]) == 20
    assert set(people.sizes("test").tolist()) == {12}
    assert len({tuple(rows.tolist()) for rows in people.index["test"]}) == 1
    abroad = populations.make(given | {"public": {"samples": 20, "data": "other"}}, 1)
    assert abroad.public["public"].shape == (20, 1, 6, 6)
    assert int(abroad.sizes("train").sum() + abroad.sizes("validation").sum()) == 2 * 200
    with pytest.raises(SettingError, match=r"population\.public has no setting 'sample'"):
        populations.make(given | {"public": {"sample": 20}}, 1)
    with pytest.raises(SettingError, match="the synthetic population quadratics has no public inputs"):
        populations.make({"kind": "synthetic", "name": "quadratics", "public": 3}, 0)


def test_who_has_more_data_is_likelier_to_get_a_larger_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "load", lambda name, **_: images("own", 6000, (1, 6, 6)))
    given: dict[str, Any] = {
        "data": "own",
        "partition": {"name": "dirichlet_resplit", "clients": 150, "alpha": 0.5, "minimum": 3},
        "model": [{"name": "mlp", "sizes": [36, width, 10]} for width in (9, 2, 5)],
        "models": "by size",
    }
    people = populations.make(given, 0)
    width = torch.tensor([people.make(a).body[1].out_features for a in people.architecture])
    size = people.sizes("train").double()
    assert all(20 <= int((width == w).sum()) <= 90 for w in (2, 5, 9))
    mean = [float(size[width == w].mean()) for w in (2, 5, 9)]
    assert mean[0] < mean[1] < mean[2]
    with pytest.raises(SettingError, match="'in turn' or 'by size', not 'by luck'"):
        populations.make(given | {"models": "by luck"}, 0)
