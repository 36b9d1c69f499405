"""Who holds what: a partition deals a data set to clients, and says who belongs together where that is known.

Clients hold places in the data set's pooled order (training rows first), so an image held by several clients is never
copied. The publisher's training rows are dealt out as training and validation data, along its own border between the
two where it draws one. Its test rows are given to each client as its own distribution implies: all test images of its
classes where it holds whole classes, else the largest sample that has its class proportions. A partition that does
otherwise says `resplit`, and how it divides. Everything follows from the seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.errors import DataError, SettingError
from coterie.settings import call, hint, real, whole

Places = NDArray[np.int64]
DRAWS = 10_000  # how often Dirichlet shares are redrawn before giving up on the minimum size


@dataclass(frozen=True, eq=False)
class Partition:
    """What each client holds, and the truth about who belongs together."""

    train: tuple[Places, ...]  # places in the pooled order, one array for each client
    validation: tuple[Places, ...]  # cut from the client's training share
    test: tuple[Places, ...]  # what the client is judged on
    groups: NDArray[np.int64] | None = None  # true cluster of each client, if there is one
    relabel: NDArray[np.int64] | None = None  # n × C: client i sees class y as relabel[i, y]
    helped: tuple[int, ...] = ()  # those who are to be helped, where the others only help
    resplit: bool = False  # True where the publisher's division into training and test was not kept
    facts: dict[str, Any] = field(default_factory=dict)  # what a report should say: clients dropped, owners

    def __post_init__(self) -> None:
        """Refuse a client with nothing to learn from or nothing to be judged on."""
        n = len(self.train)
        if not (n == len(self.validation) == len(self.test)):
            raise DataError(f"partition: {n} training, {len(self.validation)} validation, {len(self.test)} test shares")
        for i in range(n):
            for split, share in (("training", self.train[i]), ("test", self.test[i])):
                if not len(share):
                    raise DataError(
                        f"partition: client {i} of {n} has no {split} samples; take fewer clients or more data"
                    )

    def __len__(self) -> int:
        """How many clients there are."""
        return len(self.train)

    def graph(self, *, normalised: bool = False) -> NDArray[np.float64] | None:
        """The true graph: 1 inside clusters (diagonal included), 0 elsewhere; or the same with rows summing to one."""
        if self.groups is None:
            return None
        same: NDArray[np.float64] = (self.groups[:, None] == self.groups[None, :]).astype(np.float64)
        return same / same.sum(1, keepdims=True) if normalised else same

    def counts(self, dataset: Dataset, split: str = "train") -> NDArray[np.int64]:
        """Samples of each class at each client (n × C), classes as the client sees them."""
        labels, c = _classes(dataset)
        shares: tuple[Places, ...] = getattr(self, split)
        counts = np.stack([np.bincount(labels[share], minlength=c) for share in shares])
        if self.relabel is not None:
            seen = np.zeros_like(counts)
            np.put_along_axis(seen, self.relabel, counts, axis=1)
            counts = seen
        return counts.astype(np.int64)


# What every partition needs


def _classes(dataset: Dataset) -> tuple[NDArray[np.int64], int]:
    """Class numbers of all samples, and how many classes there are."""
    targets = dataset.targets
    if targets.ndim != 1 or targets.dtype.kind not in "iu":
        raise DataError(f"data set {dataset.name} has no class numbers; only iid and cluster_split can deal it")
    labels = targets.astype(np.int64)
    c = len(dataset.classes) or int(labels.max()) + 1
    if labels.min() < 0 or labels.max() >= c:
        raise DataError(
            f"data set {dataset.name}: class numbers must lie in 0 to {c - 1}, the number of class names less 1"
        )
    return labels, c


def _sizes(what: str, groups: int, each: int | Sequence[int]) -> list[int]:
    """Clients in each group, from one number for all or one number for each."""
    if isinstance(each, Sequence) and not isinstance(each, str):
        if len(each) != groups:
            raise SettingError(f"{what} lists {len(each)} sizes for {groups} groups; give one number, or one for each")
        return [whole(what, size, 1) for size in each]
    return [whole(what, each, 1)] * groups


def _enough(dataset: Dataset, clients: int, images: int) -> None:
    if images < clients:
        raise DataError(
            f"data set {dataset.name} has {images} training samples to deal to {clients} clients; take fewer clients"
        )


def _even(rng: np.random.Generator, pool: Places, parts: int) -> list[Places]:
    """A pool in random order, in parts whose sizes differ by at most one."""
    return np.array_split(rng.permutation(pool), parts)


def _deal(rng: np.random.Generator, labels: NDArray[np.int64], fractions: NDArray[np.float64]) -> list[Places]:
    """Client i gets the share `fractions[i, c]` of the images of class c; a column may sum to less than one."""
    n, c = fractions.shape
    cuts = np.rint(np.cumsum(fractions, 0) * np.bincount(labels, minlength=c)).astype(np.int64)
    shares: list[list[Places]] = [[] for _ in range(n)]
    for k in range(c):
        parts = np.split(rng.permutation(np.flatnonzero(labels == k)), cuts[:, k])[:n]
        for share, part in zip(shares, parts, strict=True):
            share.append(part)
    return [np.concatenate(share) for share in shares]


def _proportional(dataset: Dataset, rng: np.random.Generator, shares: Sequence[Places]) -> list[Places]:
    """For each client the largest sample of the publisher's test images that has the class proportions of its share."""
    labels, c = _classes(dataset)
    pools = [dataset.train + np.flatnonzero(labels[dataset.train :] == k) for k in range(c)]
    there = np.array([len(pool) for pool in pools])
    tests = []
    for share in shares:
        held = np.bincount(labels[share], minlength=c)
        can = (held > 0) & (there > 0)
        scale = (there[can] / held[can]).min(initial=there.sum())
        take = np.where(can, np.maximum(1, np.rint(held * scale)), 0).astype(np.int64)
        chosen = [rng.choice(pools[k], take[k], replace=False) for k in np.flatnonzero(take)]
        tests.append(np.concatenate([*chosen, np.empty(0, np.int64)]))
    return tests


