"""Synthetic populations: pure functions of their counters, with the distributions that the papers name."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from coterie.data.synthetic import LeastSquares, Linear, MeanEstimation, Quadratics, Volumes
from coterie.errors import SettingError

ALL = [
    MeanEstimation(mu=0.1),
    LeastSquares(),
    LeastSquares(dimension=10, centres=1, spread=0.3),
    Linear(noise=0.5),
    Quadratics(),
]
MEANS = ("mean-estimation", "quadratics")  # inputs are constants: the samples are the targets


@pytest.mark.parametrize("made", ALL, ids=lambda made: f"{made.kind}-{made.d}")
def test_a_sample_depends_on_its_counters_only(made):  # but for the last bit of a cosine
    clients, counters = torch.arange(made.n), torch.arange(50)
    x, y = made.samples(clients[:, None], counters)
    assert x.shape[:2] == y.shape[:2] == (made.n, 50)
    order = torch.randperm(50)
    for one, many in zip(made.samples(clients[1:3, None], counters[order]), (x, y), strict=True):
        assert_close(one, many[1:3, order], rtol=1e-12, atol=1e-12)
    for one, many in zip(made.samples(torch.tensor(2), torch.tensor(7)), (x, y), strict=True):
        assert_close(one, many[2, 7], rtol=1e-12, atol=1e-12)
    other = type(made)(**{**vars(made), "seed": 1}).samples(clients[:, None], counters)
    assert not (other[1] == y).any()
    assert (y if made.kind in MEANS else x).flatten().unique().numel() == (y if made.kind in MEANS else x).numel()


@pytest.mark.parametrize("made", ALL, ids=lambda made: f"{made.kind}-{made.d}")
def test_what_is_written_down_is_the_beginning_of_every_stream(made):
    data = made.dataset(30, 10)
    assert data.train == 30 * made.n
    assert np.bincount(data.groups).tolist() == [40] * made.n
    x, y = made.samples(torch.tensor(1), torch.arange(30))
    mine = np.flatnonzero(data.groups == 1)
    np.testing.assert_allclose(data.inputs[mine[:30]], x, rtol=1e-12)
    np.testing.assert_allclose(data.targets[mine[:30]], y, rtol=1e-12)
    assert mine[30] >= data.train
    assert not np.isin(data.targets[mine[30:]], data.targets[mine[:30]]).any()
    held = made.validation(1, 10)[1]
    assert not np.isin(held, data.targets).any()
    assert data.facts["clusters"] == made.groups()


@pytest.mark.parametrize("made", ALL, ids=lambda made: f"{made.kind}-{made.d}")
def test_the_truth_is_the_best_and_excess_is_what_is_lost_beyond_it(made):
    truth = made.truth()
    assert truth.shape == (made.n, made.d)
    assert_close(made.excess(truth), torch.zeros(made.n, dtype=torch.float64))
    x, y = made.samples(torch.arange(made.n)[:, None], torch.arange(200_000 // made.n))
    generator = torch.Generator().manual_seed(0)
    models = truth + torch.randn(made.n, made.d, generator=generator, dtype=torch.float64)

    def loss(w):
        predicted = x * w[:, None] if made.kind in MEANS else (x * w[:, None]).sum(-1, keepdim=True)
        return (predicted - y).square().mean((1, 2))

    assert_close(loss(models) - loss(truth), made.excess(models), rtol=0.1, atol=0.05)


def test_mean_estimation_is_meritfeds():
    made = MeanEstimation(mu=0.1)
    truth = made.truth()
    assert (made.n, made.d, made.groups().count(1)) == (150, 10, 95)
    assert_close(truth[:5], torch.zeros(5, 10, dtype=torch.float64))
    assert_close(truth[5], torch.full((10,), 0.1 / 10**0.5, dtype=torch.float64))
    assert_close(truth[149].norm(), torch.tensor(1.0, dtype=torch.float64))
    noise = made.samples(torch.arange(150)[:, None], torch.arange(1000))[1] - truth[:, None]
    assert abs(float(noise.mean())) < 0.003
    assert abs(float(noise.var()) - 1) < 0.005
    corr = torch.corrcoef(noise.flatten(0, 1).T) - torch.eye(10)
    assert float(corr.abs().max()) < 0.02


def test_least_squares_has_two_clusters_or_a_centre():
    two = LeastSquares().truth()
    assert torch.equal(two[0], two[2])
    assert not torch.isclose(two[0], two[1]).any()
    near, far = (LeastSquares(clients=500, centres=1, spread=v).truth() for v in (0.01, 1.0))
    assert_close(near.std(0), torch.full((2,), 0.01, dtype=torch.float64), rtol=0.15, atol=0)
    assert_close((far - far[0]) / 100, near - near[0])
    x, y = LeastSquares().samples(torch.tensor(0), torch.arange(9))
    assert_close(y[:, 0], x @ two[0])


def test_linear_is_comets():
    made = Linear()
    x, _ = made.samples(torch.arange(3)[:, None], torch.arange(1000))
    assert 9.9 < float(x.abs().max()) <= 10
    assert made.groups() == (0, 0, 1)
    public = made.public(100)
    assert public.shape == (100, 2)
    assert torch.equal(made.public(50), public[:50])
    spread = torch.stack([Linear(seed=seed).truth() for seed in range(300)])
    apart = (spread - spread.mean(1, keepdim=True))[:, 2]
    assert 80 < float(apart.std()) < 180


def test_volumes_look_like_heads():
    made = Volumes(train=(2, 1, 1), test=(1, 1, 0), shape=(24, 30, 24))
    data = made.dataset()
    assert data.inputs.shape == (6, 1, 24, 30, 24)
    assert data.inputs.dtype == np.float32
    assert data.targets.shape == (6, 24, 30, 24)
    assert data.train == 4
    assert data.groups.tolist() == [0, 0, 1, 2, 0, 1]
    assert set(np.unique(data.targets)) == {0, 1}
    share = data.targets.mean((1, 2, 3))
    assert ((share > 0.05) & (share < 0.5)).all()
    for image, mask in zip(data.inputs[:, 0], data.targets, strict=True):
        assert abs(image.mean()) < 1e-3
        assert abs(image.std() - 1) < 1e-2
        assert image[mask == 1].mean() > image[mask == 0].mean() + 0.5
    assert torch.equal(made.volume(1, 0)[0], torch.from_numpy(data.inputs[2]))
    assert len({image.tobytes() for image in data.inputs}) == 6
    with pytest.raises(SettingError, match="too small"):
        Volumes(shape=(2, 9, 9))
    with pytest.raises(SettingError, match="3 hospitals"):
        Volumes(train=(1,))


def test_gradients_of_quadratics_are_those_of_example_2_with_equal_noise():
    made = Quadratics(curvatures=(0.5, 2.0), per_cluster=3, noise=0.3)
    a, mu = made.curvature(), made.truth()
    scale, target = made.samples(torch.arange(made.n)[:, None], torch.arange(40_000))
    at = torch.randn(made.d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = 2 / made.d * scale * (scale * at - target)  # of the mean over coordinates
    assert_close(gradients.mean(1), a[:, None] * (at - mu), rtol=0, atol=0.3 / 40_000**0.5 * 5)
    spread = gradients.var(1).sum(1)
    assert_close(spread, torch.full_like(spread, 0.09), rtol=0.03, atol=0)
