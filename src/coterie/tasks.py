"""What is learned: per-sample losses, metrics, and the check that a model's outputs fit its targets.

`loss` and `summary` see one batch and run inside `vmap` and `torch.compile`; `measure` sees the summaries of m clients
at once, padded to the longest (`valid` says which entries are real), and loops over no client. Metrics are in float64.

Where a client's split lacks something, this is what its metrics say. An empty split: every metric NaN. Classes absent
from the split: `balanced_accuracy` averages over the classes present in the targets, `macro_f1` over those present in
the targets or the predictions (both as scikit-learn), `auroc` (one class against the rest) over those present in the
targets; with a single class present `auroc` is NaN. `own_classes_accuracy`, which some papers call accuracy, lets the
model answer with classes of the split only, so with a single one it is 1. `r2` of a constant target is 1 if it is met
exactly and 0 if not, and NaN for fewer than two samples (as scikit-learn).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import CoterieError, DataError, ModelError, SettingError
from coterie.settings import call, hint

CALIBRATION_BINS = 15
LOWER_IS_BETTER = frozenset({"loss", "perplexity", "calibration_error"})


def logits_of(output: Any) -> Tensor:
    """The tensor in a model's output, which may be the tensor itself or carry it as `.logits` (transformers do)."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ModelError(f"a model must return a tensor or something with .logits, not a {type(output).__name__}")
    return found


class Task(ABC):
    """What is learned."""

    name: ClassVar[str]
    main: ClassVar[str]  # the metric that tables show first
    metrics: ClassVar[tuple[str, ...]]  # every metric it can report

    def higher_is_better(self, metric: str) -> bool:
        """Whether a larger value of this metric is the better one."""
        self._known([metric])
        return metric not in LOWER_IS_BETTER

    def check(self, output: Any, target: Any, who: object) -> None:
        """Refuse outputs that do not fit their targets; `who` is the client's key. Reads values, so once a fit."""
        try:
            if not isinstance(target, Tensor):
                raise DataError(f"targets are a {type(target).__name__}; they must be a tensor")
            logits = logits_of(output)
            if not logits.is_floating_point():
                raise ModelError(f"outputs are {_kind(logits)}; they must be floating-point numbers")
            self._check(logits, target)
        except CoterieError as error:
            raise type(error)(f"client {who}: {error}") from None

    @abstractmethod
    def loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss of each sample of a batch, shape (B,)."""

    @abstractmethod
    def soft(self, output: Any) -> Tensor:
        """What models agree about or not: probabilities in the shape of the outputs, or the numbers of a regression."""

    @abstractmethod
    def summary(self, output: Any, target: Tensor) -> Tensor:
        """What evaluation keeps of each sample: B×S, from which `measure` computes every metric."""

    def measure(self, summary: Tensor, valid: Tensor, metrics: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Each metric asked for (all of them by default) of m clients, from their summaries m×P×S where `valid` m×P."""
        asked = self.metrics if metrics is None else tuple(metrics)
        self._known(asked)
        # padding may hold anything, NaN and labels out of range included, so it goes before any arithmetic
        kept = summary.where(valid.unsqueeze(-1), 0)
        return {metric: self._measure(metric, kept, valid) for metric in asked}

    @abstractmethod
    def _check(self, logits: Tensor, target: Tensor) -> None: ...

    @abstractmethod
    def _measure(self, metric: str, kept: Tensor, valid: Tensor) -> Tensor:
        """One metric (m,) from summaries whose padding is zero; an empty split comes out as 0/0."""

    def _known(self, asked: Iterable[str]) -> None:
        for metric in asked:
            if metric not in self.metrics:
                raise SettingError(f"{self.name} has no metric {metric!r}: {hint(metric, self.metrics)}")


