"""GPT-2 under LoRA: what trains, what it computes, and that a stack of clients computes what each does alone."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from coterie.asks import Evaluate, Gradient, Predict
from coterie.data.population import Client, population
from coterie.data.sources import door, store
from coterie.data.sources.gpt2 import MODEL
from coterie.errors import DataError, ModelError
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet
from coterie.models import build
from coterie.models.gpt2 import GPT2, load
from coterie.tasks import LanguageModel

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
SMALL = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 50,
    "n_positions": 12,
    "bos_token_id": 49,
    "eos_token_id": 49,
}


def test_what_trains_is_what_the_paper_says():
    with torch.device("meta"):
        model = GPT2({})  # GPT-2's own size is what its configuration has by default
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    assert (trained, total - trained) == (589_824, 124_439_808)
    assert f"{trained / total:.2%}" == "0.47%"


def test_it_is_gpt2_with_a_low_rank_change(tmp_path):
    """Against the library's own attention, and against weights to which the change is added by hand."""
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL)).eval()
    given = {name: value.clone() for name, value in base.transformer.state_dict().items()}
    save_file(given, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"architectures": ["GPT2LMHeadModel"]}))
    model, ids = load(tmp_path, rank=3, alpha=6).eval(), torch.randint(0, 50, (4, 9))
    assert_close(model(ids), base(input_ids=ids).logits)
    lora = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in lora.values():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, a in lora.items():
        if "lora_A" in name:
            b = lora[name.replace("lora_A", "lora_B")]
            place = name.partition("transformer.")[2].partition(".lora_A")[0]
            base.transformer.get_submodule(place).weight.data += 6 / 3 * (b @ a).T
    assert_close(model(ids), base(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.train()(ids), model(ids))  # dropout is on
    del given["h.1.mlp.c_fc.weight"]
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack h\.1\.mlp\.c_fc\.weight"):
        load(tmp_path)


def test_a_stack_computes_what_each_client_does_alone():
    draw = torch.Generator().manual_seed(0)

    def some(count):
        text = torch.randint(0, 50, (count, 9), generator=draw)
        return text[:, :-1], text[:, 1:]

    people = population(
        [Client(f"c{i}", some(6 + i), some(3), some(4)) for i in range(3)],
        model=lambda: GPT2(SMALL, rank=2),
        task=LanguageModel(50),
        public={"public": some(2)[0]},
    )
    found = []
    for kind in (StackedFleet, LoopFleet):
        fleet = kind(people, seed=1, dtype=torch.float64)
        x = fleet.initial(shared=True) + 0.05
        everyone = fleet.everyone
        found.append(
            (
                fleet.ask(Gradient(everyone, x, 4)).rows,
                fleet.ask(Predict(everyone, x)).outputs,
                fleet.ask(Evaluate(everyone, x, "test")).metrics["perplexity"],
                torch.tensor(float(fleet.d)),
            )
        )
    for stacked, alone in zip(*found, strict=True):
        assert_close(stacked, alone, rtol=0, atol=1e-10)
    assert found[0][3] == 2 * 2 * (16 + 48 + 16 + 16 + 16 + 64 + 64 + 16)
    assert found[0][0].abs().max() > 1e-4


def test_its_gradient_compiles_into_one_graph():
    model, ids = GPT2(SMALL).eval(), torch.randint(0, 50, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    rows = {n: torch.stack([p.detach(), 0.9 * p.detach()]) for n, p in model.named_parameters() if p.requires_grad}

    def loss(row, x):
        return functional_call(model, row, (x,)).square().mean()

    torch.compiler.reset()
    step = vmap(grad(loss))
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")(rows, ids)
    for name, expected in step(rows, ids).items():
        assert_close(traced[name], expected)


def test_the_published_weights_are_taken_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "home"))
    with pytest.raises(DataError, match="coterie data get gpt2"):
        build("gpt2")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(DataError, match=r"model\.safetensors is missing; it belongs in .* comes from https"):
        door.get("gpt2", path=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match="SHA-256 is"):
        door.get("gpt2", path=tmp_path)
    torch.manual_seed(0)
    base = transformers.GPT2Model(transformers.GPT2Config(**SMALL))
    with store.installing("gpt2", {"source": "files", "facts": {}}) as out:
        save_file(dict(base.state_dict()), out.folder / "model.safetensors")
        out.text("config.json", json.dumps(SMALL))
    model = build("gpt2", rank=2, dropout=0.0)
    assert_close(model.adapted.get_base_model().transformer.wte.weight.detach(), base.wte.weight.detach())
    assert MODEL.sources() == ("official", "files")
