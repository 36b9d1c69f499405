"""Projections against a general solver and the conditions that single out the nearest point."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from coterie.errors import DataError
from coterie.graph.projections import Projection, box, row_normalised, simplex

weights = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.floats(-5, 5, allow_subnormal=False)
)


@given(weights)
@settings(deadline=None)
def test_simplex_meets_the_optimality_conditions(w: np.ndarray) -> None:
    p = simplex(torch.from_numpy(w)).numpy()
    assert p.min() >= 0
    assert p.sum(1) == pytest.approx(1)
    # KKT: one threshold per row; w − p equals it on the support and stays below it elsewhere.
    for row, near in zip(w, p, strict=True):
        gap = (row - near)[near > 1e-12]
        assert np.ptp(gap) <= 1e-9
        assert np.all(row[near <= 1e-12] <= gap.max() + 1e-9)
    assert simplex(torch.from_numpy(p)).numpy() == pytest.approx(p)


def test_simplex_agrees_with_a_general_solver() -> None:
    rng = np.random.default_rng(0)
    for row in rng.standard_normal((5, 6)):
        solved = minimize(
            lambda p, row=row: 0.5 * ((p - row) ** 2).sum(),
            np.full(6, 1 / 6),
            jac=lambda p, row=row: p - row,
            bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(6)},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        assert simplex(torch.from_numpy(row)).numpy() == pytest.approx(solved.x, abs=1e-6)


def test_simplex_is_batched_and_known_by_hand() -> None:
    w = torch.tensor([[[2.0, 0.0], [0.5, 0.5]], [[0.0, 0.4], [-1.0, -1.0]]], dtype=torch.float64)
    expected = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.3, 0.7], [0.5, 0.5]]], dtype=torch.float64)
    assert torch.allclose(simplex(w), expected)


def test_box_and_rows() -> None:
    w = torch.tensor([[-1.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(box(w), torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64))
    assert torch.equal(box(w, -0.5, 2), torch.tensor([[-0.5, 2.0], [0.0, 0.0]], dtype=torch.float64))
    rows = row_normalised(torch.tensor([[1.0, 3.0], [0.0, 0.0]], dtype=torch.float64))
    assert torch.equal(rows, torch.tensor([[0.25, 0.75], [0.0, 1.0]], dtype=torch.float64))
    with pytest.raises(DataError, match=r"square.*\(2, 3\)"):
        row_normalised(torch.ones(2, 3))


def test_any_callable_is_a_projection() -> None:
    choices: list[Projection] = [box, simplex, row_normalised, lambda w: w.clamp_min(0)]
    assert all(choice(torch.ones(2, 2)).shape == (2, 2) for choice in choices)
