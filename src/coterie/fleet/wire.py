"""What travels between a server and its sites: asks and answers as plain arrays, checked against what was asked.

A packet is one block of safetensors whose metadata hold one JSON object: no pickle, nothing that could run. Rows go
once per distinct row (or mean of rows: midpoints are built by the sender) of an ask, so that a site with one client
receives just what the ledger counts as `sent`; indices, scalars, reasons and the free loss beside a gradient are
framing. A Gram matrix may hold pairs of several sites: rows or sketches go up, and whoever asked multiplies them.
Rows that answer may be rounded on their way (`precision`); int8 has one scale per row, in float32.

Readers trust nothing: names, types, shapes and sizes are checked before anything is used, and what is wrong is a
WireError, which becomes a pair that is not ok.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from coterie import draws
from coterie.asks import (
    NONFINITE,
    OK,
    Answer,
    Ask,
    Coarse,
    Compress,
    Distil,
    Drift,
    Evaluate,
    Fit,
    Gradient,
    Loss,
    Own,
    Plan,
    Predict,
    Pull,
)
from coterie.errors import CoterieError
from coterie.fleet.base import is_start
from coterie.fleet.compress import coarse_packed, coarse_packing, coarse_unpacked, packed, packing, unpacked
from coterie.fleet.reduce import finite, zeroed
from coterie.settings import build

VERSION = 1
KINDS: dict[str, type[Ask]] = {kind.kind: kind for kind in (Gradient, Loss, Fit, Predict, Evaluate)}
Precision = Literal["full", "float32", "bfloat16", "float16", "int8"]
PRECISIONS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
MOST = 1 << 28  # probabilities that a message may unfold to: of few classes of many, little travels
NAME = 100  # letters of the longest name
Arrays = dict[str, Tensor]

# ask → its plain fields and what they may be; rows, indices and riders are dealt with below
_PLAIN: dict[type[Ask], dict[str, tuple[type, ...]]] = {
    Gradient: {"batch": (int, type(None)), "split": (str,), "sampling": (str,), "track": (bool,), "give": (str,),
               "sketch": (int, type(None))},
    Loss: {"batch": (int, type(None)), "split": (str,), "sampling": (str,), "track": (bool,), "buffers": (str,)},
    Fit: {"give": (str,), "split": (str,), "keep": (str, type(None)), "track": (bool,)},
    Predict: {"inputs": (str,), "buffers": (str,), "soft": (bool,)},
    Evaluate: {"split": (str,), "buffers": (str,), "metrics": (list, type(None))},
}  # fmt: skip
_DISTIL = {"inputs": str, "batch": int, "loss": str, "temperature": float, "alone": bool}
_VECTORS = {Gradient: ("draw", "into", "weights"), Loss: ("draw",), Fit: ("draw",)}  # one number per pair


class WireError(CoterieError):
    """Something that arrived is not what it must be."""


# ---- packets ---------------------------------------------------------------------------------------------------------


def seal(head: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> bytes:
    """One block of bytes."""
    flat: Arrays = {}
    seen: set[int] = set()
    for name, value in (arrays or {}).items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        flat[name] = value.clone() if memory in seen else value  # safetensors takes no tensor twice
        seen.add(memory)
    return encode(flat, metadata={"head": json.dumps({"wire": VERSION, **head}, allow_nan=False)})


def unseal(block: bytes, most: int) -> tuple[dict[str, Any], Arrays]:
    """Head and arrays of a block of at most so many bytes."""
    if len(block) > most:
        raise WireError(f"a message of {len(block)} bytes is too large: at most {most} are taken")
    try:
        length = int.from_bytes(block[:8], "little")
        head = json.loads(json.loads(block[8 : 8 + length])["__metadata__"]["head"])
        arrays = decode(block)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a message cannot be read: {type(error).__name__}") from None
    if not isinstance(head, dict) or head.get("wire") != VERSION:
        raise WireError(f"a message is not of version {VERSION} of this wire format")
    return head, arrays


def field(head: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A plain value of a head, if it is there and of the right type."""
    value = head.get(name)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WireError(f"{name} must be {wanted}, and is {type(value).__name__}")
    if isinstance(value, str) and not (len(value) <= NAME and value.isprintable()):
        raise WireError(f"{name} is no name of at most {NAME} letters")
    return value


