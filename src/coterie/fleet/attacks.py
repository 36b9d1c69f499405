"""Clients that lie: any of them, with any algorithm, over any fleet.

An attacker computes and remembers what an honest client would, and answers whatever came of it. What it says in place
of its true answer v, where μ and s are the mean and the standard deviation of the honest answers in each coordinate:

    none        v: nobody attacks, but the clients are left out of the averages all the same, for comparison
    bit_flip    −v
    ipm         −ε μ, inner-product manipulation (Xie et al. 2020), ε = 0.1
    alie        μ − z s, "a little is enough" (Baruch et al. 2019), z = 100
    gaussian    σ times standard normal noise in place of v, σ = 10
    mimic       the v of one honest client, `victim` (Karimireddy et al. 2022)
    free_rider  0, as if it had done nothing
    label_flip  v, but of data in which class y is called C − 1 − y: training, validation and test data alike

ε, z and σ are `strength`, and the values given are those of MeritFed's authors, who attack with the last third of the
clients. ipm, alie and mimic know the honest answers to the same ask about the same model; where no honest client was
asked about it (everyone at a model of its own), all honest answers to the ask; where there are none at all, they say
v. With `among = "all"`, μ and s take in what the attackers would have said, as in those authors' code.

- Gradient: v is the gradient. Sums, inner products and sketches are made of single rows after the lie.
- Fit: v is the update, and where a model is given, start + update is (so a free-rider sends back what it received);
  only the columns that move are lied about. A model that began as the client's own, Own, has no start that anyone
  else knows: there v is the model. With give="nothing" nothing is said, and the attacker's own model is an honest one.
- Loss: v is the loss. The free loss beside a gradient or an update stays as it was.
- Predict: v are the outputs on public inputs.
- Evaluate, and all that an observer watches, are true; runs leave attackers out of their averages instead.

What is compressed is compressed again after the lie, and the ledger counts attackers like everyone. Noise follows from
seed, client, round, place of the ask and draw. Buffers, which no ask sends, are honest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie import draws
from coterie.asks import NONFINITE, OK, Answer, Ask, Fit, Gradient, Loss, Own, Predict
from coterie.data.population import Population
from coterie.errors import SettingError
from coterie.fleet.altering import Altering
from coterie.fleet.base import Fleet
from coterie.fleet.compress import squeezed
from coterie.settings import hint, real
from coterie.tasks import Classification


@dataclass(frozen=True, eq=False)
class Scene:
    """What attackers know when they answer about one model."""

    own: Tensor  # k×d: their true answers
    crowd: Tensor  # h×d: those of the honest
    victim: int  # the row of the crowd to copy
    strength: float
    keys: Tensor  # k: of their noise


def bit_flip(scene: Scene) -> Tensor:
    """−v."""
    return -scene.own


def ipm(scene: Scene) -> Tensor:
    """−ε μ."""
    return (-scene.strength * scene.crowd.mean(0)).expand_as(scene.own)


def alie(scene: Scene) -> Tensor:
    """μ − z s; one honest client deviates from nobody."""
    spread = scene.crowd.std(0) if len(scene.crowd) > 1 else torch.zeros_like(scene.crowd[0])
    return (scene.crowd.mean(0) - scene.strength * spread).expand_as(scene.own)


def gaussian(scene: Scene) -> Tensor:
    """σ times noise."""
    entries = torch.arange(scene.own.shape[1], device=scene.own.device)
    noise = [draws.normal(draws.fold(key, entries), scene.own.dtype) for key in scene.keys]
    return scene.strength * torch.stack(noise)


def mimic(scene: Scene) -> Tensor:
    """The victim's v."""
    return scene.crowd[scene.victim].expand_as(scene.own)


def free_rider(scene: Scene) -> Tensor:
    """0."""
    return torch.zeros_like(scene.own)


LIES: dict[str, Callable[[Scene], Tensor]] = {
    "bit_flip": bit_flip,
    "ipm": ipm,
    "alie": alie,
    "gaussian": gaussian,
    "mimic": mimic,
    "free_rider": free_rider,
}
KINDS = ("none", *LIES, "label_flip")
STRENGTHS = {"ipm": 0.1, "alie": 100.0, "gaussian": 10.0}
CROWDED = ("ipm", "alie", "mimic")  # who need others' answers
SHARES = {"third": 1 / 3, "half": 1 / 2, "quarter": 1 / 4}


