"""Names and settings given by people: what they pick, or one sentence saying what would be right."""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from coterie.errors import SettingError

Result = TypeVar("Result")


def hint(word: str, known: Iterable[str]) -> str:
    """What was probably meant, or all there is."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"


def call(kind: str, name: str, table: Mapping[str, Callable[..., Result]], /, *given: Any, **settings: Any) -> Result:
    """`table[name](*given, **settings)`; `kind` says in an error what the names are names of."""
    if name not in table:
        raise SettingError(f"no {kind} is called {name!r}: {hint(name, sorted(table))}")
    function = table[name]
    parameters = list(inspect.signature(function).parameters.values())[len(given) :]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)  # then somebody further on knows the settings
    parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    known = [p.name for p in parameters]
    for setting in settings:
        if setting not in known and not passes_on:
            raise SettingError(f"{kind} {name} has no setting {setting!r}: {hint(setting, known)}")
    for p in parameters:
        if p.default is p.empty and p.name not in settings:
            raise SettingError(f"{kind} {name} needs the setting {p.name!r}")
    return function(*given, **settings)


def whole(what: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number in its range."""
    if (
        isinstance(value, bool)
        or not hasattr(value, "__index__")
        or value < least
        or (most is not None and value > most)
    ):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SettingError(f"{what} must be a whole number {span}, not {value!r}")
    return int(value)


def real(what: str, value: Any, above: float, most: float = float("inf"), *, closed: bool = False) -> float:
    """A number in (above, most], or in [above, most] where `closed`."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (above < value <= most or (closed and value == above)) or value == float("inf"):
        low = f"at least {above:g}" if closed else f"above {above:g}"
        raise SettingError(
            f"{what} must be a number {low}{f' and at most {most:g}' if most < float('inf') else ''}, not {value!r}"
        )
    return float(value)


def build(kind: type[Result], settings: Mapping[str, Any], where: str) -> Result:
    """A dataclass from plain values, as a TOML file or a command line has them; `where` is the key they stand under.

    Nested tables make nested dataclasses. Names must exist and types must fit; the class itself checks ranges.
    """
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(cast(Any, kind)) if f.init}
    values = {}
    for name, value in settings.items():
        if name not in known:
            raise SettingError(f"{where} has no setting {name!r}: {hint(name, known)}")
        factory = known[name].default_factory
        start = known[name].default if factory is dataclasses.MISSING else factory()
        start = None if start is dataclasses.MISSING else start
        values[name] = _fit(hints[name], value, start, f"{where}.{name}")
    for name, f in known.items():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in values:
            raise SettingError(f"{where} needs the setting {name!r}")
    try:
        return kind(**values)
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from None


def _fit(wanted: Any, value: Any, start: Any, where: str) -> Any:
    """The value as the type that is wanted, or a sentence."""
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        if isinstance(value, wanted):
            return value
        if not isinstance(value, Mapping):
            raise SettingError(f"{where} must be a table, not {value!r}")
        given = {f.name: getattr(start, f.name) for f in dataclasses.fields(wanted)} if start is not None else {}
        if {"steps", "epochs"} & set(value):  # the one replaces the other
            given = {k: v for k, v in given.items() if k not in ("steps", "epochs")}
        return build(wanted, {**given, **value}, where)
    if origin in (typing.Union, types.UnionType):
        if (value is None or value == "none") and type(None) in inside:
            return None
        errors = []
        for kind in inside:
            if kind is not type(None):
                try:
                    return _fit(kind, value, start, where)
                except SettingError as error:
                    errors.append(error)
        raise errors[0]
    if origin is typing.Literal:
        if value not in inside:
            raise SettingError(f"{where} must be one of {', '.join(map(repr, inside))}, not {value!r}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise SettingError(f"{where} must be a list, not {value!r}")
        kinds = [inside[0]] * len(value) if len(inside) == 2 and inside[1] is Ellipsis else list(inside)
        if len(kinds) != len(value):
            raise SettingError(f"{where} must have {len(kinds)} entries, not {len(value)}")
        return tuple(_fit(k, v, None, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if wanted in (int, str, bool):
        if type(value) is wanted:
            return value
        names = {int: "a whole number", str: "text", bool: "true or false"}
        raise SettingError(f"{where} must be {names[wanted]}, not {value!r}")
    if wanted is float:
        raise SettingError(f"{where} must be a number, not {value!r}")
    return value
