"""Batched augmentation against a plain loop over samples, and its promises about keys."""

import math

import pytest
import torch
from torch.testing import assert_close

from coterie import draws
from coterie.data.augment import Augment
from coterie.errors import DataError, SettingError

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def plain(setting: Augment, image: torch.Tensor, key: int) -> torch.Tensor:
    """One sample, step by step, with torch's own padding; draws come from the plain-integer fold."""

    def unit(counter: int) -> float:
        return ((draws.fold_int(key, counter) >> 40) & 0xFFFFFF) / 2**24

    x = image.double() / 255 if image.dtype == torch.uint8 else image.double()
    _, height, width = x.shape
    pad = setting.crop
    if pad:
        if setting.fill == "reflect":
            wide = torch.nn.functional.pad(x[None], (pad,) * 4, mode="reflect")[0]
        else:
            wide = torch.nn.functional.pad(x, (pad,) * 4, value=setting.fill)
        top, left = math.floor(unit(0) * (2 * pad + 1)), math.floor(unit(1) * (2 * pad + 1))
        x = wide[:, top : top + height, left : left + width]
    if setting.flip and unit(2) < 0.5:
        x = x.flip(-1)
    if setting.jitter:
        brightness, contrast, saturation, hue = setting.jitter
        luma = torch.tensor([0.299, 0.587, 0.114], dtype=x.dtype)
        x = (x * (1 + (2 * unit(3) - 1) * brightness)).clamp(0, 1)
        grey = (luma @ x.reshape(3, -1)).mean()
        x = (grey + (x - grey) * (1 + (2 * unit(4) - 1) * contrast)).clamp(0, 1)
        grey = (luma @ x.reshape(3, -1)).reshape(1, height, width)
        x = (grey + (x - grey) * (1 + (2 * unit(5) - 1) * saturation)).clamp(0, 1)
        if hue:
            turn = (2 * unit(6) - 1) * 2 * math.pi * hue
            there = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
            back = torch.tensor([[1, 0.956, 0.619], [1, -0.272, -0.647], [1, -1.106, 1.703]])
            rotation = torch.tensor(
                [[1, 0, 0], [0, math.cos(turn), -math.sin(turn)], [0, math.sin(turn), math.cos(turn)]]
            )
            matrix = back.double() @ rotation.double() @ there.double()
            x = (matrix @ x.reshape(3, -1)).reshape(x.shape).clamp(0, 1)
    if setting.mean:
        x = (x - torch.tensor(setting.mean).double()[:, None, None]) / torch.tensor(setting.std).double()[:, None, None]
    return x


SETTINGS = {
    "nothing": Augment(),
    "flip": Augment(flip=True),
    "crop, reflect": Augment(crop=4, flip=True, mean=MEAN, std=STD),
    "crop, constant": Augment(crop=3, fill=0.25, flip=True),
    "jitter": Augment(jitter=(0.4, 0.3, 0.5, 0.1), mean=MEAN, std=STD),
    "all": Augment(crop=4, fill=0.0, flip=True, jitter=0.3, mean=MEAN, std=STD),
}


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (*shape, 3, 12, 10), dtype=torch.uint8, generator=generator)
    return x, torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("floats", [False, True], ids=["bytes", "floats"])