_CLASS_METRICS = (
    "accuracy",
    "own_classes_accuracy",
    "balanced_accuracy",
    "macro_f1",
    "auroc",
    "calibration_error",
    "loss",
)


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes: logits B×C, targets B integers in [0, C), cross-entropy."""

    classes: int

    name = "classification"
    main = "accuracy"
    metrics = _CLASS_METRICS

    def __post_init__(self) -> None:
        """Refuse fewer than two classes."""
        _at_least("classes", self.classes, 2)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Cross-entropy, (B,)."""
        return F.cross_entropy(_precise(logits_of(output)), target.long(), reduction="none")

    def soft(self, output: Any) -> Tensor:
        """B×C probabilities."""
        return logits_of(output).softmax(-1)

    def summary(self, output: Any, target: Tensor) -> Tensor:
        """C log-probabilities and the label."""
        scores = F.log_softmax(_precise(logits_of(output)), -1)
        return torch.cat([scores, target.to(scores.dtype).unsqueeze(-1)], -1)

    def _check(self, logits: Tensor, target: Tensor) -> None:
        _integers(target, "labels")
        if target.dim() != 1:
            raise DataError(f"targets have shape {_shape(target)}; classification needs one label per sample, (B,)")
        if logits.dim() != 2 or logits.shape[1] != self.classes:
            raise ModelError(f"outputs have shape {_shape(logits)}; {self.classes} classes need (B, {self.classes})")
        _same_batch(logits, target)
        _in_range(target, self.classes, "label")

    def _measure(self, metric: str, kept: Tensor, valid: Tensor) -> Tensor:
        scores, label = kept[..., :-1], kept[..., -1].long()
        if metric == "auroc":
            each = [_auroc(scores[..., c].contiguous(), label == c, valid) for c in range(self.classes)]
            return torch.stack(each, -1).nanmean(-1)
        return _class_metric(metric, scores, label, valid)


@dataclass(frozen=True)
class Binary(Task):
    """Yes or no: one logit per sample, (B,) or (B, 1); targets 0 or 1 of any number type; logistic loss."""

    name = "binary"
    main = "accuracy"
    metrics = _CLASS_METRICS

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Logistic loss, (B,)."""
        logits = _precise(logits_of(output)).flatten()
        return F.binary_cross_entropy_with_logits(logits, target.flatten().to(logits.dtype), reduction="none")

    def soft(self, output: Any) -> Tensor:
        """The probability of a yes."""
        return logits_of(output).sigmoid()

    def summary(self, output: Any, target: Tensor) -> Tensor:
        """The logit and the label."""
        logits = _precise(logits_of(output)).flatten()
        return torch.stack([logits, target.flatten().to(logits.dtype)], -1)

    def _check(self, logits: Tensor, target: Tensor) -> None:
        if target.dim() != 1 and not (target.dim() == 2 and target.shape[1] == 1):
            raise DataError(f"targets have shape {_shape(target)}; binary needs one per sample, (B,) or (B, 1)")
        if logits.dim() != 1 and not (logits.dim() == 2 and logits.shape[1] == 1):
            raise ModelError(f"outputs have shape {_shape(logits)}; binary needs one logit, (B,) or (B, 1)")
        _same_batch(logits, target)
        _finite(target)
        wrong = target[(target != 0) & (target != 1)]
        if wrong.numel():
            raise DataError(f"label {wrong[0].item():g} is not allowed; binary labels are 0 and 1")

    def _measure(self, metric: str, kept: Tensor, valid: Tensor) -> Tensor:
        logits, label = kept[..., 0].contiguous(), kept[..., 1].long()
        if metric == "auroc":
            return _auroc(logits, label == 1, valid)
        scores = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)
        return _class_metric(metric, scores, label, valid)


@dataclass(frozen=True)
class Regression(Task):
    """Numbers: outputs and targets (B,) or (B, k); the loss is the mean over coordinates of the squared error."""

    name = "regression"
    main = "r2"
    metrics = ("r2", "loss")

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Mean over coordinates of the squared error, (B,)."""
        values = _columns(_precise(logits_of(output)))
        return (values - _columns(target).to(values.dtype)).square().mean(-1)

    def soft(self, output: Any) -> Tensor:
        """The outputs as they are."""
        return logits_of(output)

    def summary(self, output: Any, target: Tensor) -> Tensor:
        """The k outputs and the k targets."""
        values = _columns(_precise(logits_of(output)))
        return torch.cat([values, _columns(target).to(values.dtype)], -1)

    def _check(self, logits: Tensor, target: Tensor) -> None:
        if target.dim() not in (1, 2):
            raise DataError(f"targets have shape {_shape(target)}; regression needs (B,) or (B, k)")
        width = _columns(target).shape[1]
        if logits.dim() not in (1, 2) or _columns(logits).shape[1] != width:
            raise ModelError(f"outputs have shape {_shape(logits)}; {width} targets per sample need (B, {width})")
        _same_batch(logits, target)
        _finite(target)

    def _measure(self, metric: str, kept: Tensor, valid: Tensor) -> Tensor:
        value, target = kept.double().chunk(2, -1)
        error = (value - target).square()
        if metric == "loss":
            return _mean(error.mean(-1), valid)
        count = valid.sum(-1, keepdim=True)
        spread = (target - (target.sum(1) / count).unsqueeze(1)).square().where(valid.unsqueeze(-1), 0).sum(1)
        residual = error.sum(1)
        constant = spread == 0
        r2 = torch.where(constant, (residual == 0).double(), 1 - residual / spread.masked_fill(constant, 1))
        return r2.where(count > 1, torch.nan).mean(-1)


