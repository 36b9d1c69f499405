"""Sizes, shapes, and that every architecture can be stacked: its vmapped gradient is the loop's."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.errors import ModelError, SettingError
from coterie.models import build, names

IMAGE = (3, 32, 32)

# name, settings, parameters, shape of one input, shape of one output
CASES = [
    ("linear", {"inputs": 13, "outputs": 1}, 14, (13,), (1,)),
    ("linear", {"inputs": 12, "outputs": 3, "bias": False}, 36, (3, 2, 2), (3,)),
    ("mlp", {"sizes": [784, 100, 10]}, 79_510, (1, 28, 28), (10,)),
    ("mlp", {"sizes": [5, 2]}, 12, (5,), (2,)),
    ("mean", {"d": 10}, 10, (10,), (10,)),
    ("cnn28", {}, 21_840, (1, 28, 28), (10,)),
    ("lenet", {}, 62_006, IMAGE, (10,)),
    ("cnn", {"size": 8}, 6_058, (1, 8, 8), (10,)),
    ("cnn", {}, 52_138, (1, 28, 28), (10,)),
    ("cnn_scool", {}, 878_538, IMAGE, (10,)),
    ("cnn_comet", {}, 76_336, IMAGE, (10,)),
    ("cnn4", {}, 273_188, (3, 84, 84), (100,)),
    ("resnet9", {"dropout": 0.0}, 6_573_130, IMAGE, (10,)),
    ("resnet9", {"dropout": 0.0, "norm": "group", "classes": 100}, 6_619_300, IMAGE, (100,)),
    ("resnet18", {}, 11_173_962, IMAGE, (10,)),
    ("vgg11", {"dropout": 0.0}, 9_756_426, IMAGE, (10,)),
    ("vgg13", {"dropout": 0.0}, 9_941_322, IMAGE, (10,)),
    ("unet3d", {}, 246_137, (1, 8, 4, 12), (1, 8, 4, 12)),
    ("unet3d", {"channels": 2, "classes": 3, "width": 4}, 61_851, (2, 4, 4, 4), (3, 4, 4, 4)),
]
IDS = [f"{name}-{parameters}" for name, _, parameters, _, _ in CASES]
HEADLESS = {"mean"}


def test_every_model_is_tested() -> None:
    assert {case[0] for case in CASES} | {"gpt2", "minilm"} == set(names())  # these have tests of their own


@pytest.mark.parametrize(("name", "settings", "parameters", "inputs", "outputs"), CASES, ids=IDS)
def test_size_and_shape(name: str, settings: dict, parameters: int, inputs: tuple, outputs: tuple) -> None:
    model = build(name, **settings).eval()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.randn(2, *inputs)).shape == (2, *outputs)
    assert name in HEADLESS or any(key.startswith("head.") for key, _ in model.named_parameters())


# of the larger models one stands for its kin (vgg13 is vgg11 with more layers), and one of those with BatchNorm is run
# in eval mode; resnet18 takes images of any size
COVERED = {"vgg13-9941322", "resnet9-6619300"}
MODES = [
    pytest.param(*case[:3], (3, 16, 16) if case[0] == "resnet18" else case[3], case[4], mode, id=f"{name}-{mode}")
    for case, name in zip(CASES, IDS, strict=True)
    for mode in ("train", "eval")
    if name not in COVERED and (mode == "train" or case[2] < 1e5 or case[0] == "resnet18")
]


@pytest.mark.parametrize(("name", "settings", "parameters", "inputs", "outputs", "mode"), MODES)
def test_stacked_gradient_is_the_loops(
    name: str, settings: dict, parameters: int, inputs: tuple, outputs: tuple, mode: str
) -> None:
    torch.manual_seed(0)
    model = build(name, **settings).double().train(mode == "train")
    buffers = dict(model.named_buffers())
    rows = {key: torch.stack([p.detach(), 0.9 * p.detach()]) for key, p in model.named_parameters()}
    kept = {key: torch.stack([b, b + 1]) for key, b in buffers.items()}
    x = torch.randn(2, 2, *inputs, dtype=torch.float64)
    aim = torch.randn(2, *outputs, dtype=torch.float64)

    def loss(row: dict[str, Tensor], kept: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (functional_call(model, (row, kept), (x,)) - aim).square().mean(), kept

    stacked, moved = vmap(grad(loss, has_aux=True), randomness="different")(
        rows, {key: b.clone() for key, b in kept.items()}, x
    )
    for r in range(2):
        own = {key: b[r].clone() for key, b in kept.items()}
        one, after = grad(loss, has_aux=True)({key: p[r] for key, p in rows.items()}, own, x[r])
        assert any(g.abs().max() > 0 for g in one.values())
        for key, g in one.items():
            torch.testing.assert_close(stacked[key][r], g, rtol=1e-9, atol=1e-12)
        for key, b in after.items():
            torch.testing.assert_close(moved[key][r], b, rtol=1e-9, atol=1e-12)
    assert not buffers or mode == "eval" or not torch.equal(moved[min(moved)], kept[min(kept)])


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES} - {"vgg13", "cnn_comet", "cnn_scool"}))  # same code
def test_one_graph(name: str) -> None:
    torch.manual_seed(0)
    settings, inputs = next((case[1], case[3]) for case in CASES if case[0] == name)
    model = build(name, **settings).eval()
    x = torch.randn(2, *inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_stacked_gradient_in_one_graph() -> None:
    model = build("cnn", size=8).double()
    rows = {key: torch.stack([p.detach(), 0.9 * p.detach()]) for key, p in model.named_parameters()}
    x = torch.randn(2, 3, 1, 8, 8, dtype=torch.float64)

    def loss(row: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, row, (x,)).square().mean()

    step = vmap(grad(loss))
    compiled = torch.compile(step, fullgraph=True, backend="eager")(rows, x)
    for key, g in step(rows, x).items():
        torch.testing.assert_close(compiled[key], g)


def test_mean_starts_on_the_unit_sphere_and_ignores_its_input() -> None:
    model = build("mean", d=4)
    assert torch.equal(model(torch.full((3, 7), torch.nan)), torch.full((3, 4), 0.5))


def test_dropout_only_where_the_experiments_have_it() -> None:
    rates = {
        name: [m.p for m in build(name, **settings).modules() if isinstance(m, nn.Dropout)]
        for name, settings in [("resnet9", {}), ("vgg11", {}), ("resnet18", {}), ("lenet", {}), ("cnn_scool", {})]
    }
    assert rates == {"resnet9": [0.2], "vgg11": [0.5, 0.5], "resnet18": [], "lenet": [], "cnn_scool": []}


def test_group_norm_leaves_no_buffers() -> None:
    assert not list(build("resnet9", norm="group").buffers())
    assert not list(build("resnet18", norm="group").buffers())
    assert list(build("resnet9", norm="batch").buffers())


def test_same_seed_same_start() -> None:
    starts = []
    for _ in range(2):
        torch.manual_seed(3)
        starts.append(build("cnn28").state_dict())
    assert all(torch.equal(starts[0][key], starts[1][key]) for key in starts[0])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet_9", {}, "no model is called 'resnet_9': did you mean resnet9?"),
        ("zzz", {}, "no model is called 'zzz': there are cnn, cnn28"),
        ("resnet9", {"nrm": "batch"}, "model resnet9 has no setting 'nrm': did you mean norm?"),
        ("linear", {"inputs": 3}, "model linear needs the setting 'outputs'"),
        ("resnet9", {"norm": "layer"}, 'norm is \'layer\'; it must be "batch" or "group"'),
        ("mlp", {"sizes": [3]}, "sizes is [3]; an mlp needs at least an input and an output width"),
        ("cnn_scool", {"size": 8}, "size 8 is too small for 2 convolutions of 5×5"),
        ("cnn4", {"size": 8}, "size is 8; four poolings need at least 16"),
    ],
)
def test_wrong_settings_say_what_would_be_right(name: str, settings: dict, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        build(name, **settings)
    assert str(caught.value).startswith(message)


def test_volumes_that_cannot_be_halved_twice() -> None:
    with pytest.raises(ModelError, match=r"volumes are \(8, 6, 8\); unet3d needs sides divisible by 4"):
        build("unet3d")(torch.zeros(1, 1, 8, 6, 8))
