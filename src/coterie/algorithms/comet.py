"""COMET (Cho, Wang, Chirvolu and Joshi 2023): clients learn from the mean predictions of those who predict alike.

Communication-Efficient and Model-Heterogeneous Personalized Federated Learning via Clustered Knowledge Transfer.
Everyone keeps its own model, of any architecture. What travels are soft outputs s_k on unlabelled public inputs P:

    c-means on the outputs that arrived in the last round: centroids c_1 … c_c, unweighted means          (Algorithm 1)
    m clients, drawn without replacement with chances p_k (data shares); each gets all centroids, and
    s̄_k = argmin_{c_j} ‖c_j − s_k‖² over the whole stack, held for the round                                        (4)
    w_k ← w_k − η ∇[F_k(w_k) + λ_k/|P| Σ_x ‖s̄_k(x) − s_k(x)‖²]   for the plan's steps, on a private batch and a
    public batch of b' each; then it sends its new s_k                                                        (1), (2)

The outputs that the first round clusters are asked of m random clients before it. After a `warmup` of rounds in which
everyone trains alone they are those of its last round. A newcomer needs nothing: it takes its nearest centroid. Outputs
that coincide (equal initial models) count as one point, as often as it is there; where there are fewer points than
centroids, some are sent twice. `c="silhouette"` picks c each round, from 2 to `most`, and 1 where no clustering of the
last outputs scores above FOUND.

λ is one number, one for each client, or `adaptive`. Theorem IV.7 has the deviations v_k² of clients from what they have
in common: λ_k* = σ²/(v_k² ν) and α*_{k,i} = B_k/(σ² + βv_i²), where the printed B_k does not make the weights sum to
one, and must be B_k = A_k(σ² + βv_k²)/(σ² + βv_k² + A_k) = (Σ_i 1/(σ² + βv_i²))⁻¹, the same for all k. With it the
minimiser of (13) is the Bayes estimate: its weight on the others' mean, λν/(β + λν) · (σ² + βv_k²)/(σ² + βv_k² + A_k),
is σ²/(σ² + βv_k² + A_k) exactly where λν/β = σ²/(βv_k²). So, where `variances` are known, there is one target for all,
Σ_i α_i s_i with α_i ∝ 1/(e + v_i²), and λ_k = λ e/v_k², where e = σ²/β (`error`) is the variance of an estimate made
alone and λ, in the means of (1), the ratio of private to public second moments: 1 where inputs are alike.

Where they are not known, `adaptive` measures: v_k² is the mean squared distance of a client's outputs to the mean of
the others who took the same centroid, and λ_k = λ min(1, h / v_k²), h the harmonic mean over clients. Nobody is pulled
harder than by λ: whoever is very near the others would be, by many times, and its training would diverge. The theorem's
σ² and with it the scale cannot be had from outputs, and where labels differ any pull may hurt, so whether to be pulled
at all is learned. Beside a client's model two more train: one that is always pulled, whose outputs are those that
travel, and one always alone. By how much the first does better on validation data is g_k, a running mean over rounds;
the client's model is pulled as well while g_k + 2 (ḡ − s) > 0, where ḡ is the mean of g over clients and s its standard
error. Else it trains alone: whoever was never pulled ends as `local` does where batches are read as epochs, or after a
`warmup` (else all but the first round's batches are those that `local` draws; its outputs were asked for before). That
costs three times the work, two numbers a client and round, and the centroids twice, since the ledger charges each model
that they pull.

BatchNorm: a private and a public batch are normalised each by itself, and only the private one moves the buffers.

Travels: up m·outputs, down m·clusters·outputs; phases 1; graphs 1; rows n.
(`outputs` is |P|·N; the first round has one more phase, up m·outputs. `coarse` lets less travel, both ways. While
everyone warms up nothing travels, but for the outputs of the last of these rounds.)
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, Info, per_client
from coterie.asks import Answer, Ask, Coarse, Distil, Evaluate, Fit, Own, Plan, Predict
from coterie.errors import SettingError
from coterie.fleet.base import Fleet
from coterie.settings import real, whole

STARTS = 10  # of k-means
FOUND = 0.1  # the least silhouette of clusters that are there; a cloud without any scores up to 0.05
SAME = 1e-6  # root mean square distance below which outputs coincide
MEMORY = 0.8  # of the running mean of what the pull is worth
COMMON = 2  # how much everyone's gain counts beside a client's own, which a few validation samples tell


@dataclass(frozen=True)
class COMETState:
    """What arrived last; the models are the clients' own."""

    heard: Tensor  # whose outputs these are, on the host
    outputs: Tensor  # heard × P × N: s
    apart: Tensor  # n float64, on the host: v², 0 where not known yet
    worth: Tensor  # n float64, on the host: by how much the pull has helped, as a running mean


