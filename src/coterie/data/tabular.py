"""Tables with gaps: imputation by the mean and standardisation, fitted on training data, per client or federated.

Federated means that each client says three numbers per column of its training rows (how many values there are, their
mean, their sum of squared deviations) and all use the pooled ones: exactly what pooling the tables would give, to
rounding, and no row travels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError, SettingError

Table = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """What is said of the values that a table has, column by column; gaps are NaN."""

    count: Table
    mean: Table
    squares: Table  # sums of squared deviations from the mean

    @classmethod
    def of(cls, table: NDArray[Any]) -> "Moments":
        """The moments of a table of rows × columns."""
        table = np.asarray(table, dtype=np.float64)
        there = ~np.isnan(table)
        count = there.sum(0).astype(np.float64)
        mean = np.where(there, table, 0).sum(0) / np.maximum(count, 1)
        return cls(count, mean, (np.where(there, table - mean, 0) ** 2).sum(0))

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of two tables one below the other, without a loss of digits where means are large."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * self.count * share
        return Moments(count, self.mean + apart * share, squares)


@dataclass(frozen=True)
class Scale:
    """How a table is made ready: a gap becomes the training mean, then mean 0 and deviation 1 in every column."""

    mean: Table
    std: Table

    @classmethod
    def of(cls, moments: Moments) -> "Scale":
        """A constant column becomes 0; so does one of which training data say nothing, whatever it holds later."""
        std = np.sqrt(moments.squares / np.maximum(moments.count, 1))
        std = np.where(std > 1e-12 * np.maximum(1, np.abs(moments.mean)), std, 1)
        return cls(moments.mean, np.where(moments.count > 0, std, np.inf))

    def __call__(self, table: NDArray[Any]) -> Table:
        """The table, without gaps."""
        return np.nan_to_num((np.asarray(table, dtype=np.float64) - self.mean) / self.std, nan=0.0)


def prepare(
    table: NDArray[Any], training: Sequence[NDArray[Any]], holdings: Sequence[NDArray[Any]], by: str = "federated"
) -> NDArray[np.float32]:
    """The whole table made ready for clients that hold some of its rows; nothing but training rows is looked at.

    `training` and `holdings` give each client's training rows and all of its rows; `by` is "federated" or "client".
    Rows that nobody holds are scaled by the pooled moments.
    """
    if by not in ("federated", "client"):
        raise SettingError(f"tables are prepared 'federated' or by 'client', not by {by!r}")
    owners = np.zeros(len(table), dtype=np.int64)
    for i, rows in enumerate(holdings):
        if by == "client" and owners[rows].any():
            raise DataError(
                f"client {i} holds a row that client {int(owners[rows].max()) - 1} holds too; give by=federated"
            )
        owners[rows] = i + 1
    each = [Moments.of(table[rows]) for rows in training]
    for i, rows in enumerate(training):
        if not len(rows):
            raise DataError(f"client {i} has no training rows to prepare its table by")
    made = Scale.of(reduce(Moments.__add__, each))(table)
    if by == "client":
        for moments, rows in zip(each, holdings, strict=True):
            made[rows] = Scale.of(moments)(table[rows])
    return made.astype(np.float32)
