"""Wiki-40B in four languages, from the publisher's record files: `train/ca_examples-00000-of-00002` and so on.

A record file is a sequence of length (8 bytes), checksum (4), data, checksum (4); the data are a protocol buffer with
the article under `text`, in which `_START_ARTICLE_` and the like stand before titles, sections and paragraphs.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.sources import store
from coterie.data.sources.languages import LANGUAGES, SPLITS
from coterie.data.sources.progress import Progress
from coterie.data.sources.spec import FILES, Form, Raw, Spec
from coterie.data.sources.store import Writer
from coterie.data.text import tokens
from coterie.errors import DataError

_MOST = {"train": 800_000, "validation": 100_000, "test": 100_000}  # tokens per language, as CoBo uses
_MARKS = ("_START_ARTICLE_", "_START_SECTION_", "_START_PARAGRAPH_")
_LARGEST = 1 << 26  # bytes of one article


@cache
def _table() -> list[int]:
    """CRC-32C of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


def checksum(content: bytes) -> int:
    """The masked CRC-32C that record files carry."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[bytes]:
    """The records of one file, each checked."""
    with path.open("rb") as file:
        while head := file.read(12):
            if len(head) != 12 or checksum(head[:8]) != struct.unpack("<I", head[8:])[0]:
                raise DataError(f"{path.name}: the head of a record is damaged; the file is truncated or altered")
            (size,) = struct.unpack("<Q", head[:8])
            if size > _LARGEST:
                raise DataError(f"{path.name}: a record claims {size} bytes")
            content, tail = file.read(size), file.read(4)
            if len(content) != size or len(tail) != 4 or checksum(content) != struct.unpack("<I", tail)[0]:
                raise DataError(f"{path.name}: a record is damaged; the file is truncated or altered")
            yield content


def fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protocol buffer that have a length; others are passed over."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number without an end")

    while place < len(content):
        key = number()
        if key & 7 == 2:
            size = number()
            if size > len(content) - place:
                raise ValueError("a field longer than its record")
            yield key >> 3, content[place : place + size]
            place += size
        elif key & 7 == 0:
            number()
        elif key & 7 in (1, 5):
            place += 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"a field of kind {key & 7}")


def article(name: str, content: bytes) -> str:
    """The running text of a record: paragraphs, and titles on lines of their own."""
    try:
        (features,) = [value for field, value in fields(content) if field == 1]
        for _, entry in fields(features):
            parts = dict(fields(entry))
            if parts.get(1) == b"text":
                values = dict(fields(parts[2]))[1]
                text = dict(fields(values))[1].decode("utf-8")
                break
        else:
            raise ValueError("no text")
    except (ValueError, KeyError, IndexError) as problem:
        raise DataError(f"{name}: a record is no article of Wiki-40B: {problem}") from problem
    lines = text.replace("_NEWLINE_", "\n").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip() and line.strip() not in _MARKS)


def _tokens(folder: Path, part: str, language: str, most: int) -> NDArray[np.int32]:
    """The first `most` tokens of a language's part; whole articles in the publisher's order."""
    places = sorted(folder.glob(f"**/{part}/{language}_examples-*-of-*"))
    if not places:
        name = f"{part}/{language}_examples-00000-of-0000N"
        raise DataError(f"Wiki-40B: {name} is missing; it belongs in {folder}")
    encode, taken, total = tokens.gpt2().encode_batch, [], 0
    articles = (article(path.name, content) for path in places for content in records(path))
    while total < most and (some := list(islice(articles, 64))):
        for one in encode(some):
            taken.append(one.ids)
            total += len(one.ids) + 1
    return tokens.stream(taken)[:most]


def decode(folder: Path, out: Writer, progress: Progress, *, most: dict[str, int] = _MOST) -> dict[str, Any]:
    """Tokens of every language and part."""
    counts: dict[str, dict[str, int]] = {language: {} for language in LANGUAGES}
    with progress.bar("Wiki-40B", len(LANGUAGES) * len(SPLITS), unit="parts") as advance:
        for language in LANGUAGES:
            for part in SPLITS:
                stream = _tokens(folder, part, language, most[part])
                out.array(f"{language}-{part}", stream)
                counts[language][part] = len(stream)
                advance(1)
    return {"languages": list(LANGUAGES), "counts": counts}


def read(folder: Path, facts: dict[str, Any], context: int = 512) -> Dataset:
    """Blocks of `context` tokens and the tokens that follow them, as for the other corpus."""
    streams = {part: [store.array(folder, f"{one}-{part}") for one in facts["languages"]] for part in SPLITS}
    return tokens.corpus(folder.name, streams, tuple(facts["languages"]), context, facts)


SPEC = Spec(
    name="wiki40b",
    title="Wiki-40B in Catalan, Spanish, German and Dutch",
    licence="CC BY-SA 3.0",
    size=16_000_000,
    forms=(
        Form(
            FILES,
            tuple(
                Raw(f"{part}/{language}_examples-*-of-*", unpacked=(f"**/{part}/{language}_examples-*-of-*",))
                for part in SPLITS
                for language in LANGUAGES
            ),
            decode,
        ),
    ),
    open=read,
    needs=("gpt2-tokenizer",),
    hint="the publisher's bucket gs://tfds-data/downloads/wiki40b/tfrecord_prod",
    settings=("context",),
)
