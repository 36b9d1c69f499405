"""The papers' synthetic populations, whose true models are known, and volumes like those of IXI.

Online data: sample k of client c is a pure function of (seed, c, k), so a stream has no end and no order of asking,
and a client that reads on from where it was gets fresh samples. `dataset` writes the beginning of every stream down.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coterie import draws
from coterie.data.dataset import Dataset
from coterie.errors import DataError, SettingError

GENERATED = {"source": "generated", "licence": "none needed", "division": "generated with the data"}
_VALIDATION, _TEST = 1 << 40, 1 << 41  # where the streams of samples that nobody trains on begin


@dataclass(frozen=True)
class Synthetic(ABC):
    """Clients whose data come from known distributions."""

    kind: ClassVar[str]
    seed: int = 0

    @property
    @abstractmethod
    def n(self) -> int:
        """How many clients there are."""

    @property
    @abstractmethod
    def d(self) -> int:
        """How many numbers a model has."""

    @abstractmethod
    def truth(self) -> Tensor:
        """The best model of each client: n × d."""

    @abstractmethod
    def groups(self) -> tuple[int, ...]:
        """The true cluster of each client."""

    @abstractmethod
    def samples(self, clients: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples with these numbers; the two tensors are broadcast against each other."""

    @abstractmethod
    def excess(self, models: Tensor) -> Tensor:
        """How much more each client expects to lose with its row of n × d models than with its best model."""

    def dataset(self, train: int, test: int = 0) -> Dataset:
        """The first `train` samples of every client, then `test` others of every client; `groups` are the clients."""
        clients = torch.arange(self.n)
        parts = [(clients[:, None], torch.arange(train)), (clients[:, None], _TEST + torch.arange(test))]
        inputs, targets = zip(*(self.samples(*part) for part in parts), strict=True)
        owners = [np.repeat(np.arange(self.n), count) for count in (train, test)]
        return Dataset(
            name=self.kind,
            inputs=torch.cat([part.flatten(0, 1) for part in inputs]).numpy(),
            targets=torch.cat([part.flatten(0, 1) for part in targets]).numpy(),
            train=self.n * train,
            groups=np.concatenate(owners),
            facts={**GENERATED, "seed": self.seed, "clusters": self.groups()},
        )

    def validation(self, client: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples of one client beside those it trains on."""
        return self.samples(torch.tensor(client), _VALIDATION + torch.arange(count))

    def tested(self, client: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples of one client that it is judged on."""
        return self.samples(torch.tensor(client), _TEST + torch.arange(count))

    def _key(self, what: str) -> Tensor:
        return torch.tensor(draws.fold_int(draws.name(f"synthetic/{self.kind}/{what}"), self.seed))

    def _each(self, clients: Tensor, counters: Tensor, width: int) -> Tensor:
        """A key for every number of every sample."""
        keys = draws.fold(draws.fold(self._key("samples").to(clients.device), clients), counters)
        return draws.fold(keys[..., None], torch.arange(width, device=clients.device))

    def _constant(self, what: str, *shape: int) -> Tensor:
        return draws.fold(self._key(what), torch.arange(int(np.prod(shape)))).reshape(shape)


@dataclass(frozen=True)
class MeanEstimation(Synthetic):
    """MeritFed §4.1: the target's group around 0, a near group at distance `mu` along the ones, a far one around `e`.

    Every sample is its own target and the input is a constant 1, so that a linear layer without bias is the estimate;
    the loss is the mean over coordinates of (x − ξ)².
    """

    kind: ClassVar[str] = "mean-estimation"
    sizes: tuple[int, int, int] = (5, 95, 50)
    dimension: int = 10
    mu: float = 0.001

    @property
    def n(self) -> int:
        """How many clients there are."""
        return sum(self.sizes)

    @property
    def d(self) -> int:
        """How many numbers a model has."""
        return self.dimension

    def groups(self) -> tuple[int, ...]:
        """0 for the target's group, 1 for the near one, 2 for the far one."""
        return tuple(group for group, size in enumerate(self.sizes) for _ in range(size))

    def truth(self) -> Tensor:
        """The mean of each client's distribution; `e` is drawn from the unit sphere."""
        far = draws.normal(self._constant("e", self.d))
        means = torch.stack(
            [
                torch.zeros(self.d, dtype=torch.float64),
                torch.full((self.d,), self.mu / self.d**0.5, dtype=torch.float64),
                far / far.norm(),
            ]
        )
        return means[torch.tensor(self.groups())]

    def samples(self, clients: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """A constant, and a normal vector around the client's mean."""
        noise = draws.normal(self._each(clients, counters, self.d))
        return torch.ones_like(noise[..., :1]), self.truth().to(clients.device)[clients] + noise

    def excess(self, models: Tensor) -> Tensor:
        """The mean over coordinates of the squared distance to the client's mean."""
        return (models - self.truth().to(models)).square().mean(1)


@dataclass(frozen=True)
class LeastSquares(Synthetic):
    """All-for-one, appendix A: y = ⟨x, θᵢ⟩ without noise, x ~ N(0, I), θᵢ = centre[i mod centres] + spread · ξᵢ.

    `centres=2, spread=0` is Figure 2 (two clusters); `centres=1, spread=v` is Figure 1 (a common centre).
    """

    kind: ClassVar[str] = "least-squares"
    clients: int = 20
    dimension: int = 2
    centres: int = 2
    spread: float = 0.0

    @property
    def n(self) -> int:
        """How many clients there are."""
        return self.clients

    @property
    def d(self) -> int:
        """How many numbers a model has."""
        return self.dimension

    def groups(self) -> tuple[int, ...]:
        """The centre of each client."""
        return tuple(client % self.centres for client in range(self.n))

    def truth(self) -> Tensor:
        """θᵢ; the centres are drawn from N(0, I)."""
        centres = draws.normal(self._constant("centres", self.centres, self.d))
        apart = draws.normal(self._constant("apart", self.n, self.d))
        return centres[torch.tensor(self.groups())] + self.spread * apart

    def samples(self, clients: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """A normal vector and its product with the client's model."""
        x = draws.normal(self._each(clients, counters, self.d))
        return x, (x * self.truth().to(clients.device)[clients]).sum(-1, keepdim=True)

    def excess(self, models: Tensor) -> Tensor:
        """E⟨x, θ − θᵢ⟩² = ‖θ − θᵢ‖², since x has the identity as covariance."""
        return (models - self.truth().to(models)).square().sum(1)


@dataclass(frozen=True)
class Linear(Synthetic):
    """COMET, Figure 2: yₖ = ⟨x, wₖ⟩ + noise, wₖ = θ + ζₖ, ζₖ ~ N(0, spreadₖ²), θ and x uniform in ±reach."""

    kind: ClassVar[str] = "linear"
    spreads: tuple[float, ...] = (2.0, 5.0, 200.0)
    dimension: int = 2
    reach: float = 10.0
    noise: float = 0.0

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.spreads)

    @property
    def d(self) -> int:
        """How many numbers a model has."""
        return self.dimension

    def groups(self) -> tuple[int, ...]:
        """Two clusters: the clients near θ, and those whose spread exceeds the reach."""
        return tuple(int(spread > self.reach) for spread in self.spreads)

    def truth(self) -> Tensor:
        """The true model of each client."""
        theta = (draws.unit(self._constant("theta", self.d)) * 2 - 1) * self.reach
        spreads = torch.tensor(self.spreads, dtype=torch.float64)[:, None]
        return theta + spreads * draws.normal(self._constant("zeta", self.n, self.d))

    def samples(self, clients: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """A uniform vector and its product with the client's model."""
        keys = self._each(clients, counters, self.d + 1)
        x = (draws.unit(keys[..., :-1]) * 2 - 1) * self.reach
        y = (x * self.truth().to(clients.device)[clients]).sum(-1, keepdim=True)
        return x, y + self.noise * draws.normal(keys[..., -1:])

    def public(self, count: int) -> Tensor:
        """Public inputs, from the range of the private ones."""
        keys = draws.fold(draws.fold(self._key("public"), torch.arange(count))[:, None], torch.arange(self.d))
        return (draws.unit(keys) * 2 - 1) * self.reach

    def excess(self, models: Tensor) -> Tensor:
        """The squared distance to the true model times the variance of x, which is reach²/3."""
        return (models - self.truth().to(models)).square().sum(1) * self.reach**2 / 3


@dataclass(frozen=True)
class Quadratics(Synthetic):
    """CoBo, Example 2: f_i(x) = a_i/2 · ‖x − μ_k‖² for client i of cluster k; μ_k is `apart` times the k-th axis.

    A sample is ξ ~ N(μ_k, s_i² I), as a regression of √(a_i d/2)·x on √(a_i d/2)·ξ, whose loss is a_i/2 · ‖x − ξ‖² and
    whose gradient a_i (x − ξ) has the variance a_i² d s_i² = `noise`² for every client. With equal curvatures M_ij = 0.
    """

    kind: ClassVar[str] = "quadratics"
    clusters: int = 2
    per_cluster: int = 4
    dimension: int = 10
    curvatures: tuple[float, float] = (0.7, 1.0)  # a_i of the clients of a cluster, from the one to the other
    apart: float = 1.0
    noise: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not 1 <= self.clusters <= self.dimension:
            raise SettingError(f"clusters lie on axes of their own: from 1 to {self.dimension}, not {self.clusters}")
        if min(self.curvatures) <= 0:
            raise SettingError(f"curvatures are above 0, not {self.curvatures}")

    @property
    def n(self) -> int:
        """How many clients there are."""
        return self.clusters * self.per_cluster

    @property
    def d(self) -> int:
        """How many numbers a model has."""
        return self.dimension

    def groups(self) -> tuple[int, ...]:
        """The cluster of each client."""
        return tuple(client // self.per_cluster for client in range(self.n))

    def curvature(self) -> Tensor:
        """a_i of each client."""
        return torch.linspace(*self.curvatures, self.per_cluster, dtype=torch.float64).repeat(self.clusters)

    def truth(self) -> Tensor:
        """μ of each client's cluster."""
        return self.apart * torch.eye(self.d, dtype=torch.float64)[torch.tensor(self.groups())]

    def samples(self, clients: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """The scale √(a_i d/2), and a noisy centre times the scale."""
        normal = draws.normal(self._each(clients, counters, self.d))
        a = self.curvature().to(clients.device)[clients].expand(normal.shape[:-1])[..., None]
        scale = (a * self.d / 2).sqrt()
        centre = self.truth().to(clients.device)[clients]
        return scale, scale * (centre + self.noise / (a * self.d**0.5) * normal)

    def excess(self, models: Tensor) -> Tensor:
        """a_i/2 · ‖x − μ‖²."""
        return self.curvature().to(models) / 2 * (models - self.truth().to(models)).square().sum(1)


@dataclass(frozen=True)
class Volumes:
    """Heads like those of IXI, with masks: a brighter ellipsoid in a dimmer one, seen by scanners that differ.

    Hospitals differ, as real ones do, in contrast, noise and a slow drift of brightness across the volume. Volume k of
    hospital h is a pure function of (seed, h, k).
    """

    train: tuple[int, ...] = (24, 16, 8)  # volumes of each hospital
    test: tuple[int, ...] = (6, 4, 2)
    shape: tuple[int, int, int] = (48, 60, 48)
    seed: int = 0
    names: tuple[str, ...] = field(default=("Guys", "HH", "IOP"))

    def __post_init__(self) -> None:
        """Refuse counts that do not fit."""
        if not len(self.train) == len(self.test) == len(self.names):
            raise SettingError(f"{len(self.names)} hospitals have {len(self.train)} and {len(self.test)} counts")
        if min(self.shape) < 4:
            raise SettingError(f"a volume of {self.shape} is too small for a head")

    def volume(self, hospital: int, number: int) -> tuple[Tensor, Tensor]:
        """One volume (1 × shape, float32, mean 0 and deviation 1) and its mask (shape, int64)."""
        key = draws.fold_int(draws.name("synthetic/volumes"), self.seed, hospital, number)
        scanner = draws.fold_int(draws.name("synthetic/scanner"), self.seed, hospital)
        u = draws.unit(draws.fold(torch.tensor(key), torch.arange(16)))
        s = draws.unit(draws.fold(torch.tensor(scanner), torch.arange(8)))
        axes = [torch.linspace(-1, 1, extent, dtype=torch.float64) for extent in self.shape]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1) - (u[:3] - 0.5) * 0.2
        turn = (u[3] - 0.5) * 0.6
        a, b = places[..., 0].clone(), places[..., 1].clone()
        places[..., 0], places[..., 1] = turn.cos() * a - turn.sin() * b, turn.sin() * a + turn.cos() * b
        size = 0.75 + 0.1 * u[4:7]
        angle = torch.atan2(places[..., 1], places[..., 0])
        rough = 1 + 0.05 * torch.sin(3 * angle + 6.28 * u[7]) + 0.05 * torch.sin(4 * places[..., 2] + 6.28 * u[8])
        radius = (places / size).square().sum(-1).sqrt() / rough
        brain, head = radius < 0.75, radius < 0.95
        folds = torch.sin(9 * radius + 2 * angle + 6.28 * u[9])
        image = 0.25 * head + (0.3 + 0.3 * s[0]) * brain + 0.08 * brain * folds
        drift = (places * (s[1:4] - 0.5)).sum(-1)
        noise = draws.normal(draws.fold(torch.tensor(draws.fold_int(key, 99)), torch.arange(image.numel())))
        image = image * (1 + 0.6 * drift) + (0.04 + 0.08 * s[4]) * noise.reshape(self.shape)
        image = (image - image.mean()) / image.std()
        return image.float()[None], brain.long()

    def dataset(self) -> Dataset:
        """All volumes, training ones first; `groups` are the hospitals."""
        if not sum(self.train):
            raise DataError("volumes: no hospital has any to train on")
        inputs, targets, groups = [], [], []
        for counts, first in ((self.train, 0), (self.test, _TEST)):
            for hospital, count in enumerate(counts):
                for number in range(count):
                    image, mask = self.volume(hospital, first + number)
                    inputs.append(image.numpy())
                    targets.append(mask.numpy())
                    groups.append(hospital)
        return Dataset(
            name="volumes",
            inputs=np.stack(inputs),
            targets=np.stack(targets),
            train=sum(self.train),
            classes=("background", "brain"),
            groups=np.array(groups),
            facts={**GENERATED, "seed": self.seed, "owners": self.names},
        )
