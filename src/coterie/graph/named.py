"""A function picked by its name and given named settings, or one sentence saying what would be right."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from coterie.errors import SettingError

Result = TypeVar("Result")


def _hint(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"


def call(kind: str, name: str, table: Mapping[str, Callable[..., Result]], *given: Any, **settings: Any) -> Result:
    """`table[name](*given, **settings)`; `kind` says in an error what the names are names of."""
    if name not in table:
        raise SettingError(f"no {kind} is called {name!r}: {_hint(name, sorted(table))}")
    function = table[name]
    parameters = list(inspect.signature(function).parameters.values())[len(given) :]
    known = [p.name for p in parameters]
    for setting in settings:
        if setting not in known:
            raise SettingError(f"{kind} {name} has no setting {setting!r}: {_hint(setting, known)}")
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
