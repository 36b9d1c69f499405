"""Reads the few pickles that publishers offer, without letting a pickle run anything.

Only the names in `_ALLOWED` mean something, and each means an inert stand-in of ours that keeps data; any other name
is refused. The interpreter is Python's own one in Python: the one in C lets a few bytes ask for gigabytes.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError

_KINDS = "biufSUO"


def _dtype(text: Any, *_: Any) -> "_Dtype":
    return _Dtype(text)


class _Dtype:
    """A dtype that is only a word and a byte order."""

    def __init__(self, text: Any) -> None:
        if isinstance(text, bytes):
            text = text.decode("ascii")
        if not isinstance(text, str) or len(text) > 8 or text[:1] not in _KINDS or not text[1:].isdigit():
            raise pickle.UnpicklingError(f"a dtype {text!r:.40}")
        self.text, self.order = text, "="

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if order in ("<", ">"):
            self.order = order

    @property
    def real(self) -> np.dtype[Any]:
        kind = np.dtype(self.order + self.text if self.text[0] != "O" else "O")
        if not 0 < kind.itemsize <= 1024:
            raise pickle.UnpicklingError(f"a dtype {self.text!r}")
        return kind


def _shaped(data: Any, dtype: _Dtype, shape: Any, fortran: bool) -> NDArray[Any]:
    shape = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
    if len(shape) > 8 or any(extent < 0 for extent in shape):
        raise pickle.UnpicklingError(f"an array of shape {shape}")
    if dtype.text[0] == "O":
        flat = np.empty(len(data), dtype=object)
        flat[:] = data
    else:
        flat = np.frombuffer(data.encode("latin-1") if isinstance(data, str) else data, dtype=dtype.real)
    return flat.reshape(shape, order="F" if fortran else "C")


class Array:
    """Stands in for numpy's array while a pickle is read; `value` is the array."""

    value: NDArray[Any]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _shaped(data, dtype, shape, bool(fortran))


class Inert:
    """Stands in for any other class that is known: keeps what it was built from."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _reconstruct(*_: Any) -> Array:
    return Array()


def _frombuffer(data: Any, dtype: _Dtype, shape: Any, order: Any) -> NDArray[Any]:
    return _shaped(data, dtype, shape, order == "F")


def _scalar(dtype: _Dtype, data: Any) -> Any:
    return _shaped(data, dtype, (1,), False)[0]


def _encode(text: str, encoding: str = "latin-1") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise pickle.UnpicklingError(f"an encoding {encoding!r:.40}")
    return text.encode(encoding)


def _empty() -> bytes:
    """How empty bytes are written for Python 2."""
    return b""


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("_codecs", "encode"): _encode,
        ("__builtin__", "bytes"): _empty,
        ("numpy", "ndarray"): Inert,
        ("numpy", "dtype"): _dtype,
        ("builtins", "slice"): Inert,
        ("pandas._libs.internals", "_unpickle_block"): Inert,
    }
    for core in ("numpy.core", "numpy._core"):
        known[f"{core}.multiarray", "_reconstruct"] = _reconstruct
        known[f"{core}.multiarray", "scalar"] = _scalar
        known[f"{core}.numeric", "_frombuffer"] = _frombuffer
    for module, names in {
        "pandas.core.frame": ("DataFrame",),
        "pandas.core.internals.managers": ("BlockManager",),
        "pandas.core.indexes.base": ("Index", "_new_Index"),
        "pandas.core.indexes.range": ("RangeIndex",),
    }.items():
        for name in names:
            known[module, name] = Inert
    return known


_Interpreter: Any = pickle._Unpickler  # the one written in Python


class _Reader(_Interpreter):  # type: ignore[misc]  # known at run time only
    dispatch: ClassVar[dict[int, Any]] = dict(_Interpreter.dispatch)

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._allowed = _allowed()
        self._size = len(content)

    def find_class(self, module: str, name: str) -> Any:
        """Only what is known has a meaning."""
        try:
            return self._allowed[module, name]
        except (KeyError, TypeError):
            raise pickle.UnpicklingError(f"the name {module!s:.60}.{name!s:.60}, which no data need") from None

    def load_bytearray8(self) -> None:
        """Python's own version makes room for as many bytes as are claimed before it looks whether they are there."""
        size = int.from_bytes(self.read(8), "little")
        if size > self._size:
            raise pickle.UnpicklingError(f"{size} bytes, more than the file has")
        self.append(bytearray(self.read(size)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def plain(value: Any) -> Any:
    """The array that a stand-in holds; anything else as it is."""
    return value.value if isinstance(value, Array) else value


def loads(name: str, content: bytes) -> Any:
    """The data in a pickle: text of Python 2 stays bytes; an array, alone or in a dictionary, becomes numpy's."""
    try:
        found = _Reader(content).load()
        if isinstance(found, dict):
            return {key: plain(value) for key, value in found.items()}
        return plain(found)
    except Exception as problem:  # a damaged pickle can fail in any way, and every way means the same
        raise DataError(f"{name} is refused: it is damaged, or asks for {problem}") from problem
