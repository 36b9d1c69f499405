"""Counter-based draws against a plain numpy version of splitmix64, and against the distributions they promise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie import draws

INT64 = st.integers(-(2**63), 2**63 - 1)
U = np.uint64


def splitmix(key: int, counter: int) -> int:
    """The finaliser as it is published, on unsigned 64-bit numbers, seen as signed."""
    mask = 2**64 - 1
    z = U((key + 0x9E3779B97F4A7C15 * (counter + 1)) & mask)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> U(30))) * U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U(27))) * U(0x94D049BB133111EB)
    return int((z ^ (z >> U(31))).astype(np.int64))


@given(INT64, INT64)
def test_three_ways_to_fold_are_one(key: int, counter: int) -> None:
    expected = splitmix(key, counter)
    assert draws.fold_int(key, counter) == expected
    assert draws.fold(torch.tensor(key), counter).item() == expected
    assert draws.fold(torch.tensor(key), torch.tensor(counter)).item() == expected


def test_fold_is_the_published_splitmix64() -> None:
    # the first outputs of Vigna's splitmix64.c from the state 0
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [draws.fold_int(0, i) % 2**64 for i in range(4)] == known


@given(INT64, st.lists(INT64, max_size=4))
def test_folding_counters_at_once_is_folding_one_after_the_other(key: int, counters: list[int]) -> None:
    expected = key
    for counter in counters:
        expected = splitmix(expected, counter)
    assert draws.fold_int(key, *counters) == expected


def test_fold_broadcasts_and_runs_inside_vmap_and_compile() -> None:
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**62), 2**62, (5, 1), generator=g)
    counters = torch.randint(-(2**62), 2**62, (7,), generator=g)
    expected = [[splitmix(k, c) for c in counters.tolist()] for k in keys.flatten().tolist()]
    assert draws.fold(keys, counters).tolist() == expected
    inside = torch.vmap(lambda key: torch.vmap(lambda c: draws.fold(key, c))(counters))(keys.flatten())
    assert inside.tolist() == expected
    compiled = torch.compile(lambda k, c: draws.unit(draws.fold(draws.fold(k, c), 3)), backend="eager", fullgraph=True)
    plain = draws.unit(torch.tensor([[splitmix(e, 3) for e in row] for row in expected]))
    assert torch.equal(compiled(keys, counters), plain)


@given(INT64)
def test_unit_takes_the_upper_bits(key: int) -> None:
    bits = key % 2**64
    assert draws.unit(torch.tensor(key)).item() == (bits >> 11) / 2**53 < 1
    assert draws.unit(torch.tensor(key), torch.float32).item() == (bits >> 40) / 2**24 < 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_unit_is_uniform_and_normal_is_normal(dtype: torch.dtype) -> None:
    keys = draws.fold(torch.tensor(draws.name("a test")), torch.arange(20_000))
    u, z = draws.unit(keys, dtype), draws.normal(keys, dtype)
    assert u.dtype == z.dtype == dtype
    assert stats.kstest(u.double().numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(z.double().numpy(), "norm").pvalue > 0.01
    # neighbouring counters, and the number itself, tell nothing about the next
    assert abs(np.corrcoef(u[:-1].double(), u[1:].double())[0, 1]) < 0.03
    assert abs(np.corrcoef(u.double(), z.double())[0, 1]) < 0.03


def test_every_bit_of_key_and_counter_counts() -> None:
    base = splitmix(12345, 678)
    for bit in range(64):
        flip = 1 << bit if bit < 63 else -(1 << 63)
        for changed in (draws.fold_int(12345 ^ flip, 678), draws.fold_int(12345, 678 ^ flip)):
            assert 10 < ((changed ^ base) % 2**64).bit_count() < 54


def test_names_are_keys_that_never_change() -> None:
    assert draws.name("") == -5426141060434712860  # blake2b with a digest of 8 bytes, little-endian
    assert draws.name("initial") != draws.name("initial ")


def test_a_generator_starts_from_its_key() -> None:
    for key in (-1, -(2**63), 2**63 - 1, 0):
        a, b = (torch.rand(3, generator=draws.generator(key)) for _ in range(2))
        assert torch.equal(a, b)
    assert not torch.equal(torch.rand(3, generator=draws.generator(1)), torch.rand(3, generator=draws.generator(2)))
