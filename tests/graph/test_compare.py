"""Comparison with a true graph against plain loops and graphs known by hand."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.errors import DataError
from coterie.graph.compare import auroc, compare, found, inside_across, l1_distance, top_share

TRUTH = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3), torch.ones(1, 1)).double()
N = 6
OFF = [(i, j) for i, j in product(range(N), repeat=2) if i != j]
graphs = arrays(np.float64, (N, N), elements=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))


@given(graphs)
@settings(deadline=None, max_examples=50)
def test_against_plain_loops(w: np.ndarray) -> None:
    t = TRUTH.numpy()
    rows = []
    for i in range(N):
        total = w[i].sum()
        row = w[i] / total if total else np.eye(N)[i]
        rows.append(sum(abs(row[j] - t[i, j] / t[i].sum()) for j in range(N)))
    got = torch.from_numpy(w)
    assert l1_distance(got, TRUTH) == pytest.approx(np.mean(rows))
    true = [w[i, j] for i, j in OFF if t[i, j]]
    false = [w[i, j] for i, j in OFF if not t[i, j]]
    wins = sum((a > b) + 0.5 * (a == b) for a in true for b in false)
    assert auroc(got, TRUTH) == pytest.approx(wins / (len(true) * len(false)))
    assert inside_across(got, TRUTH) == pytest.approx((np.mean(true), np.mean(false)))


@given(graphs, st.integers(1, N - 1))
@settings(deadline=None, max_examples=15)
def test_ties_count_in_expectation(w: np.ndarray, k: int) -> None:
    rng, t = np.random.default_rng(0), TRUTH.numpy().copy()
    np.fill_diagonal(t, 0)
    w = w.copy()
    np.fill_diagonal(w, -1)
    shares = []
    for _ in range(400):
        best = np.argsort(-(w + 1e-6 * rng.random(w.shape)), axis=1)[:, :k]
        shares.append(np.take_along_axis(t, best, 1)[:5].mean())  # the sixth is alone
    assert top_share(torch.from_numpy(w), TRUTH, k) == pytest.approx(np.mean(shares), abs=0.06)


def test_extremes() -> None:
    right = compare(TRUTH * 0.3, TRUTH)
    assert right == pytest.approx(
        {"found": 1, "l1": 0, "auroc": 1, "inside": 0.3, "across": 0, "top_share": 1}, abs=1e-12
    )
    wrong = compare(1 - TRUTH, TRUTH)
    assert wrong == pytest.approx({"found": 0, "l1": 2, "auroc": 0, "inside": 0, "across": 1, "top_share": 0})
    # Uniform weights know nothing: |1/6 − 1/m| over m members and 1/6 over the rest is 2(1 − m/6).
    flat = compare(torch.ones(N, N), TRUTH)
    assert flat["l1"] == pytest.approx(np.mean([2 * (1 - m / 6) for m in (2, 2, 3, 3, 3, 1)]))
    assert flat["auroc"] == 0.5
    assert flat["top_share"] == pytest.approx(np.mean([1 / 5, 1 / 5, 2 / 5, 2 / 5, 2 / 5]))


def test_the_diagonal_can_be_left_out() -> None:
    w = TRUTH.clone().fill_diagonal_(100)
    assert l1_distance(w, TRUTH) > 0.5
    assert l1_distance(w, TRUTH, diagonal=False) == 0


def test_where_there_is_nothing_to_compare() -> None:
    assert math.isnan(auroc(torch.ones(3, 3), torch.ones(3, 3)))
    assert math.isnan(inside_across(torch.ones(3, 3), torch.eye(3))[0])
    assert math.isnan(top_share(torch.ones(3, 3), torch.eye(3)))
    with pytest.raises(DataError, match=r"\(2, 2\) cannot be compared with a true one of \(3, 3\)"):
        compare(torch.ones(2, 2), torch.eye(3))
    with pytest.raises(DataError, match="1 to 2"):
        top_share(torch.ones(3, 3), torch.ones(3, 3), 3)


def test_groups_are_found_when_strong_links_join_exactly_them() -> None:
    faint = TRUTH + 0.1
    assert found(faint, TRUTH)
    assert not found(TRUTH @ torch.ones(N, N, dtype=torch.float64), TRUTH)  # everyone alike
    assert not found(torch.eye(N), TRUTH)
    assert found(torch.eye(N), torch.eye(N))
    wrong = faint.clone()
    wrong[0, 4] = wrong[4, 0] = 1.0
    assert not found(wrong, TRUTH)
    assert not found(torch.where(TRUTH > 0, torch.nan, 0), TRUTH)
