"""Imputation and standardisation: federated equals pooled, and only training rows are looked at."""

import numpy as np
import pytest

from coterie.data.tabular import Moments, Scale, prepare
from coterie.errors import DataError, SettingError


@pytest.fixture
def table():
    generator = np.random.default_rng(0)
    made = generator.normal(size=(90, 5)) * [1, 10, 0.1, 1, 1] + [0, 1e6, -3, 0, 0]
    made[generator.random(made.shape) < 0.2] = np.nan
    made[:, 3] = 7.0
    made[:, 4] = np.nan
    return made


CLIENTS = [np.arange(start, start + 30) for start in (0, 30, 60)]
TRAINING = [rows[:20] for rows in CLIENTS]


def test_federated_moments_are_those_of_the_pooled_table(table):
    first, second, third = (Moments.of(table[rows]) for rows in TRAINING)
    pooled = Moments.of(table[np.concatenate(TRAINING)])
    for merged in (first + second + third, third + (first + second)):
        for name in ("count", "mean", "squares"):
            np.testing.assert_allclose(getattr(merged, name), getattr(pooled, name), rtol=1e-10)
    known = table[np.concatenate(TRAINING)][:, :3]
    np.testing.assert_allclose(pooled.mean[:3], np.nanmean(known, 0))
    np.testing.assert_allclose(Scale.of(pooled).std[:3], np.nanstd(known, 0))


def test_what_is_prepared_has_no_gaps_and_the_right_scale(table):
    for by in ("federated", "client"):
        made = prepare(table, TRAINING, CLIENTS, by)
        assert made.dtype == np.float32
        assert np.isfinite(made).all()
        assert (made[:, 3:] == 0).all()
        for rows in TRAINING if by == "client" else [np.concatenate(TRAINING)]:
            there = np.where(np.isnan(table[rows][:, :3]), np.nan, made[rows][:, :3])
            np.testing.assert_allclose(np.nanmean(there, 0), 0, atol=1e-4)
            np.testing.assert_allclose(np.nanstd(there, 0), 1, atol=1e-4)
            assert (made[rows][:, :3][np.isnan(there)] == 0).all()


@pytest.mark.parametrize("by", ["federated", "client"])
def test_only_training_rows_are_looked_at(table, by):
    before = prepare(table, TRAINING, CLIENTS, by)
    held = np.setdiff1d(np.arange(90), np.concatenate(TRAINING))
    changed = table.copy()
    changed[held] *= 100
    after = prepare(changed, TRAINING, CLIENTS, by)
    training = np.concatenate(TRAINING)
    np.testing.assert_array_equal(after[training], before[training])
    assert not np.allclose(after[held, 0], before[held, 0])


def test_a_column_that_training_never_saw_says_nothing(table):
    table[:30, 0] = np.nan
    table[25, 0] = 1e9
    made = prepare(table, TRAINING, CLIENTS, "client")
    assert (made[:30, 0] == 0).all()
    assert prepare(table, TRAINING, CLIENTS, "federated")[25, 0] > 1e8


def test_rows_that_nobody_holds_are_scaled_as_all_together(table):
    both = prepare(table, TRAINING[:2], CLIENTS[:2], "client")
    np.testing.assert_array_equal(both[60:], prepare(table, TRAINING[:2], CLIENTS[:2])[60:])


def test_what_cannot_be_prepared_is_said(table):
    with pytest.raises(SettingError, match="not by 'hospital'"):
        prepare(table, TRAINING, CLIENTS, "hospital")
    with pytest.raises(DataError, match="client 1 holds a row that client 0 holds too"):
        prepare(table, TRAINING, [CLIENTS[0], CLIENTS[0]], "client")
    with pytest.raises(DataError, match="client 1 has no training rows"):
        prepare(table, [TRAINING[0], TRAINING[1][:0]], CLIENTS[:2])
