"""Losses and metrics against torch and scikit-learn, one client at a time, on ragged data with garbage as padding."""

import dataclasses
import itertools
import math
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor
from torch.func import grad, vmap

from coterie.errors import CoterieError, DataError, ModelError, SettingError
from coterie.tasks import Binary, Classification, LanguageModel, Regression, Segmentation, Task, infer, logits_of, task

C, V = 4, 7
TASKS: dict[str, Task] = {
    "classification": Classification(C),
    "binary": Binary(),
    "regression": Regression(),
    "segmentation": Segmentation(3),
    "dice": Segmentation(2, "dice"),
    "language_model": LanguageModel(V),
}


def sample(name: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and targets of n samples, float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    if name == "classification":
        return 2 * normal(n, C), torch.randint(C, (n,), generator=g)
    if name == "binary":
        return 2 * normal(n, 1), torch.randint(2, (n,), generator=g)
    if name == "regression":
        target = normal(n, 3)
        return target + 0.5 * normal(n, 3), target
    if name == "segmentation":
        return normal(n, 3, 4, 5), torch.randint(3, (n, 4, 5), generator=g)
    if name == "dice":
        return normal(n, 1, 2, 3, 4), torch.randint(2, (n, 2, 3, 4), generator=g)
    target = torch.randint(V, (n, 6), generator=g)
    return normal(n, 6, V), target.masked_fill(torch.rand(n, 6, generator=g) < 0.3, -100)


def ragged(each: Task, clients: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Summaries m×P×S, real samples scattered among garbage, and the mask that tells them apart."""
    found = [each.summary(output, target) for output, target in clients]
    longest = max(len(one) for one in found) + 3
    summary = torch.full((len(found), longest, found[0].shape[1]), torch.nan, dtype=torch.float64)
    summary[:, ::2] = 1e9
    valid = torch.zeros(len(found), longest, dtype=torch.bool)
    for i, one in enumerate(found):
        places = torch.randperm(longest, generator=torch.Generator().manual_seed(i))[: len(one)]
        summary[i, places], valid[i, places] = one, True
    return summary, valid


def assert_all_close(got: Tensor, expected: list[float]) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12, equal_nan=True)


# ---- losses ----


def reference_loss(name: str, output: Tensor, target: Tensor) -> Tensor:
    """The loss of one sample, from torch's own functions on a batch of one."""
    if name == "classification":
        return F.cross_entropy(output[None], target[None])
    if name == "binary":
        return F.binary_cross_entropy_with_logits(output.squeeze(), target.double())
    if name == "regression":
        return F.mse_loss(output, target)
    if name == "language_model":
        return F.cross_entropy(output, target)
    if name == "dice":
        p, g = output[0].sigmoid(), target.double()
        return 1 - (2 * (p * g).sum() + 1) / (p.sum() + g.sum() + 1)
    p = output.softmax(0)
    dice = [
        (2 * p[c][target == c].sum() + 1) / (p[c].sum() + (target == c).sum() + 1) for c in range(1, output.shape[0])
    ]
    return 1 - torch.stack(dice).mean() + F.cross_entropy(output[None], target[None])


@pytest.mark.parametrize("name", TASKS)
def test_loss_of_each_sample(name: str) -> None:
    output, target = sample(name, 9)
    expected = torch.stack([reference_loss(name, o, t) for o, t in zip(output, target, strict=True)])
    torch.testing.assert_close(TASKS[name].loss(output, target), expected, rtol=1e-12, atol=1e-12)
    wrapped = types.SimpleNamespace(logits=output)
    assert torch.equal(TASKS[name].loss(wrapped, target), TASKS[name].loss(output, target))
    assert torch.equal(TASKS[name].summary(wrapped, target), TASKS[name].summary(output, target))


@pytest.mark.parametrize("name", TASKS)
def test_loss_and_gradient_vmapped_equal_the_loop(name: str) -> None:
    each = TASKS[name]
    output, target = (x.unflatten(0, (3, 4)) for x in sample(name, 12))
    torch.testing.assert_close(
        vmap(each.loss)(output, target), torch.stack([each.loss(o, t) for o, t in zip(output, target, strict=True)])
    )
    torch.testing.assert_close(
        vmap(each.summary)(output, target),
        torch.stack([each.summary(o, t) for o, t in zip(output, target, strict=True)]),
    )

    def total(o: Tensor, t: Tensor) -> Tensor:
        return each.loss(o, t).sum()

    stacked = vmap(grad(total))(output, target)
    assert stacked.abs().sum() > 0
    torch.testing.assert_close(stacked, torch.stack([grad(total)(o, t) for o, t in zip(output, target, strict=True)]))


@pytest.mark.parametrize("name", TASKS)
def test_one_graph(name: str) -> None:
    each = TASKS[name]
    output, target = (x.unflatten(0, (3, 4)) for x in sample(name, 12))
    valid = torch.rand(3, 4) < 0.7

    def everything(output: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, summary = vmap(each.loss)(output, target), vmap(each.summary)(output, target)
        moved = vmap(grad(lambda o, t: each.loss(o, t).sum()))(output, target)
        return loss, moved, each.measure(summary, valid)

    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(output, target, valid), everything(output, target, valid), rtol=1e-9, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_scored_in_float32(name: str, dtype: torch.dtype) -> None:
    output, target = sample(name, 5)
    loss = TASKS[name].loss(output.to(dtype), target)
    assert loss.dtype == TASKS[name].summary(output.to(dtype), target).dtype == torch.float32
    torch.testing.assert_close(loss, TASKS[name].loss(output.to(dtype).float(), target))


def test_regression_does_not_broadcast() -> None:
    output, target = torch.arange(4.0), torch.tensor([1.0, 3, 2, 0])
    expected = torch.tensor([1.0, 4, 0, 9])
    for o in (output, output[:, None]):
        for t in (target, target[:, None]):
            assert torch.equal(Regression().loss(o, t), expected)


def test_binary_takes_any_kind_of_label_and_both_shapes() -> None:
    logits = torch.tensor([0.3, -2.0], dtype=torch.float64)
    expected = torch.log1p(torch.exp(torch.tensor([-0.3, -2.0], dtype=torch.float64)))
    for target in (torch.tensor([1, 0]), torch.tensor([True, False]), torch.tensor([[1.0], [0.0]])):
        torch.testing.assert_close(Binary().loss(logits, target), expected)
        torch.testing.assert_close(Binary().loss(logits[:, None], target), expected)


def test_an_ignored_token_that_exists_is_no_right_guess() -> None:
    output = 9 * F.one_hot(torch.tensor([[0, 1, 2, 0]]), V).double()
    each = LanguageModel(V, ignore=0)
    got = each.measure(*ragged(each, [(output, torch.tensor([[0, 1, 3, 0]]))]))
    assert_all_close(got["accuracy"], [0.5])


def test_a_sequence_with_nothing_asked_costs_nothing() -> None:
    output = torch.randn(2, 3, V, dtype=torch.float64, requires_grad=True)
    loss = LanguageModel(V).loss(output, torch.tensor([[-100] * 3, [1, -100, 2]]))
    assert loss[0] == 0
    assert loss[1] > 0
    loss.sum().backward()
    assert output.grad is not None
    assert output.grad.isfinite().all()
    assert not output.grad[0].any()


# ---- metrics ----


def calibration_error(confidence: np.ndarray, hit: np.ndarray) -> float:
    edges = np.linspace(0, 1, 16)
    total = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(hit[inside].mean() - confidence[inside].mean())
    return total


def classification_reference(output: Tensor, target: Tensor) -> dict[str, float]:
    """What scikit-learn says of one client."""
    scores = torch.cat([torch.zeros_like(output), output], 1) if output.shape[1] == 1 else output
    p, y = scores.softmax(1).numpy(), target.numpy()
    guess = p.argmax(1)
    present = np.unique(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's about classes that are predicted and absent
        balanced = sk.balanced_accuracy_score(y, guess)
    return {
        "accuracy": sk.accuracy_score(y, guess),
        "own_classes_accuracy": float(np.mean(present[p[:, present].argmax(1)] == y)),
        "balanced_accuracy": balanced,
        "macro_f1": sk.f1_score(y, guess, average="macro"),
        "auroc": math.nan if len(present) < 2 else float(np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in present])),
        "calibration_error": calibration_error(p.max(1), guess == y),
        "loss": sk.log_loss(y, p, labels=np.arange(p.shape[1])),
    }


@pytest.mark.parametrize("name", ["classification", "binary"])
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_classification_metrics_are_scikit_learns(name: str, sizes: list[int], seed: int) -> None:
    clients = [sample(name, n, seed + i) for i, n in enumerate(sizes)]
    got = TASKS[name].measure(*ragged(TASKS[name], clients))
    expected = [classification_reference(*client) for client in clients]
    assert set(got) == set(TASKS[name].metrics) == set(expected[0])
    for metric, values in got.items():
        assert_all_close(values, [one[metric] for one in expected])


def test_auroc_of_all_classes_is_scikit_learns_own_macro_average() -> None:
    output, target = sample("classification", 60)
    assert len(target.unique()) == C
    expected = sk.roc_auc_score(target.numpy(), output.softmax(1).numpy(), multi_class="ovr", average="macro")
    got = TASKS["classification"].measure(*ragged(TASKS["classification"], [(output, target)]), ["auroc"])
    assert_all_close(got["auroc"], [expected])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, math.inf]), st.integers(0, 1)), min_size=1, max_size=20
    )
)
def test_auroc_counts_ties_half_and_survives_infinite_scores(pairs: list[tuple[float, int]]) -> None:
    score = torch.tensor([s for s, _ in pairs], dtype=torch.float64)
    y = torch.tensor([t for _, t in pairs])
    got = Binary().measure(*ragged(Binary(), [(score, y)]), ["auroc"])["auroc"]
    expected = math.nan
    if len(y.unique()) == 2:
        expected = sk.roc_auc_score(y.numpy(), score.clamp(-9, 9).numpy())
    assert_all_close(got, [expected])


