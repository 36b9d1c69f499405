"""Communities of planted graphs, and agreement against counting by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from coterie.errors import DataError, SettingError
from coterie.graph.communities import adjusted_rand, communities, exact, threshold

GROUPS = np.repeat(np.arange(4), [2, 5, 3, 6])


def planted(noise: float, seed: int, inside: float = 0.9, across: float = 0.05) -> torch.Tensor:
    """Noisy weights, rows not symmetric, clients in random order within the known groups."""
    rng = np.random.default_rng(seed)
    same = GROUPS[:, None] == GROUPS[None, :]
    return torch.from_numpy(np.clip(np.where(same, inside, across) + noise * rng.standard_normal(same.shape), 0, 1))


@given(seed=st.integers(0, 1000), scale=st.sampled_from([1.0, 1e-4, 50.0]))
@settings(max_examples=15, deadline=None)
def test_planted_communities_are_found(seed: int, scale: float) -> None:
    w = planted(0.05, seed) * scale
    assert exact(communities(w), GROUPS)
    assert exact(communities(w, k=4), GROUPS)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(GROUPS)))
    assert exact(communities(w[order][:, order]), GROUPS[order.numpy()])


def test_spectral_clustering_bridges_what_a_threshold_joins() -> None:
    w = planted(0.02, 0)
    w[0, 2] = w[2, 0] = 0.9  # one link joins two communities
    assert communities(w).max() == 2
    assert exact(communities(w, k=4), GROUPS)


def test_pieces_are_found_with_k() -> None:
    assert exact(communities(planted(0, 0, 1, 0), k=4), GROUPS)


def test_extremes() -> None:
    assert communities(torch.ones(4, 4)).tolist() == [0] * 4
    assert communities(torch.eye(4)).tolist() == [0, 1, 2, 3]
    assert communities(torch.ones(4, 4), k=1).tolist() == [0] * 4
    assert communities(torch.ones(3, 3), k=3).tolist() == [0, 1, 2]
    assert communities(torch.ones(1, 1)).tolist() == [0]
    assert threshold(torch.tensor([0.0, 0.1, 0.1, 0.9, 1.0])) == pytest.approx(0.5)
    with pytest.raises(DataError, match="square graph"):
        communities(torch.ones(2, 3))
    with pytest.raises(DataError, match="finite"):
        communities(torch.full((2, 2), torch.nan))
    with pytest.raises(SettingError, match="from 1 to 4"):
        communities(torch.ones(4, 4), k=5)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12))
@settings(deadline=None)
def test_agreement(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    assert adjusted_rand(a, b) == pytest.approx(adjusted_rand_score(b, a))
    both = len(set(pairs))
    assert exact(a, b) == (both == len(set(a.tolist())) == len(set(b.tolist())))
    assert exact(a, 3 - a)