def _of_classes(dataset: Dataset, held: Sequence[NDArray[np.int64]]) -> list[Places]:
    """For each client all of the publisher's test images of the classes it holds."""
    labels, _ = _classes(dataset)
    return [dataset.train + np.flatnonzero(np.isin(labels[dataset.train :], own)) for own in held]


def _finish(
    dataset: Dataset,
    rng: np.random.Generator,
    shares: Sequence[Places],
    tests: Sequence[Places],
    validation: float,
    *,
    groups: NDArray[np.int64] | None = None,
    relabel: NDArray[np.int64] | None = None,
    facts: dict[str, Any] | None = None,
) -> Partition:
    """Cut each share into training and validation: at least one sample for each, if there are two.

    A client validates on what its share has of the publisher's validation samples; on a random part if it has none.
    """
    real("validation", validation, 0, 0.9, closed=True)
    train, held_out = [], []
    for share in shares:
        kept = share >= dataset.train - dataset.validation
        if kept.any() and not kept.all():
            held_out.append(np.sort(share[kept]))
            train.append(np.sort(share[~kept]))
            continue
        size = len(share)
        cut = min(max(1, round(validation * size)), size - 1) if validation and size else 0
        order = rng.permutation(share)
        held_out.append(np.sort(order[:cut]))
        train.append(np.sort(order[cut:]))
    test = tuple(np.sort(own) for own in tests)
    return Partition(tuple(train), tuple(held_out), test, groups, relabel, facts=facts or {})


# The partitions


def iid(dataset: Dataset, *, clients: int, validation: float = 0.1, seed: int = 0) -> Partition:
    """Everyone draws from the same distribution: training data split evenly, all test images for each."""
    rng = np.random.default_rng(seed)
    whole("clients", clients, 1)
    _enough(dataset, clients, dataset.train)
    shares = _even(rng, dataset.train_indices, clients)
    groups = np.zeros(clients, np.int64)
    return _finish(dataset, rng, shares, [dataset.test_indices] * clients, validation, groups=groups)


def _permutations(rng: np.random.Generator, clusters: int, c: int, shift: int | None) -> NDArray[np.int64]:
    """A label permutation for each cluster, all different, the identity first.

    Up to C clusters no class has the same label in two of them (CoBo §4.1): each permutation is a random perfect
    matching of classes with labels not yet used, which exists by Hall's theorem.
    """
    if shift is not None:
        moves = shift * np.arange(clusters)
        if len(np.unique(moves % c)) < clusters:
            raise SettingError(
                f"shift {shift} gives two of {clusters} clusters the same labels among {c} classes; take another shift"
            )
        return (np.arange(c)[None, :] + moves[:, None]) % c
    if c < 12 and clusters > factorial(c):
        raise SettingError(f"{c} classes have {factorial(c)} label permutations, not enough for {clusters} clusters")
    from scipy.optimize import linear_sum_assignment  # half a second, which no site has to spend

    rows = [np.arange(c)]
    used = np.eye(c)
    while len(rows) < clusters:
        if clusters <= c:
            row = linear_sum_assignment(rng.random((c, c)) + c * used)[1]
        else:
            row = rng.permutation(c)
            if any(np.array_equal(row, other) for other in rows):
                continue
        used[np.arange(c), row] = 1
        rows.append(row)
    return np.stack(rows).astype(np.int64)


