"""Communities of clients in a learned graph, and whether they are the true ones."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import SpectralClustering
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from coterie.errors import DataError
from coterie.settings import whole


def threshold(values: Tensor) -> float:
    """The weight that best parts strong links from weak ones (Otsu: most variance between the two sides)."""
    v = values.flatten().sort().values
    if not len(v) or v[0] == v[-1]:
        return float(v[0]) / 2 if len(v) else 0.0
    m = torch.arange(1, len(v), dtype=v.dtype, device=v.device)
    low = v.cumsum(0)[:-1]
    high = v.sum() - low
    between = m * (len(v) - m) * (high / (len(v) - m) - low / m) ** 2
    cut = int(between.argmax())
    return float(v[cut] + v[cut + 1]) / 2


def communities(w: Tensor, k: int | None = None) -> NDArray[np.int64]:
    """The community of each client in the symmetrised graph, the diagonal apart.

    With k: spectral clustering into k. Without: what the links above `threshold` connect, however many those are.
    """
    n = w.shape[0]
    if w.shape != (n, n) or not bool(torch.isfinite(w).all()) or bool((w < 0).any()):
        raise DataError(
            f"communities need a square graph of finite weights, none negative; this one is {tuple(w.shape)}"
        )
    both = (w + w.T).to(torch.float64).cpu() / 2
    off = ~torch.eye(n, dtype=torch.bool)
    if k is None:
        links = off & (both > threshold(both[off]))
        return np.asarray(connected_components(links.numpy(), directed=False)[1], np.int64)
    if whole("k, the number of communities,", k, 1, n) in (1, n):
        return np.arange(n) % k
    affinity = torch.where(off, both, 0)
    # A faint link everywhere: the embedding of a graph in pieces is not determined.
    affinity = affinity + 1e-6 * max(float(affinity.max()), 1e-12)
    cluster = SpectralClustering(k, affinity="precomputed", assign_labels="cluster_qr", random_state=0)
    return np.asarray(cluster.fit_predict(affinity.numpy()), np.int64)


def adjusted_rand(found: ArrayLike, true: ArrayLike) -> float:
    """Agreement of two groupings: 1 the same up to names, 0 as by chance."""
    return float(adjusted_rand_score(np.asarray(true), np.asarray(found)))


def exact(found: ArrayLike, true: ArrayLike) -> bool:
    """Whether two groupings are the same up to names."""
    a, b = np.asarray(found), np.asarray(true)
    return bool(np.array_equal(a[:, None] == a[None, :], b[:, None] == b[None, :]))