def array(arrays: Mapping[str, Tensor], name: str, dtype: torch.dtype, *shape: int | None) -> Tensor:
    """An array, if it is there, of this type and shape (None: any length)."""
    value = arrays.get(name)
    if value is None:
        raise WireError(f"the array {name} is missing")
    fits = value.ndim == len(shape) and all(b is None or a == b for a, b in zip(value.shape, shape, strict=True))
    if value.dtype != dtype or not fits:
        raise WireError(
            f"{name} must be {dtype} of shape {tuple('?' if s is None else s for s in shape)}, "
            f"and is {value.dtype} of shape {tuple(value.shape)}"
        )
    return value


# ---- asks ------------------------------------------------------------------------------------------------------------


def write_ask(ask: Ask, keys: Sequence[str], arrays: Arrays, name: str, earlier: Sequence[str] = ()) -> dict[str, Any]:
    """An ask as a head; its arrays are added under the name. `keys` are those of all clients by their numbers.

    Rows that an `earlier` ask of the message brings along are not sent again.
    """
    kind = type(ask)
    head: dict[str, Any] = {
        "kind": ask.kind,
        "memory": ask.memory,
        "clients": [keys[c] for c in ask.clients.tolist()],
        **{f: getattr(ask, f) for f in _PLAIN[kind]},
    }
    if isinstance(ask.models, Own):
        head["own"] = {"slot": ask.models.slot, "shared": ask.models.shared}
    else:
        rows, at = distinct(ask.models, ask.at, ask.m)
        arrays[f"{name}/at"] = at
        same = (e for e in earlier if f"{e}/models" in arrays and torch.equal(arrays[f"{e}/models"], rows))
        head["rows"] = next(same, name)
        arrays[f"{head['rows']}/models"] = rows
    for vector in _VECTORS.get(kind, ()):
        value = getattr(ask, vector)
        if value is not None:
            arrays[f"{name}/{vector}"] = value.double() if vector == "weights" else value
    if isinstance(ask, Gradient):
        if ask.give == "gram":
            head["give"] = "rows"  # inner products of several sites are the asker's to form
        head["outputs"] = ask.outputs if ask.give == "sum" else None
    if isinstance(ask, (Gradient, Fit)):
        head["compress"] = None if ask.compress is None else asdict(ask.compress)
    if isinstance(ask, Predict):
        head["coarse"] = None if ask.coarse is None else asdict(ask.coarse)
    if isinstance(ask, Evaluate):
        head["metrics"] = None if ask.metrics is None else list(ask.metrics)
    if isinstance(ask, Fit):
        head["plan"] = asdict(ask.plan)
        for rider, given in (("pull", ask.pull), ("drift", ask.drift)):
            if given is not None:
                head[rider] = _write_rider(given, ask, arrays, f"{name}/{rider}")
        if ask.distil is not None:
            head["distil"] = _write_distil(ask.distil, ask, arrays, f"{name}/distil")
        if ask.columns is not None:
            arrays[f"{name}/columns"] = ask.columns
    return head