def test_equals_a_plain_loop_over_samples(setting, floats):
    x, keys = batch(40)
    x = x.double() / 255 if floats else x
    expected = torch.stack([plain(setting, image, int(key)) for image, key in zip(x, keys, strict=True)])
    # the random numbers carry 24 bits, so a factor is off by up to 2⁻²⁴ of itself
    assert_close(setting(x, keys, dtype=torch.float64), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_depends_on_the_samples_key_only(setting):
    x, keys = batch(4, 6)
    every = setting(x, keys)
    assert every.shape == x.shape
    order = torch.randperm(24)
    moved = setting(x.reshape(24, 3, 12, 10)[order], keys.reshape(24)[order])
    assert_close(moved, every.reshape(24, 3, 12, 10)[order], rtol=0, atol=1e-6)
    assert_close(setting(x[1, 2], keys[1, 2]), every[1, 2], rtol=0, atol=1e-6)
    assert_close(setting(x[:, 2:5], keys[:, 2:5]), every[:, 2:5], rtol=0, atol=1e-6)


def test_moves_are_exact_whatever_the_place():
    setting = Augment(crop=4, flip=True, mean=MEAN, std=STD)
    x, keys = batch(64)
    assert torch.equal(setting(x, keys)[10:20], setting(x[10:20], keys[10:20]))


def test_without_keys_only_scales():
    x, _ = batch(5)
    setting = SETTINGS["all"]
    expected = (x.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    assert_close(setting(x), expected)
    assert_close(Augment()(x), x.float() / 255)


def test_every_crop_and_both_sides_occur_equally_often():
    x = torch.arange(25, dtype=torch.float32).reshape(1, 1, 5, 5).expand(9000, 1, 5, 5) / 25
    keys = draws.fold(torch.tensor(7), torch.arange(9000))
    centre = (Augment(crop=1)(x, keys)[:, 0, 2, 2] * 25).round().long()
    seen, counts = centre.unique(return_counts=True)
    assert seen.tolist() == [6, 7, 8, 11, 12, 13, 16, 17, 18]
    assert counts.min() > 850
    assert counts.max() < 1150
    flipped = (Augment(flip=True)(x, keys)[:, 0, 0, 0] > 0).float().mean()
    assert 0.47 < flipped < 0.53


def test_compiles_into_one_graph():
    setting = SETTINGS["all"]
    x, keys = batch(3, 8)
    compiled = torch.compile(setting.__call__, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, keys), setting(x, keys))
    assert_close(compiled(x, None), setting(x))


@pytest.mark.full
def test_compiles_with_inductor():
    setting = Augment(crop=4, flip=True, jitter=(0.2, 0.2, 0.2, 0.1), mean=MEAN, std=STD)
    x, keys = batch(3, 8)
    assert_close(torch.compile(setting.__call__, fullgraph=True)(x, keys), setting(x, keys), rtol=1e-5, atol=1e-5)


def test_plain_settings_from_a_file():
    told = {"crop": 4, "fill": "reflect", "flip": True, "mean": [0.5], "std": [0.5], "jitter": [0.1, 0.1]}
    setting = Augment(**told)
    assert setting == Augment(crop=4, flip=True, mean=(0.5,), std=(0.5,), jitter=(0.1, 0.1, 0.0, 0.0))
    assert hash(setting)
    x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert_close(setting(x), torch.full((2, 1, 8, 8), -1.0))
    assert setting(x, torch.arange(2)).shape == x.shape


@pytest.mark.parametrize(
    "told",
    [
        {"crop": -1},
        {"fill": "wrap"},
        {"fill": 2.0},
        {"mean": (0.5,)},
        {"mean": (0.5,), "std": (0.0,)},
        {"jitter": (2.0,)},
        {"jitter": (0, 0, 0, 0.6)},
        {"jitter": (0,) * 5},
        {"jitter": (-0.1,)},
    ],
)
def test_settings_that_mean_nothing_are_refused(told):
    with pytest.raises(SettingError):
        Augment(**told)


def test_images_that_do_not_fit_are_refused():
    x, keys = batch(4)
    for bad in (
        lambda: Augment(mean=(0.5,), std=(0.5,))(x),
        lambda: Augment(crop=10)(x, keys),
        lambda: Augment(jitter=0.1)(x[:, :1], keys),
        lambda: Augment()(x.long()),
        lambda: Augment()(x[0, 0]),
        lambda: Augment(flip=True)(x, keys[:2]),
        lambda: Augment(flip=True)(x, keys.int()),
    ):
        with pytest.raises(DataError):
            bad()
