"""Any state as flat tensors and a JSON tree, and back; nothing is pickled.

The tree says how tensors, numbers, lists and dataclasses are nested. A dataclass is made again only if the type of its
place allows it: the root's type is given, and those inside follow from the annotations of fields.
"""

import dataclasses
import typing
from typing import Any

import torch
from torch import Tensor

from coterie.errors import RecordError


def pack(value: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """The tree, and the tensors by their path."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, name or "state", tensors), tensors


def unpack(tree: Any, tensors: dict[str, Tensor], kind: Any, device: torch.device) -> Any:
    """What was packed; tensors that were not on the host go to `device`."""
    match tree:
        case {"tensor": str(name), "host": bool(host), "stride": stride}:
            if name not in tensors:
                raise RecordError(f"the tensor {name} is missing from the checkpoint")
            return _laid(tensors[name], stride, torch.device("cpu") if host else device)
        case {"dataclass": str(name), "fields": dict(fields)}:
            made = {k.__name__: k for k in _dataclasses(kind)}
            if name not in made:
                raise RecordError(f"the checkpoint holds a {name} where {kind} belongs")
            hints = typing.get_type_hints(made[name])
            return made[name](**{k: unpack(v, tensors, hints[k], device) for k, v in fields.items()})
        case {"dict": list(pairs)}:
            return {k: unpack(v, tensors, kind, device) for k, v in pairs}
        case {"list": list(values)}:
            return [unpack(v, tensors, kind, device) for v in values]
        case {"tuple": list(values)}:
            return tuple(unpack(v, tensors, kind, device) for v in values)
        case {"value": value}:
            return float(value) if isinstance(value, str) and tree.get("float") else value
    raise RecordError(f"the checkpoint holds something unknown: {tree!r}")


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value
        kept = value.stride() if _dense(value) and not value.is_contiguous() else None
        return {"tensor": name, "host": value.device.type == "cpu", "stride": kept}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        packed = {k: _pack(v, f"{name}/{k}", tensors) for k, v in inside.items()}
        return {"dataclass": type(value).__name__, "fields": packed}
    if isinstance(value, dict):
        return {"dict": [[k, _pack(v, f"{name}/{k}", tensors)] for k, v in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, float):
        return {"value": repr(value), "float": True}  # JSON knows no infinity
    if value is None or type(value) in (bool, int, str):
        return {"value": value}
    raise RecordError(f"a state holds tensors and plain values, but {name} is a {type(value).__name__}")


def _dense(value: Tensor) -> bool:
    """Whether the tensor fills its memory, in whatever order."""
    order = sorted(range(value.ndim), key=value.stride)
    size = 1
    for axis in order:
        if value.shape[axis] > 1:
            if value.stride(axis) != size:
                return False
            size *= value.shape[axis]
    return True


def _laid(value: Tensor, stride: list[int] | None, device: torch.device) -> Tensor:
    """A copy in memory of its own, in the order it once had: sums must round as they did."""
    if stride is None:
        return value.to(device, copy=True)
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device).copy_(value)


def _dataclasses(kind: Any) -> list[Any]:
    """The dataclasses that a type allows: itself, members of a union, what a container holds."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [found for inside in typing.get_args(kind) for found in _dataclasses(inside)]