@dataclass(frozen=True)
class Attack:
    """The `[attack]` table: who attacks, and how.

    `clients`: a list of keys, or text with one key or several between commas; a whole number, the last so many; a
    share below 1, or "last third", "last half", "last quarter". Of several pools each gives its last ones.
    """

    kind: str
    clients: int | float | str | tuple[str, ...] = "last third"
    strength: float | None = None  # ε, z or σ; default: see above
    among: Literal["honest", "all"] = "honest"  # whose answers ipm and alie average
    victim: str = ""  # whom to mimic; default: of the honest who answered the one whose key comes last

    def __post_init__(self) -> None:
        """Refuse what is no attack."""
        if self.kind not in KINDS:
            raise SettingError(f"no attack is called {self.kind!r}: {hint(self.kind, KINDS)}")
        if self.strength is not None:
            if self.kind not in STRENGTHS:
                raise SettingError(f"strength goes with {', '.join(STRENGTHS)}, not with {self.kind}")
            real("strength", self.strength, 0)
        if self.among == "all" and self.kind not in ("ipm", "alie"):
            raise SettingError(f"among goes with ipm and alie, not with {self.kind}")
        if self.victim and self.kind != "mimic":
            raise SettingError(f"victim goes with mimic, not with {self.kind}")

    @property
    def alters(self) -> bool:
        """Whether answers are altered."""
        return self.kind in LIES

    def on(self, population: Population) -> Population:
        """The same population with its attackers named, and where labels are flipped, with other labels."""
        chosen = set(self.chosen(population))
        keys = population.keys[: population.n]
        if len(chosen) == len(keys):
            raise SettingError(f"all {len(keys)} clients would be attackers: leave at least one honest")
        if helped := [key for key in population.helped if key in chosen]:
            raise SettingError(f"client {helped[0]!r} is the target and cannot attack: say with clients who does")
        if self.victim and (self.victim not in keys or self.victim in chosen):
            honest = [key for key in keys if key not in chosen]
            raise SettingError(f"the victim {self.victim!r} is no honest client: {hint(self.victim, honest)}")
        named = replace(population, attackers=tuple(key for key in keys if key in chosen))
        return flipped(named) if self.kind == "label_flip" else named

    def chosen(self, population: Population) -> list[str]:
        """The keys of the attackers."""
        keys, given = population.keys[: population.n], self.clients
        if isinstance(given, str):
            word = given.removeprefix("last ").strip()
            if given not in keys and given.startswith("last ") and (word in SHARES or word.isdigit()):
                given = SHARES[word] if word in SHARES else int(word)
            else:
                given = (given,) if given in keys else tuple(key.strip() for key in given.split(","))
        if isinstance(given, tuple):
            for key in given:
                if key not in keys:
                    known = [*keys, *(f"last {share}" for share in SHARES)]
                    raise SettingError(f"clients: {key!r} is no client: {hint(key, known)}")
            if not given:
                raise SettingError("clients names nobody: an attack has at least one attacker")
            return list(given)
        pools = population.pools or (0,) * len(keys)
        found: list[str] = []
        for pool in sorted(set(pools)):
            own = [key for key, p in zip(keys, pools, strict=True) if p == pool]
            found += own[-_count(given, len(own)) :]
        return found


def _count(given: int | float, n: int) -> int:
    """How many attackers that is of n clients."""
    if isinstance(given, float):
        if not 0 < given < 1:
            raise SettingError(f"clients: a share of attackers is above 0 and below 1, not {given}")
        given = max(1, int(given * n + 1e-9))
    if given < 1:
        raise SettingError(f"clients: an attack has at least one attacker, not {given}")
    if given >= n:
        raise SettingError(f"clients: {given} attackers were asked for, and there are {n} clients, one of them honest")
    return given


def flipped(population: Population) -> Population:
    """With class y called C − 1 − y in all data of the attackers."""
    task = population.task
    if not isinstance(task, Classification) or population.stream is not None:
        raise SettingError(f"label_flip needs samples with classes, and these clients learn {task.name}")
    if not len(population.targets):
        raise SettingError("label_flip needs the clients' data, and these are at their sites: alter answers instead")
    relabel = population.relabel
    if relabel is None:
        relabel = torch.arange(task.classes).expand(len(population.keys), -1)
    liars = torch.tensor([key in population.attackers for key in population.keys])
    relabel = torch.where(liars[:, None], task.classes - 1 - relabel, relabel)
    return replace(population, relabel=relabel, targets=population.targets.long())