def permuted_clusters(
    dataset: Dataset,
    *,
    clusters: int,
    clients_per_cluster: int | Sequence[int],
    share: float = 1.0,
    disjoint: bool = False,
    shift: int | None = None,
    validation: float = 0.1,
    test: int | None = None,
    seed: int = 0,
) -> Partition:
    """Clusters that see the same images under different labels (CoBo §4).

    Every cluster splits the whole training set evenly between its clients; with `disjoint`, clusters first get
    disjoint equal parts of it. Each client keeps the fraction `share` of its part (Figure 2a). Labels are permuted at
    random, or with `shift` cyclically, y + shift × cluster mod C, as in the authors' code (shift 11). Everyone is
    tested on all of the publisher's test images, or on the same `test` of them, drawn at random.
    """
    rng = np.random.default_rng(seed)
    _, c = _classes(dataset)
    whole("clusters", clusters, 1)
    sizes = _sizes("clients_per_cluster", clusters, clients_per_cluster)
    real("share", share, 0, 1)
    permutations = _permutations(rng, clusters, c, shift if shift is None else whole("shift", shift, 1))
    if disjoint:
        _enough(dataset, sum(sizes), dataset.train)
        pools = _even(rng, dataset.train_indices, clusters)
    else:
        pools = [dataset.train_indices] * clusters
    for size, pool in zip(sizes, pools, strict=True):
        _enough(dataset, size, len(pool))
    parts = [part for size, pool in zip(sizes, pools, strict=True) for part in _even(rng, pool, size)]
    groups = np.repeat(np.arange(clusters), sizes)
    shares = [part[: max(1, round(share * len(part)))] for part in parts]
    judged = dataset.test_indices
    if test is not None:
        judged = rng.choice(judged, whole("test", test, 1, len(judged)), replace=False)
    return _finish(
        dataset, rng, shares, [judged] * len(shares), validation, groups=groups, relabel=permutations[groups]
    )


def _dirichlet_shares(
    dataset: Dataset,
    rng: np.random.Generator,
    clients: int,
    alpha: float,
    minimum: int,
    drop: bool,
    by: str,
    sigma: float,
) -> tuple[list[Places], dict[str, Any]]:
    """Training shares of at least `minimum` images each, and what was dropped for it."""
    labels, c = _classes(dataset)
    labels = labels[: dataset.train]
    whole("clients", clients, 1)
    real("alpha", alpha, 0)
    whole("minimum", minimum, 1)
    real("sigma", sigma, 0, closed=True)
    if by not in ("class", "client"):
        raise SettingError(f"dirichlet deals by 'class' or by 'client', not by {by!r}")
    if by == "class" and sigma:
        raise SettingError(
            "sigma spreads client sizes, which by='class' draws itself; set by='client' or leave sigma out"
        )
    _enough(dataset, clients * (1 if drop else minimum), dataset.train)
    pool = np.bincount(labels, minlength=c)
    for _ in range(1 if drop else DRAWS):
        if by == "class":
            fractions = rng.dirichlet(np.full(clients, alpha), c).T
        else:
            wanted = rng.dirichlet(np.full(c, alpha), clients) * (pool > 0)
            wanted *= np.exp(sigma * rng.standard_normal((clients, 1))) / wanted.sum(1, keepdims=True)
            # One factor for all clients: every class suffices, and each client keeps its class shares.
            asked = wanted.sum(0)
            factor = (pool[asked > 0] / asked[asked > 0]).min()
            fractions = wanted * factor / np.maximum(pool, 1)
        got = np.diff(np.rint(np.cumsum(fractions, 0) * pool), axis=0, prepend=0).sum(1)
        if drop or got.min() >= minimum:
            break
    else:
        raise SettingError(
            f"none of {DRAWS} draws gave each of {clients} clients {minimum} samples; take a larger alpha, "
            "fewer clients, a smaller minimum, or drop=true"
        )
    shares = _deal(rng, labels, fractions)
    kept = [share for share in shares if len(share) >= minimum]
    if not kept:
        raise SettingError(f"dirichlet left none of {clients} clients with {minimum} samples; take a smaller minimum")
    return kept, {"clients_asked": clients, "clients_dropped": clients - len(kept)} if drop else {}


