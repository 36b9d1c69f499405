"""What the text classification data sets share: padded rows of token numbers, kept beside the texts."""

import json
from collections.abc import Sequence
from typing import Any

from coterie.data.sources.store import Writer
from coterie.data.text import tokens


def write(out: Writer, texts: Sequence[str], length: int) -> dict[str, Any]:
    """Token numbers of MiniLM's tokenizer (0 where a text has ended), made once, and the texts themselves."""
    out.array("inputs", tokens.padded(tokens.minilm(), texts, length))
    out.text("texts.json", json.dumps(list(texts), ensure_ascii=False))
    return {"length": length, "tokenizer": "minilm"}
