"""How a record is written: whole or not at all, and in one sentence where the disk refuses."""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.errors import RecordError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFullError(RecordError):
    """There is no room for the record."""


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Turn what the system says into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(f"the disk is full: {what} {path} could not be written") from error
        raise RecordError(f"{what} {path} cannot be used: {error.strerror or error}") from error


def write(path: Path, content: bytes) -> None:
    """A whole file, or the one that was there before: write beside it, flush, rename, flush the folder."""
    beside = path.with_name(f".{path.name}.new")
    with explained("the file", path):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        flush(path.parent)


def flush(folder: Path) -> None:
    """Make the names in a folder last."""
    with suppress(PermissionError):  # not every system lets a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Plain values, readable by people too."""
    write(path, (json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    with explained("the file", path):
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def plain(value: Any) -> Any:
    """Any settings or numbers as JSON knows them; what is not finite becomes null."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
