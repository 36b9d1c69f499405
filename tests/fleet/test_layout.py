"""Rows and parameters are the same memory, and dropout is a hash that behaves like dropout."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from builders import MODELS, Dropping, classes, linear, mlp
from coterie import draws
from coterie.asks import Fit, Gradient, Loss, Plan, Predict
from coterie.errors import ModelError
from coterie.fleet.base import Fleet
from coterie.fleet.layout import KeyedDropout, Layout, keyed
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

FLEETS: list[type[Fleet]] = [StackedFleet, LoopFleet]


@pytest.mark.parametrize("model", MODELS)
def test_views_are_views_and_flatten_undoes_them(model: str) -> None:
    module = MODELS[model][0]()
    layout = Layout.of(module)
    assert layout.d == sum(p.numel() for p in module.parameters())
    rows = torch.randn(3, layout.d)
    views = layout.views(rows)
    assert [v.shape[1:] for v in views.values()] == [p.shape for p in module.parameters()]
    start = rows.data_ptr()
    for view in views.values():
        assert view.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        assert view.data_ptr() == start
        start += 4 * view[0].numel()
    assert torch.equal(layout.flatten(views), rows)
    next(iter(views.values())).fill_(7)
    assert (rows[:, 0] == 7).all()
    assert torch.equal(layout.flatten(layout.views(rows[0]), lead=0), rows[0])


def test_views_of_rows_that_do_not_lie_together() -> None:
    layout = Layout.of(mlp())
    wide = torch.randn(4, 2 * layout.d)
    for rows in (wide[::2, ::2], wide[0, : layout.d].expand(3, -1), torch.randn(layout.d, 3).T):
        assert torch.equal(layout.flatten(layout.views(rows)), rows)


def test_a_row_goes_in_and_comes_out() -> None:
    module, other = mlp(), mlp()
    layout = Layout.of(module)
    expected = nn.utils.parameters_to_vector(module.parameters())
    assert torch.equal(layout.row(module), expected)
    layout.load(other, layout.row(module))
    x = torch.randn(5, 6)
    assert torch.equal(other(x), module(x))
    with pytest.raises(ModelError, match=f"rows are 3 wide where the model has {layout.d}"):
        layout.views(torch.zeros(2, 3))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 3), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_columns_of_parts() -> None:
    layout = Layout.of(Headed())  # head.weight 12, head.bias 3, body.0 24 + 4, body.2 16
    assert layout.columns("head").tolist() == list(range(15))
    assert layout.columns("body").tolist() == list(range(15, 59))
    assert layout.columns("body.0").tolist() == list(range(15, 43))
    assert layout.columns("body.0.bias").tolist() == list(range(39, 43))
    assert layout.columns("").tolist() == list(range(59))
    assert Layout.of(mlp()).columns("head").tolist() == list(range(56, 83))  # no head: the last layer
    assert Layout.of(linear()).columns("head").tolist() == list(range(21))
    with pytest.raises(ModelError, match=r"no parameter below 'bod': there are head\.weight"):
        layout.columns("bod")


@pytest.mark.parametrize("kind", FLEETS)
def test_only_the_columns_that_may_move_do(kind: type[Fleet]) -> None:
    fleet = kind(classes(Headed), dtype=torch.float64)
    body = fleet.columns("body")
    for plan in (Plan(steps=2, momentum=0.9, weight_decay=0.1), Plan(steps=2, optimiser="adamw", weight_decay=0.1)):
        moved = fleet.ask(Fit(fleet.everyone, fleet.initial(), plan, columns=body)).rows != 0
        assert not moved[:, fleet.columns("head")].any()
        assert moved[:, body].float().mean() > 0.5


class Adapted(nn.Module):
    """A frozen base and a small trained part, as under LoRA; what is frozen is drawn when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.base(x)))


def test_frozen_parameters_are_no_part_of_a_row_and_the_same_for_all() -> None:
    people = classes(Adapted)
    assert Layout.of(Adapted()).names == ("out.weight", "out.bias")
    torch.manual_seed(1)
    fleets = [kind(people, dtype=torch.float64) for kind in FLEETS]
    for fleet in fleets:
        assert fleet.d == 27
        x = fleet.initial()
        exported = fleet.module(2, x[2])
        public = people.public["public"].double()
        outputs = fleet.ask(Predict(fleet.everyone, x)).outputs
        torch.testing.assert_close(outputs[2], exported(public), rtol=0, atol=1e-12)
        assert torch.equal(outputs[0], outputs[3])
        assert fleet.ask(Gradient(fleet.everyone, x, 4)).rows.shape == (4, 27)
    torch.testing.assert_close(
        *(f.watch(Predict(f.everyone, f.initial())).outputs for f in fleets), rtol=0, atol=1e-12
    )  # whatever torch's generator had given before
    base = dict(fleets[0]._modules[0].named_parameters())["base.weight"]
    assert base.shape == (8, 6)  # one copy, never stacked


def test_building_a_fleet_leaves_torchs_generator_alone() -> None:
    people = classes(Adapted)
    torch.manual_seed(5)
    expected = torch.rand(3)
    for kind in FLEETS:
        torch.manual_seed(5)
        fleet = kind(people)
        fleet.ask(Gradient(fleet.everyone, fleet.initial(shared=False), 4))
        fleet.module(0, fleet.initial()[0])
        assert torch.equal(torch.rand(3), expected)


