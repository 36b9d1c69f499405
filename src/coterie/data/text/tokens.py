"""The GPT-2 and MiniLM tokenizers from installed files, and running text cut into blocks for language models."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.sources import store
from coterie.errors import DataError, ModelError

END = 50256  # GPT-2's only special token: the end of a text


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as problem:
        raise ModelError("tokenizers are missing: pip install 'coterie[text]'") from problem
    return tokenizers


def _folder(name: str) -> Any:
    if store.manifest(name) is None:
        raise DataError(f"{name} is not in {store.root()}; fetch it with: coterie data get {name}")
    return store.root() / name


def gpt2() -> Any:
    """GPT-2's tokenizer (a `tokenizers.Tokenizer`): 50,257 byte-level tokens."""
    library, folder = _library(), _folder("gpt2-tokenizer")
    model = library.models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def minilm() -> Any:
    """MiniLM's tokenizer: BERT's 30,522 lower-case word pieces; `[PAD]` is 0."""
    return _library().Tokenizer.from_file(str(_folder("minilm") / "tokenizer.json"))


def padded(tokenizer: Any, texts: Sequence[str], length: int) -> NDArray[np.int64]:
    """One row of token numbers per text, cut at `length` and filled up with 0."""
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=0, pad_token="[PAD]")
    return np.array([one.ids for one in tokenizer.encode_batch(list(texts))], dtype=np.int64).reshape(-1, length)


def stream(texts: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    """Texts one after the other, each with the end token behind it."""
    parts = [np.array([*ids, END], dtype=np.int32) for ids in texts]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def blocks(tokens: NDArray[Any], context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks of `context` tokens, and for each token the one that follows; a rest that fills no block is dropped."""
    count = max(len(tokens) - 1, 0) // context
    used = np.asarray(tokens[: count * context + 1], dtype=np.int64)
    return used[: count * context].reshape(count, context), used[1 : count * context + 1].reshape(count, context)


def corpus(
    name: str, streams: dict[str, list[NDArray[Any]]], owners: tuple[str, ...], context: int, facts: dict[str, Any]
) -> Dataset:
    """A data set of blocks from one stream per owner and split, the splits in order and the last for testing."""
    if context < 1:
        raise DataError(f"data set {name}: a context of {context} tokens makes no block")
    inputs, targets, groups, ends = [], [], [], {}
    for part, each in streams.items():
        for number, tokens in enumerate(each):
            x, y = blocks(tokens, context)
            inputs.append(x)
            targets.append(y)
            groups.append(np.full(len(x), number))
        ends[part] = sum(map(len, inputs))
    if not ends["train"]:
        raise DataError(f"data set {name}: no text has {context} tokens")
    return Dataset(
        name=name,
        inputs=np.concatenate(inputs),
        targets=np.concatenate(targets),
        train=ends["validation"],
        groups=np.concatenate(groups),
        facts={**facts, "owners": owners, "context": context},
        validation=ends["validation"] - ends["train"],
    )
