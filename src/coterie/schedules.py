"""Learning rates over a run, one tick a round, computed by torch's own schedulers."""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.optim import lr_scheduler as s

from coterie.errors import SettingError


def _ticks(given: str, usual: int) -> int:
    """How many rounds, as text or, where there is none, as usual: at least one."""
    if given and int(given) < 1:
        raise ValueError(f"{given} rounds; it takes at least one")
    return int(given) if given else max(1, usual)


def _step(optimiser: Any, rounds: int, every: str = "", factor: str = "0.1") -> Any:
    return s.StepLR(optimiser, _ticks(every, rounds // 2), float(factor))


def _warm(optimiser: Any, rounds: int, ticks: str = "") -> Any:
    warm = _ticks(ticks, rounds // 20)
    rise = s.LinearLR(optimiser, 1 / (warm + 1), 1.0, warm)
    fall = s.LinearLR(optimiser, 1.0, 0.0, max(1, rounds - warm))
    return s.SequentialLR(optimiser, [rise, fall], [warm])


SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": lambda optimiser, rounds: s.ConstantLR(optimiser, 1.0, 1),
    "linear": lambda optimiser, rounds: s.LinearLR(optimiser, 1.0, 0.0, rounds),
    "cosine": lambda optimiser, rounds: s.CosineAnnealingLR(optimiser, rounds),
    "step": _step,  # step:80:0.1 multiplies by 0.1 every 80 rounds
    "warm-linear": _warm,  # warm-linear:10 rises for 10 rounds, then falls to zero
}


@lru_cache(maxsize=256)
def rates(schedule: str, lr: float, rounds: int) -> tuple[float, ...]:
    """The rate of each round. A schedule is a name, with its arguments after colons: `step:80:0.1`."""
    name, *arguments = schedule.split(":")
    if name not in SCHEDULES:
        raise SettingError(f"no schedule {name!r}: there are {', '.join(SCHEDULES)}")
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR warns of its own use of step(epoch)
        try:
            scheduler = SCHEDULES[name](optimiser, rounds, *arguments)
        except (TypeError, ValueError) as error:
            raise SettingError(f"schedule {schedule!r}: {error}") from None
        values = []
        for _ in range(rounds):
            values.append(float(optimiser.param_groups[0]["lr"]))
            optimiser.step()
            scheduler.step()
    if not all(0 <= value < float("inf") for value in values):
        raise SettingError(f"schedule {schedule!r}: its rates must be finite and at least 0")
    return tuple(values)
