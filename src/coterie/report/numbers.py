"""How numbers are written for people."""

import math
from typing import Any

_SHARES = ("accuracy", "own_classes_accuracy", "balanced_accuracy", "macro_f1", "dice")  # shown in per cent
NOTHING = "–"


def unit(metric: str) -> tuple[float, str]:
    """By what a metric is multiplied to be shown, and its unit."""
    return (100.0, "%") if metric in _SHARES else (1.0, "")


def title(metric: str) -> str:
    """A metric's name as a person writes it, with its unit."""
    named = metric.replace("_", " ")
    return f"{named} ({unit(metric)[1]})" if unit(metric)[1] else named


def value(metric: str, number: Any) -> str:
    """One value of a metric, without its unit."""
    if number is None or not math.isfinite(number):
        return NOTHING
    scale, sign = unit(metric)
    return f"{scale * number:.1f}" if sign else f"{number:.4g}"


def human(count: float) -> str:
    """A count in three digits: 1.23 M."""
    power = 0
    while abs(count) >= 999.5 and power < 5:
        count, power = count / 1000, power + 1
    digits = f"{count:.0f}" if abs(count) >= 99.95 or power == 0 else f"{count:.3g}"
    return f"{digits} {('', 'k', 'M', 'G', 'T', 'P')[power]}".strip()
