"""Who holds what: nothing twice where that is claimed, nothing lost, no test row in training, the same from a seed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from coterie.data import partitions
from coterie.data.dataset import Dataset
from coterie.data.holdings import plot_holdings
from coterie.data.partitions import PARTITIONS, Partition, partition
from coterie.errors import CoterieError, DataError, SettingError

seeds = st.integers(0, 10_000)


def labelled(train: int = 2000, test: int = 400, classes: int = 10, owners: int = 0) -> Dataset:
    """Shuffled labels, every class equally often on both sides."""
    rng = np.random.default_rng(7)
    y = np.concatenate([rng.permutation(np.arange(train) % classes), rng.permutation(np.arange(test) % classes)])
    groups = np.array([f"site {k}" for k in np.arange(train + test) % owners]) if owners else None
    return Dataset("toy", np.zeros((train + test, 1), np.uint8), y, train, groups=groups)


DATA = labelled(owners=4)
GROUPED = {"alpha": 0.7, "target": "site 1", "mixed": "site 2", "clients": 7, "near": 3, "samples": 60}
# One way to call each partition, and whether training shares are disjoint and cover the training set.
WAYS: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "iid": ("iid", {"clients": 7}, True, True),
    "permuted": ("permuted_clusters", {"clusters": 4, "clients_per_cluster": 2}, False, True),
    "permuted disjoint": (
        "permuted_clusters",
        {"clusters": 10, "clients_per_cluster": [6, 6, 7, 7, 8, 8, 9, 9, 10, 10], "disjoint": True},
        True,
        True,
    ),
    "permuted share": ("permuted_clusters", {"clusters": 2, "clients_per_cluster": 3, "share": 0.3}, False, False),
    "shifted": ("permuted_clusters", {"clusters": 4, "clients_per_cluster": 2, "shift": 11}, False, True),
    "dirichlet": ("dirichlet", {"clients": 12, "alpha": 0.3, "minimum": 5}, True, True),
    "dirichlet dropped": ("dirichlet", {"clients": 60, "alpha": 0.02, "minimum": 10, "drop": True}, True, False),
    "dirichlet by client": ("dirichlet", {"clients": 9, "alpha": 0.5, "by": "client", "sigma": 0.4}, True, False),
    "comet": ("dirichlet_resplit", {"clients": 8, "alpha": 0.3}, True, False),
    "k classes": ("classes_per_client", {"clients": 20, "k": 2, "samples": 100}, True, True),
    "k classes, all": ("classes_per_client", {"clients": 9, "k": 3}, True, False),
    "groups": ("class_groups", {"groups": 5, "clients_per_group": 4, "samples": 100, "shuffle": True}, True, True),
    "halves": ("class_groups", {"groups": 2, "clients_per_group": 10}, True, True),
    "shards": ("shards", {"clients": 10, "shards_per_client": 2}, True, True),
    "owners": ("cluster_split", {"clients_per_owner": 3}, True, True),
    "mix": ("target_mix", {"alpha": 0.7}, True, False),
    "mix, extra": ("target_mix", {"alpha": 0.7, "extra": 5}, True, False),
    "group": ("target_group", GROUPED, True, False),
    "group, extra": ("target_group", GROUPED | {"extra": 5}, True, False),
}


def everything(p: Partition) -> list[np.ndarray]:
    return [*p.train, *p.validation, *p.test]


def test_every_partition_is_tried() -> None:
    assert {name for name, *_ in WAYS.values()} == set(PARTITIONS)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=6, deadline=None)
@given(seed=seeds)
def test_what_holds_for_all(way: str, seed: int) -> None:
    name, chosen, disjoint, covers = WAYS[way]
    p = partition(name, DATA, seed=seed, **chosen)
    for i in range(len(p)):
        train, validation, test = (set(split[i].tolist()) for split in (p.train, p.validation, p.test))
        assert len(train) == len(p.train[i]) > 0  # nothing twice
        assert len(test) == len(p.test[i]) > 0
        assert len(validation) == len(p.validation[i]) > 0
        assert len(train | validation | test) == len(train) + len(validation) + len(test)
        if not p.resplit:
            assert max(train | validation) < DATA.train <= min(test)
    dealt = np.concatenate([*p.train, *p.validation])
    if disjoint:
        assert len(np.unique(dealt)) == len(dealt)
    if covers:
        assert np.array_equal(np.unique(dealt), np.arange(DATA.train))
    if p.resplit:  # not even over clients does a row serve as training and test data
        assert not set(dealt.tolist()) & set(np.concatenate(p.test).tolist())
    again, other = (partition(name, DATA, seed=s, **chosen) for s in (seed, seed + 1))
    assert all(np.array_equal(a, b) for a, b in zip(everything(p), everything(again), strict=True))
    assert [share.tolist() for share in everything(p)] != [share.tolist() for share in everything(other)]
    if p.relabel is not None:
        assert np.array_equal(np.sort(p.relabel, 1), np.broadcast_to(np.arange(10), (len(p), 10)))
    graph, rows = p.graph(), p.graph(normalised=True)
    if graph is None:
        assert p.groups is None
    else:
        assert np.array_equal(graph, graph.T)
        assert np.all(graph.diagonal() == 1)
        assert np.array_equal(graph, np.array([[a == b for b in p.groups] for a in p.groups], float))
        assert np.allclose(rows.sum(1), 1)
        assert np.array_equal(rows > 0, graph > 0)


def test_target_group_is_meritfeds() -> None:
    number = np.arange(len(DATA.targets)) % 4
    data = replace(DATA, facts={"owners": ["anger", "joy", "neutral", "fear"]}, groups=number)
    settings = {"alpha": 0.7, "target": "joy", "mixed": "neutral", "clients": 7, "near": 2, "samples": 60, "seed": 1}
    p = partition("target_group", data, extra=9, **settings)
    held = [np.bincount(data.groups[np.r_[p.train[i], p.validation[i]]], minlength=4).tolist() for i in range(7)]
    assert held[1:3] == [[0, 42, 18, 0]] * 2
    assert held[3:] == [[60, 0, 0, 0], [0, 0, 60, 0], [0, 0, 0, 60], [60, 0, 0, 0]]
    assert len(p.train[0]) == 60
    assert set(data.groups[np.r_[p.train[0], p.validation[0], p.test[0]]]) == {1}
    assert len(p.validation[0]) == 9
    assert min(p.validation[0]) >= data.train
    assert p.helped == (0,)
    assert p.groups.tolist() == [0, 1, 1, 2, 2, 2, 2]
    scarce = replace(data, groups=np.where(np.arange(len(number)) % 40 == 3, 3, np.arange(len(number)) % 3))
    few = partition("target_group", scarce, **settings)
    last = np.bincount(scarce.groups[np.r_[few.train[5], few.validation[5]]], minlength=4).tolist()
    assert last == [0, 0, 60 - last[3], last[3]]  # all there is of that group, and the rest is neutral
    assert 0 < last[3] == int((scarce.groups[: data.train] == 3).sum()) < 60
    cut = partition("target_group", replace(data, train=len(number)), **settings)  # no test samples from the publisher
    assert cut.resplit
    assert not few.resplit
    assert len(cut.test[0]) == round(0.2 * (number == 1).sum())
    for wrong, words in (
        ({"target": "jo"}, "did you mean joy"),
        ({"mixed": "joy"}, "must be different groups"),
        ({"samples": 300}, "joy has no 210 samples left"),
        ({"extra": 5000}, "extra must be fewer"),
    ):
        with pytest.raises((DataError, SettingError), match=words):
            partition("target_group", data, **(settings | wrong))


@given(clusters=st.integers(1, 10), seed=seeds)
@settings(max_examples=20, deadline=None)
def test_no_class_has_one_label_in_two_clusters(clusters: int, seed: int) -> None:
    p = partition("permuted_clusters", DATA, clusters=clusters, clients_per_cluster=2, seed=seed)
    first = p.relabel[::2]
    assert np.array_equal(first, p.relabel[1::2])
    assert np.array_equal(first[0], np.arange(10))
    assert all(len(np.unique(column)) == clusters for column in first.T)


def test_permutations_are_distinct_beyond_as_many_as_classes() -> None:
    p = partition("permuted_clusters", labelled(classes=4), clusters=24, clients_per_cluster=1)
    assert len(np.unique(p.relabel, axis=0)) == 24


def test_shift_is_the_authors_code() -> None:
    p = partition("permuted_clusters", DATA, clusters=4, clients_per_cluster=2, shift=11)
    assert np.array_equal(p.relabel[5], (np.arange(10) + 11 * 2) % 10)
    assert np.array_equal(p.graph(), np.kron(np.eye(4), np.ones((2, 2))))


def test_counts_are_seen_under_the_clients_own_labels() -> None:
    data = labelled(classes=3, train=30, test=9)
    p = Partition((np.flatnonzero(data.targets[:30] == 1),), (np.empty(0, np.int64),), (np.array([30]),))
    assert p.counts(data).tolist() == [[0, 10, 0]]
    moved = Partition(p.train, p.validation, p.test, relabel=np.array([[1, 2, 0]]))
    assert moved.counts(data).tolist() == [[0, 0, 10]]


def test_shares_are_the_asked_fraction() -> None:
    p = partition("permuted_clusters", DATA, clusters=2, clients_per_cluster=4, share=0.5, validation=0.2)
    assert [len(t) + len(v) for t, v in zip(p.train, p.validation, strict=True)] == [250] * 8
    assert [len(v) for v in p.validation] == [50] * 8


def test_dirichlet_by_class_follows_the_closed_form() -> None:
    # A client's fraction of a class is Beta(α, (n − 1)α): mean 1/n, variance (1/n)(1 − 1/n)/(nα + 1).
    n, alpha, data = 5, 0.4, labelled(train=4000, test=10)
    fractions = []
    for seed in range(60):
        p = partition("dirichlet", data, clients=n, alpha=alpha, minimum=1, validation=0, seed=seed)
        fractions.append(p.counts(data) / 400)
    fractions = np.stack(fractions)
    assert fractions.sum(1) == pytest.approx(1)
    assert fractions.mean() == pytest.approx(1 / n)
    assert fractions.var() == pytest.approx((1 / n) * (1 - 1 / n) / (n * alpha + 1), rel=0.06)


def test_dirichlet_by_client_keeps_its_class_shares_and_sizes() -> None:
    # By client, class shares are Dirichlet(α) over C classes: mean square Σ_c p_c² = (α + 1)/(Cα + 1).
    data = labelled(train=20_000, test=100)
    squares, spreads = [], []
    for seed in range(30):
        p = partition(
            "dirichlet", data, clients=20, alpha=0.5, by="client", sigma=0.6, minimum=1, validation=0, seed=seed
        )
        counts = p.counts(data)
        assert counts.sum(0).max() == 2000  # the scarcest class is used up
        squares.append(((counts / counts.sum(1, keepdims=True)) ** 2).sum(1).mean())
        spreads.append(np.log(counts.sum(1)).std(ddof=1))
    assert np.mean(squares) == pytest.approx(1.5 / 6, rel=0.06)
    assert np.mean(spreads) == pytest.approx(0.6, rel=0.06)


def test_dropping_says_how_many() -> None:
    p = partition("dirichlet", DATA, clients=60, alpha=0.02, minimum=10, drop=True)
    assert p.facts["clients_asked"] == 60
    assert p.facts["clients_dropped"] == 60 - len(p) > 0
    assert min(len(t) + len(v) for t, v in zip(p.train, p.validation, strict=True)) >= 10
    kept = partition("dirichlet", DATA, clients=12, alpha=0.3, minimum=30)
    assert len(kept) == 12
    assert min(len(t) + len(v) for t, v in zip(kept.train, kept.validation, strict=True)) >= 30


@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_tests_have_the_class_proportions_of_training(seed: int) -> None:
    p = partition("dirichlet", DATA, clients=6, alpha=0.3, minimum=20, validation=0, seed=seed)
    train, test = p.counts(DATA), p.counts(DATA, "test")
    assert np.array_equal(train > 0, test > 0)
    # The largest such sample: some class is used up (40 test images each), and the others follow it within rounding.
    assert np.all(test.max(1) == 40)
    expected = train * (40 / train.max(1, keepdims=True))
    assert np.all(np.abs(test - np.where(train > 0, np.maximum(expected, 1), 0)) <= 0.5 + 1e-9)


def test_comet_splits_each_share_by_itself() -> None:
    p = partition("dirichlet_resplit", labelled(train=20_000), clients=20, alpha=1.0, minimum=100)
    assert p.resplit
    fractions = []
    for train, validation, test in zip(p.train, p.validation, p.test, strict=True):
        assert len(validation) / len(test) == pytest.approx(0.2, rel=0.1)
        fractions.append(round(len(train) / len(test) * 0.5, 1))
    assert set(fractions) == {0.1, 0.3, 0.4}
    assert max(map(np.max, p.test)) < 20_000  # the publisher's test images stay out


@given(k=st.integers(1, 10), clients=st.integers(1, 25), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_k_classes_each_and_every_class_equally_often(k: int, clients: int, seed: int) -> None:
    p = partition("classes_per_client", DATA, clients=clients, k=k, samples=2 * k, validation=0, seed=seed)
    counts = p.counts(DATA)
    assert np.array_equal(np.sort(counts, 1)[:, -k:], np.full((clients, k), 2))
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    assert all(
        (a == b) == np.array_equal(counts[i], counts[j]) for i, a in enumerate(p.groups) for j, b in enumerate(p.groups)
    )
    own = [set(np.flatnonzero(row)) for row in counts]
    assert [set(DATA.targets[test]) for test in p.test] == own
    assert [len(test) for test in p.test] == [40 * k] * clients


def test_scool_settings_use_every_image_once() -> None:
    data = labelled(train=50_000, test=10_000)
    p = partition("classes_per_client", data, clients=100, k=2, samples=500)
    assert len(np.unique(np.concatenate([*p.train, *p.validation]))) == 50_000
    sbm = partition("class_groups", data, groups=5, clients_per_group=20, samples=500)
    assert np.array_equal(sbm.graph(), np.kron(np.eye(5), np.ones((20, 20))))
    assert [len(test) for test in sbm.test] == [2000] * 100


def test_groups_have_disjoint_classes() -> None:
    p = partition("class_groups", DATA, groups=3, clients_per_group=[1, 2, 3], classes_per_group=2, shuffle=True)
    counts = p.counts(DATA)
    holds = [set(np.flatnonzero(counts[p.groups == g].sum(0))) for g in range(3)]
    assert [len(h) for h in holds] == [2, 2, 2]
    assert len(set.union(*holds)) == 6
    halves = partition("class_groups", DATA, groups=2, clients_per_group=2)
    assert set(DATA.targets[halves.train[0]]) == set(range(5))
    assert set(DATA.targets[halves.test[3]]) == set(range(5, 10))


def test_shards_hold_few_classes() -> None:
    p = partition("shards", DATA, clients=10, shards_per_client=2)
    assert np.all((p.counts(DATA) > 0).sum(1) <= 2)


def test_natural_owners_keep_their_samples() -> None:
    one = partition("cluster_split", DATA)
    assert len(one) == 4
    assert one.groups is None
    for i, name in enumerate(one.facts["owners"]):
        assert all(set(DATA.groups[split[i]]) == {name} for split in (one.train, one.validation, one.test))
    three = partition("cluster_split", DATA, clients_per_owner=3)
    assert np.array_equal(three.graph(), np.kron(np.eye(4), np.ones((3, 3))))


def test_target_mix_is_meritfeds() -> None:
    data = labelled(train=50_000, test=10_000)
    p = partition("target_mix", data, alpha=0.7, extra=300)
    counts = p.counts(data) + p.counts(data, "validation")
    assert p.counts(data)[0].tolist() == [250] * 3 + [0] * 7
    assert np.all(np.abs(counts[1:11, :3] - 175) <= 1)
    assert np.all(np.abs(counts[1:11, 3:6] - 75) <= 1)
    assert counts[11:, 6:].tolist() == [[250] * 4] * 9
    assert p.counts(data, "validation")[0].tolist() == [300] * 3 + [0] * 7
    assert p.counts(data, "test")[0].tolist() == [700] * 3 + [0] * 7
    assert p.resplit
    assert not partition("target_mix", data, alpha=0.7).resplit


def test_validation_follows_the_publisher_where_it_draws_a_border() -> None:
    data = replace(DATA, validation=300)
    for name, chosen, disjoint, covers in WAYS.values():
        p = partition(name, data, seed=3, **chosen)
        if name == "dirichlet_resplit":
            continue  # divides each share anew, and says so
        for train, validation in zip(p.train, p.validation, strict=True):
            assert validation.size
            assert p.resplit or validation.max() < data.train
            if validation[0] < data.train:  # a target may validate on test samples, which is declared
                assert train.max() < 1700 <= validation.min()
        if disjoint and covers:
            assert np.array_equal(np.unique(np.concatenate(p.validation)), np.arange(1700, 2000))
    few = partition("iid", replace(labelled(train=40, test=40), validation=1), clients=4)
    assert sorted(v[0] >= 39 for v in few.validation) == [False, False, False, True]  # a random part for the others
    with pytest.raises(DataError, match="9 validation samples of 9"):
        replace(labelled(train=9), validation=9)


def test_whoever_divides_anew_says_how() -> None:
    for name, chosen, *_ in WAYS.values():
        p = partition(name, DATA, **chosen)
        assert ("division" in p.facts) == p.resplit


def test_validation_may_be_left_out() -> None:
    p = partition("iid", DATA, clients=3, validation=0)
    assert [len(v) for v in p.validation] == [0, 0, 0]
    tiny = partition("iid", labelled(train=3, test=2, classes=2), clients=2)
    assert sorted((len(t), len(v)) for t, v in zip(tiny.train, tiny.validation, strict=True)) == [(1, 0), (1, 1)]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("irichlet", {}, "did you mean dirichlet"),
    ("iid", {"client": 3}, "no setting 'client': did you mean clients"),
    ("iid", {}, "needs the setting 'clients'"),
    ("iid", {"clients": 0}, "whole number of at least 1, not 0"),
    ("iid", {"clients": 2.5}, "whole number"),
    ("iid", {"clients": True}, "whole number"),
    ("iid", {"clients": 2001}, "2000 training samples to deal to 2001 clients"),
    ("iid", {"clients": 2, "validation": 1.0}, "validation must be a number at least 0 and at most 0.9"),
    ("permuted_clusters", {"clusters": 2, "clients_per_cluster": [1, 2, 3]}, "lists 3 sizes for 2 groups"),
    ("permuted_clusters", {"clusters": 2, "clients_per_cluster": [1, 0]}, "clients_per_cluster"),
    ("permuted_clusters", {"clusters": 2, "clients_per_cluster": 1, "shift": 10}, "shift 10"),
    ("permuted_clusters", {"clusters": 2, "clients_per_cluster": 1, "share": 0.0}, "share must be a number above 0"),
    ("permuted_clusters", {"clusters": 3, "clients_per_cluster": 1000, "disjoint": True}, "3000 clients"),
    ("dirichlet", {"clients": 3, "alpha": 0.0}, "alpha must be a number above 0, not 0.0"),
    ("dirichlet", {"clients": 3, "alpha": float("nan")}, "alpha"),
    ("dirichlet", {"clients": 3, "alpha": 1, "by": "label"}, "by 'class' or by 'client'"),
    ("dirichlet", {"clients": 3, "alpha": 1, "sigma": 0.5}, "by='client'"),
    ("dirichlet", {"clients": 3, "alpha": 1, "minimum": 1000}, "take fewer clients"),
    ("dirichlet", {"clients": 100, "alpha": 0.01, "minimum": 15}, "larger alpha"),
    ("dirichlet", {"clients": 3, "alpha": 1, "minimum": 1900, "drop": True}, "smaller minimum"),
    ("dirichlet_resplit", {"clients": 3, "alpha": 1, "test": 0.6}, "more than the whole share"),
    ("dirichlet_resplit", {"clients": 3, "alpha": 1, "shares": []}, "shares must list"),
    ("classes_per_client", {"clients": 3, "k": 11}, "from 1 to 10, not 11"),
    ("classes_per_client", {"clients": 3, "k": 2, "samples": 5000}, "its holders ask for"),
    ("class_groups", {"groups": 11, "clients_per_group": 1}, "groups must be a whole number from 1 to 10"),
    ("class_groups", {"groups": 4, "clients_per_group": 1, "classes_per_group": 3}, "need 12 classes and toy has 10"),
    ("class_groups", {"groups": 2, "clients_per_group": 5000}, "no training samples"),
    ("shards", {"clients": 2000}, "take fewer clients"),
    ("cluster_split", {"clients_per_owner": 501}, "owner site 0 of data set toy has 500 training"),
    ("target_mix", {"alpha": 1.5}, "alpha"),
    ("target_mix", {"alpha": 0.5, "clients": 11}, "clients must be a whole number of at least 12"),
    ("target_mix", {"alpha": 0.5, "extra": 40}, "40 test images"),
]


@pytest.mark.parametrize(("name", "chosen", "says"), BAD)
def test_errors_say_what_would_be_right(
    name: str, chosen: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "DRAWS", 50)
    with pytest.raises(CoterieError) as caught:
        partition(name, DATA, **chosen)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_of_the_data() -> None:
    real = Dataset("curve", np.zeros((4, 1)), np.zeros(4), 3)
    with pytest.raises(DataError, match="curve has no class numbers"):
        partition("shards", real, clients=2)
    with pytest.raises(DataError, match="no natural owners"):
        partition("cluster_split", real)
    with pytest.raises(DataError, match="no test samples"):
        partition("iid", Dataset("all", np.zeros((4, 1)), np.zeros(4, int), 4), clients=2)
    with pytest.raises(DataError, match="0 to 1"):
        partition("shards", Dataset("odd", np.zeros((4, 1)), np.arange(4), 3, classes=("a", "b")), clients=2)
    with pytest.raises(SettingError, match="2 label permutations"):
        partition("permuted_clusters", labelled(classes=2), clusters=3, clients_per_cluster=1)
    with pytest.raises(DataError, match="1 test shares"):
        Partition((np.arange(2),) * 2, (np.arange(2),) * 2, (np.arange(2),))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    for way in ("dirichlet", "permuted"):
        name, chosen, *_ = WAYS[way]
        plot_holdings(DATA, partition(name, DATA, **chosen), tmp_path / "holdings.png")
        image = imread(tmp_path / "holdings.png")
        assert 300 < image.shape[0] < 3000
        assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 50


def test_owners_without_test_samples_give_a_share_of_their_own() -> None:
    data = labelled(train=2000, test=0, owners=4)
    with pytest.raises(DataError, match="0 test samples"):
        partition("cluster_split", data)
    cut = partition("cluster_split", data, test=0.25, validation=0.2)
    assert cut.resplit
    assert not partition("cluster_split", DATA, test=0.25).resplit
    for own in zip(cut.train, cut.validation, cut.test, strict=True):
        held = np.concatenate(own)
        assert len(np.unique(held)) == 500
        assert [len(part) for part in own] == [300, 75, 125]
        assert len(set(data.groups[held])) == 1
    assert not np.array_equal(cut.test[0], partition("cluster_split", data, test=0.25, seed=1).test[0])