def read_ask(
    head: Any, arrays: Arrays, name: str, numbers: Mapping[str, int], dtype: torch.dtype, device: torch.device
) -> Ask:
    """The ask again, about clients by their numbers here."""
    if not isinstance(head, dict):
        raise WireError("an ask must be an object")
    kind = KINDS.get(field(head, "kind", str))
    if kind is None:
        raise WireError(f"{head['kind']!r} is not a question a fleet can be asked")
    clients = [numbers.get(key) if isinstance(key, str) else None for key in field(head, "clients", list)]
    if not clients or None in clients:
        raise WireError("an ask names clients who are not here")
    m = len(clients)
    values: dict[str, Any] = {f: field(head, f, *kinds) for f, kinds in _PLAIN[kind].items()}
    values["memory"] = field(head, "memory", str)
    for vector in _VECTORS.get(kind, ()):
        if f"{name}/{vector}" in arrays:
            wanted = torch.float64 if vector == "weights" else torch.long
            values[vector] = array(arrays, f"{name}/{vector}", wanted, m)
    own = field(head, "own", dict, type(None))
    if own is not None:
        models: Tensor | Own = Own(field(own, "slot", str), field(own, "shared", bool))
    else:
        models = array(arrays, f"{field(head, 'rows', str)}/models", dtype, None, None).to(device)
        values["at"] = array(arrays, f"{name}/at", torch.long, m)
    if kind is Gradient:
        values["outputs"] = field(head, "outputs", int, type(None))
        if values["outputs"] is not None and not 0 <= values["outputs"] <= m:
            raise WireError("a sum has at most one output per pair")
    if kind in (Gradient, Fit) and (how := field(head, "compress", dict, type(None))) is not None:
        values["compress"] = build(Compress, how, "compress")
    if kind is Predict and (how := field(head, "coarse", dict, type(None))) is not None:
        values["coarse"] = build(Coarse, how, "coarse")
    if kind is Evaluate:
        metrics = values["metrics"]
        if metrics is not None and not all(isinstance(metric, str) for metric in metrics):
            raise WireError("metrics must be names")
        values["metrics"] = None if metrics is None else tuple(metrics)
    if kind is Fit:
        values["plan"] = build(Plan, field(head, "plan", dict), "plan")
        for rider, make in (("pull", Pull), ("drift", Drift)):
            if head.get(rider) is not None:
                values[rider] = _read_rider(
                    make, head[rider], arrays, f"{name}/{rider}", models, values, m, dtype, device
                )
        if head.get("distil") is not None:
            values["distil"] = _read_distil(head["distil"], arrays, f"{name}/distil", m, dtype, device)
        if f"{name}/columns" in arrays:
            values["columns"] = array(arrays, f"{name}/columns", torch.long, None)
    return kind(torch.tensor(clients), models, **values)


def distinct(rows: Tensor, at: Tensor | None, m: int) -> tuple[Tensor, Tensor]:
    """The distinct rows (or means of rows) that m pairs mean, and which of them each pair means."""
    if at is None:
        return rows, torch.arange(m)
    chosen, inverse = torch.unique(at.reshape(m, -1), dim=0, return_inverse=True)
    picked = rows[chosen.to(rows.device)]  # distinct × q × d
    total = picked[:, 0].clone()
    for k in range(1, picked.shape[1]):
        total += picked[:, k]
    return total / picked.shape[1] if picked.shape[1] > 1 else total, inverse


def _write_weight(weight: float | Tensor, arrays: Arrays, name: str) -> float | None:
    if isinstance(weight, Tensor) and weight.ndim:
        arrays[f"{name}/weight"] = weight.double()
        return None
    return float(weight)


def _read_weight(head: Mapping[str, Any], arrays: Arrays, name: str, m: int, dtype: torch.dtype) -> float | Tensor:
    weight = field(head, "weight", float, type(None))
    return array(arrays, f"{name}/weight", torch.float64, m).to(dtype) if weight is None else weight


def _write_rider(rider: Pull | Drift, ask: Fit, arrays: Arrays, name: str) -> dict[str, Any]:
    head: dict[str, Any] = {"start": is_start(rider, ask)}
    if not head["start"]:
        lone = rider.rows.ndim == 1
        rows = rider.rows[None] if lone else rider.rows
        at = torch.zeros(ask.m, dtype=torch.long) if lone else rider.at
        arrays[f"{name}/rows"], arrays[f"{name}/at"] = distinct(rows, at, ask.m)
    if isinstance(rider, Pull):
        head["weight"] = _write_weight(rider.weight, arrays, name)
    return head


