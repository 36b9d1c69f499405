"""Who may talk to whom, fixed beforehand: adjacency matrices, and the weights and schedules made from them.

An adjacency is a symmetric n×n matrix of zeros and ones with an empty diagonal, float64. Random ones follow from their
seed and are redrawn until connected.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from coterie.errors import DataError, SettingError
from coterie.settings import call, real, whole

Schedule = Callable[[int], Tensor]  # mixing weights of a round
DRAWS = 1_000  # how often a random topology is redrawn before giving up on connecting it


def _symmetric(directed: NDArray[Any]) -> Tensor:
    """An adjacency from edges given in at least one direction."""
    links = (directed != 0) | (directed.T != 0)
    np.fill_diagonal(links, False)
    return torch.from_numpy(links.astype(np.float64))


def _circulant(n: int, steps: NDArray[np.int64]) -> Tensor:
    """Clients on a circle, linked to those so many places on."""
    gap = (np.arange(n)[None, :] - np.arange(n)[:, None]) % n
    return _symmetric(np.isin(gap, steps % n))


def connected(adjacency: Tensor) -> bool:
    """Whether every client is reached from every other, directions followed as they are."""
    links = (adjacency != 0).cpu().numpy()
    return bool(connected_components(links, directed=True, connection="strong")[0] == 1)


def _until_connected(what: str, draw: Callable[[], NDArray[Any]]) -> Tensor:
    for _ in range(DRAWS):
        adjacency = _symmetric(draw())
        if connected(adjacency):
            return adjacency
    raise SettingError(f"none of {DRAWS} draws of {what} was connected; ask for more links")


def ring(n: int) -> Tensor:
    """Everyone and the two beside it."""
    return group_ring(n, neighbours=2)


def group_ring(n: int, *, neighbours: int) -> Tensor:
    """A ring in which everyone is linked to the nearest `neighbours`, half on each side (SCooL, C.2)."""
    whole("clients", n, 2)
    half = whole("neighbours of a group ring", neighbours, 1) // 2
    if neighbours % 2 or neighbours > max(n - 1, 2):
        raise SettingError(
            f"a group ring of {n} clients takes an even number of neighbours below {n}, not {neighbours}"
        )
    return _circulant(n, np.arange(1, half + 1))


def complete(n: int) -> Tensor:
    """Everyone with everyone."""
    return _symmetric(np.ones((whole("clients", n, 2), n)))


def star(n: int, *, centre: int = 0) -> Tensor:
    """Everyone with the centre only."""
    links = np.zeros((whole("clients", n, 2), n))
    links[whole("centre", centre, 0, n - 1)] = 1
    return _symmetric(links)


def exponential(n: int) -> Tensor:
    """Everyone with those 1, 2, 4, 8 … places on around a circle, both ways."""
    return _circulant(n, 2 ** np.arange(max(1, (whole("clients", n, 2) - 1).bit_length())))


def bipartite(n: int) -> Tensor:
    """Two halves, even and odd clients; everyone with the whole other half."""
    side = np.arange(whole("clients", n, 2)) % 2
    return _symmetric(side[:, None] != side[None, :])


def generalised_bipartite(n: int, *, neighbours: int = 10, seed: int = 0) -> Tensor:
    """Two random halves; everyone in the larger with `neighbours` random ones in the other (SCooL, C.2)."""
    half = whole("clients", n, 2) // 2
    whole("neighbours across a bipartite graph", neighbours, 1, half)
    rng = np.random.default_rng(seed)

    def draw() -> NDArray[Any]:
        order = rng.permutation(n)
        one, other = order[half:], order[:half]
        picks = other[rng.random((n - half, half)).argsort(1)[:, :neighbours]]
        links = np.zeros((n, n))
        links[one[:, None], picks] = 1
        return links

    return _until_connected(f"a bipartite graph of {n} clients with {neighbours} neighbours", draw)


def _regular(rng: np.random.Generator, n: int, degree: int) -> NDArray[Any]:
    """Pair random link ends, keep the pairs that fit, and pair the rest anew (Steger and Wormald, 1999)."""
    while True:
        links = np.zeros((n, n), bool)
        ends = np.repeat(np.arange(n), degree)
        for _ in range(100):
            u, v = np.sort(rng.permutation(ends).reshape(-1, 2), axis=1).T
            first = np.zeros(len(u), bool)
            first[np.unique(u * n + v, return_index=True)[1]] = True
            good = first & (u != v) & ~links[u, v]
            links[u[good], v[good]] = links[v[good], u[good]] = True
            ends = np.concatenate([u[~good], v[~good]])
            if not len(ends):
                return links


def random_regular(n: int, *, degree: int, seed: int = 0) -> Tensor:
    """Everyone with `degree` random others."""
    whole("clients", n, 2)
    whole("degree", degree, min(2, n - 1), n - 1)
    if n * degree % 2:
        raise SettingError(f"{n} clients cannot all have degree {degree}: one of the two must be even")
    rng = np.random.default_rng(seed)
    if degree <= (n - 1) // 2:
        return _until_connected(f"a graph of {n} clients with degree {degree}", lambda: _regular(rng, n, degree))
    # Pairing gets stuck on dense graphs; what is left out of one is sparse.
    return _until_connected("a dense regular graph", lambda: ~_regular(rng, n, n - 1 - degree))


def erdos_renyi(n: int, *, p: float, seed: int = 0) -> Tensor:
    """Every pair with probability p."""
    whole("clients", n, 2)
    real("p", p, 0, 1)
    rng = np.random.default_rng(seed)
    return _until_connected(
        f"an Erdős–Rényi graph of {n} clients with p = {p:g}", lambda: np.triu(rng.random((n, n)) < p, 1)
    )


def small_world(n: int, *, neighbours: int = 4, rewire: float = 0.1, seed: int = 0) -> Tensor:
    """A group ring whose links are each turned to a random client with probability `rewire` (Watts and Strogatz)."""
    real("rewire", rewire, 0, 1, closed=True)
    lattice = group_ring(n, neighbours=neighbours).numpy() != 0
    rng = np.random.default_rng(seed)

    def draw() -> NDArray[Any]:
        links: NDArray[Any] = lattice.copy()
        for step in range(1, neighbours // 2 + 1):
            for i in np.flatnonzero(rng.random(n) < rewire):
                j = (i + step) % n
                free = np.flatnonzero(~links[i] & (np.arange(n) != i))
                if links[i, j] and len(free):
                    k = rng.choice(free)
                    links[i, j] = links[j, i] = False
                    links[i, k] = links[k, i] = True
        return links

    return _until_connected(f"a small world of {n} clients", draw)


def from_file(n: int, *, path: str | Path) -> Tensor:
    """A symmetric n×n matrix (.npy), or links one a line as `client,client` (.csv, clients counted from 0)."""
    file = Path(path)
    if file.suffix not in (".npy", ".csv"):
        raise DataError(f"topology file {file} must be a matrix in .npy or links in .csv")
    try:
        if file.suffix == ".npy":
            table = np.load(file, allow_pickle=False)
        else:
            table = np.loadtxt(file, delimiter=",", ndmin=2, usecols=(0, 1))
    except (OSError, ValueError) as error:
        raise DataError(f"topology file {file} cannot be read: {str(error).splitlines()[0]}") from error
    if not np.isfinite(table).all():
        raise DataError(f"topology file {file} holds numbers that are not finite")
    if file.suffix == ".csv":
        if table.size and ((table != np.rint(table)).any() or table.min() < 0 or table.max() >= n):
            raise DataError(f"topology file {file} names clients outside 0 to {n - 1}")
        links = np.zeros((n, n))
        links[tuple(table.astype(np.int64).T)] = 1
        return _symmetric(links)
    if table.shape != (n, n):
        raise DataError(f"topology file {file} holds an array of shape {table.shape}, not the {n}×{n} of the clients")
    if not np.array_equal(table != 0, table.T != 0):
        raise DataError(f"topology file {file} holds a matrix that is not symmetric")
    return _symmetric(table)


def metropolis(adjacency: Tensor) -> Tensor:
    """Metropolis-Hastings weights 1/(1 + max(degrees)): symmetric, and rows and columns sum to one."""
    links = (adjacency != 0).to(torch.float64)
    if not torch.equal(links, links.T):
        raise DataError("Metropolis weights need a symmetric adjacency")
    links = links - torch.diag(links.diagonal())
    degree = links.sum(1)
    w = links / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return w + torch.diag(1 - w.sum(1))


def mixing(given: Tensor | str | Path, n: int) -> Tensor:
    """Mixing weights as they are given, a matrix or the name of a .npy file: symmetric, and rows that sum to one."""
    if isinstance(given, str | Path):
        try:
            given = torch.from_numpy(np.load(given, allow_pickle=False))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"mixing weights {given} cannot be read: {str(error).splitlines()[0]}") from error
    w = torch.as_tensor(given, dtype=torch.float64).cpu()
    if w.shape != (n, n):
        raise DataError(f"mixing weights of {n} clients are a matrix of {n}×{n}, not of shape {tuple(w.shape)}")
    if not bool(torch.isfinite(w).all()) or bool((w < 0).any()):
        raise DataError("mixing weights must be finite and at least 0")
    if not torch.allclose(w, w.T, rtol=0, atol=1e-9):
        i, j = divmod(int((w - w.T).abs().argmax()), n)
        raise DataError(f"mixing weights must be symmetric, but w[{i}, {j}] is {w[i, j]:g} and w[{j}, {i}] {w[j, i]:g}")
    if not torch.allclose(w.sum(1), torch.ones(n, dtype=w.dtype), rtol=0, atol=1e-6):
        i = int((w.sum(1) - 1).abs().argmax())
        raise DataError(f"the rows of mixing weights must sum to one, but row {i} sums to {w[i].sum():g}")
    warn_of_pieces(w)
    return w


def warn_of_pieces(w: Tensor) -> None:
    """Say so where some clients never hear of others."""
    pieces = connected_components((w != 0).numpy(), directed=False)[0]
    if pieces > 1:
        warnings.warn(f"the topology is in {pieces} pieces: clients in one never hear of another's", stacklevel=2)


def placed(name: str, ids: Tensor, **settings: Any) -> Schedule:
    """The mixing weights of each round over a named topology or schedule, by the clients' ids.

    Who has which place follows from the ids: where the order of the clients tells who belongs together, a ring would
    give it away. In a file places are the clients' numbers.
    """
    weights = schedule(name, len(ids), **settings)
    if name == "file":
        warn_of_pieces(weights(0))
        return weights
    place = ids.argsort().argsort()
    return lambda t: weights(t)[place[:, None], place]


def among(w: Tensor, here: Tensor) -> Tensor:
    """Mixing weights among those who are here: what would go to others stays with oneself."""
    both = w * here * here[:, None]
    return both + torch.diag(1 - both.sum(1))


def one_peer_exponential(n: int) -> Schedule:
    """In round t everyone averages with the one 2^(t mod ⌈log₂ n⌉) places on; exact after log₂ n rounds for n = 2^k."""
    hops = max(1, (whole("clients", n, 2) - 1).bit_length())
    own = torch.eye(n, dtype=torch.float64)
    return lambda t: (own + own.roll(2 ** (t % hops), dims=1)) / 2


def random_matching(n: int, *, seed: int = 0) -> Schedule:
    """In each round clients pair up at random and average; with an odd number one stays alone."""
    whole("clients", n, 2)

    def weights(t: int) -> Tensor:
        pairs = np.random.default_rng([seed, t]).permutation(n)[: n // 2 * 2].reshape(-1, 2)
        links = np.zeros((n, n))
        links[pairs[:, 0], pairs[:, 1]] = 1
        return metropolis(_symmetric(links))

    return weights


TOPOLOGIES: dict[str, Callable[..., Tensor]] = {
    "ring": ring,
    "group_ring": group_ring,
    "bipartite": bipartite,
    "generalised_bipartite": generalised_bipartite,
    "complete": complete,
    "star": star,
    "exponential": exponential,
    "random_regular": random_regular,
    "erdos_renyi": erdos_renyi,
    "small_world": small_world,
    "file": from_file,
}
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "one_peer_exponential": one_peer_exponential,
    "random_matching": random_matching,
}


def topology(name: str, n: int, **settings: Any) -> Tensor:
    """The named adjacency of n clients."""
    return call("topology", name, TOPOLOGIES, n, **settings)


def schedule(name: str, n: int, **settings: Any) -> Schedule:
    """The named mixing weights of each round: a schedule, or the Metropolis weights of a topology in every round."""
    if name in SCHEDULES:
        return call("topology", name, SCHEDULES, n, **settings)
    table: dict[str, Callable[..., Any]] = {**TOPOLOGIES, **SCHEDULES}
    w = metropolis(call("topology", name, table, n, **settings))
    return lambda t: w
