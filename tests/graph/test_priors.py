"""Priors of the cooperation graph: the ELBO never falls, updates equal plain loops, communities are recovered."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln, logsumexp, psi
from torch import Tensor, nn

from coterie import draws
from coterie.errors import CoterieError, DataError, SettingError
from coterie.graph import encoder, topologies
from coterie.graph.communities import adjusted_rand
from coterie.graph.priors import (
    MMSBM,
    PRIORS,
    SBM,
    Attention,
    AttentionReference,
    Beliefs,
    Dirac,
    Evidence,
    Prior,
    attention_reference,
    mmsbm,
)

EPS = 1e-6


@dataclass
class Few:
    """Some clients, their draws keyed by ids."""

    n: int
    seed: int = 0
    t: int = 0
    spans: tuple[tuple[int, int], ...] = ((0, 6), (6, 9), (9, 20))
    shapes: tuple[tuple[int, ...], ...] = ((2, 3), (3,), (1, 11))
    order: tuple[int, ...] = ()

    @property
    def everyone(self) -> Tensor:
        return torch.arange(self.n)

    @property
    def ids(self) -> Tensor:
        ids = draws.fold(torch.tensor(draws.name("ids")), torch.arange(self.n))
        return ids[list(self.order)] if self.order else ids

    def uniform(self, tag: str, *clients: Tensor) -> Tensor:
        key: Tensor = torch.tensor(draws.fold_int(draws.name(tag), self.seed, self.t))
        for row in torch.stack([self.ids[c] for c in clients]).sort(dim=0).values:
            key = draws.fold(key ^ row, 0)
        return draws.unit(key)

    def generator(self, tag: str) -> torch.Generator:
        return draws.generator(draws.fold_int(draws.name(tag), self.seed))


def evidence(clients: Few, log_p: Tensor, known: Tensor | None = None, seed: int = 0) -> Evidence:
    every = torch.ones(clients.n, clients.n, dtype=torch.bool)
    g = torch.Generator().manual_seed(seed)
    moved = torch.randn(clients.n, 20, generator=g, dtype=torch.float64)
    known = every if known is None else known
    return Evidence(torch.where(known, log_p, 0), known, every, 1.0, lambda: moved.clone(), clients)


def random_case(seed: int, n: int, share: float, scale: float) -> tuple[Few, Evidence]:
    g = torch.Generator().manual_seed(seed)
    clients = Few(n, seed)
    log_p = scale * (torch.randn(n, n, generator=g, dtype=torch.float64) - 0.5)
    known = torch.rand(n, n, generator=g) < share
    return clients, evidence(clients, log_p, known | torch.eye(n, dtype=torch.bool), seed)


CASES = st.tuples(
    st.integers(0, 10_000), st.integers(4, 14), st.sampled_from([0.4, 1.0]), st.sampled_from([0.1, 2.0, 40.0])
)


def not_below(after: Tensor, before: Tensor) -> bool:
    return float(after) >= float(before) - 1e-9 * max(1.0, abs(float(before)))


@pytest.mark.parametrize(
    "prior",
    [SBM(3), SBM(1), SBM(4, sweeps=1, learn=False), MMSBM(3), MMSBM(2, sweeps=1), Attention()],
    ids=str,
)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=CASES)
def test_no_e_step_lowers_its_elbo(prior: Prior, case: tuple[int, int, float, float]) -> None:
    clients, seen = random_case(*case)
    w, beliefs = prior.init(clients)
    w, beliefs = prior.e_step(w, beliefs, seen)  # the likelihoods change between rounds, so begin from a W for these
    for t in range(3):
        beliefs = prior.m_step(w, beliefs, seen)
        clients.t = t + 1
        before = prior.elbo(w, beliefs, seen)
        w, beliefs = prior.e_step(w, beliefs, seen)
        assert not_below(prior.elbo(w, beliefs, seen), before)
        assert bool(((w >= 0) & (w <= 1)).all())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=CASES)
def test_no_part_of_the_block_models_sweep_lowers_the_elbo(case: tuple[int, int, float, float]) -> None:
    clients, seen = random_case(*case)
    prior = SBM(3)
    w, beliefs = prior.init(clients)
    w = torch.rand(w.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(case[0]))
    last = prior.elbo(w, beliefs, seen)
    for i in [*range(clients.n), *range(clients.n)]:  # one client at a time, links in between
        beliefs = beliefs | prior.memberships(w, beliefs, prior.pairs(seen), torch.tensor([i]))
        now = prior.elbo(w, beliefs, seen)
        assert not_below(now, last)
        w = prior.links(beliefs, seen)
        last = prior.elbo(w, beliefs, seen)
        assert not_below(last, now)


def test_the_m_step_raises_what_it_fits() -> None:
    for seed in range(10):
        clients, seen = random_case(seed, 12, 0.8, 2.0)
        for prior in (SBM(3, eta2=1e-4), MMSBM(3, eta2=1e-4), SBM(3, eta2=1.0), MMSBM(3, eta2=1.0)):
            w, beliefs = prior.e_step(*prior.init(clients), seen)
            after = prior.m_step(w, beliefs, seen)
            for part in ("b", "alpha"):  # B to its optimum, α a little uphill
                moved = beliefs | {part: after[part]}
                assert (
                    float(prior.elbo(w, moved, seen)) >= float(prior.elbo(w, beliefs, seen)) - 1e-4 * clients.n**2 * EPS
                )


# ---- the bound itself ------------------------------------------------------------------------------------------------


def plain_elbo(kind: str, w: Any, log_p: Any, pairs: list[tuple[int, int]], beliefs: dict[str, Any]) -> float:
    """(41) and its like in appendix F, term by term from the equations."""
    gamma, alpha, b = beliefs["gamma"] + EPS, beliefs["alpha"] + EPS, beliefs["b"]
    n, m = gamma.shape

    def pi(i: int, g: int) -> float:  # E log π_ig
        return float(psi(gamma[i, g]) - psi(gamma[i].sum()))

    def member(of: Any, i: int) -> float:  # E log P(z|π_i) − E log q(z)
        return sum(of[g] * (pi(i, g) - (math.log(of[g]) if of[g] > 0 else 0)) for g in range(m))

    total = 0.0
    for i, j in pairs:
        mine, other = (beliefs["omega"][i], beliefs["omega"][j]) if kind == "sbm" else (
            beliefs["to"][i, j], beliefs["by"][i, j],
        )  # fmt: skip
        x = w[i, j]
        total += x * log_p[i, j]
        for g in range(m):
            for h in range(m):
                total += mine[g] * other[h] * (x * math.log(b[g, h] + EPS) + (1 - x) * math.log(1 - b[g, h] + EPS))
        total -= sum(p * math.log(p) for p in (x, 1 - x) if p > 0)
        if kind == "mmsbm":
            total += member(mine, i) + member(other, j)
    for i in range(n):
        if kind == "sbm":
            total += member(beliefs["omega"][i], i)
        total += gammaln(alpha.sum()) - gammaln(gamma[i].sum())
        for g in range(m):
            total += gammaln(gamma[i, g]) - gammaln(alpha[g]) + (alpha[g] - gamma[i, g]) * pi(i, g)
    return total


@pytest.mark.parametrize("kind", ["sbm", "mmsbm"])
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_the_bound_equals_its_equations_and_no_round_lowers_it(kind: str, share: float) -> None:
    for seed in range(4):
        clients, seen = random_case(seed, 7, share, 3.0)
        prior = PRIORS[kind](3)  # type: ignore[call-arg]
        w, beliefs = prior.e_step(*prior.init(clients), seen)
        pairs = [(i, j) for i, j in itertools.permutations(range(7), 2) if seen.known[i, j]]

        def bound(w: Tensor, beliefs: Beliefs, kind: str = kind, seen: Any = seen, pairs: Any = pairs) -> float:
            return plain_elbo(kind, w.numpy(), seen.log_p.numpy(), pairs, {k: v.numpy() for k, v in beliefs.items()})

        for t in range(4):
            before = bound(w, beliefs)
            assert float(prior.elbo(w, beliefs, seen)) == pytest.approx(before, rel=1e-10, abs=1e-9)
            clients.t = t + 1
            w, beliefs = prior.e_step(w, beliefs, seen)
            assert bound(w, beliefs) >= before - 1e-9 * abs(before)
            beliefs = prior.m_step(w, beliefs, seen)


def evidence_of(kind: str, log_p: Any, alpha: Any, b: Any) -> float:
    """log P(D|θ) by adding up all memberships, π integrated out."""
    n, m = len(log_p), len(alpha)
    pairs = list(itertools.permutations(range(n), 2))
    sides = [(i,) for i in range(n)] if kind == "sbm" else [*pairs, *((j, i) for i, j in pairs)]  # whose π each z is of
    found = []
    for z in itertools.product(range(m), repeat=len(sides)):
        counts = np.zeros((n, m))
        for side, g in zip(sides, z, strict=True):
            counts[side[0], g] += 1
        total = float((gammaln(alpha.sum()) - gammaln(alpha.sum() + counts.sum(1))).sum())
        total += float((gammaln(alpha + counts) - gammaln(alpha)).sum())
        for place, (i, j) in enumerate(pairs):
            g, h = (z[i], z[j]) if kind == "sbm" else (z[place], z[len(pairs) + place])
            total += math.log(b[g, h] * math.exp(log_p[i, j]) + 1 - b[g, h])
        found.append(total)
    return float(logsumexp(found))


@pytest.mark.parametrize(("kind", "n"), [("sbm", 4), ("mmsbm", 2)])
def test_the_bound_is_below_the_evidence_and_not_far(kind: str, n: int) -> None:
    for seed in range(3):
        clients, seen = random_case(seed, n, 1.0, 1.5)
        prior = PRIORS[kind](2)  # type: ignore[call-arg]
        w, beliefs = prior.init(clients)
        for t in range(10):
            clients.t = t
            w, beliefs = prior.e_step(w, beliefs, seen)
        exact = evidence_of(kind, seen.log_p.numpy(), beliefs["alpha"].numpy(), beliefs["b"].numpy())
        assert exact - 3 < float(prior.elbo(w, beliefs, seen)) < exact


@pytest.mark.parametrize("prior", [Attention(), AttentionReference()], ids=str)
def test_with_attention_the_bound_is_the_evidence(prior: Any) -> None:
    clients, seen = random_case(1, 6, 0.6, 2.0)
    w, beliefs = prior.e_step(*prior.init(clients), seen)
    log_p = prior.log_p(beliefs, seen.known) if isinstance(prior, Attention) else prior.log_p(beliefs, seen)
    exact = sum(logsumexp((seen.log_p + log_p)[i][seen.known[i]].numpy()) for i in range(6))
    assert float(prior.elbo(w, beliefs, seen)) == pytest.approx(exact, abs=1e-10)


# ---- against plain loops ---------------------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def plain_links(log_p: Any, omega: Any, b: Any) -> Any:
    n, m = omega.shape
    w = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            score = log_p[i, j]
            for g in range(m):
                for h in range(m):
                    score += omega[i, g] * omega[j, h] * (math.log(b[g, h] + EPS) - math.log(1 - b[g, h] + EPS))
            w[i, j] = sigmoid(score)
    return w


def plain_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    parts = [math.exp(s - top) for s in scores]
    return [p / sum(parts) for p in parts]


def plain_member(i: int, w: Any, known: Any, omega: Any, gamma: Any, b: Any) -> list[float]:
    n, m = omega.shape
    scores = []
    for k in range(m):
        score = psi(gamma[i, k] + EPS) - psi(gamma[i].sum() + EPS)
        for j in range(n):
            if j == i:
                continue
            for h in range(m):
                if known[i, j]:
                    score += omega[j, h] * (
                        w[i, j] * math.log(b[k, h] + EPS) + (1 - w[i, j]) * math.log(1 - b[k, h] + EPS)
                    )
                if known[j, i]:
                    score += omega[j, h] * (
                        w[j, i] * math.log(b[h, k] + EPS) + (1 - w[j, i]) * math.log(1 - b[h, k] + EPS)
                    )
        scores.append(score)
    return plain_softmax(scores)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_block_model_equals_a_plain_loop(share: float) -> None:
    clients, seen = random_case(3, 70, share, 2.0)  # more clients than one block
    prior = SBM(3, eta2=0.01, restart=False)
    _, beliefs = prior.init(clients)
    g = torch.Generator().manual_seed(0)
    beliefs["b"] = torch.rand(3, 3, generator=g, dtype=torch.float64)  # not symmetric
    w, after = prior.e_step(torch.zeros(70, 70), beliefs, seen)
    m = prior.m_step(w, after, seen)
    log_p, known, b = seen.log_p.numpy(), seen.known.numpy(), beliefs["b"].numpy()
    omega, gamma, alpha = (beliefs[k].numpy().copy() for k in ("omega", "gamma", "alpha"))
    for sweep in range(2):
        links = plain_links(log_p, omega, b)
        for i in clients.uniform(f"order {sweep}", clients.everyone).argsort().tolist():
            omega[i] = plain_member(i, links, known, omega, gamma, b)
            gamma[i] = omega[i] + alpha
    links = plain_links(log_p, omega, b)
    np.testing.assert_allclose(after["omega"].numpy(), omega, rtol=0, atol=1e-10)
    np.testing.assert_allclose(after["gamma"].numpy(), gamma, rtol=0, atol=1e-10)
    np.testing.assert_allclose(w.numpy(), links, rtol=0, atol=1e-10)
    for g_ in range(3):
        slope = -70 * psi(alpha[g_] + EPS) + 70 * psi(alpha.sum() + 3 * EPS)
        for i in range(70):
            slope += psi(gamma[i, g_] + EPS) - psi(gamma[i].sum() + 3 * EPS)
        assert float(m["alpha"][g_]) == pytest.approx(alpha[g_] + 0.01 * slope, abs=1e-9)
        for h in range(3):
            pairs = [(i, j) for i in range(70) for j in range(70) if i != j and known[i, j]]
            hits = sum(links[i, j] * omega[i, g_] * omega[j, h] for i, j in pairs)
            chances = sum(omega[i, g_] * omega[j, h] for i, j in pairs)
            assert float(m["b"][g_, h]) == pytest.approx(hits / (chances + EPS), abs=1e-9)


def test_mixed_memberships_equal_a_plain_loop() -> None:
    n, m = 6, 3
    clients, seen = random_case(5, n, 0.7, 2.0)
    prior = MMSBM(m, sweeps=1, restart=False)
    w, beliefs = prior.e_step(*prior.init(clients), seen)
    beliefs["b"] = torch.rand(m, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = prior.links(beliefs, seen)
    after_w, after = prior.e_step(w, beliefs, seen)
    b, known, log_p = beliefs["b"].numpy(), seen.known.numpy(), seen.log_p.numpy()
    by, gamma = beliefs["by"].numpy(), beliefs["gamma"].numpy()
    on, off = np.log(b + EPS), np.log(1 - b + EPS)
    to, new = np.zeros((n, n, m)), np.zeros((n, n, m))
    summed = np.tile(beliefs["alpha"].numpy(), (n, 1))
    for i in range(n):
        for j in range(n):
            x = float(w[i, j])
            to[i, j] = plain_softmax(
                [float(x * on[k] @ by[i, j] + (1 - x) * off[k] @ by[i, j] + psi(gamma[i, k] + EPS)) for k in range(m)]
            )
            new[i, j] = plain_softmax(
                [
                    float(x * on[:, k] @ to[i, j] + (1 - x) * off[:, k] @ to[i, j] + psi(gamma[j, k] + EPS))
                    for k in range(m)
                ]
            )
            if i != j and known[i, j]:
                summed[i] += to[i, j]
                summed[j] += new[i, j]
            score = log_p[i, j] + to[i, j] @ (on - off) @ new[i, j]
            assert float(after_w[i, j]) == pytest.approx(sigmoid(score), abs=1e-10)
    np.testing.assert_allclose(after["to"].numpy(), to, rtol=0, atol=1e-10)
    np.testing.assert_allclose(after["by"].numpy(), new, rtol=0, atol=1e-10)
    np.testing.assert_allclose(after["gamma"].numpy(), summed, rtol=0, atol=1e-10)


def test_attention_equals_a_plain_loop_and_its_slope_finite_differences() -> None:
    clients, seen = random_case(7, 6, 0.6, 2.0)
    prior = Attention(lr=0.1, weight_decay=0.01)
    w, beliefs = prior.e_step(*prior.init(clients), seen)
    first, one, second, two = (part.numpy() for part in beliefs["phi"].split(encoder.SIZES))
    first, second = first.reshape(encoder.WIDTH, encoder.HIDDEN), second.reshape(encoder.HIDDEN, encoder.OUT)
    code = [[np.tanh(np.tanh(s @ first + one) @ second + two) for s in client] for client in beliefs["sketch"].numpy()]
    for i in range(6):
        f = [sum(a @ b for a, b in zip(code[i], code[j], strict=True)) / 3 for j in range(6)]
        scores = [float(seen.log_p[i, j]) + f[j] if seen.known[i, j] else -math.inf for j in range(6)]
        np.testing.assert_allclose(w[i].numpy(), plain_softmax(scores), rtol=0, atol=1e-10)
    phi = beliefs["phi"]

    def objective(at: Tensor) -> float:
        log_p = encoder.log_attention(at, beliefs["sketch"], seen.known)
        return float((w[seen.known] * log_p[seen.known]).sum())

    moved = prior.m_step(w, beliefs, seen)["phi"] - phi  # Adam's first step: the sign of the slope
    for k in range(0, len(phi), 25):
        step = torch.zeros_like(phi)
        step[k] = 1e-5
        slope = (objective(phi + step) - objective(phi - step)) / 2e-5 - 0.01 * float(phi[k])
        assert float(moved[k]) == pytest.approx(0.1 * math.copysign(1, slope), abs=1e-3)


def test_sketches_keep_inner_products() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 400, generator=g, dtype=torch.float64)
    rows[1] = rows[0] + 0.1 * rows[1]
    sketched = encoder.sketch(rows, ((0, 150), (150, 400)))
    assert sketched.shape == (30, 2, encoder.WIDTH)
    unit = torch.nn.functional.normalize(rows)
    for part, (a, b) in enumerate(((0, 150), (150, 400))):
        exact, found = unit[:, a:b] @ unit[:, a:b].T, sketched[:, part] @ sketched[:, part].T
        assert (exact - found).abs().mean() < 2 * (b - a) / 400 / encoder.WIDTH**0.5
        assert float(found[0, 1] / found[0, 0]) == pytest.approx(1, abs=0.2)


def test_the_pull_of_attention_is_the_gradient_of_its_prior() -> None:
    clients, seen = random_case(2, 5, 1.0, 1.0)
    prior = Attention(models=True)
    w, beliefs = prior.e_step(*prior.init(clients), seen)
    here = torch.tensor([True, True, False, True, True])
    x = seen.moved()
    pull = prior.pull(w, beliefs, x, 0.5, here, seen)
    assert pull is not None
    both = here & here[:, None]

    def objective(moved: Tensor) -> float:
        log_p = encoder.log_attention(beliefs["phi"], encoder.sketch(moved, clients.spans), both)
        return float((w[both] * log_p[both]).sum())

    for i, k in ((0, 0), (1, 7), (4, 19), (2, 3)):
        step = torch.zeros_like(x)
        step[i, k] = 1e-5
        slope = (objective(x + step) - objective(x - step)) / 2e-5
        assert float(pull[i, k]) == pytest.approx(0.5 * slope, abs=1e-7)
    assert Attention().pull(w, beliefs, x, 0.5, here, seen) is None


# ---- graphs that the model itself makes ------------------------------------------------------------------------------


def sampled(n: int, m: int, inside: float, across: float, seed: int) -> tuple[Any, Tensor]:
    """Communities and links drawn from the block model, and likelihoods that all but tell the links."""
    rng = np.random.default_rng(seed)
    z = rng.permutation(np.arange(n) % m)
    y = rng.random((n, n)) < np.where(z[:, None] == z, inside, across)
    return z, torch.from_numpy(np.where(y, 6.0, -6.0) + rng.standard_normal((n, n)))


def learned(
    prior: Prior, clients: Few, log_p: Tensor, rounds: int = 10, known: Tensor | None = None
) -> tuple[Tensor, Beliefs]:
    w, beliefs = prior.init(clients)
    for t in range(rounds):
        clients.t = t
        w, beliefs = prior.e_step(w, beliefs, evidence(clients, log_p, known))
        beliefs = prior.m_step(w, beliefs, evidence(clients, log_p, known))
    return w, beliefs


@pytest.mark.parametrize("kind", [SBM, MMSBM])
@pytest.mark.parametrize(("m", "inside", "across"), [(2, 0.8, 0.2), (4, 0.9, 0.1), (3, 0.9, 0.3)])
def test_communities_of_sampled_graphs_are_recovered_with_their_rates(
    kind: Any, m: int, inside: float, across: float
) -> None:
    found = []
    for seed in range(3):
        z, log_p = sampled(48, m, inside, across, seed)
        _, beliefs = learned(kind(m), Few(48, seed), log_p)
        share = beliefs["omega"] if kind is SBM else beliefs["gamma"]
        found.append((adjusted_rand(share.argmax(1).numpy(), z), beliefs["b"]))
    assert min(score for score, _ in found) > 0.95
    _, b = max(found, key=lambda f: f[0])
    own = torch.eye(m, dtype=torch.bool)
    assert float(b[own].mean()) == pytest.approx(inside, abs=0.06)
    assert float(b[~own].mean()) == pytest.approx(across, abs=0.06)


@pytest.mark.parametrize("kind", [SBM, MMSBM])
def test_with_the_same_likelihoods_no_round_of_em_lowers_the_bound(kind: Any) -> None:
    clients = Few(100)
    z, log_p = sampled(100, 5, 0.8, 0.2, 0)
    seen, prior = evidence(clients, log_p), kind(5)
    w, beliefs = prior.init(clients)
    bounds = []
    for t in range(12):
        clients.t = t
        w, beliefs = prior.e_step(w, beliefs, seen)
        bounds.append(float(prior.elbo(w, beliefs, seen)))
        beliefs = prior.m_step(w, beliefs, seen)
        assert float(beliefs["alpha"].max()) < 10  # its gradient is in the hundreds
    assert all(after > before - 1e-2 for before, after in itertools.pairwise(bounds))
    assert bounds[-1] > bounds[0] + 1
    share = beliefs["omega"] if kind is SBM else beliefs["gamma"]
    assert adjusted_rand(share.argmax(1).numpy(), z) > 0.7


@pytest.mark.parametrize("kind", [SBM, MMSBM])
def test_a_poor_first_partition_does_not_stay(kind: Any) -> None:
    rng = np.random.default_rng(0)
    z = rng.permutation(np.arange(100) % 5)
    linked = rng.random((100, 100)) < np.where(z[:, None] == z, 0.95, 0.05)
    log_p = torch.from_numpy(np.where(linked, 1.0, -1.0) + rng.standard_normal((100, 100)))
    scores = {}
    for restart in (False, True):
        _, beliefs = learned(kind(5, restart=restart), Few(100), log_p)
        share = beliefs["omega"] if kind is SBM else beliefs["gamma"]
        scores[restart] = adjusted_rand(share.argmax(1).numpy(), z)
    assert scores[True] == 1
    assert scores[False] < 0.9


def test_where_nobody_was_measured_nothing_is_fitted() -> None:
    clients = Few(5)
    seen = evidence(clients, torch.zeros(5, 5, dtype=torch.float64), torch.eye(5, dtype=torch.bool))
    for prior in (SBM(2), MMSBM(2)):
        w, beliefs = prior.e_step(*prior.init(clients), seen)
        after = prior.m_step(w, beliefs, seen)
        assert torch.equal(after["b"], prior.init(clients)[1]["b"])
        assert torch.equal(after["alpha"], beliefs["alpha"])


def test_half_the_pairs_are_enough() -> None:
    z, log_p = sampled(60, 3, 0.9, 0.1, 1)
    known = torch.rand(60, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    _, beliefs = learned(SBM(3), Few(60, 4), log_p, known=known)
    assert adjusted_rand(beliefs["omega"].argmax(1).numpy(), z) > 0.95


@pytest.mark.parametrize("prior", [SBM(3), SBM(2, learn=False, reference=True), MMSBM(2), Dirac()], ids=str)
def test_permuted_clients_give_a_permuted_graph(prior: Prior) -> None:
    _, log_p = sampled(9, 3, 0.8, 0.2, 2)
    order = [3, 8, 0, 5, 1, 4, 2, 7, 6]
    w, _ = learned(prior, Few(9, 1), log_p, 3)
    permuted, _ = learned(prior, Few(9, 1, order=tuple(order)), log_p[order][:, order], 3)
    torch.testing.assert_close(permuted, w[order][:, order], rtol=0, atol=1e-10)


def test_the_reference_starts_afresh_keeps_b_and_takes_w_before_its_last_sweep() -> None:
    clients, seen = random_case(1, 8, 1.0, 2.0)
    mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) < 0.6
    seen = Evidence(seen.log_p, seen.known, mask, 2.0, seen.moved, clients)
    prior = SBM(2, learn=False, reference=True)
    w, beliefs = prior.e_step(*prior.init(clients), seen)
    again, _ = prior.e_step(w, prior.m_step(w, beliefs, seen) | {"omega": torch.rand(8, 2)}, seen)
    assert torch.equal(w, again)
    start = prior.init(clients)[1]
    omega, gamma, b = (start[k].numpy().copy() for k in ("omega", "gamma", "b"))
    assert b.tolist() == [[0.8, 0.2], [0.2, 0.8]]
    np.testing.assert_allclose(omega.sum(1), 1, rtol=0, atol=1e-12)
    assert ((gamma > 0) & (gamma <= 1)).all()
    log_p = np.where(mask, seen.log_p, 0)
    for sweep in range(2):
        links = plain_links(2.0 * log_p, omega, b)  # the whole score, over the temperature
        links = 1 / (1 + ((1 - links) / links) ** 0.5)
        for i in clients.uniform(f"order {sweep}", clients.everyone).argsort().tolist():
            share = np.zeros(2)
            for k in range(2):  # (48), neither shifted nor without ε
                for j in {*range(8)} - {i}:
                    for h in range(2):
                        for x, rate in ((links[i, j], b[k, h]), (links[j, i], b[h, k])):
                            share[k] += omega[j, h] * (x * math.log(rate + EPS) + (1 - x) * math.log(1 - rate + EPS))
                share[k] += psi(gamma[i, k] + EPS) - psi(gamma[i].sum() + EPS)
            omega[i] = np.exp(share) / (np.exp(share).sum() + EPS)
            gamma[i] = omega[i] + 1
    np.testing.assert_allclose(w.numpy(), links, rtol=0, atol=1e-10)
    np.testing.assert_allclose(beliefs["omega"].numpy(), omega, rtol=0, atol=1e-10)


def test_with_many_clients_the_references_memberships_vanish() -> None:
    prior = SBM(2, learn=False, reference=True)
    for n in (20, 100):
        clients = Few(n, 1)
        log_p = -4 * torch.rand(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        w, beliefs = prior.e_step(*prior.init(clients), evidence(clients, log_p))
        assert 7 < float(beliefs["omega"].sum()) < 11
    assert float((w - torch.sigmoid(log_p)).abs().mean()) < 0.002


def test_the_references_attention_is_that_of_one_encoder_a_tensor_and_one_adamw_a_client() -> None:
    n, lr = 4, 0.2
    clients, seen = random_case(3, n, 0.7, 2.0)
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[2] = mask[1, 3] = False  # one that listens to nobody
    seen = Evidence(seen.log_p, seen.known, mask, 1.0, seen.moved, clients)
    allowed = (seen.known & mask).numpy()
    prior = AttentionReference(lr=lr)
    _, beliefs = prior.init(clients)
    nets = nn.ModuleList(
        nn.Sequential(nn.Linear(math.prod(shape[1:]), 10), nn.Tanh(), nn.Linear(10, 20), nn.Tanh())
        for shape in clients.shapes
    ).double()
    size = [(n_.in_features, n_.weight.numel()) for net in nets for n_ in net if isinstance(n_, nn.Linear)]
    assert beliefs["phi"].numel() == sum(p.numel() for p in nets.parameters())
    assert float(beliefs["phi"].abs().max()) <= max(fan**-0.5 for fan, _ in size)

    def load(phi: Tensor) -> None:  # their linear layers keep outputs first, φ inputs first
        start = 0
        for net in nets:
            for layer in (net[0], net[2]):
                rows, columns = layer.weight.shape
                layer.weight.data = phi[start : start + rows * columns].view(columns, rows).T.clone()
                start += rows * columns
                layer.bias.data = phi[start : start + rows].clone()
                start += rows

    def flat() -> Tensor:
        parts = [(layer.weight.T.flatten(), layer.bias) for net in nets for layer in (net[0], net[2])]
        return torch.cat([p.detach().flatten() for pair in parts for p in pair])

    def scores(i: int) -> Tensor:
        unit = [-row / (row.norm() + 1e-10) for row in seen.moved()]
        f = []
        for j in range(n):
            each = []
            for net, shape, (a, b) in zip(nets, clients.shapes, clients.spans, strict=True):
                mine, other = (net(unit[c][a:b].view(shape[0], -1)) for c in (i, j))
                each.append((mine * other).sum() / shape[0])
            f.append(sum(each) / len(each))
        return torch.stack(f)  # type: ignore[arg-type]

    phi = beliefs["phi"].clone()
    optimisers: dict[int, Any] = {}
    for _ in range(3):
        w, beliefs = prior.e_step(torch.zeros(n, n), beliefs, seen)
        new = []
        for i in range(n):
            at = allowed[i].nonzero()[0].tolist()
            if not at:
                assert not bool(w[i].any())
                continue
            load(phi)
            log_p = scores(i)[at].log_softmax(0)
            expected = (seen.log_p[i, at] + log_p).softmax(0)
            torch.testing.assert_close(w[i, at], expected.detach(), rtol=0, atol=1e-10)
            target = seen.log_p[i, at].softmax(0)
            adam = torch.optim.AdamW(nets.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
            if i in optimisers:
                adam.load_state_dict(optimisers[i])
            adam.zero_grad()
            (-(target * log_p).sum()).backward()
            adam.step()
            optimisers[i] = adam.state_dict()
            new.append(flat())
        phi = torch.stack(new).mean(0)
        beliefs = prior.m_step(w, beliefs, seen)
        torch.testing.assert_close(beliefs["phi"], phi, rtol=0, atol=1e-9)
        target = torch.where(seen.known & mask, seen.log_p, -torch.inf)[[0, 1, 3]].softmax(1)
        torch.testing.assert_close(prior.rank(w, seen)[[0, 1, 3]], target, rtol=0, atol=1e-12)
    assert attention_reference.HIDDEN == 10


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_dirac_refuses_what_is_no_mixing_matrix_and_warns_of_pieces() -> None:
    clients, n = Few(4), 4
    ring = topologies.metropolis(topologies.topology("ring", n))
    assert torch.equal(Dirac(matrix=ring).init(clients)[0], ring)
    lopsided = ring.clone()
    lopsided[0, 1] += 0.1
    lopsided[0, 0] -= 0.1
    for matrix, says in (
        (lopsided, "must be symmetric, but w[0, 1]"),
        (ring * 0.9, "must sum to one, but row"),
        (-ring + 2 * torch.diag(ring.sum(1)), "at least 0"),
        (ring[:3], "4×4, not of shape (3, 4)"),
        (ring * torch.nan, "finite"),
        ("nowhere.npy", "cannot be read"),
    ):
        with pytest.raises(DataError) as caught:
            Dirac(matrix=matrix).init(clients)
        assert says in str(caught.value)
    with pytest.warns(UserWarning, match="in 2 pieces"):
        Dirac(matrix=torch.block_diag(ring[:1, :1] * 3, torch.full((3, 3), 1 / 3, dtype=torch.float64))).init(clients)
    with pytest.raises(SettingError, match="did you mean ring"):
        Dirac(topology="rign").init(clients)


def test_weights_of_those_who_are_away_stay_with_oneself() -> None:
    w = topologies.metropolis(topologies.topology("ring", 5))
    there = torch.tensor([True, False, True, True, True])
    mixed = topologies.among(w, there)
    assert torch.equal(mixed, mixed.T)
    assert mixed.sum(1).numpy() == pytest.approx(1)
    assert mixed[1].tolist() == [0, 1, 0, 0, 0]
    assert float(mixed[0, 0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prior", "says"),
    [
        (lambda: SBM(7).init(Few(6)), "7 communities are more than 6 clients"),
        (lambda: MMSBM(7).init(Few(6)), "7 communities are more than 6 clients"),
        (lambda: MMSBM(10).init(Few(10_000)), "take 14.9 GiB"),
        (lambda: SBM(0), "communities"),
        (lambda: SBM(2, sweeps=0), "sweeps"),
        (lambda: SBM(2, inside=1.0), "inside"),
        (lambda: SBM(2, eta2=-1.0), "eta2"),
        (lambda: Attention(lr=-1.0), "lr"),
        (lambda: AttentionReference(weight_decay=-1.0), "weight_decay"),
    ],
)
def test_settings_without_meaning_are_refused(prior: Any, says: str) -> None:
    with pytest.raises(CoterieError) as caught:
        prior()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_limit_of_mixed_memberships_is_what_it_says() -> None:
    n, m = 40, 3
    _, beliefs = MMSBM(m).init(Few(n))
    assert beliefs["to"].nbytes + beliefs["by"].nbytes == 16 * n * n * m
    assert 16 * 3660**2 * 10 <= mmsbm.LIMIT < 16 * 3670**2 * 10


def test_every_prior_is_tried() -> None:
    assert set(PRIORS) >= {"dirac", "sbm", "attention", "attention_reference", "mmsbm"}
