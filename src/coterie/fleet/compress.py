"""What compressed rows and coarse probabilities are when they arrive: see coterie.asks.Compress and Coarse."""

import numpy as np
import torch
from torch import Tensor

from coterie import draws
from coterie.asks import Coarse, Compress, place_bits


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
            return {"steps": _in_bits(steps, how.bits), "top": top}
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
            steps = _from_bits(parts["steps"], how.bits, width) - levels
            return steps.to(dtype) / levels * parts["top"]
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


def _in_bits(whole: Tensor, bits: int) -> Tensor:
    """Rows of small whole numbers (m×width) as bytes."""
    spread = (whole.cpu().numpy()[..., None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(spread.astype(np.uint8).reshape(len(whole), -1), axis=1))


def _from_bits(block: Tensor, bits: int, width: int) -> Tensor:
    spread = np.unpackbits(block.numpy(), axis=1, count=width * bits)
    return torch.from_numpy((spread.reshape(-1, width, bits).astype(np.int64) << np.arange(bits)).sum(-1))


def coarsened(values: Tensor, how: Coarse | None) -> Tensor:
    """Probabilities, classes last, as they arrive."""
    return values if how is None else _restored(*_cut(values, how), how, values.shape).to(values.dtype)


def coarse_packed(values: Tensor, how: Coarse) -> dict[str, Tensor]:
    """Probabilities (m×…×C) as what travels for them."""
    kept, places = _cut(values, how)
    parts = {"values": kept.flatten(1) if how.bits is None else _in_bits(kept.flatten(1), how.bits)}
    if places is not None:
        parts["places"] = _in_bits(places.flatten(1), place_bits(values.shape[-1]))
    return parts


def coarse_packing(
    how: Coarse, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of what travels for probabilities of this shape."""
    m, each = shape[0], shape[1:]
    values, places = how.bytes(each, dtype.itemsize)
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "values": (dtype, (m, values // dtype.itemsize)) if how.bits is None else (torch.uint8, (m, values)),
        "places": (torch.uint8, (m, places)),
    }
    return found if how.top is not None else {"values": found["values"]}


def coarse_unpacked(parts: dict[str, Tensor], how: Coarse, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The probabilities again, from parts of the types and shapes that `coarse_packing` says."""
    kept_shape = (shape[0], *how.kept(shape[1:]))
    width = torch.Size(kept_shape[1:]).numel()
    kept = parts["values"] if how.bits is None else _from_bits(parts["values"], how.bits, width)
    places = None
    if how.top is not None:
        places = _from_bits(parts["places"], place_bits(shape[-1]), width).clamp(max=shape[-1] - 1).reshape(kept_shape)
    return _restored(kept.reshape(kept_shape), places, how, torch.Size(shape)).to(dtype)


def _cut(values: Tensor, how: Coarse) -> tuple[Tensor, Tensor | None]:
    """What is kept, in steps where it is rounded, and of which classes."""
    places = None
    if how.top is not None:
        values, places = values.topk(min(how.top, values.shape[-1]), dim=-1)
    if how.bits is not None:
        top = (1 << how.bits) - 1
        values = (values.double() * top).round().clamp(0, top).nan_to_num().long()  # whoever is not finite is not ok
    return values, places


def _restored(kept: Tensor, places: Tensor | None, how: Coarse, shape: torch.Size) -> Tensor:
    if how.bits is not None:
        kept = kept.double() / ((1 << how.bits) - 1)
    if places is None:
        return kept
    others = shape[-1] - kept.shape[-1]
    rest = (1 - kept.sum(-1, keepdim=True)).clamp(min=0) / max(1, others)
    return rest.expand(shape).scatter(-1, places, kept)
