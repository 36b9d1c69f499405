"""Reads the voxels of a NIfTI-1 file: a head of 348 bytes, then values in Fortran order, often under gzip."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.sources import unpack
from coterie.errors import DataError

_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}


def parse(name: str, content: bytes) -> NDArray[Any]:
    """The voxels as float32, scaled as the head says."""
    content = unpack.gunzip(name, content)
    order = next((sign for sign in "<>" if content[:4] == struct.pack(f"{sign}i", 348)), "")
    if not order or len(content) < 348 or content[344:348] not in (b"n+1\0", b"ni1\0"):
        raise DataError(f"{name} is no NIfTI-1 file")
    axes, *extents = struct.unpack_from(f"{order}8h", content, 40)
    (kind,) = struct.unpack_from(f"{order}h", content, 70)
    start, slope, offset = struct.unpack_from(f"{order}3f", content, 108)
    if not 1 <= axes <= 7 or min(extents[:axes]) < 1 or kind not in _TYPES or not 348 <= start <= len(content):
        raise DataError(f"{name}: {axes} axes of {extents}, values of type {kind} from byte {start} on cannot be read")
    dtype, count = np.dtype(order + _TYPES[kind]), int(np.prod(extents[:axes], dtype=object))
    if len(content) < int(start) + count * dtype.itemsize:
        raise DataError(f"{name} ends before its {count} voxels do; it is truncated")
    values = np.frombuffer(content, dtype, count, int(start)).reshape(extents[:axes], order="F").astype(np.float32)
    while values.ndim > 3 and values.shape[-1] == 1:
        values = values[..., 0]
    return values * np.float32(slope) + np.float32(offset) if slope and np.isfinite(slope + offset) else values