@dataclass(frozen=True)
class Segmentation(Task):
    """A class for each pixel or voxel: logits B×C×spatial, targets B×spatial integers in [0, C), class 0 background.

    With two classes, outputs may also be B×1×spatial: the logit of the foreground. Soft Dice averages over the
    foreground classes 1 − (2Σpg + smooth) / (Σp + Σg + smooth). The metric `dice` is that of the most likely classes,
    averaged over the foreground classes found in target or prediction (1 if neither has any), then over samples.
    """

    classes: int = 2
    criterion: Literal["dice", "dice+ce"] = "dice+ce"  # soft Dice alone, or its sum with the mean cross-entropy
    smooth: float = 1.0

    name = "segmentation"
    main = "dice"
    metrics = ("dice", "accuracy", "loss")

    def __post_init__(self) -> None:
        """Refuse fewer than two classes and unknown criteria."""
        _at_least("classes", self.classes, 2)
        if self.criterion not in ("dice", "dice+ce"):
            raise SettingError(f'criterion is {self.criterion!r}; it must be "dice" or "dice+ce"')

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Soft Dice, alone or with cross-entropy, (B,)."""
        logits, label = self._flat(output, target)
        probability = logits.softmax(1)[:, 1:]
        truth = self._foreground(label).to(logits.dtype)
        overlap = 2 * (probability * truth).sum(-1) + self.smooth
        dice = 1 - (overlap / (probability.sum(-1) + truth.sum(-1) + self.smooth)).mean(-1)
        if self.criterion == "dice":
            return dice
        return dice + F.cross_entropy(logits, label, reduction="none").mean(-1)

    def soft(self, output: Any) -> Tensor:
        """B×C×spatial probabilities, or those of the foreground where there is one logit."""
        logits = logits_of(output)
        return logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)

    def summary(self, output: Any, target: Tensor) -> Tensor:
        """Three numbers: Dice, the share of right voxels, the loss."""
        logits, label = self._flat(output, target)
        predicted = logits.argmax(1)
        guess, truth = self._foreground(predicted), self._foreground(label)
        total = (guess.sum(-1) + truth.sum(-1)).to(logits.dtype)
        found = total > 0
        each = 2 * (guess & truth).sum(-1) / total.clamp(min=1)
        dice = torch.where(found.any(-1), each.sum(-1) / found.sum(-1).clamp(min=1), 1)
        accuracy = (predicted == label).to(logits.dtype).mean(-1)
        return torch.stack([dice, accuracy, self.loss(output, target)], -1)

    def _flat(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = _precise(logits_of(output)).flatten(2)
        if logits.shape[1] == 1:  # softmax over (0, z) is the sigmoid of z
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        return logits, target.flatten(1).long()

    def _foreground(self, label: Tensor) -> Tensor:
        return label.unsqueeze(1) == torch.arange(1, self.classes, device=label.device).unsqueeze(-1)

    def _check(self, logits: Tensor, target: Tensor) -> None:
        _integers(target, "masks")
        widths = (1, 2) if self.classes == 2 else (self.classes,)
        if target.dim() < 2:
            raise DataError(f"targets have shape {_shape(target)}; segmentation needs masks (B, spatial…)")
        if logits.dim() < 3 or logits.shape[1] not in widths:
            right = " or ".join(f"(B, {width}, spatial…)" for width in widths)
            raise ModelError(f"outputs have shape {_shape(logits)}; {self.classes} classes need {right}")
        _same_batch(logits, target)
        if logits.shape[2:] != target.shape[1:]:
            raise ModelError(
                f"outputs cover {tuple(logits.shape[2:])} and masks {tuple(target.shape[1:])}; they must be equal"
            )
        _in_range(target, self.classes, "label")

    def _measure(self, metric: str, kept: Tensor, valid: Tensor) -> Tensor:
        return _mean(kept[..., self.metrics.index(metric)], valid)


@dataclass(frozen=True)
class LanguageModel(Task):
    """The next token: logits B×T×V, targets B×T already shifted, `ignore` where nothing is asked.

    The loss of a sequence is the mean over its tokens (0 if all are ignored), and the metric `loss` the mean over
    sequences; `perplexity` and `accuracy` count every token of the split the same.
    """

    vocabulary: int
    ignore: int = -100

    name = "language_model"
    main = "perplexity"
    metrics = ("perplexity", "accuracy", "loss")

    def __post_init__(self) -> None:
        """Refuse fewer than two tokens."""
        _at_least("vocabulary", self.vocabulary, 2)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Mean negative log-likelihood of the tokens of each sequence, (B,)."""
        return self._nll(logits_of(output), target) / (target != self.ignore).sum(-1).clamp(min=1)

    def soft(self, output: Any) -> Tensor:
        """B×T×V probabilities."""
        return logits_of(output).softmax(-1)

    def summary(self, output: Any, target: Tensor) -> Tensor:
        """Three numbers: the sum of the negative log-likelihoods, the number of tokens, how many were guessed."""
        nll = self._nll(logits_of(output), target)
        asked = target != self.ignore
        right = asked & (logits_of(output).argmax(-1) == target)
        return torch.stack([nll, asked.sum(-1).to(nll.dtype), right.sum(-1).to(nll.dtype)], -1)

    def _nll(self, logits: Tensor, target: Tensor) -> Tensor:
        flat = _precise(logits).flatten(0, 1)
        each = F.cross_entropy(flat, target.flatten().long(), reduction="none", ignore_index=self.ignore)
        return each.reshape(target.shape).sum(-1)

    def _check(self, logits: Tensor, target: Tensor) -> None:
        _integers(target, "tokens")
        if target.dim() != 2:
            raise DataError(f"targets have shape {_shape(target)}; a language model needs token numbers (B, T)")
        if logits.dim() != 3 or logits.shape[2] != self.vocabulary:
            raise ModelError(
                f"outputs have shape {_shape(logits)}; {self.vocabulary} tokens need (B, T, {self.vocabulary})"
            )
        _same_batch(logits, target)
        if logits.shape[1] != target.shape[1]:
            raise ModelError(f"outputs cover {logits.shape[1]} tokens and targets {target.shape[1]}; shift both alike")
        _in_range(target[target != self.ignore], self.vocabulary, "token", f" or {self.ignore} (ignored)")

    def _measure(self, metric: str, kept: Tensor, valid: Tensor) -> Tensor:
        nll, tokens, right = kept.double().unbind(-1)
        if metric == "loss":
            return _mean(nll / tokens.clamp(min=1), valid)
        if metric == "accuracy":
            return right.sum(-1) / tokens.sum(-1)
        return torch.exp(nll.sum(-1) / tokens.sum(-1))


