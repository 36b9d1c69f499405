"""What a compressed row is when it arrives: see coterie.asks.Compress."""

import numpy as np
import torch
from torch import Tensor

from coterie import draws
from coterie.asks import Compress


def squeezed(rows: Tensor, how: Compress | None, keys: Tensor) -> Tensor:
    """Rows (m×d) as they arrive; what is random in it follows from a key for each row."""
    if how is None or how.kind == "none":
        return rows
    if how.kind == "topk":
        top = rows.abs().topk(how.kept(rows.shape[1]), dim=1).indices
        return torch.zeros_like(rows).scatter(1, top, rows.gather(1, top))
    bits = draws.fold(keys[:, None], torch.arange(rows.shape[1], device=rows.device))
    if how.kind == "quantise":
        levels = (1 << (how.bits - 1)) - 1
        top = rows.abs().amax(1, keepdim=True)
        scaled = rows / torch.where(top > 0, top, 1) * levels
        near: Tensor = torch.floor(scaled + draws.unit(bits).to(rows.dtype))
        return near / levels * top
    sign, bucket = _hashed(bits, how.kept(rows.shape[1]), rows.dtype)
    sketch = rows.new_zeros(len(rows), how.kept(rows.shape[1])).scatter_add_(1, bucket, rows * sign)
    return sketch.gather(1, bucket) * sign


def _hashed(bits: Tensor, buckets: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A sign and a bucket for each entry of each row."""
    return 1 - 2 * ((bits >> 63) & 1).to(dtype), (bits & ((1 << 62) - 1)) % buckets


def packed(rows: Tensor, how: Compress, keys: Tensor) -> dict[str, Tensor]:
    """Rows that were squeezed, as what travels for them: as many bytes as the ledger says."""
    width = rows.shape[1]
    match how.kind:
        case "topk":
            places = rows.abs().topk(how.kept(width), dim=1).indices
            return {"values": rows.gather(1, places), "places": places.to(_index_type(rows.dtype))}
        case "quantise":
            levels = (1 << (how.bits - 1)) - 1
            top = rows.abs().amax(1, keepdim=True)
            steps = torch.round(rows / torch.where(top > 0, top, 1) * levels).long() + levels
            spread = (steps.cpu().numpy()[..., None] >> np.arange(how.bits)) & 1
            whole = np.packbits(spread.astype(np.uint8).reshape(len(rows), -1), axis=1)
            return {"steps": torch.from_numpy(whole), "top": top}
    bits = draws.fold(keys[:, None], torch.arange(width))
    sign, bucket = _hashed(bits, how.kept(width), rows.dtype)
    return {"sketch": rows.new_zeros(len(rows), how.kept(width)).scatter_(1, bucket, rows * sign)}


def unpacked(parts: dict[str, Tensor], how: Compress, width: int, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows again. Shapes and types are those of `packing`, which the caller has checked."""
    match how.kind:
        case "topk":
            places = parts["places"].long().clamp(0, width - 1)
            return parts["values"].new_zeros(len(places), width).scatter_(1, places, parts["values"])
        case "quantise":
            levels = (1 << (how.bits - 1)) - 1
            spread = np.unpackbits(parts["steps"].numpy(), axis=1, count=width * how.bits)
            steps = (spread.reshape(-1, width, how.bits).astype(np.int64) << np.arange(how.bits)).sum(-1) - levels
            return torch.from_numpy(steps).to(dtype) / levels * parts["top"]
    bits = draws.fold(keys[:, None], torch.arange(width))
    sign, bucket = _hashed(bits, how.kept(width), dtype)
    return parts["sketch"].gather(1, bucket) * sign


def packing(how: Compress, m: int, width: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of what travels for m rows."""
    kept = how.kept(width)
    match how.kind:
        case "topk":
            return {"values": (dtype, (m, kept)), "places": (_index_type(dtype), (m, kept))}
        case "quantise":
            return {"steps": (torch.uint8, (m, -(-width * how.bits // 8))), "top": (dtype, (m, 1))}
    return {"sketch": (dtype, (m, kept))}


def _index_type(dtype: torch.dtype) -> torch.dtype:
    """Places are as wide as values."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32
