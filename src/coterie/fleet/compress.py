"""What a compressed row is when it arrives: see coterie.asks.Compress."""

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
    sign = 1 - 2 * ((bits >> 63) & 1).to(rows.dtype)
    bucket = (bits & ((1 << 62) - 1)) % how.kept(rows.shape[1])
    sketch = rows.new_zeros(len(rows), how.kept(rows.shape[1])).scatter_add_(1, bucket, rows * sign)
    return sketch.gather(1, bucket) * sign
