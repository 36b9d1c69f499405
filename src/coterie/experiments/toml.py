"""Plain values as TOML: the standard library reads it and does not write it."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def value(v: Any) -> str:
    """One value in one line; what is None is written "none", as settings read it."""
    if isinstance(v, bool):
        return "true" if v else "false"
    if v is None:
        return '"none"'
    if isinstance(v, Mapping):
        inside = ", ".join(f"{_key(k)} = {value(x)}" for k, x in v.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(v, list | tuple):
        return f"[{', '.join(value(x) for x in v)}]"
    if isinstance(v, int | float):
        return repr(v)
    return json.dumps(str(v), ensure_ascii=False)


def dump(tables: Mapping[str, Any]) -> str:
    """A document: values first, then a header per table, and one per table of a table of tables."""
    lines = [f"{_key(k)} = {value(v)}" for k, v in tables.items() if not isinstance(v, Mapping)]
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            continue
        if table and all(isinstance(v, Mapping) for v in table.values()):
            parts = {f"{_key(name)}.{_key(k)}": v for k, v in table.items()}
        else:
            parts = {_key(name): table}
        for header, part in parts.items():
            lines += ["", f"[{header}]", *(f"{_key(k)} = {value(v)}" for k, v in part.items())]
    return "\n".join(lines) + "\n"