def dirichlet(
    dataset: Dataset,
    *,
    clients: int,
    alpha: float,
    minimum: int = 2,
    drop: bool = False,
    by: str = "class",
    sigma: float = 0.0,
    validation: float = 0.1,
    seed: int = 0,
) -> Partition:
    """Label skew from a Dirichlet distribution.

    `by="class"` divides each class between the clients with shares from Dirichlet(alpha): all images are dealt and
    sizes differ. `by="client"` gives each client class shares from Dirichlet(alpha) and a log-normal size of spread
    `sigma`; sizes are scaled together until the scarcest class is used up. Shares are redrawn until each client has
    `minimum` images, or with `drop` the clients that have fewer are left out and `facts` says how many.
    """
    rng = np.random.default_rng(seed)
    shares, facts = _dirichlet_shares(dataset, rng, clients, alpha, minimum, drop, by, sigma)
    return _finish(dataset, rng, shares, _proportional(dataset, rng, shares), validation, facts=facts)


def dirichlet_resplit(
    dataset: Dataset,
    *,
    clients: int,
    alpha: float,
    minimum: int = 20,
    drop: bool = False,
    shares: Sequence[float] = (0.1, 0.3, 0.4),
    validation: float = 0.1,
    test: float = 0.5,
    seed: int = 0,
) -> Partition:
    """COMET's own division: the training images dealt by class, then each client's share split by itself.

    A client trains on a fraction of its share picked at random from `shares`, validates on `validation` and is tested
    on `test` of it; the publisher's test images are not used, which `resplit` says.
    """
    rng = np.random.default_rng(seed)
    if isinstance(shares, str) or not isinstance(shares, Sequence) or not shares:
        raise SettingError(
            f"shares must list the training fractions to pick from, such as [0.1, 0.3, 0.4], not {shares!r}"
        )
    for fraction in (*shares, validation, test):
        real("a fraction of dirichlet_resplit", fraction, 0, 1)
    if max(shares) + validation + test > 1 + 1e-9:
        raise SettingError(
            f"train {max(shares):g} + validation {validation:g} + test {test:g} is more than the whole share; lower one"
        )
    whole("minimum", minimum, 3)
    dealt, facts = _dirichlet_shares(dataset, rng, clients, alpha, minimum, drop, "class", 0.0)
    train, held_out, tests = [], [], []
    for share, fraction in zip(dealt, rng.choice(np.asarray(shares), len(dealt)), strict=True):
        size, order = len(share), rng.permutation(share)
        b = min(max(1, round(validation * size)), size - 2)
        c = min(max(1, round(test * size)), size - b - 1)
        a = min(max(1, round(fraction * size)), size - b - c)
        train.append(np.sort(order[:a]))
        held_out.append(np.sort(order[a : a + b]))
        tests.append(np.sort(order[a + b : a + b + c]))
    facts |= {"division": "each client's share of the publisher's training data, divided at random"}
    return Partition(tuple(train), tuple(held_out), tuple(tests), resplit=True, facts=facts)


