"""The `[population]` table: who there is. A `kind` names the function that makes the clients of a seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from coterie import models, tasks
from coterie.data.augment import Augment
from coterie.data.dataset import Dataset
from coterie.data.holding import Public, Schema, declare
from coterie.data.partitions import Partition
from coterie.data.partitions import partition as cut
from coterie.data.population import Client, Population, deal
from coterie.data.population import online as fresh
from coterie.data.population import population as packed
from coterie.data.public import Shown, borrow, keep_back
from coterie.data.synthetic import LeastSquares, Linear, MeanEstimation, Quadratics, Synthetic, Volumes
from coterie.data.tabular import prepare
from coterie.errors import CoterieError, SettingError
from coterie.settings import build, call, whole

Named = str | Mapping[str, Any]  # a name, or a table with a `name` and its settings


def _named(given: Named, where: str) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        return given, {}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise SettingError(f"{where} must be a name or a table with a name, not {given!r}")
    return given["name"], {k: v for k, v in given.items() if k != "name"}


def _task(given: Named, dataset: Dataset) -> tasks.Task:
    """The task; how many classes there are is the data set's to say."""
    name, settings = _named(given, "population.task")
    if _has_classes(name):
        settings.setdefault("classes", len(dataset.classes) or int(dataset.targets.max()) + 1)
    return tasks.task(name, **settings)


def _has_classes(task: str) -> bool:
    kind = tasks.TASKS.get(task)
    return kind is not None and "classes" in {f.name for f in fields(kind)}  # type: ignore[arg-type]


def _owners(division: Partition) -> list[str] | None:
    """The owners' names; where several clients share one, with numbers."""
    names = division.facts.get("owners")
    if names is None or len(set(names)) == len(names):
        return names
    return [f"{name}-{names[:i].count(name)}" for i, name in enumerate(names)]


def _makers(model: Named | Sequence[Named]) -> list[Callable[[], nn.Module]]:
    """What makes a module of each architecture."""
    found: list[Callable[[], nn.Module]] = []
    for one in [model] if isinstance(model, str | Mapping) else model:
        name, settings = _named(one, "population.model")
        found.append(partial(models.build, name, **settings))
    return found


def _transform(given: Mapping[str, Any] | None, dataset: Dataset) -> Augment | None:
    """How images are varied; `normalise = true` takes means and deviations from the data set."""
    if given is None:
        return Augment() if dataset.inputs.dtype == np.uint8 else None
    settings = dict(given)
    if settings.pop("normalise", False):
        if "mean" not in dataset.facts or "std" not in dataset.facts:
            raise SettingError(f"population.augment: {dataset.name} does not say its channel means; give mean and std")
        settings |= {"mean": dataset.facts["mean"], "std": dataset.facts["std"]}
    return build(Augment, settings, "population.augment")


