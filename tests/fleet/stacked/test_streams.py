"""Which samples are drawn, against permutations sorted one at a time with plain numbers."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import draws
from coterie.fleet.base import RING
from coterie.fleet.stacked import streams
from coterie.fleet.stacked.streams import Streams

SIZES = (5, 5, 3)
IDS = (11, -22, 33)


def made(sizes: tuple[int, ...] = SIZES) -> Streams:
    held = torch.zeros(len(sizes), max(sizes), dtype=torch.long)
    for i, size in enumerate(sizes):
        held[i, :size] = 100 * i + torch.arange(size)
    return Streams(torch.tensor(IDS[: len(sizes)]), {"train": held}, {"train": torch.tensor(sizes)}, (),
                   torch.device("cpu"))  # fmt: skip


@cache
def permutation(client: int, epoch: int, size: int) -> list[int]:
    """As fleet.base has it: samples sorted by the key folded with the permutation's number and their own."""
    key = draws.fold_int(IDS[client], draws.name("permutation"), draws.name("train"), epoch)
    return [100 * client + i for i in sorted(range(size), key=lambda i: draws.fold_int(key, i))]


def read(client: int, size: int, start: int, count: int) -> list[int]:
    return [permutation(client, k // size, size)[k % size] for k in range(start, start + count)]


@pytest.mark.parametrize("chunk", [1, 1 << 17])
@pytest.mark.parametrize(
    "starts",
    [(0, 0, 0), (RING * 5 - 2,) * 3, (RING * 5 * 7 + 4,) * 3, (0, 3 * RING * 5 - 1, 12 * RING * 3), (1, 2, 3)],
    ids=["start", "over the end of a table", "far on", "far apart", "side by side"],
)
def test_epochs_are_read_on_from_any_place(starts: tuple[int, ...], chunk: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(streams, "CACHED", chunk)
    some = made()
    for local in ([0, 1, 2], [2, 0], [1]):
        found = some.samples("train", torch.tensor(local), torch.tensor(starts)[local], 7, fresh=False)
        assert found.tolist() == [read(i, SIZES[i], starts[i], 7) for i in local]


def test_clients_of_one_size_at_one_place_are_a_slice() -> None:
    some = made((4, 4))
    for start in range(0, 3 * RING * 4, 3):
        found = some.samples("train", torch.arange(2), torch.full((2,), start), 3, fresh=False)
        assert found.tolist() == [read(i, 4, start, 3) for i in range(2)]


def test_only_what_is_read_is_sorted_and_only_once(monkeypatch: Any) -> None:
    sorted_: list[tuple[int, list[int]]] = []
    inner = Streams._sorted

    def listening(self: Streams, split: str, block: int, local: Tensor) -> Tensor:
        sorted_.append((block, local.tolist()))
        return inner(self, split, block, local)

    monkeypatch.setattr(Streams, "_sorted", listening)
    some = made()
    lap = RING * 5
    for turn in range(3):  # a training set that is also read, faster, by the inner problem
        some.samples("train", torch.tensor([0, 1]), torch.tensor([turn, turn]), 1, fresh=False)
        some.samples("train", torch.tensor([0]), torch.tensor([3 * lap + turn]), 1, fresh=False)
        some.samples("train", torch.tensor([1]), torch.tensor([turn]), 1, fresh=True)
    assert sorted_ == [(0, [0, 1]), (3, [0])]
