"""`coterie.train`: one algorithm on a fleet, from Python, without a record on disk."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.algorithm import Algorithm
from coterie.algorithms import make
from coterie.errors import SettingError
from coterie.experiments.budget import Budget
from coterie.fleet.base import Fleet
from coterie.runs.runner import drive
from coterie.settings import hint


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run has made: a personal model per client, who listened to whom, and how good it is."""

    fleet: Fleet
    graph: NDArray[np.float64]  # n×n after the last round: row i says how much client i listens to each client
    metrics: dict[str, float]  # means over clients, each at its best validation round
    clients: dict[str, list[float]]  # the same for every client
    history: list[dict[str, Any]]  # every evaluation, as the record's metrics.jsonl has it
    ledger: dict[str, Any]  # numbers and bytes moved
    rows: dict[str, dict[str, Tensor]]  # "best" and "last": rows and buffers by client

    def model(self, key: str, which: str = "best") -> nn.Module:
        """A client's own model, ready to use: of its best validation round, or the last."""
        if key not in self.fleet.keys:
            raise SettingError(f"no client is called {key!r}: {hint(key, self.fleet.keys)}")
        if which not in self.rows:
            raise SettingError(f"a model is the 'best' or the 'last', not {which!r}")
        kept = self.rows[which]
        module = self.fleet.module(self.fleet.keys.index(key), kept[f"{key}/row"])
        own = dict(module.named_buffers())
        for name, value in kept.items():
            if name.startswith(f"{key}/buffers/"):
                own[name.removeprefix(f"{key}/buffers/")].copy_(value)
        return module


def train(
    algorithm: str | Algorithm,
    fleet: Fleet,
    rounds: int,
    *,
    evaluate_every: int | None = None,
    patience: int | None = None,
    **settings: Any,
) -> Trained:
    """Run an algorithm for some rounds. `settings` are its hyper-parameters: `plan={"lr": 0.1}`, `rho=0.1` …

    The fleet starts afresh, whatever ran on it before. Models are measured on validation and test data, or on
    training data where there are no others, every `evaluate_every` rounds (default: twenty times in all).
    """
    if isinstance(algorithm, str):
        algorithm = make(algorithm, settings, rounds=rounds, **fleet.population.told)
    elif settings:
        raise SettingError(f"{type(algorithm).__name__} is made already: {', '.join(settings)} cannot be set")
    every = evaluate_every or max(1, rounds // 20)
    fleet.reset()
    done = drive(fleet, algorithm, Budget(rounds=rounds, evaluate_every=every, patience=patience))
    assert done.graph is not None
    return Trained(
        fleet=fleet,
        graph=done.graph.cpu().numpy(),
        metrics=done.result["metrics"],
        clients=done.result["clients"],
        history=done.lines,
        ledger=done.result["ledger"],
        rows=done.models,
    )
