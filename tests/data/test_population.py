"""What a population packs: shared samples once, labels as a client sees them, and refusals that name who and what."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

from builders import classes, linear, mlp
from coterie.asks import Evaluate, Gradient, Loss, Own
from coterie.data.dataset import Dataset
from coterie.data.digits import digits
from coterie.data.partitions import Partition, partition
from coterie.data.population import SPLITS, Client, Population, deal, population
from coterie.errors import AskError, CoterieError, DataError, ModelError, SettingError
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.remote import declared
from coterie.fleet.stacked import StackedFleet
from coterie.tasks import Binary, Classification, Regression, task

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]


def data(n: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.arange(n) % 3


def held(people: Population, client: int, split: str = "train") -> tuple[Tensor, Tensor]:
    rows = people.index[split][client]
    return people.inputs[rows], people.labels(client, rows)


class Squares(TorchDataset[Any]):
    """A map-style data set that counts how often a sample is read."""

    def __init__(self, n: int = 8) -> None:
        self.n, self.reads = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        self.reads += 1
        return np.full(6, i, dtype=np.float32), i % 3


# Packing


def test_classes_are_counted_as_their_holder_sees_them() -> None:
    cut = partition("permuted_clusters", digits(), clusters=2, clients_per_cluster=2, share=0.1)
    people = deal(digits(), cut, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    counts = people.counts()
    assert counts is not None
    for i in range(4):
        _, labels = held(people, i)
        assert counts[i].tolist() == [int((labels == c).sum()) for c in range(10)]
    np.testing.assert_array_equal(counts, cut.counts(digits()))
    assert declared(people).counts() is None  # what a server knows of real sites
    x, _ = data()
    assert population([Client("a", (x, x[:, :1]))], model=lambda: nn.Linear(6, 1)).counts() is None


def test_each_client_finds_its_own_samples() -> None:
    parts = {f"c{i}": {s: data(5 + i + 3 * j, 10 * i + j) for j, s in enumerate(SPLITS)} for i in range(3)}
    people = population([Client(key, **splits) for key, splits in parts.items()], model=linear)
    for i, splits in enumerate(parts.values()):
        for split, (x, y) in splits.items():
            assert torch.equal(held(people, i, split)[0], x)
            assert torch.equal(held(people, i, split)[1], y)
    assert people.sizes("validation").tolist() == [8, 9, 10]
    assert people.n == 3


def test_tensors_that_clients_share_are_stored_once_and_not_copied() -> None:
    x, y = data(30)
    both = TensorDataset(x, y)
    people = population(
        [Client("a", (x, y), test=both), Client("b", Subset(both, range(10))), Client("c", (x, y), test=(x, y))],
        model=linear,
    )
    assert len(people.inputs) == 30
    assert people.inputs.data_ptr() == x.data_ptr()
    assert people.targets.data_ptr() == y.data_ptr()
    assert [len(rows) for rows in people.index["train"]] == [30, 10, 30]


def test_arrays_are_shared_with_numpy() -> None:
    x, y = data()[0].numpy(), data()[1].numpy()
    people = population([Client(k, (x, y)) for k in "abc"], model=linear)
    assert len(people.inputs) == 9
    assert people.inputs.data_ptr() == x.ctypes.data


def test_subsets_of_subsets_of_one_data_set() -> None:
    x, y = data(20)
    whole = TensorDataset(x, y)
    outer = Subset(whole, [3, 5, 7, 11, 13])
    people = population([Client("a", Subset(outer, [4, 0])), Client("b", Subset(whole, [1, 2, 0]))], model=linear)
    assert len(people.inputs) == 20
    assert torch.equal(held(people, 0)[0], x[[13, 3]])
    assert torch.equal(held(people, 1)[1], y[[1, 2, 0]])


def test_a_map_style_data_set_is_read_once_however_many_share_it() -> None:
    whole = Squares()
    people = population([Client("a", Subset(whole, [1, 4])), Client("b", whole, test=whole)], model=linear)
    assert whole.reads == len(people.inputs) == 8
    assert held(people, 0)[0][:, 0].tolist() == [1, 4]
    assert held(people, 0)[1].tolist() == [1, 1]


def test_a_list_of_samples_is_a_data_set() -> None:
    x, y = data(3)
    people = population([Client("a", list(zip(x, y, strict=True)))], model=linear)
    assert torch.equal(people.inputs, x)
    two = population([Client("a", [(x[0], 0), (x[1], 2)])], model=linear)
    assert torch.equal(two.inputs, x[:2])


@pytest.mark.parametrize(
    ("targets", "model", "expected"),
    [
        (torch.tensor([0, 1, 2], dtype=torch.int32), linear, Classification(3)),
        (torch.tensor([0, 1, 1], dtype=torch.uint8), lambda: nn.Linear(6, 2), Classification(2)),
        (torch.tensor([True, False, True]), lambda: nn.Linear(6, 1), Binary()),
        (torch.randn(3, 2), lambda: nn.Linear(6, 2), Regression()),
    ],
)
def test_the_task_follows_from_the_targets(targets: Tensor, model: Callable[[], nn.Module], expected: Any) -> None:
    people = population([Client("a", (torch.randn(3, 6), targets))], model=model)
    assert people.task == expected
    for kind in FLEETS:
        fleet = kind(people)
        answer = fleet.ask(Gradient(fleet.everyone, fleet.initial(), 3))
        assert answer.ok.all()
        assert answer.rows.any()


def test_architectures_are_told_apart_by_identity() -> None:
    own = mlp()
    people = population([Client("a", data()), Client("b", data(), model=own), Client("c", data())], model=linear)
    assert people.architecture == (0, 1, 0)
    assert people.make(1) is not own  # the user's module is never trained
    assert torch.equal(people.make(1)[0].weight, own[0].weight)


def test_a_given_module_lends_its_weights_and_keeps_them() -> None:
    own = linear()
    before = own.weight.detach().clone()
    for kind in FLEETS:
        fleet = kind(population([Client("a", data()), Client("b", data())], model=own))
        x = fleet.initial()
        assert torch.equal(x[1, :18], before.flatten())
        assert not torch.equal(fleet.initial(shared=False)[0], fleet.initial(shared=False)[1])
        fleet.ask(Gradient(fleet.everyone, x + 1, 4))
        assert torch.equal(own.weight, before)


def test_the_server_holds_data_but_takes_no_part() -> None:
    people = population([Client("server", data(4)), Client("a", data(5)), Client("b", data(6))], model=linear)
    assert people.n == 2
    assert people.keys == ("a", "b", "server")
    assert people.sizes("train").tolist() == [5, 6]
    for kind in FLEETS:
        fleet = kind(people)
        assert fleet.keys == ("a", "b")
        assert fleet.server.tolist() == [2]
        assert fleet.initial().shape[0] == 2
        fleet.begin(0)
        fleet.present[:] = False  # the server is never absent
        x = fleet.initial()[:1]
        y = torch.arange(4) % 3
        expected = nn.functional.cross_entropy(data(4)[0] @ x[0, :18].view(3, 6).T + x[0, 18:], y)
        assert fleet.ask(Loss(fleet.server, x)).loss.item() == pytest.approx(expected.item(), abs=1e-6)
        with pytest.raises(AskError, match="there are clients 0 to 1, not 3"):
            fleet.ask(Loss([3], x))
    with pytest.raises(AskError, match="no server data"):
        StackedFleet(classes()).server  # noqa: B018


def test_a_server_with_another_architecture_makes_no_mixed_population() -> None:
    people = population(
        [Client("server", data(4), model=mlp), Client("a", data(5)), Client("b", data(6))], model=linear
    )
    for kind in FLEETS:
        fleet = kind(people)
        assert fleet.d == 21
        assert fleet.initial().shape == (2, 21)
        assert len(fleet.columns("head")) == 21
        assert fleet.watch(Loss(fleet.server, Own())).ok.all()


# Dealing


def toy(dtype: Any = np.int64) -> Dataset:
    g = np.random.default_rng(0)
    return Dataset("toy", g.random((40, 6), dtype=np.float32), (np.arange(40) % 4).astype(dtype), train=28)


def split_of(dataset: Dataset, n: int = 4, **more: Any) -> Partition:
    shares = [np.arange(dataset.train)[i::n] for i in range(n)]
    tests = [dataset.test_indices] * n
    return Partition(tuple(s[2:] for s in shares), tuple(s[:2] for s in shares), tuple(tests), **more)


def test_dealing_copies_no_sample() -> None:
    dataset = toy()
    people = deal(dataset, split_of(dataset), model=lambda: nn.Linear(6, 4))
    assert people.inputs.data_ptr() == dataset.inputs.ctypes.data
    assert people.targets.data_ptr() == dataset.targets.ctypes.data
    fleet = StackedFleet(people)
    assert fleet.parts.samples.inputs.data_ptr() == dataset.inputs.ctypes.data
    assert people.keys == ("client-0", "client-1", "client-2", "client-3")
    for client in range(4):
        for split, shares in (("train", split_of(dataset).train), ("test", split_of(dataset).test)):
            assert np.array_equal(held(people, client, split)[0].numpy(), dataset.inputs[shares[client]])


def test_read_only_samples_are_dealt_without_a_copy_too() -> None:
    dataset = toy()
    dataset.inputs.flags.writeable = False
    people = deal(dataset, split_of(dataset), model=lambda: nn.Linear(6, 4))
    assert people.inputs.data_ptr() == dataset.inputs.ctypes.data


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
@pytest.mark.parametrize("kind", FLEETS)
def test_relabelled_clients_are_clients_with_labels_changed_by_hand(kind: type[Fleet], dtype: Any) -> None:
    dataset = toy(dtype)
    relabel = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0], [2, 0, 3, 1]])
    shares = split_of(dataset, relabel=relabel, groups=np.arange(4))
    dealt = deal(dataset, shares, model=lambda: nn.Linear(6, 4))

    def pair(client: int, places: Any) -> tuple[Tensor, Tensor]:
        seen = [relabel[client][int(y)] for y in dataset.targets[places]]
        return torch.from_numpy(dataset.inputs[places]), torch.tensor(seen)

    by_hand = population(
        [Client(f"client-{i}", *(pair(i, getattr(shares, s)[i]) for s in SPLITS)) for i in range(4)],
        model=lambda: nn.Linear(6, 4),
        task=task("classification", classes=4),
    )
    one, other = kind(dealt, dtype=torch.float64), kind(by_hand, dtype=torch.float64)
    x = one.initial()
    for ask in (Gradient(one.everyone, x, 5), Loss(one.everyone, x, split="validation"), Evaluate(one.everyone, x)):
        a, b = one.ask(ask), other.ask(ask)
        assert torch.equal(a.rows, b.rows)
        assert torch.equal(a.loss, b.loss)
        for metric, value in b.metrics.items():
            torch.testing.assert_close(a.metrics[metric], value, equal_nan=True)
    assert not torch.equal(one.ask(Loss(one.everyone, x)).loss, kind(
        replace(dealt, relabel=None), dtype=torch.float64).ask(Loss(one.everyone, x)).loss)  # fmt: skip


def test_digits_dealt_by_a_registered_partition() -> None:
    dataset = digits()
    shares = partition("permuted_clusters", dataset, clusters=2, clients_per_cluster=2)
    people = deal(dataset, shares, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), prefix="ward ")
    assert people.keys[3] == "ward 3"
    assert people.groups == (0, 0, 1, 1)
    assert people.facts["data"] == "digits"
    labels = [dataset.targets[shares.train[2]], shares.relabel[2]]
    assert np.array_equal(held(people, 2)[1].numpy(), labels[1][labels[0]])


def test_one_model_each() -> None:
    dataset = toy()
    one, other = (lambda: nn.Linear(6, 4)), (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
    people = deal(dataset, split_of(dataset), model=[one, other, one, other])
    assert people.architecture == (0, 1, 0, 1)
    with pytest.raises(DataError, match="3 models given for 4 clients"):
        deal(dataset, split_of(dataset), model=[one, other, one])


def test_a_partition_of_another_data_set_is_refused() -> None:
    dataset = toy()
    shares = replace(split_of(dataset), train=(*split_of(dataset).train[:3], np.array([2, 40])))
    with pytest.raises(DataError, match="client 'client-3' holds sample 40, and there are 40"):
        deal(dataset, shares, model=lambda: nn.Linear(6, 4))


# Another order


def test_reordering_moves_everything_that_belongs_to_a_client() -> None:
    dataset = toy()
    shares = split_of(dataset, relabel=np.array([np.roll(np.arange(4), i) for i in range(4)]), groups=np.arange(4))
    people = deal(dataset, shares, model=[lambda: nn.Linear(6, 4), lambda: nn.Linear(6, 4, bias=False)] * 2)
    people = replace(people, seeds=(None, 1, 2, 3))
    order = [2, 0, 3]
    moved = people.reordered(order)
    assert moved.n == 3
    for now, before in enumerate(order):
        assert moved.keys[now] == people.keys[before]
        assert moved.groups is not None
        assert moved.groups[now] == before
        assert moved.seeds[now] == people.seeds[before]
        assert moved.architectures[moved.architecture[now]] is people.architectures[people.architecture[before]]
        for split in SPLITS:
            for a, b in zip(held(moved, now, split), held(people, before, split), strict=True):
                assert torch.equal(a, b)
    assert moved.inputs.data_ptr() == people.inputs.data_ptr()


def test_an_architecture_that_nobody_has_any_more_is_gone() -> None:
    people = classes([mlp, linear])
    for order, d in (([0, 2], 83), ([3, 1], 21)):
        for kind in FLEETS:
            fleet = kind(people.reordered(order))
            assert fleet.d == d
            assert fleet.ask(Gradient(fleet.everyone, fleet.initial(), 4)).ok.all()


def test_the_server_stays_last() -> None:
    people = population(
        [Client("a", data(5)), Client("server", data(4)), Client("b", data(6))], model=linear, groups=[7, 8]
    )
    moved = people.reordered([1, 0])
    assert moved.keys == ("b", "a", "server")
    assert moved.groups == (8, 7)
    assert moved.n == 2
    assert len(moved.index["train"][2]) == 4


# Refusals


def client(key: str = "ward 3", x: Any = None, y: Any = None, **more: Any) -> Client:
    good = data()
    return Client(key, (good[0] if x is None else x, good[1] if y is None else y), **more)


def nan_at(row: int) -> Tensor:
    x = data()[0].clone()
    x[row, 2] = float("nan")
    return x


def inf_at(row: int) -> Tensor:
    x = data()[0].clone()
    x[row, 2] = -float("inf")
    return x


CLASSES = task("classification", classes=3)
Case = tuple[Callable[[], Sequence[Client]], dict[str, Any], type[CoterieError], str]
ELSE = Client("ward 1", data(5, 1))
BAD: dict[str, Case] = {
    "nobody": (lambda: [], {}, DataError, "no client has any data"),
    "only a server": (lambda: [client("server")], {}, DataError, "at least one client"),
    "no training data": (
        lambda: [ELSE, Client("ward 3", None, test=data())],
        {},
        DataError,
        "client 'ward 3' has no training data",
    ),
    "empty training data": (
        lambda: [ELSE, client(x=torch.zeros(0, 6), y=torch.zeros(0, dtype=torch.long))],
        {},
        DataError,
        "client 'ward 3' has no training data",
    ),
    "the same key": (lambda: [client(), ELSE, client()], {}, DataError, "two clients have the key 'ward 3'"),
    "two servers": (lambda: [ELSE, client("server"), client("server")], {}, DataError, "the key 'server'"),
    "more inputs than targets": (
        lambda: [ELSE, client(y=torch.zeros(8, dtype=torch.long))],
        {},
        DataError,
        "client 'ward 3': 9 train inputs but 8 targets",
    ),
    "label too large": (
        lambda: [ELSE, client(y=torch.arange(9) % 4)],
        {"task": CLASSES},
        DataError,
        "client 'ward 3': train label 3 is out of range: its model has 3 outputs",
    ),
    "label negative": (
        lambda: [ELSE, client(y=torch.arange(9) % 3 - 1)],
        {"task": CLASSES},
        DataError,
        "client 'ward 3': label -1 is out of range",
    ),
    "label negative where the labels say what the task is": (
        lambda: [ELSE, client(y=torch.arange(9) % 3 - 1)],
        {},
        DataError,
        "client 'ward 3': label -1 is negative",
    ),
    "a list of models": (
        lambda: [ELSE, client(model=[nn.Linear(6, 3)])],
        {},
        ModelError,
        "client 'ward 3': a model is an nn.Module or a function that makes one, not a list",
    ),
    "label too large in a test split": (
        lambda: [ELSE, client(test=(data()[0], torch.full((9,), 9)))],
        {"task": CLASSES},
        DataError,
        "client 'ward 3': test label 9",
    ),
    "NaN in the inputs": (lambda: [ELSE, client(x=nan_at(8))], {}, DataError, "client 'ward 3': inputs contain NaN"),
    "infinity in the inputs": (lambda: [client(x=inf_at(0)), ELSE], {}, DataError, "client 'ward 3': inputs contain"),
    "NaN in the targets": (
        lambda: [client("ward 1", y=torch.zeros(9)), client(y=torch.full((9,), float("nan")))],
        {"model": lambda: nn.Linear(6, 1)},
        DataError,
        "client 'ward 3': the target of sample 0 is nan",
    ),
    "inputs of another shape": (
        lambda: [ELSE, client(x=torch.zeros(9, 5))],
        {},
        DataError,
        "client 'ward 3': its train inputs are torch.float32 of shape (5,), the others' are torch.float32 of",
    ),
    "inputs of another type": (
        lambda: [ELSE, client(x=data()[0].double())],
        {},
        DataError,
        "client 'ward 3': its train inputs are torch.float64",
    ),
    "targets of another kind": (
        lambda: [ELSE, client(y=torch.zeros(9))],
        {},
        DataError,
        "client 'ward 3': its train targets are torch.float32",
    ),
    "output that does not fit": (
        lambda: [ELSE, client(model=lambda: nn.Linear(6, 4))],
        {"task": CLASSES},
        ModelError,
        "client 'ward 3': outputs have shape (9, 4); 3 classes need (B, 3)",
    ),
    "model that cannot take the samples": (
        lambda: [ELSE, client(model=lambda: nn.Linear(7, 3))],
        {},
        ModelError,
        "client 'ward 3': its model cannot take samples of shape (6,)",
    ),
    "no model": (
        lambda: [client("ward 1", model=linear), client()],
        {"model": None},
        ModelError,
        "client 'ward 3' has no model",
    ),
    "no module": (lambda: [ELSE], {"model": lambda: 3}, ModelError, "is int, not an nn.Module"),
    "data of no known kind": (
        lambda: [ELSE, Client("ward 3", 5)],
        {},
        DataError,
        "client 'ward 3': its train data are int, not (inputs, targets) or a data set",
    ),
    "one number": (
        lambda: [Client("ward 3", (torch.tensor(1.0), torch.tensor(1)))],
        {},
        DataError,
        "client 'ward 3': its train data are one number",
    ),
    "samples that do not stack": (
        lambda: [Client("ward 3", [(torch.zeros(6), 0), (torch.zeros(5), 1), (torch.zeros(6), 1)])],
        {},
        DataError,
        "client 'ward 3': its train samples do not stack",
    ),
    "a subset beyond the data": (
        lambda: [Client("ward 3", Subset(TensorDataset(*data()), [0, 9]))],
        {},
        DataError,
        "client 'ward 3': its train subset names sample 9 of 9",
    ),
    "a subset before the data": (
        lambda: [Client("ward 3", data(), test=Subset(TensorDataset(*data()), [3, -1]))],
        {},
        DataError,
        "client 'ward 3': its test subset names sample -1 of 9",
    ),
    "a subset beyond its subset": (
        lambda: [Client("ward 3", Subset(Subset(TensorDataset(*data()), [0, 1]), [2]))],
        {},
        DataError,
        "client 'ward 3': its train subset names sample 2 of 2",
    ),
    "more groups than clients": (lambda: [ELSE], {"groups": [0, 1]}, DataError, "2 groups given for 1 clients"),
    "an unknown task": (lambda: [ELSE], {"task": "clasification"}, SettingError, "did you mean"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_clients_are_refused_where_they_enter(name: str) -> None:
    make, settings, error, says = BAD[name]
    with pytest.raises(error) as caught:
        population(make(), **{"model": linear, **settings})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", FLEETS)
def test_the_classes_of_public_inputs_are_targets_for_everyone(kind: type[Fleet]) -> None:
    x, y = data(5)
    people = population([Client("a", data())], model=linear, public={"both": (x, y), "bare": x})
    fleet = kind(people, seed=0)  # type: ignore[call-arg]
    assert fleet.labelled("both").argmax(-1).tolist() == y.tolist()
    assert fleet.labelled("both").sum(-1).tolist() == [1.0] * 5
    with pytest.raises(AskError, match=r"no classes are known of public inputs 'bare' \(of these: both\)"):
        fleet.labelled("bare")


def test_public_classes_that_do_not_fit_are_refused() -> None:
    x, y = data(5)
    with pytest.raises(DataError, match=r"public inputs 'p' need a class each, 5 in all, not \(4,\)"):
        population([Client("a", data())], model=linear, public={"p": (x, y[:4])})
    wide = StackedFleet(population([Client("a", data())], model=linear, public={"p": (x, y + 2)}), seed=0)
    with pytest.raises(AskError, match="classes 2 to 4, and the clients' models outputs for 0 to 2"):
        wide.labelled("p")