TASKS: dict[str, type[Task]] = {
    each.name: each for each in (Classification, Binary, Regression, Segmentation, LanguageModel)
}


def task(which: str | Task, /, **settings: Any) -> Task:
    """The task of this name with these settings: `task("classification", classes=10)`; a task is returned as it is."""
    if isinstance(which, Task):
        if settings:
            raise SettingError(
                f"settings {', '.join(settings)} came with a ready {which.name} task; give a name instead"
            )
        return which
    return call("task", which, TASKS, **settings)


def infer(targets: Tensor) -> Task:
    """Guess the task from all clients' targets: bool → `Binary`, whole numbers (N,) → `Classification` with as many
    classes as the largest label says (two at least), floating-point → `Regression`. Anything else must be named.
    """
    if targets.is_floating_point():
        return Regression()
    if targets.dtype == torch.bool:
        return Binary()
    if targets.dim() != 1:
        raise SettingError(
            f"whole-number targets of shape {_shape(targets)} fit several tasks; name one: segmentation, language_model"
        )
    if not targets.numel():
        raise DataError("there are no targets to infer the task from; name it")
    if int(targets.min()) < 0:
        raise DataError(f"label {int(targets.min())} is negative; labels are 0, 1, 2, …")
    return Classification(max(2, int(targets.max()) + 1))