@dataclass(frozen=True)
class COMET(Algorithm):
    """Clustered co-distillation."""

    plan: Plan = field(default_factory=lambda: Plan(steps=50))
    lam: float | tuple[float, ...] = 2.0  # λ, or one for each client
    c: int | Literal["silhouette"] = 3
    most: int = 6  # the largest c that silhouettes choose from
    m: int | None = None  # clients a round; None: all that are there
    public_batch: int = 128  # b'
    inputs: str = "public"
    warmup: int = 0  # rounds without a pull
    adaptive: bool = False
    variances: tuple[float, ...] = ()  # v_k² of each client, where they are known
    error: float = 1.0  # σ²/β, which goes with them
    coarse: Coarse | None = None  # how outputs and centroids travel
    shared: bool = True  # one initial model for all of an architecture, or one each

    mixed = True

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for each in self.lam if isinstance(self.lam, tuple) else (self.lam,):
            real("lam", each, 0, closed=True)
        if self.c != "silhouette":
            whole("c", self.c, 1, self.m)
        elif self.m is not None:
            whole("m", self.m, 3)
        whole("most", self.most, 2)
        whole("public_batch", self.public_batch, 1)
        whole("warmup", self.warmup, 0)
        real("error", self.error, 0)
        if self.variances and self.c != 1:
            raise SettingError(f"with variances there is one target for all: set c = 1, not {self.c!r}")
        if self.variances and self.adaptive:
            raise SettingError("an adaptive lam measures what variances say: set one of them")
        for v in self.variances:
            real("each of the variances", v, 0)

    def init(self, fleet: Fleet) -> COMETState:
        """Nobody was heard yet. Refuses what the fleet's models, public inputs or numbers do not allow."""
        shape = fleet.predictions(self.inputs)
        if self.m is not None:
            whole("m, clients a round,", self.m, 1, fleet.n)
        if self.c != "silhouette":
            whole("c, centroids of the clients of a round,", self.c, 1, min(self.m or fleet.n, fleet.most))
        for name, given in (("lam", self.lam), ("variances", self.variances)):
            if isinstance(given, tuple) and given and len(given) != fleet.n:
                raise SettingError(f"{name} has {len(given)} entries for {fleet.n} clients")
        if self.adaptive and not bool(fleet.sizes("validation").all()):
            lacks = fleet.keys[int((fleet.sizes("validation") == 0).nonzero()[0])]
            raise SettingError(f"an adaptive lam is judged on validation data, and client {lacks!r} has none")
        none = torch.zeros(fleet.n, dtype=torch.float64)
        outputs = torch.zeros(0, *shape, dtype=fleet.dtype, device=fleet.device)
        return COMETState(torch.zeros(0, dtype=torch.long), outputs, none, none)

    def round(self, fleet: Fleet, state: COMETState) -> tuple[COMETState, Info]:
        """Cluster what arrived; those drawn train, pulled to their nearest centroid, and predict."""
        pulls = fleet.t >= self.warmup
        if pulls and not len(state.heard):
            state = self.first(fleet, state)
        pulls = pulls and len(state.heard) > 0  # nobody answered: train alone
        who = self.drawn(fleet, "selected", fleet.sizes("train").double())
        alpha = self.centroids(fleet, state) if pulls else torch.zeros(0, len(state.heard), dtype=torch.float64)
        distil, trusted = None, torch.ones(len(who), dtype=torch.bool)
        if pulls:
            targets = (alpha.to(state.outputs) @ state.outputs.flatten(1)).unflatten(1, state.outputs.shape[1:])
            lam = self.weights(fleet, state)[who]
            distil = Distil(targets, self.inputs, lam.to(state.outputs), self.public_batch, coarse=self.coarse)
            trusted = self.trusted(state)[who] & (lam > 0)
        told = self.ask(fleet, who, distil, trusted)
        fit, predicted = told["model"], told.get("said")
        ok = (fit.ok if predicted is None else fit.ok & predicted.ok).cpu()
        choice = told.get("pulled", fit).choice.cpu() if pulls else torch.zeros(len(who), dtype=torch.long)
        graph = torch.eye(fleet.n, dtype=torch.float64)
        cluster = torch.full((fleet.n,), -1)
        if pulls:
            listened = alpha.new_zeros(len(who), fleet.n).index_add_(1, state.heard, alpha[choice])
            graph[who[ok & trusted]] = listened[ok & trusted]
            cluster[who[ok]] = choice[ok]
        info = Info(graph, per_client(fleet.n, who, ok), per_client(fleet.n, who, fit.loss), {
            "clusters": torch.tensor(len(alpha)), "outputs": torch.tensor(state.outputs[0].numel() if pulls else 0),
            "cluster": cluster,
        })  # fmt: skip
        if predicted is None or not bool(ok.any()):
            return state, info
        state = replace(state, heard=who[ok], outputs=predicted.outputs[ok.to(predicted.outputs.device)])
        if self.adaptive and pulls:
            state = self.learned(state, choice[ok], self.gain(fleet, told)[ok])
        return state, info

    def first(self, fleet: Fleet, state: COMETState) -> COMETState:
        """The outputs of m random clients, before anybody trains."""
        who = self.drawn(fleet, "first", torch.ones(fleet.n, dtype=torch.float64))
        answer = fleet.ask(Predict(who, self.model, self.inputs, soft=True, coarse=self.coarse))
        return replace(state, heard=who[answer.ok.cpu()], outputs=answer.outputs[answer.ok])

    def drawn(self, fleet: Fleet, tag: str, size: Tensor) -> Tensor:
        """m of those who are there, without replacement by `size`: the first of exponential clocks with such rates.

        In the order of the clocks, so that k-means sees the same in whatever order the clients stand.
        """
        order = (-torch.log1p(-fleet.uniform(tag, fleet.everyone)) / size).argsort()
        return order[fleet.present[order]][: self.m]

    def centroids(self, fleet: Fleet, state: COMETState) -> Tensor:
        """How each centroid is made of those heard: c × heard, rows that sum to one."""
        if self.variances:
            weight = 1 / (self.error + torch.tensor(self.variances, dtype=torch.float64)[state.heard])
            return (weight / weight.sum())[None]
        seen = state.outputs.double().cpu().flatten(1)
        near = (
            torch.cdist(seen, seen, compute_mode="donot_use_mm_for_euclid_dist") <= SAME * state.outputs.shape[1] ** 0.5
        )
        same, place = near.int().argmax(1).unique(return_inverse=True)
        random = int(torch.randint(1 << 31, (), generator=fleet.generator("k-means")))
        if self.c == "silhouette":
            label = _clearest(seen[same], place, min(self.most, len(seen) - 1), random)
            count = int(label.max()) + 1
        else:
            label, count = _clusters(seen[same], place, self.c, random), self.c
        member = torch.nn.functional.one_hot(label, count).T.double()
        member = torch.where(member.sum(1, keepdim=True) > 0, member, member[label[0]])
        return member / member.sum(1, keepdim=True)

    def weights(self, fleet: Fleet, state: COMETState) -> Tensor:
        """λ_k of every client."""
        lam = torch.as_tensor(self.lam, dtype=torch.float64).expand(fleet.n)
        if self.variances:
            return lam * self.error / torch.tensor(self.variances, dtype=torch.float64)
        if self.adaptive:
            known = state.apart > 0
            harmonic = known.sum() / (1 / state.apart[known]).sum() if bool(known.any()) else torch.tensor(1.0)
            lam = lam * torch.where(known, harmonic / torch.where(known, state.apart, 1), 1).clamp(max=1)
        return lam

    def trusted(self, state: COMETState) -> Tensor:
        """Whom the pull has helped so far; without `adaptive` nobody asks."""
        worth = state.worth
        if not self.adaptive:
            return torch.ones(len(worth), dtype=torch.bool)
        sure = float(worth.mean()) - float(worth.std(correction=0)) / len(worth) ** 0.5
        found: Tensor = worth > -COMMON * sure
        return found

    def ask(self, fleet: Fleet, who: Tensor, distil: Distil | None, trusted: Tensor) -> dict[str, Answer]:
        """Train, and predict if the next round pulls; one phase."""
        plan, speaks = self.plan.at(fleet.t), self.model
        mine = distil
        if self.adaptive and distil is not None:
            mine = replace(distil, weight=distil.weight * trusted.to(distil.targets)) if bool(trusted.any()) else None
        asks: dict[str, Ask] = {"model": Fit(who, self.model, plan, give="nothing", distil=mine)}
        if self.adaptive:
            speaks, alone = Own("pulled", self.shared), Own("alone", self.shared)
            asks["pulled"] = Fit(who, speaks, plan, give="nothing", distil=distil)
            asks["alone"] = Fit(who, alone, plan, give="nothing")
            if distil is not None:
                asks["with"], asks["without"] = (
                    Evaluate(who, each, "validation", metrics=(fleet.task.main,)) for each in (speaks, alone)
                )
        if fleet.t + 1 >= self.warmup:
            asks["said"] = Predict(who, speaks, self.inputs, soft=True, coarse=self.coarse)
        told = fleet.ask(*asks.values())
        return dict(zip(asks, told if isinstance(told, tuple) else (told,), strict=True))

    def gain(self, fleet: Fleet, told: dict[str, Answer]) -> Tensor:
        """By how much the pulled model does better on validation data than the one alone; 0 where either is silent."""
        main, pair = fleet.task.main, (told["with"], told["without"])
        ours, others = (each.metrics[main].double().cpu() for each in pair)
        gain = (ours - others).where((pair[0].ok & pair[1].ok).cpu(), 0).nan_to_num()
        return gain if fleet.task.higher_is_better(main) else -gain

    def learned(self, state: COMETState, choice: Tensor, gain: Tensor) -> COMETState:
        """v² of those who answered, and what the pull is worth to them."""
        seen, who = state.outputs.double().cpu().flatten(1), state.heard
        others = ~torch.eye(len(who), dtype=torch.bool)
        alike = others & (choice[:, None] == choice)
        alike = torch.where(alike.any(1, keepdim=True), alike, others).double()
        mean = alike / alike.sum(1, keepdim=True).clamp(min=1) @ seen
        apart, worth = state.apart.clone(), state.worth.clone()
        if len(who) > 1:
            apart[who] = (seen - mean).square().sum(1) / state.outputs.shape[1]
        worth[who] = MEMORY * worth[who] + (1 - MEMORY) * gain
        return replace(state, apart=apart, worth=worth)

    @property
    def model(self) -> Own:
        """Everyone's own."""
        return Own("model", self.shared)

    def personal(self, state: COMETState) -> Own:
        """The model at the client."""
        return self.model


def _clusters(points: Tensor, place: Tensor, c: int, random: int) -> Tensor:
    """The cluster of each client: c-means over distinct points, each as heavy as it is frequent."""
    if len(points) <= c:
        return place
    from sklearn.cluster import KMeans  # a second, which no command line has to wait for

    found = KMeans(c, n_init=STARTS, random_state=random).fit(points.numpy(), sample_weight=place.bincount().numpy())
    return torch.from_numpy(found.labels_).long()[place]


def _clearest(points: Tensor, place: Tensor, most: int, random: int) -> Tensor:
    """The clustering of 2 to `most` clusters with the highest silhouette, or a single cluster."""
    from sklearn.metrics import silhouette_score

    best, score = torch.zeros(len(place), dtype=torch.long), FOUND
    for c in range(2, min(most, len(points)) + 1):
        label = _clusters(points, place, c, random)
        clear = float(silhouette_score(points[place].numpy(), label.numpy()))
        if clear > score:
            best, score = label, clear
    return best
