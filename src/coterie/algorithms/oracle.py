"""Oracle: FedAvg inside each true group. What a method that finds the groups at once could reach.

Travels: up m·d, down m·d; phases 1; graphs 1; rows n.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.algorithms.fedavg import shares
from coterie.asks import Fit, Plan
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised


@dataclass(frozen=True)
class OracleState:
    """One model per group, and who belongs where."""

    x: Tensor  # groups × d
    group: Tensor  # n


@dataclass(frozen=True)
class Oracle(Algorithm):
    """FedAvg inside given groups."""

    groups: tuple[int, ...] = ()  # the group of each client
    plan: Plan = field(default_factory=lambda: Plan(epochs=1))
    weighted: bool = True

    absent_stays = False

    def init(self, fleet: Fleet) -> OracleState:
        """The shared initial model, once per group."""
        if len(self.groups) != fleet.n:
            raise SettingError(
                f"oracle must be told the true group of each of {fleet.n} clients, not {len(self.groups)}"
            )
        _, group = torch.unique(torch.tensor(self.groups), return_inverse=True)
        return OracleState(fleet.initial()[0].repeat(int(group.max()) + 1, 1), group)

    def round(self, fleet: Fleet, state: OracleState) -> tuple[OracleState, Info]:
        """Everyone trains from the model of its group, which moves by the average update in the group."""
        answer = fleet.ask(Fit(fleet.everyone, state.x, self.plan.at(fleet.t), at=state.group, give="update"))
        p = shares(fleet, answer.ok, self.weighted)
        member = torch.nn.functional.one_hot(state.group).T.double()  # groups × n
        weight = member * p
        weight = weight / weight.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        x = state.x + weight.to(answer.rows) @ answer.rows
        return OracleState(x, state.group), Info(row_normalised(weight[state.group]), answer.ok, answer.loss)

    def personal(self, state: OracleState) -> Tensor:
        """The model of the client's group."""
        return state.x[state.group.to(state.x.device)]
