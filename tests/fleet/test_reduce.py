"""Reductions of gradients against plain formulas."""

import pytest
import torch

from coterie.fleet.reduce import finite, inner_products, zeroed


@pytest.mark.parametrize("d", [1, 7, 16, 33, 100])
def test_inner_products_in_spans_are_inner_products(d: int) -> None:
    block = torch.randn(3, 4, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    expected = torch.tensor([[[float(a @ b) for b in group] for a in group] for group in block], dtype=torch.float64)
    torch.testing.assert_close(inner_products(block, span=8), expected, rtol=0, atol=1e-12)


def test_rows_that_hold_anything_but_numbers_are_found_and_emptied() -> None:
    rows = torch.tensor([[1.0, -2.0], [torch.inf, 0.0], [0.0, -torch.inf], [torch.nan, 1.0], [3e38, 3e38], [0.0, 0.0]])
    good = finite(rows)
    assert good.tolist() == [True, False, False, False, True, True]
    assert torch.equal(zeroed(rows, good)[1:4], torch.zeros(3, 2))
    assert torch.equal(zeroed(rows, good)[[0, 4, 5]], rows[[0, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_finite_if_every_number_is(dtype: torch.dtype) -> None:
    """Also where their sum is not, and where what is not finite would cancel."""
    most = torch.finfo(dtype).max
    rows = torch.ones(6, 50, dtype=dtype)
    rows[0] = most
    rows[1, 7] = float("nan")
    rows[2, 3], rows[2, 4] = float("inf"), -float("inf")
    rows[3, 49] = -float("inf")
    rows[4, :2] = torch.tensor([most, -most], dtype=dtype)
    assert finite(rows).tolist() == [True, False, False, False, True, True]
    assert finite(rows[4:]).tolist() == [True, True]
    assert finite(rows[:, :0]).tolist() == [True] * 6
