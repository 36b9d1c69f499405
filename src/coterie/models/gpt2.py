"""GPT-2 under LoRA: a language model that all clients share, frozen, and some trained numbers beside each layer.

Rank 4 beside the matrices of attention and MLP makes 589,824 trained numbers of 124 million, CoBo's 0.47 %.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from coterie.errors import DataError, ModelError

_ATTENTION = "coterie"  # the name under which transformers know `_attend`


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Plain attention whose dropout is the module that is there for it, so that a fleet can key it."""
    weights = (query @ key.transpose(-1, -2) * scaling + mask).softmax(-1)
    weights = module.attn_dropout(weights)  # type: ignore[operator]
    return (weights @ value).transpose(1, 2), weights


class GPT2(nn.Module):
    """Token numbers B × T to logits B × T × vocabulary. Only LoRA's matrices train; they begin as no change at all.

    `alpha` is LoRA's: its update counts alpha / rank times (32 and 4 are what its authors take for GPT-2). `dropout` is
    everywhere: in the embedding, the attention, the residual paths and before LoRA's matrices. Without `weights` the
    frozen part is drawn at random.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        rank: int = 4,
        alpha: float = 32,
        dropout: float = 0.1,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        try:
            from peft import LoraConfig, get_peft_model
            from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel
            from transformers.masking_utils import eager_mask
        except ImportError as problem:
            raise ModelError(f"{problem.name} is missing: pip install 'coterie[text]'") from problem
        AttentionInterface.register(_ATTENTION, _attend)
        AttentionMaskInterface.register(_ATTENTION, eager_mask)
        known = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
        known |= {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
        base = GPT2LMHeadModel(GPT2Config(**known | {"attn_implementation": _ATTENTION}))
        if weights is not None:
            missing, _ = base.transformer.load_state_dict(weights, strict=False)
            if missing:
                raise ModelError(f"the weights of GPT-2 lack {missing[0]} and {len(missing) - 1} others")
        lora = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # a factor like any other
            lora_dropout=dropout,
            target_modules=["c_attn", "c_fc", "c_proj"],
            fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():  # peft asks transformers in words that these no longer like
            warnings.simplefilter("ignore", FutureWarning)
            self.adapted: Any = get_peft_model(base, lora)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after each."""
        return self.adapted(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def gpt2(rank: int = 4, alpha: float = 32, dropout: float = 0.1) -> GPT2:
    """The installed GPT-2 with new matrices beside it."""
    from coterie.data.sources import store

    if store.manifest("gpt2") is None:
        raise DataError(f"gpt2 is not in {store.root()}; fetch it with: coterie data get gpt2")
    return load(store.root() / "gpt2", rank=rank, alpha=alpha, dropout=dropout)


def load(folder: Path, **settings: Any) -> GPT2:
    """LoRA beside the model whose `config.json` and `model.safetensors` lie in a folder."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return GPT2(config, weights=load_file(folder / "model.safetensors"), **settings)