def test_classes_absent_from_a_split() -> None:
    # three of class 1, one of class 2; the model says 1, 1, 0, 2: classes 0 (predicted only) and 3 (nowhere) are absent
    output = 5 * F.one_hot(torch.tensor([1, 1, 0, 2]), C).double()
    got = TASKS["classification"].measure(*ragged(TASKS["classification"], [(output, torch.tensor([1, 1, 1, 2]))]))
    assert_all_close(got["balanced_accuracy"], [(2 / 3 + 1) / 2])
    assert_all_close(got["macro_f1"], [(0 + 0.8 + 1) / 3])
    alone = TASKS["classification"].measure(*ragged(TASKS["classification"], [(output, torch.tensor([1, 1, 1, 1]))]))
    assert alone["auroc"].isnan().all()
    assert_all_close(alone["balanced_accuracy"], [0.5])


def test_a_certain_prediction_shares_the_last_calibration_bin() -> None:
    # certain and wrong, and 0.95 and right, both lie in (14/15, 1]: their gaps −1 and 0.05 add up before the modulus
    logits = torch.tensor([1e9, math.log(0.95 / 0.05)], dtype=torch.float64)
    got = Binary().measure(*ragged(Binary(), [(logits, torch.tensor([0, 1]))]), ["calibration_error"])
    assert_all_close(got["calibration_error"], [0.475])


