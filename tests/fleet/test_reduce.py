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