def dealt(
    seed: int,
    *,
    data: Named,
    partition: Named,
    model: Named | Sequence[Named],
    task: Named = "classification",
    augment: Mapping[str, Any] | None = None,
    table: str | None = None,
    public: Mapping[str, Any] | None = None,
    models: str = "in turn",
    encode: Literal["none", "minilm"] = "none",
) -> Population:
    """A data set dealt to clients anew for each seed, unless the partition fixes its own.

    Of several models, client i gets number i modulo their count; with `models = "by size"` they are drawn, a larger one
    the likelier the more data the client has (see `_by_size`). With `table` (federated or client) the data are a
    table whose gaps are filled and columns scaled by training rows. Clients with natural owners are called by them.
    `public` says of which inputs everyone's predictions may be asked (see coterie.data.public). With
    `encode = "minilm"` texts are what that encoder makes of them, once and for all: a model learns the layers after it.
    """
    from coterie.data.sources import load

    name, settings = _named(data, "population.data")
    if name == "volumes":
        dataset = build(Volumes, {"seed": seed, **settings}, "population.data").dataset()
    else:
        dataset = load(name, **settings)
    if encode == "minilm":
        dataset = replace(dataset, inputs=_encoded(name, **settings))
    shown: dict[str, Any] = {}
    if public is not None:
        wanted = build(Shown, public, "population.public")
        if wanted.data in (None, dataset.name):
            dataset, shown["public"] = keep_back(dataset, wanted.samples, seed)
        else:
            shown["public"] = borrow(load(str(wanted.data)), wanted.samples, dataset, seed)
    name, settings = _named(partition, "population.partition")
    division = cut(name, dataset, **{"seed": seed, **settings})
    if table not in (None, "none"):
        holdings = [
            np.concatenate(parts) for parts in zip(division.train, division.validation, division.test, strict=True)
        ]
        dataset = replace(dataset, inputs=prepare(dataset.inputs, division.train, holdings, str(table)))
    makers = _makers(model)
    if models not in ("in turn", "by size"):
        raise SettingError(f"models go to the clients 'in turn' or 'by size', not {models!r}")
    which = [i % len(makers) for i in range(len(division))]
    if models == "by size":
        which = _by_size([len(share) for share in division.train], makers, seed)
    return deal(
        dataset,
        division,
        model=makers[0] if len(makers) == 1 else [makers[i] for i in which],
        task=_task(task, dataset),
        transform=_transform(augment, dataset),
        keys=_owners(division),
        public=shown,
    )


@lru_cache(maxsize=1)
def _encoded(name: str, **settings: Any) -> Any:
    """What MiniLM makes of the texts of a data set: half a minute for all seeds together."""
    from coterie.data.sources import load
    from coterie.models.minilm import embedded

    return embedded(load(name, **settings).inputs)


def _by_size(sizes: Sequence[int], makers: Sequence[Callable[[], nn.Module]], seed: int) -> list[int]:
    """Which model each client gets: one drawn near the place that its amount of data has among all of them.

    COMET says that the chance of a larger model is proportional to the client's data, which leaves the rest open. Here
    a client whose amount is at the fraction q of all clients' draws a Beta(1 + 3q, 1 + 3(1 − q)) number u, and takes
    the ⌊u · count⌋-th of the models by their numbers of parameters: the largest clients mostly the largest models, and
    all three about equally often.
    """
    rng = np.random.default_rng([seed, 0x5123])
    width = [sum(p.numel() for p in make().parameters()) for make in makers]
    rank = np.argsort(np.argsort(sizes, kind="stable"), kind="stable")
    q = (rank + 0.5) / len(sizes)
    u = rng.beta(1 + 3 * q, 1 + 3 * (1 - q))
    order = np.argsort(width, kind="stable")
    return [int(order[min(int(each * len(makers)), len(makers) - 1)]) for each in u]


SYNTHETIC: dict[str, Callable[..., Synthetic]] = {
    "mean-estimation": MeanEstimation,
    "least-squares": LeastSquares,
    "linear": Linear,
    "quadratics": Quadratics,
}


def synthetic(
    seed: int,
    *,
    name: str,
    train: int = 100,
    validation: float = 0.1,
    test: int = 200,
    online: bool = True,
    public: int = 0,
    **settings: Any,
) -> Population:
    """One of the papers' generated populations (coterie.data.synthetic), a linear model without bias for each client.

    Training batches are fresh samples unless `online = false`; then, and for measuring, `train` samples of each client
    are written down, of which a share is kept for validation, and `test` others.
    """
    source = call("synthetic population", name, SYNTHETIC, **{"seed": seed, **settings})
    dataset = source.dataset(train, test)
    inputs, outputs = dataset.inputs.shape[1], dataset.targets.shape[1]
    made = deal(
        dataset,
        replace(cut("cluster_split", dataset, seed=seed, validation=validation), groups=np.array(source.groups())),
        model=partial(models.build, "linear", inputs=inputs, outputs=outputs, bias=False),
        task="regression",
        public={"public": _inputs_of(source, public)} if public else {},
    )
    return fresh(made, source) if online else made