class Attacked(Altering):
    """A fleet in which the attackers that its population names do as an attack says."""

    def __init__(self, inner: Fleet, attack: Attack) -> None:
        super().__init__(inner)
        if not inner.population.attackers:
            raise SettingError("this population names no attackers: build the fleet on attack.on(population)")
        self.attack = attack
        self.liars = torch.tensor([key in inner.population.attackers for key in inner.keys])
        order = sorted(range(self.n), key=lambda c: (inner.keys[c] == attack.victim, inner.keys[c]))
        self.rank = torch.empty(self.n, dtype=torch.long)
        self.rank[torch.tensor(order)] = torch.arange(self.n)

    def touches(self, ask: Ask) -> bool:
        """Whether an attacker is asked to say something."""
        said = isinstance(ask, Gradient | Loss | Predict) or (isinstance(ask, Fit) and ask.give != "nothing")
        return self.attack.alters and said and bool(self.among(ask, self.liars).any())

    def alter(self, ask: Ask, answer: Answer, place: int) -> Answer:
        """The honest answers, and the attackers' lies."""
        name = {"loss": "loss", "predict": "outputs"}.get(ask.kind, "rows")
        told = getattr(answer, name)
        start = _start(ask)
        true = (told if start is None else told - start).reshape(ask.m, -1)
        reason = answer.reason.cpu()
        lying = self.among(ask, self.liars) & ((reason == OK) | (reason == NONFINITE))  # who lies needs no number
        said = told.clone()
        for liars, crowd in self.scenes(ask, lying, reason == OK):
            if not len(crowd) and self.attack.kind in CROWDED:
                continue
            here = liars.to(true.device)
            lie = self.lies(ask, place, liars, crowd, true).view(-1, *told.shape[1:])
            said[here] = lie if start is None else start[here] + lie
        kept = torch.where(lying, OK, reason).to(answer.reason.device, answer.reason.dtype)
        return replace(answer, reason=kept, **{name: said})

    def scenes(self, ask: Ask, lying: Tensor, ok: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each model that attackers answer about: their pairs, and those of the honest they know of."""
        honest = ok & ~self.among(ask, self.liars)
        heard = ok if self.attack.among == "all" else honest
        model = _models(ask)
        met = torch.isin(model, model[honest])
        for number in model[lying & met].unique():
            here = model == number
            yield (lying & here).nonzero().flatten(), (heard & here).nonzero().flatten()
        if bool((lying & ~met).any()):
            yield (lying & ~met).nonzero().flatten(), heard.nonzero().flatten()

    def lies(self, ask: Ask, place: int, liars: Tensor, crowd: Tensor, true: Tensor) -> Tensor:
        """What the attackers say about one model (k×d)."""
        key = draws.fold(self.inner._ids[ask.clients[liars]], draws.name("attack"))
        key = draws.fold(draws.fold(key, self.t), place)
        draw = getattr(ask, "draw", None)
        key = draws.fold(key, 0 if draw is None else draw[liars])
        scene = Scene(
            own=true[liars.to(true.device)],
            crowd=true[crowd.to(true.device)],
            victim=int(self.rank[ask.clients[crowd]].argmax()) if len(crowd) else 0,
            strength=STRENGTHS.get(self.attack.kind, 0.0) if self.attack.strength is None else self.attack.strength,
            keys=draws.fold(key, 0).to(true.device),
        )
        said = LIES[self.attack.kind](scene)
        if isinstance(ask, Fit) and ask.columns is not None:
            moving = torch.zeros(said.shape[1], dtype=torch.bool)
            moving[ask.columns] = True
            said = torch.where(moving.to(said.device), said, scene.own)
        if isinstance(ask, Gradient | Fit):
            said = squeezed(said, ask.compress, draws.fold(key, 1).to(said.device))
        return said


def _models(ask: Ask) -> Tensor:
    """A number for each pair, equal where the model is."""
    if isinstance(ask.models, Own) or ask.at is None:
        return torch.arange(ask.m)
    at = ask.at.reshape(ask.m, -1).sort(1).values
    number: Tensor = at.unique(dim=0, return_inverse=True)[1]
    return number


def _start(ask: Ask) -> Tensor | None:
    """The models that the rows of a Fit began from, where these are what is sent and anyone knows them."""
    if not isinstance(ask, Fit) or ask.give != "rows" or isinstance(ask.models, Own):
        return None
    if ask.at is None:
        return ask.models
    rows = ask.models[ask.at.to(ask.models.device)]
    return rows if ask.at.ndim == 1 else rows.mean(1)