# Metrics of m clients at once, shared by several tasks.


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return values.double().where(valid, 0).sum(-1) / valid.sum(-1)


def _class_metric(metric: str, scores: Tensor, label: Tensor, valid: Tensor) -> Tensor:
    """A metric of log-probabilities m×P×C and labels m×P."""
    top, predicted = scores.max(-1)
    hit = predicted == label
    if metric == "loss":
        return _mean(-scores.gather(-1, label.unsqueeze(-1)).squeeze(-1), valid)
    if metric == "accuracy":
        return _mean(hit, valid)
    if metric == "calibration_error":
        return _calibration_error(top.double().exp(), hit, valid)
    classes = scores.shape[-1]
    support = _count(label, valid, classes)
    if metric == "own_classes_accuracy":
        own = scores.masked_fill((support == 0).unsqueeze(-2), -torch.inf).argmax(-1)
        return _mean(own == label, valid)
    true_positive = _count(label, valid & hit, classes)
    if metric == "balanced_accuracy":
        return (true_positive / support).nanmean(-1)  # 0/0 where a class is absent
    assert metric == "macro_f1"
    return (2 * true_positive / (support + _count(predicted, valid, classes))).nanmean(-1)


def _count(index: Tensor, which: Tensor, size: int) -> Tensor:
    """How many of the chosen entries of each client have each index, m×size."""
    return torch.zeros(*index.shape[:-1], size, dtype=torch.float64, device=index.device).scatter_add(
        -1, index, which.double()
    )


def _calibration_error(confidence: Tensor, hit: Tensor, valid: Tensor) -> Tensor:
    """Share-weighted mean over equal-width bins (lower, upper] of |accuracy − mean confidence|."""
    # a NaN confidence still needs a bin, where it makes the result NaN
    place = (confidence * CALIBRATION_BINS).ceil().nan_to_num(1).clamp(1, CALIBRATION_BINS).long() - 1
    gap = (hit.double() - confidence).where(valid, 0)
    bins = torch.zeros(*gap.shape[:-1], CALIBRATION_BINS, dtype=gap.dtype, device=gap.device)
    return bins.scatter_add(-1, place, gap).abs().sum(-1) / valid.sum(-1)


def _auroc(score: Tensor, positive: Tensor, valid: Tensor) -> Tensor:
    """How often a positive scores above a negative, ties counting half (Mann-Whitney); NaN if either is missing."""
    negative, positive = valid & ~positive, valid & positive
    negatives = negative.sum(-1, keepdim=True)
    ladder = score.masked_fill(~negative, torch.inf).sort(-1).values
    below = torch.searchsorted(ladder, score)
    not_above = torch.searchsorted(ladder, score, right=True).minimum(negatives)  # the infinities are no negatives
    wins = ((below + not_above).double() / 2).where(positive, 0).sum(-1)
    broken = (score.isnan() & valid).any(-1)
    return (wins / (positive.sum(-1) * negatives.squeeze(-1))).masked_fill(broken, torch.nan)


# Shapes, dtypes and what is said about them.


def _precise(values: Tensor) -> Tensor:
    """Half-precision outputs in float32: a mean of many losses is lost in 8 bits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _columns(values: Tensor) -> Tensor:
    return values.unsqueeze(-1) if values.dim() == 1 else values


def _shape(values: Tensor) -> str:
    return str(tuple(values.shape))


def _kind(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise SettingError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _integers(target: Tensor, what: str) -> None:
    if target.is_floating_point() or target.is_complex():
        raise DataError(f"{what} are {_kind(target)}; they must be integers, for example target.long()")


def _same_batch(logits: Tensor, target: Tensor) -> None:
    if logits.shape[0] != target.shape[0]:
        raise ModelError(f"{logits.shape[0]} outputs for {target.shape[0]} targets; each sample needs one output")


def _finite(target: Tensor) -> None:
    bad = (~target.isfinite()).flatten().nonzero()
    if bad.numel():
        place = int(bad[0]) // (target.numel() // target.shape[0])
        raise DataError(f"the target of sample {place} is {target.flatten()[bad[0]].item()}; targets must be finite")


def _in_range(target: Tensor, size: int, what: str, besides: str = "") -> None:
    wrong = target[(target < 0) | (target >= size)]
    if wrong.numel():
        raise DataError(f"{what} {int(wrong[0])} is out of range; {what}s must be 0 to {size - 1}{besides}")
