"""The embedded data set: its shape, its range, and a division that never moves."""

import hashlib

import numpy as np
from sklearn.datasets import load_digits

from coterie.data.digits import digits


def test_every_image_is_there_once_and_in_range() -> None:
    data = digits()
    assert data.inputs.shape == (1797, 1, 8, 8)
    assert data.inputs.dtype == np.float32
    assert data.inputs.min() == 0
    assert data.inputs.max() == 1
    rows = {(image.tobytes(), int(label)) for image, label in zip(data.inputs, data.targets, strict=True)}
    raw = load_digits()
    theirs = (raw.images / 16).astype(np.float32)
    assert rows == {(image.tobytes(), int(label)) for image, label in zip(theirs, raw.target, strict=True)}


def test_the_division_is_stratified_fixed_and_said_to_be_ours() -> None:
    data = digits()
    trained, all_ = np.bincount(data.targets[: data.train]), np.bincount(data.targets)
    assert np.all(np.abs(trained - 0.8 * all_) <= 0.5)
    assert "ours" in data.facts["division"]
    assert len(data.classes) == 10
    # The division must be the same on every machine and with every version: results refer to it.
    assert hashlib.sha256((data.inputs * 16).astype(np.uint8).tobytes()).hexdigest()[:16] == "70f101950dc2455b"
    assert np.array_equal(data.inputs, digits().inputs)