def test_outputs_that_are_not_numbers_give_nan_not_an_error() -> None:
    output, target = sample("classification", 8)
    output[3] = torch.nan
    good = sample("classification", 8, 1)
    got = TASKS["classification"].measure(*ragged(TASKS["classification"], [(output, target), good]))
    for metric in ("loss", "auroc", "calibration_error"):
        assert got[metric].isnan().tolist() == [True, False]


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(2, 20), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_regression_metrics_are_scikit_learns(sizes: list[int], seed: int) -> None:
    clients = [sample("regression", n, seed + i) for i, n in enumerate(sizes)]
    for output, target in clients:
        target[:, 1] = 2.0  # a constant coordinate, missed …
        target[:, 2] = output[:, 2] = 3.0  # … and met
    got = Regression().measure(*ragged(Regression(), clients))
    assert_all_close(got["r2"], [sk.r2_score(t.numpy(), o.numpy()) for o, t in clients])
    assert_all_close(got["loss"], [sk.mean_squared_error(t.numpy(), o.numpy()) for o, t in clients])


def test_r2_of_one_sample_is_nan() -> None:
    one, two = (torch.tensor([1.0, 2.0][:n], dtype=torch.float64) for n in (1, 2))
    got = Regression().measure(*ragged(Regression(), [(one, one), (two, two)]))["r2"]
    assert_all_close(got, [math.nan, 1.0])


