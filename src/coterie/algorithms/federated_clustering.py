"""Federated Clustering (Werner, He, Karimireddy, Jordan and Jaggi 2023): descend along clipped means of gradients.

Provably Personalized and Robust Federated Learning, arXiv 2306.08393: Federated-Clustering with Threshold-Clustering,
every client the centre of one cluster. Everyone's gradient is taken at everyone's model, g_j(x_i), and client i finds
the mean of its own kind, `inner` times from z_i = g_i(x_i):

    τ_i = the distance from z_i within which a cluster's worth of the gradients g_j(x_i) lies
    z_i ← 1/n Σ_j (g_j(x_i) where ‖g_j(x_i) − z_i‖ ≤ τ_i, else z_i),       x_i ← x_i − η z_i

The estimate and the descent are the paper's. Its theory has τ in quantities nobody knows: like the authors' published
code we take the quantile size/n of the distances, anew each time, and `inner` = 10. CoBo's paper tells it the true
number and sizes of the clusters; a client needs to know the size of its own only, which `groups` says where `size`
does not. Of m clients that answer, size·m/n make a cluster's worth: rounded, and at least one.

z_i is always a weighted mean of gradients, so clustering needs inner products only: n matrices of n×n, from n²
gradients that the fleet streams. The mean itself is asked for in a second phase, with the weights found. Its batches
are fresh; with sampling="epoch" or whole splits they are the very ones that were clustered. Only the gradient at its
own model moves a client's buffers.

`every` > 1 clusters in each k-th iteration only; between, i takes the plain mean over those last within its radius.

Travels: up 2·m²·d, down 2·m²·d; phases 2; graphs ≤ 8; rows m².
(Rows are fewer where the fleet answers in chunks. Between clusterings one phase of (m + pairs)·d both ways.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info
from coterie.asks import Gradient, Sampling
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.graph.projections import row_normalised
from coterie.schedules import rates
from coterie.settings import real, whole


@dataclass(frozen=True)
class FederatedClusteringState:
    """Everything the next iteration needs."""

    x: Tensor  # n×d: the personal models
    near: Tensor  # n×n float64, on the host: 1 for those last within the radius of client i


@dataclass(frozen=True)
class FederatedClustering(Algorithm):
    """The paper's η; the other names are ours."""

    lr: float = 0.05  # η
    batch: int | None = 128
    size: int | None = None  # clients in a cluster; default: as `groups` has it, client by client
    inner: int = 10  # times the centre is estimated
    every: int = 1  # iterations from one clustering to the next
    lr_schedule: str = "constant"
    sampling: Sampling = "fresh"
    shared: bool = True  # one initial model for all, or one each
    rounds: int = 40_000  # the run's budget, for decaying rates
    groups: tuple[int, ...] = ()  # the true clusters, for their sizes only

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        real("lr", self.lr, 0, closed=True)
        for name in ("batch", "size", "inner", "every", "rounds"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, 1)
        rates(self.lr_schedule, self.lr, 1)  # a schedule checks itself

    def init(self, fleet: Fleet) -> FederatedClusteringState:
        """Initial models; nobody has a neighbour yet."""
        x = fleet.initial(self.shared).clone()
        self.sizes(fleet.n)
        return FederatedClusteringState(x, torch.eye(fleet.n, dtype=torch.float64))

    def sizes(self, n: int) -> Tensor:
        """How large the cluster of each client is."""
        if self.size is not None:
            return torch.full((n,), whole("size", self.size, 1, n))
        if len(self.groups) != n:
            raise SettingError(f"federated_clustering must be told `size`, or the true group of each of {n} clients")
        group = torch.tensor(self.groups)
        return (group[:, None] == group).sum(1)

    def round(self, fleet: Fleet, state: FederatedClusteringState) -> tuple[FederatedClusteringState, Info]:
        """Find everyone's weights, every so often; then one step along the weighted mean at each model."""
        x, near, here = state.x, state.near, fleet.present.nonzero().flatten()
        if fleet.t % self.every == 0 and len(here):
            w, within = self.cluster(fleet, x, here)
            near = near.clone()
            near[here] = 0
            near[here[:, None], here] = within.cpu()
            asked = fleet.present[:, None] & fleet.present
        else:
            w = row_normalised(near * fleet.present).to(x.device)
            asked = fleet.present[:, None] & fleet.present & (near > 0)
        i, j = (asked & ~torch.eye(fleet.n, dtype=torch.bool)).nonzero(as_tuple=True)
        others, own = fleet.ask(
            self.gradient(j, x, at=i, give="sum", into=i, weights=w[i.to(w.device), j.to(w.device)], outputs=fleet.n),
            Gradient(fleet.everyone, x, self.batch, sampling=self.sampling),
        )
        mine = w.diagonal().to(x.dtype)
        total = mine + others.weight  # less than one where an answer is missing
        mean = (mine[:, None] * own.rows + others.sums) / torch.where(total > 0, total, 1)[:, None]
        z = torch.where((total > 0)[:, None], mean, own.rows)
        lr = rates(self.lr_schedule, self.lr, self.rounds)[min(fleet.t, self.rounds - 1)]
        x = torch.where(own.ok[:, None], x - lr * z, x)
        info = Info(row_normalised(near), own.ok, own.loss, {"pairs": torch.tensor(len(i))})
        return FederatedClusteringState(x, near), info

    def gradient(self, clients: Tensor, x: Tensor, **settings: object) -> Gradient:
        """Gradients at others' models, which leave nothing behind at the client."""
        return Gradient(clients, x, self.batch, sampling=self.sampling, track=False, **settings)  # type: ignore[arg-type]

    def cluster(self, fleet: Fleet, x: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each gradient in each z_i (n×n), and who of those present is within the radius (m×m)."""
        m = len(here)
        i, j = here.repeat_interleave(m), here.repeat(m)
        probe = fleet.ask(self.gradient(j, x, at=i, give="gram", group=torch.arange(m).repeat_interleave(m)))
        size = self.sizes(fleet.n)[here].to(x.device).double()
        small, within = threshold(probe.gram.double(), probe.ok.view(m, m), size / fleet.n, self.inner)
        w = torch.eye(fleet.n, dtype=torch.float64, device=x.device)
        w[i.to(w.device), j.to(w.device)] = small.flatten()
        return w, within

    def personal(self, state: FederatedClusteringState) -> Tensor:
        """Everyone's own row."""
        return state.x


def threshold(gram: Tensor, ok: Tensor, share: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """Threshold clustering of m centres at once: z_i = Σ_j w_ij g_j(x_i), with gram[i] the products of the g_j(x_i).

    Gives w and who is within the radius in the end. Only answers that are `ok` are points; a client whose own gradient
    is missing stays by itself.
    """
    m = len(gram)
    w = alone = torch.eye(m, dtype=gram.dtype, device=gram.device)
    square, points = gram.diagonal(dim1=1, dim2=2), ok.sum(1, keepdim=True)
    rank = (share[:, None] * points).round().long().clamp(min=1)  # how many make a cluster's worth
    within = alone
    for _ in range(inner):
        product = (gram @ w[..., None])[..., 0]  # ⟨g_j, z_i⟩
        distance = (square - 2 * product + (w * product).sum(1, keepdim=True)).clamp(min=0).masked_fill(~ok, torch.inf)
        tau = distance.sort(1).values.gather(1, rank - 1)
        within = ((distance <= tau) & ok).double()
        w = (within + (points - within.sum(1, keepdim=True)) * w) / points.clamp(min=1)
    own = ok.diagonal()[:, None]
    return torch.where(own, w, alone), torch.where(own, within, alone)
