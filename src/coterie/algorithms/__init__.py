"""The registry of algorithms: one file each, one line here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.algorithm import Algorithm
from coterie.algorithms.allforone import AllForOne
from coterie.algorithms.apfl import APFL
from coterie.algorithms.cobo import CoBo
from coterie.algorithms.comet import COMET
from coterie.algorithms.d_psgd import DPSGD
from coterie.algorithms.dada import Dada
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.dsfl import DSFL
from coterie.algorithms.fedadp import FedAdp
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.federated_clustering import FederatedClustering
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.fedmd import FedMD
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.finetuned_fedavg import FinetunedFedAvg
from coterie.algorithms.hypcluster import HypCluster
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.kt_pfl import KTpFL
from coterie.algorithms.local import Local
from coterie.algorithms.meritfed import MeritFed
from coterie.algorithms.meta_l2c import MetaL2C
from coterie.algorithms.oracle import Oracle
from coterie.algorithms.per_fedavg import PerFedAvg
from coterie.algorithms.per_fedavg_global import PerFedAvgGlobal
from coterie.algorithms.robust import Robust
from coterie.algorithms.scool import SCooL
from coterie.algorithms.sgd_full import SGDFull
from coterie.algorithms.sgd_ideal import SGDIdeal
from coterie.algorithms.sgd_random import SGDRandom
from coterie.algorithms.tawt import TAWT
from coterie.algorithms.validation_weights import ValidationWeights
from coterie.algorithms.wga_bc import WGABC
from coterie.errors import SettingError
from coterie.settings import build, hint

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "finetuned_fedavg": FinetunedFedAvg,
    "oracle": Oracle,
    "cobo": CoBo,
    "allforone": AllForOne,
    "ditto": Ditto,
    "apfl": APFL,
    "wga_bc": WGABC,
    "ifca": IFCA,
    "federated_clustering": FederatedClustering,
    "validation_weights": ValidationWeights,
    "fedfomo": FedFomo,
    "scool": SCooL,
    "meritfed": MeritFed,
    "sgd_full": SGDFull,
    "sgd_ideal": SGDIdeal,
    "sgd_random": SGDRandom,
    "fedadp": FedAdp,
    "tawt": TAWT,
    "robust": Robust,
    "d_psgd": DPSGD,
    "dada": Dada,
    "comet": COMET,
    "meta_l2c": MetaL2C,
    "fedprox": FedProx,
    "per_fedavg": PerFedAvg,
    "per_fedavg_global": PerFedAvgGlobal,
    "hypcluster": HypCluster,
    "dsfl": DSFL,
    "fedmd": FedMD,
    "kt_pfl": KTpFL,
}

# name-variant → the settings that make the variant
VARIANTS: dict[str, dict[str, Any]] = {
    "cobo-reference": {
        "lr": 0.1,
        "schedule": "power",
        "c": 2.0,
        "momentum": 0.9,
        "warmup": 2,
        "shared": False,
        "select_first": False,
    },
    "allforone-bin": {"criterion": "binary"},
    "allforone-cont": {"criterion": "continuous"},
    "allforone-oracle": {"criterion": "cluster"},
    "allforone-bin-reference": {"criterion": "binary", "strict": True, "sigma": "data"},
    "allforone-cont-reference": {"criterion": "continuous", "sigma": "equal"},
    "ifca-spread": {"start": "spread"},
    "d_psgd-epochs": {"plan": {"epochs": 5}},
    "comet-one": {"c": 1},
    "comet-silhouette": {"c": "silhouette"},
    "comet-adaptive": {"adaptive": True},
    "comet-8bit": {"coarse": {"bits": 8}},
    "comet-4bit": {"coarse": {"bits": 4}},
    "comet-top": {"coarse": {"bits": 4, "top": 1}},
    "scool-sbm": {"prior": "sbm"},
    "scool-attention": {"prior": "attention"},
    "scool-mmsbm": {"prior": "mmsbm"},
    "scool-dirac": {"prior": "dirac"},
    "scool-sbm-reference": {
        "prior": "sbm",
        "settings": {"communities": 2, "learn": False, "reference": True},
        "batch": 10,
        "warmup": 11,
    },
    "scool-attention-reference": {
        "prior": "attention_reference",
        "batch": 10,
        "warmup": 11,
        "temperature": 2.0,
    },
    "meritfed-md": {"mirror_batch": None},
    "meritfed-smd": {"mirror_batch": 90},
    "meritfed-averaged": {"mirror_batch": 90, "average": True, "cool": 400},
    "meritfed-zo": {"order": "zeroth"},
    "meritfed-all": {"who": "all"},
    "meritfed-shared": {"who": "shared"},
    "kt_pfl-reference": {"rule": "reference"},
    "robust-krum": {"rule": "krum"},
    "robust-multikrum": {"rule": "multi_krum"},
    "robust-trimmed": {"rule": "trimmed_mean"},
    "robust-median": {"rule": "median"},
    "robust-geometric": {"rule": "geometric_median"},
}


def make(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    rounds: int | None = None,
    **told: Sequence[Any] | None,
) -> Algorithm:
    """An algorithm by name, `name-variant` included, with settings as plain values.

    What the algorithm wants to know of the run (`rounds`) and of its population (`groups`, `targets`, `pools`) is
    filled in where it is not set.
    """
    kind = ALGORITHMS.get(name.partition("-")[0])
    if kind is None or ("-" in name and name not in VARIANTS):
        raise SettingError(f"no algorithm is called {name!r}: {hint(name, [*ALGORITHMS, *VARIANTS])}")
    fields = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = _over(VARIANTS.get(name, {}), settings or {})
    if rounds is not None:
        if "rounds" in fields:
            values.setdefault("rounds", rounds)
        if isinstance(values.get("plan"), Mapping):
            values["plan"] = {"rounds": rounds, **values["plan"]}
    for what, known in told.items():
        if known is not None and what in fields:
            values.setdefault(what, tuple(known))
    return build(kind, values, name)


def _over(variant: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A variant's settings with those given on top; of a table in both, entry by entry."""
    merged = dict(variant)
    for key, value in given.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and {"steps", "epochs"} & set(value):
            below = {k: v for k, v in below.items() if k not in ("steps", "epochs")}  # the one replaces the other
        merged[key] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