def test_dice_by_hand() -> None:
    target = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [2, 2, 1, 0], [0, 0, 0, 0]])
    guess = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [2, 2, 0, 2], [0, 1, 0, 0]])
    output = 3 * F.one_hot(guess, 3).double().movedim(-1, 1)
    each = Segmentation(3)
    # sample 1: class 1 overlaps in 1 of 2 + 2; sample 2: nothing to find, nothing found;
    # sample 3: class 1 missed, class 2 overlaps in 2 of 2 + 3; sample 4: one voxel found that is not there
    by_hand = [2 * 1 / 4, 1.0, (0 + 2 * 2 / 5) / 2, 0.0]
    assert_all_close(each.summary(output, target)[:, 0], by_hand)
    got = each.measure(*ragged(each, [(output, target), (output[2:], target[2:])]))
    assert_all_close(got["dice"], [sum(by_hand) / 4, sum(by_hand[2:]) / 2])
    assert_all_close(got["accuracy"], [(2 + 4 + 2 + 3) / 16, 5 / 8])
    assert_all_close(
        got["loss"], [float(each.loss(o, t).mean()) for o, t in [(output, target), (output[2:], target[2:])]]
    )


def test_soft_dice_by_hand() -> None:
    logits = torch.tensor([[[math.log(3.0), -math.log(3.0)]]], dtype=torch.float64)  # probabilities 3/4, 1/4
    target = torch.tensor([[1, 0]])
    soft = 1 - (2 * 0.75 + 0.5) / (1.0 + 1 + 0.5)
    assert_all_close(Segmentation(2, "dice", smooth=0.5).loss(logits, target), [soft])
    assert_all_close(Segmentation(2, "dice+ce", smooth=0.5).loss(logits, target), [soft - math.log(0.75)])
    two = torch.cat([torch.zeros_like(logits), logits], 1)
    assert_all_close(Segmentation(2, "dice", smooth=0.5).loss(two, target), [soft])


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_language_metrics_are_a_plain_loops(sizes: list[int], seed: int) -> None:
    clients = [sample("language_model", n, seed + i) for i, n in enumerate(sizes)]
    got = LanguageModel(V).measure(*ragged(LanguageModel(V), clients))
    expected: dict[str, list[float]] = {"perplexity": [], "accuracy": [], "loss": []}
    for output, target in clients:
        nll, right, tokens, sequences = 0.0, 0, 0, []
        for o, t in zip(output, target, strict=True):
            own = []
            for logits, token in zip(o.tolist(), t.tolist(), strict=True):
                if token != -100:
                    own.append(math.log(sum(math.exp(x) for x in logits)) - logits[token])
                    right += logits[token] == max(logits)
            nll, tokens = nll + sum(own), tokens + len(own)
            sequences.append(sum(own) / max(len(own), 1))
        expected["perplexity"].append(math.exp(nll / tokens) if tokens else math.nan)
        expected["accuracy"].append(right / tokens if tokens else math.nan)
        expected["loss"].append(sum(sequences) / len(sequences))
    for metric, values in got.items():
        assert_all_close(values, expected[metric])