def _spread(samples: int, k: int) -> NDArray[np.int64]:
    """A number of images divided between k classes as evenly as it goes."""
    return np.diff(np.arange(k + 1) * samples // k)


def _hand_out(
    dataset: Dataset, rng: np.random.Generator, held: Sequence[NDArray[np.int64]], samples: int | None
) -> list[Places]:
    """Disjoint shares: `samples` images evenly over the classes a client holds; or each class evenly to its holders."""
    labels, c = _classes(dataset)
    labels = labels[: dataset.train]
    pool = np.bincount(labels, minlength=c)
    holds = np.zeros((len(held), c), dtype=np.int64)
    for i, own in enumerate(held):
        holds[i, own] = 1 if samples is None else _spread(samples, len(own))
    wanted = holds.sum(0)
    if samples is None:
        return _deal(rng, labels, holds / np.maximum(wanted, 1))
    if (short := np.flatnonzero(wanted > pool)).size:
        k = short[0]
        raise DataError(
            f"data set {dataset.name} has {pool[k]} training images of class {k} and its holders ask for {wanted[k]}; "
            f"take fewer samples than {samples} or fewer clients"
        )
    return _deal(rng, labels, holds / np.maximum(pool, 1))


def classes_per_client(
    dataset: Dataset, *, clients: int, k: int, samples: int | None = None, validation: float = 0.1, seed: int = 0
) -> Partition:
    """Each client holds k random classes (SCooL's non-IID: 100 clients, 2 classes, 500 images; no image held twice).

    Classes are dealt from a shuffled deck in which each class is there equally often, so the images suffice wherever
    they can. Clients with the same classes have the same distribution and so are one true group.
    """
    rng = np.random.default_rng(seed)
    _, c = _classes(dataset)
    whole("clients", clients, 1)
    whole("k, the classes of a client,", k, 1, c)
    if samples is not None:
        whole("samples", samples, k)
    left = np.full(c, clients * k // c)
    left[rng.permutation(c)[: clients * k % c]] += 1
    held = []
    for i in range(clients):
        # A class with as many cards left as there are clients left must go to each of them; the others go by chance.
        forced = left == clients - i
        own = np.flatnonzero(forced)
        if len(own) < k:
            chance = np.where(forced, 0, left)
            own = np.append(own, rng.choice(c, k - len(own), replace=False, p=chance / chance.sum()))
        left[own] -= 1
        held.append(np.sort(own))
    shares = _hand_out(dataset, rng, held, samples)
    groups = np.unique(np.stack(held), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return _finish(dataset, rng, shares, _of_classes(dataset, held), validation, groups=groups)


def class_groups(
    dataset: Dataset,
    *,
    groups: int,
    clients_per_group: int | Sequence[int],
    classes_per_group: int | None = None,
    samples: int | None = None,
    shuffle: bool = False,
    validation: float = 0.1,
    seed: int = 0,
) -> Partition:
    """Groups of clients with disjoint classes, and no image held twice.

    SCooL-SBM has 5 groups of 20 clients, 2 classes each; All-for-one 2 groups, first and second half of the classes;
    CoBo's cross-device CIFAR-100 has 10 groups of 6, 6, 7, 7 … 10, 10 clients, 10 classes each. Each class is split
    evenly between the clients of its group, or each client takes `samples` images, evenly over its classes. Classes
    go to groups in order, or at random with `shuffle`.
    """
    rng = np.random.default_rng(seed)
    _, c = _classes(dataset)
    whole("groups", groups, 1, c)
    sizes = _sizes("clients_per_group", groups, clients_per_group)
    k = c // groups if classes_per_group is None else whole("classes_per_group", classes_per_group, 1)
    if k * groups > c:
        raise SettingError(f"{groups} groups of {k} classes need {k * groups} classes and {dataset.name} has {c}")
    if samples is not None:
        whole("samples", samples, k)
    order = rng.permutation(c) if shuffle else np.arange(c)
    membership = np.repeat(np.arange(groups), sizes)
    held = [np.sort(order[g * k : (g + 1) * k]) for g in membership]
    shares = _hand_out(dataset, rng, held, samples)
    return _finish(dataset, rng, shares, _of_classes(dataset, held), validation, groups=membership)


def shards(
    dataset: Dataset, *, clients: int, shards_per_client: int = 2, validation: float = 0.1, seed: int = 0
) -> Partition:
    """Training images sorted by label, cut into equal shards, a few dealt to each client (McMahan et al., 2017)."""
    rng = np.random.default_rng(seed)
    labels, _ = _classes(dataset)
    whole("clients", clients, 1)
    whole("shards_per_client", shards_per_client, 1)
    _enough(dataset, clients * shards_per_client, dataset.train)
    order = rng.permutation(dataset.train)
    order = order[np.argsort(labels[order], kind="stable")]
    pieces = np.array_split(order, clients * shards_per_client)
    hands = rng.permutation(len(pieces)).reshape(clients, shards_per_client)
    shares = [np.concatenate([pieces[piece] for piece in hand]) for hand in hands]
    return _finish(dataset, rng, shares, _proportional(dataset, rng, shares), validation)


def cluster_split(
    dataset: Dataset, *, clients_per_owner: int = 1, validation: float = 0.1, test: float = 0.0, seed: int = 0
) -> Partition:
    """Natural owners: a client, or several, for each value of `dataset.groups`, tested on the owner's test samples.

    With several clients for each owner, those of one owner are a true cluster; with one, nobody knows. Of an owner to
    whom the publisher gives no test samples, the share `test` of its training samples is for testing: `resplit`.
    """
    rng = np.random.default_rng(seed)
    real("test", test, 0, 0.9, closed=True)
    whole("clients_per_owner", clients_per_owner, 1)
    if dataset.groups is None:
        raise DataError(f"data set {dataset.name} has no natural owners; deal it with another partition, such as iid")
    owners, owner = np.unique(dataset.groups, return_inverse=True)
    owner = owner.reshape(-1)
    shares, tests, resplit = [], [], False
    for k, name in enumerate(owners):
        own = np.flatnonzero(owner == k)
        mine, judged = own[own < dataset.train], own[own >= dataset.train]
        if test and not len(judged):
            judged, mine = np.split(rng.permutation(mine), [max(1, round(test * len(mine)))])
            resplit = True
        if len(mine) < clients_per_owner or not len(judged):
            raise DataError(
                f"owner {name} of data set {dataset.name} has {len(mine)} training and {len(judged)} test samples; "
                f"{clients_per_owner} and 1 are the least for {clients_per_owner} client(s)"
            )
        shares += _even(rng, mine, clients_per_owner)
        tests += [judged] * clients_per_owner
    groups = np.repeat(np.arange(len(owners)), clients_per_owner)
    called = dataset.facts.get("owners", {})  # names, where the data set has them and groups are their places
    facts: dict[str, Any] = {"owners": [str(called[owners[g]] if called else owners[g]) for g in groups]}
    if resplit:
        facts["division"] = f"{test:.0%} of an owner's samples, drawn at random, are for testing; nobody gives others"
    truth = groups if clients_per_owner > 1 else None
    return replace(_finish(dataset, rng, shares, tests, validation, groups=truth, facts=facts), resplit=resplit)


def target_mix(
    dataset: Dataset,
    *,
    alpha: float,
    clients: int = 20,
    near: int = 10,
    target_classes: int = 3,
    extra: int = 0,
    validation: float = 0.1,
    seed: int = 0,
) -> Partition:
    """One target, clients near to it, and strangers (MeritFed §4.2), no image held twice.

    Client 0 holds the first `target_classes` classes (A); the next `near` clients a share `alpha` of A and 1 − alpha
    of as many classes after those; the others the rest. A client's whole class is a 1/clients part of its images.
    With `extra`, the target validates on that many of the publisher's test images of each class of A, which are then
    in nobody's test data: `resplit` says so. Groups: the target, the near clients, the strangers.
    """
    rng = np.random.default_rng(seed)
    labels, c = _classes(dataset)
    real("alpha", alpha, 0, 1)
    whole("near", near, 1)
    whole("clients", clients, near + 2)
    whole("extra", extra, 0)
    a = whole("target_classes", target_classes, 1, (c - 1) // 2)
    part = np.zeros((clients, c))
    part[0, :a] = 1
    part[1 : near + 1, :a] = alpha
    part[1 : near + 1, a : 2 * a] = 1 - alpha
    part[near + 1 :, 2 * a :] = 1
    shares = _deal(rng, labels[: dataset.train], part / clients)
    taken = np.empty(0, np.int64)
    if extra:
        pools = [dataset.train + np.flatnonzero(labels[dataset.train :] == k) for k in range(a)]
        if (least := min(map(len, pools))) <= extra:
            raise DataError(f"data set {dataset.name} has {least} test images of a target class; extra must be fewer")
        taken = np.sort(np.concatenate([rng.choice(pool, extra, replace=False) for pool in pools]))
    tests = [np.setdiff1d(own, taken) for own in _proportional(dataset, rng, shares)]
    tests[0] = np.setdiff1d(_of_classes(dataset, [np.arange(a)])[0], taken)
    groups = np.repeat([0, 1, 2], [1, near, clients - near - 1])
    dealt = replace(_finish(dataset, rng, shares, tests, validation, groups=groups), helped=(0,))
    if not extra:
        return dealt
    train = (np.sort(shares[0]), *dealt.train[1:])
    held_out = (taken, *dealt.validation[1:])
    facts = {"division": f"{extra} of the publisher's test images of each target class are the target's for validation"}
    return replace(dealt, train=train, validation=held_out, resplit=True, facts=facts)


def target_group(
    dataset: Dataset,
    *,
    target: str,
    mixed: str,
    alpha: float,
    clients: int = 20,
    near: int = 10,
    samples: int = 100,
    extra: int = 0,
    test: float = 0.2,
    validation: float = 0.1,
    seed: int = 0,
) -> Partition:
    """One target, clients near to it, and strangers (MeritFed §4.3), by `dataset.groups`; no text held twice.

    All have so many `samples`. Client 0 has the group `target`; the next `near` clients a share `alpha` of it and
    1 − alpha of the group `mixed`; the others one of the other groups each, in turn, filled up from `mixed`. Everyone
    is tested on all test samples of the groups it holds. Without any from the publisher the share `test` of each group
    is kept for that, and with `extra` the target validates on so many of its test samples: both are `resplit`.
    """
    rng = np.random.default_rng(seed)
    real("alpha", alpha, 0, 1)
    real("test", test, 0, 0.9)
    whole("near", near, 1)
    whole("clients", clients, near + 2)
    whole("samples", samples, 2)
    whole("extra", extra, 0)
    if dataset.groups is None:
        raise DataError(f"data set {dataset.name} has no groups; deal it with another partition, such as target_mix")
    names = [str(name) for name in dataset.facts.get("owners", np.unique(dataset.groups))]
    codes = list(range(len(names))) if "owners" in dataset.facts else list(np.unique(dataset.groups))
    for name in (target, mixed):
        if name not in names:
            raise SettingError(f"no group is called {name!r}: {hint(name, names)}")
    if target == mixed:
        raise SettingError(f"target and mixed must be different groups, not both {target!r}")
    aim, filler = names.index(target), names.index(mixed)
    held, judged = [], []
    for code in codes:
        own = np.flatnonzero(dataset.groups == code)
        mine, kept = rng.permutation(own[own < dataset.train]), own[own >= dataset.train]
        if dataset.train == len(dataset.targets):
            kept, mine = np.split(mine, [max(1, round(test * len(mine)))])
        held.append(mine)
        judged.append(rng.permutation(kept))

    def take(group: int, count: int) -> Places:
        if count > len(held[group]):
            raise DataError(f"group {names[group]} has no {count} samples left; take fewer clients or samples")
        chosen, held[group] = np.split(held[group], [count])
        return chosen

    close = round(alpha * samples)
    parts = [(aim, samples, 0), *[(aim, close, samples - close)] * near]
    others = [g for g in range(len(names)) if g != aim]
    left = {g: len(held[g]) for g in others}
    for i in range(clients - near - 1):
        g = others[i % len(others)]
        most = samples if g == filler else min(samples, left[g])
        left[g] -= most
        parts.append((g, most, samples - most))
    shares = [np.concatenate([take(g, most), take(filler, rest)]) for g, most, rest in parts]
    if extra >= len(judged[aim]):
        raise DataError(f"group {target} has {len(judged[aim])} test samples; extra must be fewer")
    taken, judged[aim] = np.split(judged[aim], [extra])
    tests = [np.concatenate([judged[g] if most else judged[g][:0], judged[filler][: len(judged[filler]) * bool(rest)]])
             for g, most, rest in parts]  # fmt: skip
    groups = np.repeat([0, 1, 2], [1, near, clients - near - 1])
    dealt = replace(_finish(dataset, rng, shares, tests, validation, groups=groups), helped=(0,))
    anew = []
    if dataset.train == len(dataset.targets):
        anew.append(f"{100 * test:g} % of each group, drawn at random, are kept for testing")
    if extra:
        dealt = replace(dealt, train=(np.sort(shares[0]), *dealt.train[1:]),
                        validation=(np.sort(taken), *dealt.validation[1:]))  # fmt: skip
        anew.append(f"{extra} test samples of group {target} are the target's for validation")
    return replace(dealt, resplit=True, facts={"division": "; ".join(anew)}) if anew else dealt


PARTITIONS: dict[str, Callable[..., Partition]] = {
    function.__name__: function
    for function in (
        iid,
        permuted_clusters,
        dirichlet,
        dirichlet_resplit,
        classes_per_client,
        class_groups,
        shards,
        cluster_split,
        target_mix,
        target_group,
    )
}


def partition(name: str, dataset: Dataset, *, seed: int = 0, **settings: Any) -> Partition:
    """The named partition of a data set."""
    return call("partition", name, PARTITIONS, dataset, seed=whole("seed", seed, 0), **settings)
