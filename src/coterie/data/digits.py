"""Digits: 1,797 handwritten digits of 8×8 pixels that come with scikit-learn, so they work offline at once."""

import numpy as np
from sklearn.datasets import load_digits

from coterie.data.dataset import Dataset, training_share

TRAIN = 0.8  # share of each class that is training data


def digits() -> Dataset:
    """All digits in [0, 1] as N×1×8×8, with a fixed stratified division, since the publisher gives none."""
    raw = load_digits()
    labels = raw.target.astype(np.int64)
    train = training_share(labels, TRAIN, "digits")
    pooled = np.concatenate([np.flatnonzero(train), np.flatnonzero(~train)])
    inputs = (raw.images / 16).astype(np.float32)[:, None][pooled]
    return Dataset(
        name="digits",
        inputs=inputs,
        targets=labels[pooled],
        train=int(train.sum()),
        classes=tuple(str(name) for name in raw.target_names),
        facts={
            "source": "scikit-learn load_digits: the test set of UCI Optical Recognition of Handwritten Digits",
            "licence": "CC BY 4.0",
            "division": "ours, fixed: 80 % of each class for training; the publisher gives none, and writers are mixed",
            "mean": [float(inputs[: train.sum()].mean(dtype=np.float64))],
            "std": [float(inputs[: train.sum()].std(dtype=np.float64))],
        },
    )