def _read_rider(
    make: Any, head: Any, arrays: Arrays, name: str, models: Tensor | Own, values: Mapping[str, Any], m: int,
    dtype: torch.dtype, device: torch.device,
) -> Any:  # fmt: skip
    if not isinstance(head, dict):
        raise WireError(f"{name} must be an object")
    if field(head, "start", bool):
        if isinstance(models, Own):
            raise WireError(f"{name} cannot be towards the start of a model that did not travel")
        rows, at = models, values["at"]
    else:
        rows = array(arrays, f"{name}/rows", dtype, None, None).to(device)
        at = array(arrays, f"{name}/at", torch.long, m)
    return Pull(rows, _read_weight(head, arrays, name, m, dtype), at) if make is Pull else Drift(rows, at)


def _write_distil(distil: Distil, ask: Fit, arrays: Arrays, name: str) -> dict[str, Any]:
    at = torch.arange(len(distil.targets)).expand(ask.m, -1) if distil.at is None else distil.at
    chosen, inverse = torch.unique(at, return_inverse=True)
    targets = distil.targets[chosen.to(distil.targets.device)].cpu()
    head: dict[str, Any] = {}
    if distil.coarse is None:
        arrays[f"{name}/targets"] = targets
    else:
        arrays |= {f"{name}/targets/{k}": v for k, v in coarse_packed(targets, distil.coarse).items()}
        head |= {"coarse": asdict(distil.coarse), "shape": list(targets.shape)}
    arrays[f"{name}/at"] = inverse.reshape(at.shape)
    plain = {each: kind(getattr(distil, each)) for each, kind in _DISTIL.items()}
    return {**head, **plain, "weight": _write_weight(distil.weight, arrays, name)}


def _read_distil(head: Any, arrays: Arrays, name: str, m: int, dtype: torch.dtype, device: torch.device) -> Distil:
    if not isinstance(head, dict):
        raise WireError(f"{name} must be an object")
    if head.get("coarse") is None:
        targets = arrays.get(f"{name}/targets")
        if targets is None or not targets.is_floating_point() or targets.ndim < 2:
            raise WireError(f"{name} has no targets")
    else:
        targets = _read_coarse(
            build(Coarse, field(head, "coarse", dict), "coarse"), field(head, "shape", list), arrays, f"{name}/targets",
            dtype,
        )  # fmt: skip
    at = arrays.get(f"{name}/at")
    if at is None or at.dtype != torch.long or at.ndim not in (1, 2) or len(at) != m:
        raise WireError(f"{name} does not say whose targets are whose")
    weight = _read_weight(head, arrays, name, m, dtype)
    plain = {each: field(head, each, kind) for each, kind in _DISTIL.items()}
    return Distil(targets.to(device), weight=weight, at=at, **plain)


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What the answer to an ask must look like."""

    fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    rounded: tuple[str, ...] = ()  # those that may have been rounded on the way


def expected(
    ask: Ask, width: int, dtype: torch.dtype, outputs: Sequence[int] = (), metrics: Sequence[str] = ()
) -> Expected:
    """Shapes and types of an answer; `outputs` are those of a prediction of one pair, `metrics` the task's."""
    m = ask.m
    match ask:
        case Gradient(give="sum"):
            sums = ask.outputs or 0
            return Expected(
                {"sums": (dtype, (sums, width)), "weight": (dtype, (sums,)), "loss": (dtype, (m,))}, ("sums",)
            )
        case Gradient():
            return Expected({"rows": (dtype, (m, ask.sketch or width)), "loss": (dtype, (m,))}, ("rows",))
        case Fit():
            fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"loss": (dtype, (m,))}
            if ask.give != "nothing":
                fields["rows"] = (dtype, (m, travelling(ask, width)))
            if ask.distil is not None:
                fields["choice"] = (torch.long, (m,))
            return Expected(fields, ("rows",))
        case Loss():
            return Expected({"loss": (dtype, (m,))})
        case Predict():
            return Expected({"outputs": (dtype, (m, *outputs))}, ("outputs",))
        case Evaluate():
            return Expected({f"metrics/{name}": (torch.float64, (m,)) for name in ask.metrics or metrics})
    raise WireError(f"{type(ask).__name__} is not a question a fleet can be asked")