def test_a_module_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no trainable parameter"):
        Layout.of(nn.Linear(2, 2).requires_grad_(False))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.out = nn.Linear(6, 5, bias=False), nn.Linear(5, 6), nn.Linear(6, 5, bias=False)
        self.out.weight = self.embed.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.out(torch.tanh(self.mid(self.embed(x)))))


def test_tied_weights_lie_in_a_row_once_and_get_the_gradient_of_both_uses() -> None:
    people = classes(Tied)
    module = Tied().double()
    assert Layout.of(module).d == 30 + 36 + 18
    for kind in FLEETS:
        fleet = kind(people, dtype=torch.float64)
        x = fleet.initial()[0]
        fleet._layouts[0].load(module, x)
        assert module.out.weight is module.embed.weight
        rows = people.index["train"][1]
        loss = nn.functional.cross_entropy(module(people.inputs[rows].double()), people.targets[rows])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        answer = fleet.ask(Gradient([1], x))
        torch.testing.assert_close(answer.rows[0], expected, rtol=0, atol=1e-12)
        assert answer.loss.item() == pytest.approx(loss.item(), abs=1e-12)
        exported = fleet.module(1, x)
        assert exported.out.weight is exported.embed.weight


# Dropout


def dropped(layer: KeyedDropout, x: Tensor, key: int) -> Tensor:
    layer.key.fill_(key)
    return layer.train()(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_keeps_its_share_and_scales_what_it_keeps(p: float) -> None:
    layer, n = KeyedDropout(p, None, 0), 40_000
    x = torch.full((n,), 3.0)
    kept = dropped(layer, x, 11)
    share = (kept != 0).double().mean().item()
    assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)
    torch.testing.assert_close(kept[kept != 0], torch.full((int((kept != 0).sum()),), 3 / (1 - p)))
    assert torch.equal(layer.eval()(x), x)
    assert torch.equal(dropped(layer, x, 11), kept)
    agreement = ((dropped(layer, x, 12) != 0) == (kept != 0)).double().mean().item()
    assert abs(agreement - (p**2 + (1 - p) ** 2)) < 0.02  # another key, an independent mask


def test_dropout_at_the_ends() -> None:
    x = torch.randn(50)
    assert torch.equal(dropped(KeyedDropout(0.0, None, 0), x, 1), x)
    assert not dropped(KeyedDropout(1.0, None, 0), x, 1).any()


def test_channel_dropout_drops_whole_channels() -> None:
    layer = keyed(nn.Dropout2d(0.5))
    assert isinstance(layer, KeyedDropout)
    kept = dropped(layer, torch.ones(16, 8, 4, 5), 3) != 0
    assert (kept.flatten(2).all(2) | ~kept.flatten(2).any(2)).all()
    assert 0.3 < kept.double().mean() < 0.7


def test_masks_under_vmap_are_those_of_each_row_alone() -> None:
    module = keyed(Dropping()).train()
    layout = Layout.of(module)
    rows, x = torch.randn(3, layout.d), torch.randn(3, 7, 6)
    keys = draws.fold(torch.tensor(9), torch.arange(3))

    def out(row: Tensor, key: Tensor, x: Tensor) -> Tensor:
        return functional_call(module, {**layout.views(row), "drop.key": key}, (x,))

    stacked = torch.vmap(out)(rows, keys, x)
    for i in range(3):
        torch.testing.assert_close(stacked[i], out(rows[i], keys[i], x[i]))


def test_every_dropout_layer_has_its_own_mask_even_one_that_stands_twice() -> None:
    once = nn.Dropout(0.5)
    module = keyed(nn.Sequential(once, nn.Identity(), once, nn.Dropout(0.5)))
    layers = [m for m in module if isinstance(m, KeyedDropout)]
    assert len(layers) == 3
    masks = [dropped(layer, torch.ones(200), 5) != 0 for layer in layers]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 0.3 < (masks[a] == masks[b]).double().mean() < 0.7
    assert type(once) is nn.Dropout  # the user's module is left alone


def shared_dropout() -> nn.Module:
    drop = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(6, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 3))


@pytest.mark.parametrize("make", [Dropping, shared_dropout])
def test_dropout_is_equal_in_both_fleets_and_off_in_evaluation(make: Callable[[], nn.Module]) -> None:
    people = classes(make)
    one, other = (kind(people, seed=2, dtype=torch.float64) for kind in FLEETS)
    x = one.initial()
    for ask in (Gradient(one.everyone, x, 5), Fit(one.everyone, x, Plan(steps=3, batch=5))):
        a, b = one.ask(ask), other.ask(ask)
        torch.testing.assert_close(a.rows, b.rows, rtol=0, atol=1e-12)
    exported = one.module(1, x[1])
    rows = people.index["test"][1]
    expected = nn.functional.cross_entropy(exported(people.inputs[rows].double()), people.targets[rows])
    assert one.ask(Loss([1], x[:1], split="test")).loss.item() == pytest.approx(expected.item(), abs=1e-12)
