"""Coterie: personal models that find out, while training, whom to learn from.

The public names are loaded when they are first used, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.algorithm import Algorithm, Info
    from coterie.asks import Plan
    from coterie.data.population import Client, Population, deal, population
    from coterie.errors import CoterieError
    from coterie.fleet.loop import LoopFleet
    from coterie.fleet.participation import Participation
    from coterie.fleet.stacked import StackedFleet
    from coterie.training import Trained, train

__version__ = "0.1.0"

_HOMES = {
    "Algorithm": "coterie.algorithm",
    "Client": "coterie.data.population",
    "CoterieError": "coterie.errors",
    "Info": "coterie.algorithm",
    "LoopFleet": "coterie.fleet.loop",
    "Participation": "coterie.fleet.participation",
    "Plan": "coterie.asks",
    "Population": "coterie.data.population",
    "StackedFleet": "coterie.fleet.stacked",
    "Trained": "coterie.training",
    "deal": "coterie.data.population",
    "population": "coterie.data.population",
    "train": "coterie.training",
}
__all__ = [
    "Algorithm",
    "Client",
    "CoterieError",
    "Info",
    "LoopFleet",
    "Participation",
    "Plan",
    "Population",
    "StackedFleet",
    "Trained",
    "deal",
    "population",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
