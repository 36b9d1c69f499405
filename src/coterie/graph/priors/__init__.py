"""Priors of SCooL's cooperation graph, by name: one file each, one line here. `base` says what a prior is."""

from coterie.graph.priors.attention import Attention
from coterie.graph.priors.attention_reference import AttentionReference
from coterie.graph.priors.base import Beliefs, Clients, Evidence, Prior
from coterie.graph.priors.dirac import Dirac
from coterie.graph.priors.mmsbm import MMSBM
from coterie.graph.priors.sbm import SBM

PRIORS: dict[str, type[Prior]] = {
    "dirac": Dirac,
    "sbm": SBM,
    "attention": Attention,
    "attention_reference": AttentionReference,
    "mmsbm": MMSBM,
}

__all__ = [
    "MMSBM",
    "PRIORS",
    "SBM",
    "Attention",
    "AttentionReference",
    "Beliefs",
    "Clients",
    "Dirac",
    "Evidence",
    "Prior",
]