@pytest.mark.parametrize("name", TASKS)
def test_an_empty_split_is_nan_and_disturbs_nobody(name: str) -> None:
    each, full = TASKS[name], sample(name, 9)
    empty = (full[0][:0], full[1][:0])
    each.check(*empty, "a")
    got = each.measure(*ragged(each, [empty, full, empty]))
    alone = each.measure(*ragged(each, [full]))
    for metric in each.metrics:
        assert got[metric].isnan().tolist() == [True, False, True]
        assert_all_close(got[metric][1:2], alone[metric].tolist())
    nobody = each.measure(torch.zeros(2, 0, each.summary(*full).shape[1]), torch.zeros(2, 0, dtype=torch.bool))
    assert all(values.isnan().all() and values.shape == (2,) for values in nobody.values())


@pytest.mark.parametrize("name", TASKS)
def test_main_metric_directions_and_choice(name: str) -> None:
    each = TASKS[name]
    assert each.main in each.metrics
    assert "loss" in each.metrics
    worse = {"loss", "perplexity", "calibration_error"}
    assert all(each.higher_is_better(metric) == (metric not in worse) for metric in each.metrics)
    summary = ragged(each, [sample(name, 4)])
    assert set(each.measure(*summary, ["loss"])) == {"loss"}
    for wrong in (lambda: each.higher_is_better("los"), lambda: each.measure(*summary, ["los"])):
        with pytest.raises(SettingError, match=f"{each.name} has no metric 'los': did you mean loss"):
            wrong()


def test_only_the_metrics_asked_for_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: pytest.fail("auroc was not asked for"))
    each = TASKS["classification"]
    each.measure(*ragged(each, [sample("classification", 4)]), ["accuracy", "macro_f1", "loss"])


# ---- what does not fit ----

