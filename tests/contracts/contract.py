"""What the contracts run an algorithm with. A registered algorithm is in the suite without a line here."""

import dataclasses
import re
import sys
from typing import Any

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms import ALGORITHMS, make
from coterie.asks import Own
from coterie.data.population import Population
from coterie.fleet.base import Fleet

ROUNDS = 5
PLAN = {"steps": 3, "batch": 6, "lr": 0.1, "momentum": 0.5}


def algorithm(name: str, population: Population, **settings: Any) -> Algorithm:
    """An algorithm with its defaults, on a short plan where it has one."""
    fields = {f.name for f in dataclasses.fields(ALGORITHMS[name])}  # type: ignore[arg-type]
    plan: dict[str, Any] = {"plan": PLAN} if "plan" in fields else {}
    plan |= dict.fromkeys(fields & {"batch", "b_alpha"}, 6)
    return make(name, plan | settings, rounds=ROUNDS, groups=population.groups)


def run(fleet: Fleet, algo: Algorithm, rounds: int = ROUNDS) -> tuple[Any, list[Info]]:
    """Plainly: round after round."""
    state, infos = algo.init(fleet), []
    for t in range(rounds):
        fleet.begin(t)
        state, info = algo.round(fleet, state)
        infos.append(info)
    return state, infos


def rows(fleet: Fleet, algo: Algorithm, state: Any) -> list[Tensor]:
    """The personal model of every client."""
    return [row.clone() for row in fleet.reveal(algo.personal(state))]


def tensors(state: Any) -> list[Tensor]:
    """Every tensor of an algorithm's state."""
    if isinstance(state, Tensor):
        return [state]
    if dataclasses.is_dataclass(state):
        return [t for f in dataclasses.fields(state) for t in tensors(getattr(state, f.name))]
    if isinstance(state, dict):
        return [t for v in state.values() for t in tensors(v)]
    if isinstance(state, list | tuple):
        return [t for v in state for t in tensors(v)]
    return []


def travels(algo: Algorithm) -> dict[str, str]:
    """The line of the docstring that says what travels and what it costs."""
    text = sys.modules[type(algo).__module__].__doc__ or ""
    found = re.search(r"Travels: up (.+?), down (.+?); phases (.+?); graphs (.+?); rows (.+?)\.(?:\s|$)", text)
    assert found, f"{type(algo).__name__} does not say what travels"
    return dict(zip(("up", "down", "phases", "graphs", "rows"), found.groups(), strict=True))


def value(formula: str, **names: int) -> int:
    """What a formula of the docstring says."""
    plain = formula.replace("·", "*").replace("²", "**2").removeprefix("≤")
    result: int = eval(plain.strip(), {"__builtins__": {}, "max": max}, names)
    return result


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


__all__ = ["ROUNDS", "Own", "algorithm", "rows", "run", "same", "tensors", "travels", "value"]
