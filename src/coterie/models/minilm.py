"""A text classifier on the MiniLM encoder that trains under `vmap` and compiles: no branch in it looks at the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.errors import DataError, ModelError

_PAD = 0


class _NoDropout(nn.Module):
    """Stands where the encoder has dropout: torch's own asks `vmap` for randomness even at rate 0."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x


class TextClassifier(nn.Module):
    """Token numbers B × L (0 where a text has ended) to logits B × classes: encode, average the tokens, one layer.

    The attention mask is four-dimensional and additive; the usual two-dimensional one makes transformers ask whether
    anything is masked at all, which cannot be asked under `vmap`. There is no dropout.
    """

    def __init__(self, classes: int, config: dict[str, Any]) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertModel
        except ImportError as problem:
            raise ModelError("transformers are missing: pip install 'coterie[text]'") from problem
        known = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
        known["attn_implementation"] = "eager"  # `vmap` has no rule for the fused kernels and would loop over models
        self.encoder: Any = BertModel(BertConfig(**known), add_pooling_layer=False)
        for module in list(self.encoder.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(module, name, _NoDropout())
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        there = (ids != _PAD).to(self.encoder.dtype)
        mask = (1 - there[:, None, None, :]) * torch.finfo(there.dtype).min
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return self.head(pooled)  # type: ignore[no-any-return]


def embedded(ids: NDArray[Any], block: int = 64) -> NDArray[np.float32]:
    """What the installed MiniLM makes of texts, as token numbers N × L: the mean over each text's tokens."""
    model = minilm(2).eval()
    model.head = nn.Identity()  # type: ignore[assignment]
    length = (ids != _PAD).sum(1)
    order = np.argsort(length, kind="stable")  # texts of about a length together: padding costs as much as words
    out = np.zeros((len(ids), model.encoder.config.hidden_size), dtype=np.float32)
    with torch.no_grad():
        for some in np.split(order, range(block, len(order), block)):
            out[some] = model(torch.from_numpy(ids[some, : max(1, int(length[some].max()))]).long()).numpy()
    return out


def minilm(classes: int) -> TextClassifier:
    """The installed MiniLM with a new last layer."""
    from coterie.data.sources import store

    if store.manifest("minilm") is None:
        raise DataError(f"minilm is not in {store.root()}; fetch it with: coterie data get minilm")
    return load(store.root() / "minilm", classes)


def load(folder: Path, classes: int) -> TextClassifier:
    """A classifier on the encoder whose `config.json` and `model.safetensors` lie in a folder."""
    from safetensors.torch import load_file

    model = TextClassifier(classes, json.loads((folder / "config.json").read_text(encoding="utf-8")))
    missing, _ = model.encoder.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if missing:
        raise ModelError(f"{folder / 'model.safetensors'} lacks {missing[0]} and {len(missing) - 1} other weights")
    return model
