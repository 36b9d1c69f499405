"""The `[run]` table: how long a run is, when it is measured, and what of it is kept."""

from dataclasses import dataclass
from typing import Literal

from coterie.errors import SettingError
from coterie.settings import whole


@dataclass(frozen=True)
class Budget:
    """Rounds are counted when they are done: an evaluation "at round 10" sees what ten rounds have made."""

    rounds: int
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluate_every: int = 10  # besides the start and the end
    checkpoint_every: int = 10
    patience: int | None = None  # stop after so many evaluations without a better mean on validation data
    after_local: bool = False  # also measure every model after one more local training by the algorithm's plan
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")  # what is measured
    metrics: tuple[str, ...] | None = None  # which, besides the main metric and the loss; default: all the task has
    keep_models: bool = True  # whether the record holds models; the best ones are in every checkpoint as well
    graphs: int = 40  # about how many graphs the record holds
    graphs_first: int = 3  # rounds at the start whose graphs are all kept
    fleet: Literal["stacked", "loop"] = "stacked"
    workers: int = 1  # algorithms at a time, each on a core of its own: where models are too small for more
    dtype: Literal["float32", "float64"] = "float32"
    autocast: Literal["bfloat16", "float16"] | None = None
    track: tuple[Literal["tensorboard"], ...] = ()  # besides the record itself

    def __post_init__(self) -> None:
        """Refuse what no run could follow."""
        whole("rounds", self.rounds, 1)
        whole("evaluate_every", self.evaluate_every, 1)
        whole("checkpoint_every", self.checkpoint_every, 1)
        whole("graphs", self.graphs, 1)
        whole("graphs_first", self.graphs_first, 0)
        whole("workers", self.workers, 1)
        if self.patience is not None:
            whole("patience", self.patience, 1)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise SettingError(f"seeds must be different whole numbers of at least 0, not {list(self.seeds)}")
        if not self.splits:
            raise SettingError("splits must name train, validation or test, at least one of them")

    def evaluates(self, done: int) -> bool:
        """Whether models are measured when so many rounds are done."""
        return done % self.evaluate_every == 0 or done == self.rounds

    def draws(self, done: int) -> bool:
        """Whether the graph of this round is kept: the first few, then evaluation rounds, at most about `graphs`."""
        evaluations = -(-self.rounds // self.evaluate_every)
        step = self.evaluate_every * max(1, -(-evaluations // self.graphs))
        return done <= self.graphs_first or done % step == 0 or done == self.rounds

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is due; the end needs none of its own but for the others of a batch."""
        return done % self.checkpoint_every == 0
