"""HypCluster (Mansour, Mohri, Ro and Suresh 2020): k hypotheses, and everyone trains the one that fits it best.

Three Approaches for Personalization with Applications to Federated Learning, arXiv 2002.10619. The rounds are IFCA's
(see there): the hypothesis of lowest loss on the client's data, a few steps of training, and an average, which
here goes by the clients' amounts of data. What differs is the beginning, `start="clients"`: some clients train one
initial model, and each hypothesis begins with what one of them made of it.

Travels: up m·d + m·clusters, down m·d + m·clusters·d; phases 2; graphs 1; rows max(n, m·clusters).
"""

from dataclasses import dataclass
from typing import Literal

from coterie.algorithms.ifca import IFCA


@dataclass(frozen=True)
class HypCluster(IFCA):
    """IFCA by data, from models of single clients."""

    weighted: bool = True
    start: Literal["random", "spread", "clients"] = "clients"
