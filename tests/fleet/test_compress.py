"""What compression does to a row, against its definition."""

import numpy as np
import pytest
import torch

from builders import classes
from coterie.asks import Compress, Fit, Gradient
from coterie.errors import AskError, SettingError
from coterie.fleet.compress import squeezed
from coterie.fleet.stacked import StackedFleet

KEYS = torch.arange(4000) * 7919


def rows(m: int = 3, d: int = 40) -> torch.Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_topk_keeps_the_largest_entries() -> None:
    g = rows()
    for row, kept in zip(g.numpy(), squeezed(g, Compress("topk", share=0.2), KEYS[:3]).numpy(), strict=True):
        expected = row.copy()
        expected[np.argsort(-np.abs(row))[8:]] = 0
        np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("how", [Compress("quantise", bits=3), Compress("sketch", share=0.5)], ids=lambda h: h.kind)
def test_quantised_and_sketched_rows_are_right_on_average(how: Compress) -> None:
    g = rows(1)
    many = squeezed(g.expand(len(KEYS), -1), how, KEYS)
    error = (many.mean(0) - g[0]) / (many.std(0) / len(KEYS) ** 0.5).clamp(min=1e-9)
    assert float(error.abs().max()) < 4.5
    assert float(many.std(0).mean()) > 0.05  # and not each time
    assert torch.equal(many[:5], squeezed(g.expand(5, -1), how, KEYS[:5]))


def test_quantised_entries_lie_on_the_levels_next_to_them() -> None:
    g = rows(2)
    got = squeezed(g, Compress("quantise", bits=4), KEYS[:2])
    levels = got / g.abs().amax(1, keepdim=True) * 7
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-12)
    assert len(levels.unique()) <= 15
    assert float((got - g).abs().max()) <= float(g.abs().max()) / 7
    assert not squeezed(torch.zeros(2, 5), Compress("quantise"), KEYS[:2]).any()


def test_sums_of_compressed_gradients_add_what_arrives() -> None:
    fleet = StackedFleet(classes(), seed=1, dtype=torch.float64)
    x, how = fleet.initial()[0], Compress("topk", share=0.1)
    fleet.begin(0)
    single = fleet.ask(Gradient(fleet.everyone, x, 6, compress=how)).rows
    fleet.begin(0)
    total = fleet.ask(Gradient(fleet.everyone, x, 6, give="sum", into=[0, 0, 0, 0], compress=how)).sums[0]
    torch.testing.assert_close(total, single.sum(0), rtol=0, atol=1e-12)
    assert fleet.ledger.sent["gradient"][:, 0].tolist() == [2 * round(0.1 * fleet.d)] * 4


def test_what_is_refused() -> None:
    x = torch.zeros(1, 3)
    with pytest.raises(SettingError, match="share"):
        Compress("topk", share=1.5)
    with pytest.raises(SettingError, match="bits"):
        Compress("quantise", bits=1)
    with pytest.raises(AskError, match="give='update'"):
        Fit([0], x, give="rows", compress=Compress("topk"))
    with pytest.raises(AskError, match="not both"):
        Gradient([0], x, 4, sketch=2, compress=Compress("topk"))
