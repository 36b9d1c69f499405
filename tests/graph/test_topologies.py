"""Topologies against graphs known by hand, and what mixing weights must be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError, DataError, SettingError
from coterie.graph import topologies
from coterie.graph.topologies import TOPOLOGIES, connected, metropolis, schedule, topology

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("ring", {}),
    ("group_ring", {"neighbours": 4}),
    ("bipartite", {}),
    ("generalised_bipartite", {"neighbours": 3, "seed": 1}),
    ("complete", {}),
    ("star", {"centre": 2}),
    ("exponential", {}),
    ("random_regular", {"degree": 4, "seed": 1}),
    ("random_regular", {"degree": 8, "seed": 1}),
    ("erdos_renyi", {"p": 0.5, "seed": 1}),
    ("small_world", {"neighbours": 4, "rewire": 0.3, "seed": 1}),
]


def edges(adjacency: torch.Tensor) -> set[tuple[int, int]]:
    return {(i, j) for i, j in adjacency.nonzero().tolist() if i < j}


def test_every_topology_is_tried() -> None:
    assert {name for name, _ in WAYS} | {"file"} == set(TOPOLOGIES)


@pytest.mark.parametrize(("name", "chosen"), WAYS)
@settings(max_examples=10, deadline=None)
@given(n=st.integers(10, 24))
def test_what_holds_for_all(name: str, chosen: dict[str, Any], n: int) -> None:
    a = topology(name, n, **chosen)
    assert a.dtype == torch.float64
    assert torch.equal(a, a.T)
    assert set(a.unique().tolist()) <= {0.0, 1.0}
    assert not a.diagonal().any()
    assert connected(a)
    assert torch.equal(a, topology(name, n, **chosen))
    w = metropolis(a)
    assert torch.equal(w, w.T)
    assert w.min() >= 0
    assert w.sum(0).numpy() == pytest.approx(1)
    assert w.sum(1).numpy() == pytest.approx(1)
    assert torch.equal((w > 0) & ~torch.eye(n, dtype=torch.bool), a > 0)
    # Connected with some own weight: repeated mixing brings everyone to the mean.
    assert torch.linalg.matrix_power(w, 20_000).numpy() == pytest.approx(1 / n, abs=1e-6)


def test_small_graphs_known_by_hand() -> None:
    assert edges(topology("ring", 4)) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert edges(topology("ring", 2)) == {(0, 1)}
    assert edges(topology("star", 3, centre=1)) == {(0, 1), (1, 2)}
    assert edges(topology("bipartite", 4)) == {(0, 1), (0, 3), (1, 2), (2, 3)}
    assert len(edges(topology("complete", 6))) == 15
    assert topology("group_ring", 9, neighbours=6)[0].tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert topology("exponential", 16)[0].nonzero().flatten().tolist() == [1, 2, 4, 8, 12, 14, 15]
    w = metropolis(topology("star", 3))
    assert w.numpy() == pytest.approx(np.array([[1, 1, 1], [1, 2, 0], [1, 0, 2]]) / 3)


@pytest.mark.parametrize(("n", "degree"), [(10, 3), (9, 4), (30, 10), (12, 9), (8, 7), (2, 1), (100, 3)])
def test_random_regular_has_its_degree(n: int, degree: int) -> None:
    a, b = (topology("random_regular", n, degree=degree, seed=seed) for seed in (0, 1))
    assert a.sum(1).tolist() == [degree] * n
    assert degree >= n - 2 or not torch.equal(a, b)


def test_generalised_bipartite_links_across_two_halves_only() -> None:
    a = topology("generalised_bipartite", 100, neighbours=10, seed=3)
    assert sorted(a.sum(1).tolist()).count(10) >= 50
    assert a.sum() == 2 * 50 * 10
    spectrum = torch.linalg.eigvalsh(a)  # symmetric about zero exactly for bipartite graphs
    assert spectrum.numpy() == pytest.approx(-spectrum.flip(0).numpy(), abs=1e-9)
    assert topology("generalised_bipartite", 7, neighbours=3).sum() == 2 * 4 * 3


def test_small_world_keeps_its_links() -> None:
    assert torch.equal(topology("small_world", 20, rewire=0), topology("group_ring", 20, neighbours=4))
    turned = topology("small_world", 20, rewire=0.5, seed=1)
    assert turned.sum() == 20 * 4
    assert not torch.equal(turned, topology("small_world", 20, rewire=0))


def test_erdos_renyi_density() -> None:
    a = topology("erdos_renyi", 200, p=0.2, seed=0)
    assert a.sum() / (200 * 199) == pytest.approx(0.2, abs=0.01)


def test_connected_sees_pieces_and_directions() -> None:
    assert not connected(torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)))
    assert not connected(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))


def test_one_peer_exponential_is_exact_for_powers_of_two() -> None:
    weights = schedule("one_peer_exponential", 8)
    product = weights(2) @ weights(1) @ weights(0)
    assert product.numpy() == pytest.approx(1 / 8)
    assert torch.equal(weights(0), weights(3))
    assert weights(1)[0].nonzero().flatten().tolist() == [0, 2]
    assert schedule("one_peer_exponential", 7)(5).sum(0).tolist() == [1] * 7


def test_random_matching_pairs_everyone_anew() -> None:
    weights = schedule("random_matching", 7, seed=1)
    w = weights(0)
    assert sorted((w > 0).sum(1).tolist()) == [1, 2, 2, 2, 2, 2, 2]
    assert w.sum(0).tolist() == [1] * 7
    assert torch.equal(w, weights(0))
    assert not torch.equal(w, weights(1))


def test_a_topology_is_a_schedule_that_stands_still() -> None:
    weights = schedule("ring", 5)
    assert torch.equal(weights(0), weights(9))
    assert torch.equal(weights(0), metropolis(topology("ring", 5)))


def test_files(tmp_path: Path) -> None:
    ring = topology("ring", 5)
    np.save(tmp_path / "a.npy", ring.numpy() + np.eye(5))
    assert torch.equal(topology("file", 5, path=tmp_path / "a.npy"), ring)
    (tmp_path / "a.csv").write_text("# links\n0,1\n1,2\n2,3\n3,4\n4,0\n")
    assert torch.equal(topology("file", 5, path=str(tmp_path / "a.csv")), ring)
    (tmp_path / "far.csv").write_text("0,5\n")
    (tmp_path / "words.csv").write_text("from,to\n0,1\n")
    np.save(tmp_path / "oneway.npy", np.triu(np.ones((5, 5))))
    np.save(tmp_path / "nan.npy", np.full((5, 5), np.nan))
    np.save(tmp_path / "pickled.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    for file, says in {
        "far.csv": "outside 0 to 4",
        "words.csv": "cannot be read",
        "oneway.npy": "not symmetric",
        "nan.npy": "not finite",
        "pickled.npy": "cannot be read",
        "none.npy": "cannot be read",
        "a.txt": ".npy or links in .csv",
    }.items():
        with pytest.raises(DataError, match=says.replace(".", r"\.")):
            topology("file", 5, path=tmp_path / file)
    with pytest.raises(DataError, match=r"\(5, 5\), not the 6×6"):
        topology("file", 6, path=tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("name", "n", "chosen", "says"),
    [
        ("rign", 5, {}, "did you mean ring"),
        ("ring", 5, {"seed": 1}, "no setting 'seed': there are none"),
        ("ring", 1, {}, "at least 2"),
        ("group_ring", 5, {"neighbours": 3}, "even number of neighbours below 5"),
        ("group_ring", 5, {}, "needs the setting 'neighbours'"),
        ("star", 5, {"centre": 5}, "from 0 to 4"),
        ("generalised_bipartite", 10, {}, "from 1 to 5, not 10"),
        ("random_regular", 5, {"degree": 3}, "one of the two must be even"),
        ("random_regular", 5, {"degree": 1}, "from 2 to 4"),
        ("erdos_renyi", 5, {"p": 0}, "above 0"),
        ("erdos_renyi", 50, {"p": 0.01}, "was connected"),
        ("small_world", 10, {"rewire": 2}, "rewire"),
    ],
)
def test_errors_say_what_would_be_right(
    name: str, n: int, chosen: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topologies, "DRAWS", 20)
    with pytest.raises(CoterieError) as caught:
        topology(name, n, **chosen)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_schedules_are_found() -> None:
    with pytest.raises(SettingError, match="did you mean one_peer_exponential"):
        schedule("one_peer_exponentail", 4)
    with pytest.raises(DataError, match="symmetric"):
        metropolis(torch.triu(torch.ones(3, 3)))