def _inputs_of(source: Synthetic, count: int) -> Tensor:
    if not isinstance(source, Linear):
        raise SettingError(f"population.public: the synthetic population {source.kind} has no public inputs")
    return source.public(whole("population.public", count, 1)).float()


def means(
    seed: int,
    *,
    mu: Sequence[float] = (0.001, 0.01, 0.1),
    sizes: Sequence[int] = (5, 95, 50),
    dimension: int = 10,
    train: int = 1000,
    validation: int = 1000,
    test: int = 1000,
) -> Population:
    """MeritFed §4.1 for several μ side by side, each a pool of its own whose first client is the target.

    Only targets have validation and test data. The samples of the pools differ by their means alone.
    """
    clients: list[Client] = []
    groups: list[int] = []
    pools: list[int] = []
    helped, truth = [], []
    for pool, distance in enumerate(mu):
        settings = {"seed": seed, "sizes": sizes, "dimension": dimension, "mu": distance}
        source = build(MeanEstimation, settings, "population")
        held = source.samples(torch.arange(source.n)[:, None], torch.arange(train))
        first = len(clients)
        keys = [f"mu-{distance:g}-{i:0{len(str(source.n - 1))}d}" for i in range(source.n)]
        clients += [Client(key, (x, y)) for key, x, y in zip(keys, *held, strict=True)]
        parts = source.validation(0, validation), source.tested(0, test)
        clients[first] = replace(clients[first], validation=parts[0], test=parts[1])
        groups += source.groups()
        pools += [pool] * source.n
        helped.append(keys[0])
        truth.append(source.truth())
    model = partial(models.build, "mean", d=dimension)
    made = packed(clients, model=model, task="regression", groups=groups)
    facts = {"data": "mean estimation", "division": "generated with the data", "mu": list(mu)}
    return replace(made, helped=tuple(helped), pools=tuple(pools), truth=torch.cat(truth), facts=facts)


def sites(
    seed: int,
    *,
    clients: Sequence[str],
    data: Mapping[str, Any],
    model: Named | Sequence[Named],
    task: Named = "classification",
    augment: Mapping[str, Any] | None = None,
    public: Mapping[str, Mapping[str, Any]] | None = None,
) -> Population:
    """Real sites, which hold their data themselves: names and a schema (`data`), the same for every seed.

    `public` names inputs that all of them hold, as a file of so many `samples` with this `sha256`.
    Of several models, client i gets number i modulo their count. For `coterie serve` and `coterie site`.
    """
    schema = schema_of(data)
    makers = _makers(model)
    name, settings = _named(task, "population.task")
    if _has_classes(name):
        if not schema.classes:
            raise SettingError(f"population.data.classes must name the classes of a {name}")
        settings.setdefault("classes", len(schema.classes))
    views = Augment() if schema.dtype == "uint8" else None
    return declare(
        clients,
        schema,
        makers,
        [i % len(makers) for i in range(len(clients))],
        tasks.task(name, **settings),
        views if augment is None else build(Augment, augment, "population.augment"),
        public=public_of(public),
    )


def public_of(public: Mapping[str, Any] | None) -> dict[str, Public]:
    """The `[population.public]` table of real sites."""
    return {name: build(Public, each, f"population.public.{name}") for name, each in (public or {}).items()}


def schema_of(data: Mapping[str, Any]) -> Schema:
    """The `[population.data]` table of real sites."""
    return build(Schema, data, "population.data")


POPULATIONS: dict[str, Callable[..., Population]] = {
    "dealt": dealt,
    "means": means,
    "sites": sites,
    "synthetic": synthetic,
}


def make(settings: Mapping[str, Any], seed: int) -> Population:
    """The clients of a seed."""
    given = dict(settings)
    kind = given.pop("kind", "dealt")
    try:
        return call("population", kind, POPULATIONS, seed, **given)
    except CoterieError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a value of the wrong type, deep inside
        raise SettingError(f"population: {str(error).splitlines()[0]}") from error