def travelling(ask: Fit, width: int) -> int:
    """How many columns of a trained row travel: those that may have moved, where the start is known to the asker."""
    return width if ask.columns is None or not _columns_suffice(ask) else len(ask.columns)


def _columns_suffice(ask: Fit) -> bool:
    return ask.give == "update" or isinstance(ask.models, Tensor)


def hash_keys(ask: Ask, clients: Sequence[int], t: int, place: int) -> Tensor:
    """By what the rows of an answer are hashed where they travel compressed: known to both sides."""
    keys = torch.tensor([clients[c] for c in ask.clients.tolist()])
    for counter in (draws.name("compress"), t, place):
        keys = draws.fold(keys, counter)
    draw = getattr(ask, "draw", None)
    return draws.fold(keys, 0 if draw is None else draw)


def _squeezed(ask: Ask) -> Compress | None:
    """How rows travel compressed: not where several are in one sum, nor where few columns travel anyway."""
    if not isinstance(ask, (Gradient, Fit)) or ask.compress is None or ask.compress.kind == "none":
        return None
    if isinstance(ask, Fit):
        return None if ask.columns is not None else ask.compress
    alone = ask.into is None or len(set(ask.into.tolist())) == ask.m == ask.outputs
    return ask.compress if alone else None


def _by_output(ask: Ask, keys: Tensor) -> Tensor:
    return keys[torch.argsort(ask.into)] if isinstance(ask, Gradient) and ask.into is not None else keys


def write_answer(ask: Ask, answer: Answer, arrays: Arrays, name: str, precision: Precision, keys: Tensor) -> None:
    """Add an answer's arrays under the name; `keys` are its `hash_keys`."""
    how = _squeezed(ask)
    arrays[f"{name}/reason"] = answer.reason.to(torch.int8)
    if isinstance(ask, Fit) and ask.columns is not None and ask.give != "nothing" and _columns_suffice(ask):
        answer = replace(answer, rows=answer.rows[:, ask.columns.to(answer.rows.device)])
    for each, value in _values(answer).items():
        if how is not None and each in ("rows", "sums"):
            arrays |= {f"{name}/{each}/{k}": v for k, v in packed(value.cpu(), how, _by_output(ask, keys)).items()}
        elif isinstance(ask, Predict) and ask.coarse is not None:
            arrays |= {f"{name}/{each}/{k}": v for k, v in coarse_packed(value.cpu(), ask.coarse).items()}
        elif each in ("rows", "sums", "outputs"):
            _write_rounded(value, arrays, f"{name}/{each}", precision)
        else:
            arrays[f"{name}/{each}"] = value


def _values(answer: Answer) -> Arrays:
    names = ("rows", "sums", "weight", "loss", "outputs", "choice")
    found = {each: value for each in names if (value := getattr(answer, each)).ndim > 1 or value.numel()}
    return found | {f"metrics/{metric}": value for metric, value in answer.metrics.items()}


