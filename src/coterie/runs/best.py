"""Which model is reported: of each client the one of the round with the best validation, beside the last."""

import math
from typing import Any

import torch
from torch import Tensor

from coterie.asks import Own
from coterie.fleet.base import Fleet

Measured = dict[str, dict[str, Tensor]]  # split → metric → n values on the host


class Best:
    """Per client: the round, what was measured there on every split, and the model.

    Rounds are compared by the main metric on the client's validation data, then by the loss there, then the earlier
    one stays. A client without validation data cannot choose, so its best round is its last.
    """

    def __init__(self, n: int, main: str, higher: bool, *, keep: bool) -> None:
        self.main, self.higher, self.keep = main, higher, keep
        self.round = torch.zeros(n, dtype=torch.long)
        self.measured: Measured = {}
        self.rows: list[Tensor] = []
        self.buffers: list[dict[str, Tensor]] = []
        self.mean = float("nan")  # best mean over clients so far, for patience
        self.stale = 0  # evaluations since

    def update(self, done: int, now: Measured) -> Tensor:
        """Take what was measured after `done` rounds; which clients did better than before."""
        better = self._better(now)
        self.round = torch.where(better, done, self.round)
        if not self.measured:
            self.measured = {split: {k: v.clone() for k, v in values.items()} for split, values in now.items()}
        else:
            for split, values in now.items():
                for metric, value in values.items():
                    self.measured[split][metric] = torch.where(better, value, self.measured[split][metric])
        mean = float(now["validation"][self.main].nanmean()) if "validation" in now else float("nan")
        if math.isnan(mean) or math.isnan(self.mean) or self._above(mean, self.mean):
            self.mean, self.stale = mean, 0
        else:
            self.stale += 1
        return better

    def take(self, better: Tensor, fleet: Fleet, models: Tensor | Own, averaged: bool) -> None:
        """Keep the models of those who did better."""
        if not self.keep or not bool(better.any()):
            return
        rows, buffers = revealed(fleet, models, averaged=averaged)
        if not self.rows:
            self.rows, self.buffers = [r.cpu() for r in rows], buffers
        for i in better.nonzero().flatten().tolist():
            self.rows[i] = rows[i].to("cpu", copy=True)
            self.buffers[i] = buffers[i]

    def _better(self, now: Measured) -> Tensor:
        everyone = torch.ones(len(self.round), dtype=torch.bool)
        if "validation" not in now or not self.measured:
            return everyone
        new, old = now["validation"], self.measured["validation"]
        a, b = (new[self.main], old[self.main]) if self.higher else (-new[self.main], -old[self.main])
        tied = (a == b) & (new["loss"] < old["loss"])
        return (a > b) | tied | b.isnan()

    def _above(self, a: float, b: float) -> bool:
        return a > b if self.higher else a < b

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "round": self.round,
            "measured": self.measured,
            "rows": self.rows,
            "buffers": self.buffers,
            "mean": self.mean,
            "stale": self.stale,
        }

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


def revealed(fleet: Fleet, models: Tensor | Own, *, averaged: bool) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Row and buffers of every client as they are evaluated; averaged buffers are those of one architecture."""
    memory = models.slot if isinstance(models, Own) else "model"
    rows = fleet.reveal(models)
    buffers = [{k: v.cpu() for k, v in fleet.buffers_of(i, memory).items()} for i in range(fleet.n)]
    if averaged and any(buffers):
        for a in set(fleet.population.architecture[: fleet.n]):
            these = [i for i in range(fleet.n) if fleet.population.architecture[i] == a]
            mean = {
                k: torch.stack([buffers[i][k].double() for i in these]).mean(0).to(v.dtype)
                for k, v in buffers[these[0]].items()
            }
            for i in these:
                buffers[i] = mean
    return rows, buffers


def named(keys: tuple[str, ...], rows: list[Tensor], buffers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Models as a record names them."""
    found = {f"{key}/row": row for key, row in zip(keys, rows, strict=True)}
    for key, own in zip(keys, buffers, strict=True):
        found |= {f"{key}/buffers/{name}": value for name, value in own.items()}
    return found
