"""One checkpoint in one file: tensors and a note, with the SHA-256 of both in its header; the last two are kept."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from coterie.errors import RecordError
from coterie.runs import files

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on after `round` rounds."""

    round: int
    note: dict[str, Any]
    tensors: dict[str, Tensor]


def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host that share no memory, as the format wants them."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def save(folder: Path, point: Checkpoint) -> None:
    """Write a checkpoint whole, then drop those before the last two."""
    tensors = bare(point.tensors)
    note = json.dumps({"round": point.round, **point.note})
    content = encode(tensors, {"note": note, "sha256": _digest(tensors, note)})
    with files.explained("the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.write(_path(folder, point.round), content)
    for old in rounds(folder)[KEPT:]:
        with suppress(OSError):
            _path(folder, old).unlink()


def load(folder: Path, done: int) -> Checkpoint:
    """Read a checkpoint and hold it against its hash."""
    path = _path(folder, done)
    with files.explained("the checkpoint", path):
        content = path.read_bytes()
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        tensors = decode(content)
        note = header["note"]
        if header["sha256"] != _digest(tensors, note):
            raise RecordError(f"the checkpoint {path} is damaged: its contents do not match their hash")
        told = json.loads(note)
        return Checkpoint(told.pop("round"), told, tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"the checkpoint {path} is damaged: {error}") from None


def rounds(folder: Path) -> list[int]:
    """After how many rounds there are checkpoints, newest first."""
    names = [p.stem.removeprefix("round-") for p in folder.glob("round-*.safetensors")]
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)


def drop_after(folder: Path, done: int) -> None:
    """Forget checkpoints of rounds that will be run again."""
    for later in rounds(folder):
        if later > done:
            with files.explained("the checkpoint", _path(folder, later)):
                _path(folder, later).unlink()


def _path(folder: Path, done: int) -> Path:
    return folder / f"round-{done:06d}.safetensors"


def _digest(tensors: dict[str, Tensor], note: str) -> str:
    total = hashlib.sha256(note.encode())
    for name, value in sorted(tensors.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