ints, floats = torch.tensor([0, 1, 2]), torch.zeros(3)
BAD: list[tuple[Task, object, object, type[CoterieError], str]] = [
    (
        Classification(3),
        torch.zeros(3, 3),
        torch.tensor([0, 12, 1]),
        DataError,
        "label 12 is out of range; labels must be 0 to 2",
    ),
    (
        Classification(3),
        torch.zeros(2, 3),
        torch.tensor([0, -1]),
        DataError,
        "label -1 is out of range; labels must be 0 to 2",
    ),
    (
        Classification(3),
        torch.zeros(3, 3),
        floats,
        DataError,
        "labels are float32; they must be integers, for example target.long()",
    ),
    (
        Classification(3),
        torch.zeros(3, 4),
        ints,
        ModelError,
        "outputs have shape (3, 4); 3 classes need (B, 3)",
    ),
    (Classification(3), torch.zeros(3), ints, ModelError, "outputs have shape (3,); 3 classes need (B, 3)"),
    (
        Classification(3),
        torch.zeros(4, 3),
        ints,
        ModelError,
        "4 outputs for 3 targets; each sample needs one output",
    ),
    (
        Classification(3),
        torch.zeros(3, 3),
        ints[:, None],
        DataError,
        "targets have shape (3, 1); classification needs one label per sample, (B,)",
    ),
    (
        Classification(3),
        torch.zeros(3, 3).long(),
        ints,
        ModelError,
        "outputs are int64; they must be floating-point numbers",
    ),
    (
        Classification(3),
        (1, 2),
        ints,
        ModelError,
        "a model must return a tensor or something with .logits, not a tuple",
    ),
    (Classification(3), torch.zeros(3, 3), [0, 1, 2], DataError, "targets are a list; they must be a tensor"),
    (Binary(), torch.zeros(3), ints, DataError, "label 2 is not allowed; binary labels are 0 and 1"),
    (
        Binary(),
        torch.zeros(3, 2),
        ints.clamp(max=1),
        ModelError,
        "outputs have shape (3, 2); binary needs one logit, (B,) or (B, 1)",
    ),
    (
        Binary(),
        torch.zeros(3),
        torch.zeros(3, 2),
        DataError,
        "targets have shape (3, 2); binary needs one per sample, (B,) or (B, 1)",
    ),
    (Binary(), torch.zeros(2, 1), floats, ModelError, "2 outputs for 3 targets; each sample needs one output"),
    (
        Binary(),
        torch.zeros(3),
        torch.tensor([0, torch.nan, 1]),
        DataError,
        "the target of sample 1 is nan; targets must be finite",
    ),
    (
        Regression(),
        torch.zeros(2, 2),
        torch.tensor([[0, 0], [0, torch.inf]]),
        DataError,
        "the target of sample 1 is inf; targets must be finite",
    ),
    (
        Regression(),
        torch.zeros(3, 2),
        floats,
        ModelError,
        "outputs have shape (3, 2); 1 targets per sample need (B, 1)",
    ),
    (
        Regression(),
        torch.zeros(2),
        floats,
        ModelError,
        "2 outputs for 3 targets; each sample needs one output",
    ),
    (
        Regression(),
        floats,
        torch.zeros(3, 1, 1),
        DataError,
        "targets have shape (3, 1, 1); regression needs (B,) or (B, k)",
    ),
    (
        Segmentation(3),
        torch.zeros(1, 3, 2, 2),
        torch.zeros(1, 2, 2),
        DataError,
        "masks are float32; they must be integers, for example target.long()",
    ),
    (
        Segmentation(3),
        torch.zeros(1, 1, 2, 2),
        torch.zeros(1, 2, 2).long(),
        ModelError,
        "outputs have shape (1, 1, 2, 2); 3 classes need (B, 3, spatial…)",
    ),
    (
        Segmentation(2),
        torch.zeros(1, 3, 2, 2),
        torch.zeros(1, 2, 2).long(),
        ModelError,
        "outputs have shape (1, 3, 2, 2); 2 classes need (B, 1, spatial…) or (B, 2, spatial…)",
    ),
    (
        Segmentation(2),
        torch.zeros(1, 1, 2, 2),
        torch.zeros(1, 2, 3).long(),
        ModelError,
        "outputs cover (2, 2) and masks (2, 3); they must be equal",
    ),
    (
        Segmentation(2),
        torch.zeros(1, 1, 2),
        torch.tensor([[0, 2]]),
        DataError,
        "label 2 is out of range; labels must be 0 to 1",
    ),
    (
        Segmentation(2),
        torch.zeros(3, 1, 2),
        ints,
        DataError,
        "targets have shape (3,); segmentation needs masks (B, spatial…)",
    ),
    (
        Segmentation(2),
        torch.zeros(2, 1, 2),
        torch.zeros(1, 2).long(),
        ModelError,
        "2 outputs for 1 targets; each sample needs one output",
    ),
    (
        LanguageModel(5),
        torch.zeros(1, 3, 5),
        torch.tensor([[0, -100, 5]]),
        DataError,
        "token 5 is out of range; tokens must be 0 to 4 or -100 (ignored)",
    ),
    (
        LanguageModel(5),
        torch.zeros(1, 3, 6),
        ints[None],
        ModelError,
        "outputs have shape (1, 3, 6); 5 tokens need (B, T, 5)",
    ),
    (
        LanguageModel(5),
        torch.zeros(1, 4, 5),
        ints[None],
        ModelError,
        "outputs cover 4 tokens and targets 3; shift both alike",
    ),
    (
        LanguageModel(5),
        torch.zeros(2, 3, 5),
        ints[None],
        ModelError,
        "2 outputs for 1 targets; each sample needs one output",
    ),
    (
        LanguageModel(5),
        torch.zeros(1, 3, 5),
        ints,
        DataError,
        "targets have shape (3,); a language model needs token numbers (B, T)",
    ),
    (
        LanguageModel(5),
        torch.zeros(1, 3, 5),
        floats[None],
        DataError,
        "tokens are float32; they must be integers, for example target.long()",
    ),
]