def read_answer(ask: Ask, what: Expected, arrays: Arrays, name: str, precision: Precision, keys: Tensor) -> Answer:
    """An answer whose arrays are what was asked for; pairs whose values are not finite are not ok, and zero."""
    reason = array(arrays, f"{name}/reason", torch.int8, ask.m)
    if len(reason) and not (0 <= int(reason.min()) and int(reason.max()) <= 5):
        raise WireError(f"{name} has an unknown reason")
    values: Arrays = {}
    how = _squeezed(ask)
    for each, (dtype, shape) in what.fields.items():
        if how is not None and each in ("rows", "sums"):
            m, width = shape
            parts = {k: array(arrays, f"{name}/{each}/{k}", *fits[:1], *fits[1])
                     for k, fits in packing(how, m, width, dtype).items()}  # fmt: skip
            values[each] = unpacked(parts, how, width, _by_output(ask, keys), dtype)
        elif isinstance(ask, Predict) and ask.coarse is not None:
            values[each] = _read_coarse(ask.coarse, shape, arrays, f"{name}/{each}", dtype)
        elif each in what.rounded:
            values[each] = _read_rounded(arrays, f"{name}/{each}", dtype, shape, precision)
        else:
            values[each] = array(arrays, f"{name}/{each}", dtype, *shape)
    if (
        isinstance(ask, Fit)
        and ask.distil is not None
        and not bool(((values["choice"] >= 0) & (values["choice"] < ask.distil.q)).all())
    ):
        raise WireError(f"{name} has chosen a target that was not sent")
    good = reason == OK
    for each in ("rows", "loss", "outputs"):
        if each in values:
            good = good & finite(values[each].reshape(ask.m, -1))
    if isinstance(ask, Gradient) and ask.into is not None:
        sane = finite(values["sums"]) & torch.isfinite(values["weight"])
        good = good & sane[ask.into]  # a sum that is spoiled is spoiled for all that went into it
        values["sums"], values["weight"] = zeroed(values["sums"], sane), values["weight"].where(sane, 0)
    reason = torch.where((reason == OK) & ~good, NONFINITE, reason).to(torch.int8)
    for each in ("rows", "loss", "outputs"):
        if each in values:
            values[each] = zeroed(values[each], good)
    metrics = {each.partition("/")[2]: values.pop(each) for each in list(values) if each.startswith("metrics/")}
    return Answer(reason, metrics=metrics, **values)


def _read_coarse(how: Coarse, shape: Sequence[Any], arrays: Arrays, name: str, dtype: torch.dtype) -> Tensor:
    """Probabilities of this shape, classes last."""
    if len(shape) < 2 or not all(type(n) is int and n > 0 for n in shape) or math.prod(shape) > MOST:
        raise WireError(f"{name} has no shape that probabilities could have")
    whole = tuple(shape)
    parts = {
        k: array(arrays, f"{name}/{k}", *fits[:1], *fits[1]) for k, fits in coarse_packing(how, whole, dtype).items()
    }
    return coarse_unpacked(parts, how, whole, dtype)


def _write_rounded(value: Tensor, arrays: Arrays, name: str, precision: Precision) -> None:
    if precision == "full":
        arrays[name] = value
    elif precision == "int8":
        flat = value.reshape(len(value), -1)
        top = flat.abs().amax(1, keepdim=True) if flat.shape[1] else flat.new_zeros(len(flat), 1)
        scale = (top / 127).float()
        steps = torch.where(scale > 0, flat / scale.to(flat.dtype), 0).round().clamp(-127, 127)
        arrays[name] = steps.to(torch.int8).reshape(value.shape)
        arrays[f"{name}/scale"] = scale.flatten()
    else:
        arrays[name] = value.to(PRECISIONS[precision])


def _read_rounded(arrays: Arrays, name: str, dtype: torch.dtype, shape: Sequence[int], precision: Precision) -> Tensor:
    if precision == "full":
        return array(arrays, name, dtype, *shape)
    value = array(arrays, name, PRECISIONS[precision], *shape).to(dtype)
    if precision == "int8":
        scale = array(arrays, f"{name}/scale", torch.float32, shape[0]).to(dtype)
        value = value * scale.view(-1, *[1] * (len(shape) - 1))
    return value