@pytest.mark.parametrize(("each", "output", "target", "kind", "message"), BAD)
def test_what_does_not_fit_is_said_with_the_client(
    each: Task, output: object, target: object, kind: type[CoterieError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        each.check(output, target, "hospital-2")
    assert str(caught.value) == f"client hospital-2: {message}"


@pytest.mark.parametrize("name", TASKS)
def test_what_fits_passes(name: str) -> None:
    output, target = sample(name, 5)
    TASKS[name].check(output, target, 0)
    TASKS[name].check(types.SimpleNamespace(logits=output), target, 0)
    if not target.is_floating_point():
        TASKS[name].check(output, target.to(torch.int32), 0)
        assert torch.equal(TASKS[name].loss(output, target.to(torch.int32)), TASKS[name].loss(output, target))


def test_logits_of() -> None:
    x = torch.ones(2)
    assert logits_of(x) is x
    assert logits_of(types.SimpleNamespace(logits=x)) is x
    with pytest.raises(ModelError, match="not a dict"):
        logits_of({"logits": x})


# ---- by name, by guess ----


def test_tasks_by_name() -> None:
    assert task("classification", classes=10) == Classification(10)
    assert task("binary") == Binary()
    assert task("regression") == Regression()
    assert task("segmentation", classes=3, criterion="dice") == Segmentation(3, "dice")
    assert task("language_model", vocabulary=9, ignore=0) == LanguageModel(9, 0)
    ready = Classification(10)
    assert task(ready) is ready
    with pytest.raises(dataclasses.FrozenInstanceError):
        ready.classes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("which", "given_settings", "message"),
    [
        ("clasification", {}, "no task is called 'clasification': did you mean classification?"),
        (
            "zzz",
            {},
            "no task is called 'zzz': there are binary, classification, language_model, regression, segmentation",
        ),
        ("classification", {"clases": 3}, "task classification has no setting 'clases': did you mean classes?"),
        ("regression", {"classes": 3}, "task regression has no setting 'classes': there are none"),
        ("classification", {}, "task classification needs the setting 'classes'"),
        ("classification", {"classes": 1}, "classes is 1; it must be a whole number of at least 2"),
        ("classification", {"classes": 2.5}, "classes is 2.5; it must be a whole number of at least 2"),
        ("language_model", {"vocabulary": 0}, "vocabulary is 0; it must be a whole number of at least 2"),
        ("segmentation", {"criterion": "ce"}, 'criterion is \'ce\'; it must be "dice" or "dice+ce"'),
        (Binary(), {"classes": 2}, "settings classes came with a ready binary task; give a name instead"),
    ],
)
def test_wrong_names_and_settings(which: str | Task, given_settings: dict, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        task(which, **given_settings)
    assert str(caught.value) == message


def test_infer() -> None:
    assert infer(torch.tensor([0, 4, 2])) == Classification(5)
    assert infer(torch.tensor([0, 0], dtype=torch.uint8)) == Classification(2)
    assert infer(torch.zeros(3, 2)) == Regression()
    assert infer(torch.tensor([True, False])) == Binary()
    with pytest.raises(SettingError, match=r"shape \(2, 3\) fit several tasks; name one"):
        infer(torch.zeros(2, 3).long())
    with pytest.raises(DataError, match="label -1 is negative"):
        infer(torch.tensor([0, -1]))
    with pytest.raises(DataError, match="no targets to infer the task from"):
        infer(torch.zeros(0).long())
