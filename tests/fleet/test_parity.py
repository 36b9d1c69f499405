"""Every ask, on every kind of model: the stacked fleet against the plain loop, float64."""

from collections.abc import Callable

import pytest
import torch

from builders import MODELS, batchnorm, classes, linear, mlp
from coterie.asks import Answer, Ask, Distil, Drift, Evaluate, Fit, Gradient, Loss, Own, Plan, Predict, Pull
from coterie.data.population import Client, Population, population
from coterie.fleet.base import Fleet
from coterie.fleet.loop import LoopFleet
from coterie.fleet.stacked import StackedFleet

LOW, HIGH = torch.triu_indices(4, 4, 1)
ENDS = torch.stack([LOW, HIGH], 1).flatten()
BOTH = torch.stack([LOW, HIGH], 1).repeat_interleave(2, 0)
OTHER = torch.stack([HIGH, LOW], 1).flatten()
PAIR = torch.arange(6).repeat_interleave(2)
QUICK = {"batch": 6, "lr": 0.1}


def models(fleet: Fleet) -> torch.Tensor:
    return fleet.initial(shared=False) * (1 + 0.1 * fleet.t)


GRADIENTS: dict[str, Callable[[Fleet], Ask]] = {
    "fresh": lambda f: Gradient(f.everyone, models(f), 5),
    "epoch": lambda f: Gradient(f.everyone, models(f), 9, sampling="epoch"),
    "whole split": lambda f: Gradient(f.everyone, models(f)),
    "batch larger than the data": lambda f: Gradient(f.everyone, models(f), 300),
    "one model for all": lambda f: Gradient(f.everyone, models(f)[1], 5),
    "draws": lambda f: Gradient(ENDS, models(f), 5, at=OTHER, draw=f.ids[OTHER], track=False),
    "midpoints": lambda f: Gradient(
        ENDS, models(f), 5, at=BOTH, draw=f.ids[OTHER], give="gram", group=PAIR, track=False
    ),
    "sketched gram": lambda f: Gradient(ENDS, models(f), 5, at=BOTH, give="gram", group=PAIR, sketch=16, track=False),
    "uneven groups": lambda f: Gradient(
        ENDS, models(f), 5, at=ENDS, give="gram", group=torch.tensor([2, 0, 2, 2, 0, 1, 4, 4, 4, 4, 2, 1]), track=False
    ),
    "sketched rows": lambda f: Gradient(f.everyone, models(f), 5, sketch=7),
    "fusable sum": lambda f: Gradient(
        ENDS, models(f), 5, at=OTHER, give="sum", into=OTHER, weights=torch.linspace(0.1, 1, 12), outputs=6, track=False
    ),
    "sum over models": lambda f: Gradient(
        ENDS, models(f), 5, at=ENDS, give="sum", into=OTHER, weights=torch.linspace(0.1, 1, 12), track=False
    ),
    "unweighted sum": lambda f: Gradient(
        f.everyone, models(f)[0], 5, give="sum", into=torch.zeros(4, dtype=torch.long)
    ),
}
LOSSES: dict[str, Callable[[Fleet], Ask]] = {
    "batch": lambda f: Loss(ENDS, models(f), 5, at=OTHER, draw=OTHER),
    "whole test split": lambda f: Loss(f.everyone, models(f), split="test"),
    "epoch, tracked": lambda f: Loss(f.everyone, models(f), 7, sampling="epoch", track=True),
    "averaged buffers": lambda f: Loss(f.everyone, models(f), split="test", buffers="averaged"),
    "recalibrated buffers": lambda f: Loss(f.everyone, models(f), split="test", buffers="recalibrated"),
    "cross": lambda f: Loss(torch.arange(4).repeat(4), models(f), 6, at=torch.arange(4).repeat_interleave(4)),
}
FITS: dict[str, Callable[[Fleet], Ask]] = {
    "epochs of ragged data": lambda f: Fit(
        f.everyone, models(f), Plan(epochs=2, momentum=0.9, weight_decay=0.01, **QUICK)
    ),
    "kept momentum, epoch sampling, clipped": lambda f: Fit(
        f.everyone,
        models(f),
        Plan(steps=4, momentum=0.9, nesterov=True, sampling="epoch", keep_optimiser=True, clip=0.5, **QUICK),
        give="rows",
    ),
    "kept Adam on some clients": lambda f: Fit(
        torch.tensor([3, 0, 1]) if f.t else f.everyone[:2],
        models(f)[:3] if f.t else models(f)[:2],
        Plan(epochs=1, optimiser="adam", keep_optimiser=True, batch=6, lr=0.01),
        give="rows",
    ),
    "AdamW, pull and drift": lambda f: Fit(
        f.everyone,
        models(f),
        Plan(epochs=1, optimiser="adamw", weight_decay=0.1, batch=6, lr=0.01),
        pull=Pull(models(f)[0], 0.3),
        drift=Drift(models(f) * 0.1),
    ),
    "whole split, pull at other rows, head only": lambda f: Fit(
        f.everyone,
        models(f),
        Plan(steps=3, batch=None, lr=0.1),
        pull=Pull(models(f), torch.linspace(0, 1, 4), at=torch.tensor([1, 2, 3, 0])),
        columns=f.columns("head"),
    ),
    "pull towards midpoints": lambda f: Fit(
        f.everyone, models(f), Plan(steps=2, **QUICK), pull=Pull(models(f), 0.5, at=BOTH[:4])
    ),
    "own": lambda f: Fit(f.everyone, Own("mine", shared=False), Plan(steps=3, **QUICK), give="nothing"),
    "own of some": lambda f: Fit(torch.tensor([2, 1]), Own("mine", shared=False), Plan(steps=3, **QUICK)),
    "keep a copy": lambda f: Fit(f.everyone, models(f)[0], Plan(steps=2, **QUICK), keep="copy"),
    "several models of one client": lambda f: Fit(
        ENDS, models(f), Plan(steps=2, **QUICK), at=OTHER, draw=OTHER, track=False
    ),
    "no step": lambda f: Fit(f.everyone, models(f), Plan(steps=0, **QUICK), give="rows"),
    "distil to the nearest of two": lambda f: Fit(
        f.everyone,
        models(f),
        Plan(steps=3, **QUICK),
        distil=Distil(
            targets(f), "public", torch.linspace(0.5, 2, 4), batch=5, at=torch.tensor([[0, 1], [1, 2], [2, 0], [1, 1]])
        ),
    ),
    "distil to the nearest of all": lambda f: Fit(
        f.everyone,
        Own("student"),
        Plan(steps=2, momentum=0.5, **QUICK),
        distil=Distil(targets(f), "public", 2.0, batch=20),
    ),
    "learn labels, and nothing else": lambda f: Fit(
        f.everyone,
        Own("student"),
        Plan(epochs=2, momentum=0.5, batch=6, lr=0.1),
        give="rows",
        distil=Distil(targets(f), "public", batch=4, at=[[0], [2], [1], [0]], loss="cross_entropy", alone=True),
    ),
    "logits alone, pulled": lambda f: Fit(
        f.everyone,
        models(f),
        Plan(steps=3, batch=None, lr=0.1, sampling="epoch"),
        pull=Pull(models(f)[0], 0.3),
        distil=Distil(targets(f) * 3, "public", torch.linspace(0.5, 2, 4), batch=4, loss="logits", alone=True),
    ),
    "a soft target beside the labels, at a temperature": lambda f: Fit(
        f.everyone,
        models(f),
        Plan(epochs=1, optimiser="adam", batch=6, lr=0.01),
        distil=Distil(targets(f), "public", 0.7, batch=5, loss="cross_entropy", temperature=3),
    ),
}
OTHERS: dict[str, Callable[[Fleet], Ask]] = {
    "predict": lambda f: Predict(f.everyone, models(f)),
    "predict, averaged": lambda f: Predict(ENDS, models(f), at=OTHER, buffers="averaged"),
    "evaluate": lambda f: Evaluate(f.everyone, models(f)),
    "evaluate one model": lambda f: Evaluate(f.everyone, models(f)[0], "validation", metrics=("accuracy", "loss")),
    "evaluate recalibrated": lambda f: Evaluate(f.everyone, models(f), buffers="recalibrated"),
    "evaluate own": lambda f: Evaluate(f.everyone, Own("mine", shared=False), buffers="averaged"),
}
ASKS = GRADIENTS | LOSSES | FITS | OTHERS


def targets(fleet: Fleet) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randn(3, 13, 3, generator=g, dtype=torch.float64).softmax(-1).to(fleet.dtype)


def close(answer: Answer, expected: Answer, what: str, atol: float = 1e-9) -> None:
    assert answer.reason.tolist() == expected.reason.tolist(), what
    for name in ("rows", "sums", "weight", "gram", "loss", "outputs"):
        a, b = getattr(answer, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, n=name: f"{what}, {n}: {m}")
    assert answer.metrics.keys() == expected.metrics.keys()
    for name, value in answer.metrics.items():
        torch.testing.assert_close(value, expected.metrics[name], rtol=0, atol=atol, equal_nan=True)


def walk(fleet: Fleet, asks: dict[str, Callable[[Fleet], Ask]], rounds: int = 3) -> list[dict[str, Answer]]:
    """A few rounds of one phase with all these asks: later ones see what earlier ones left at the clients."""
    answers = []
    for t in range(rounds):
        fleet.begin(t)
        answers.append(dict(zip(asks, fleet.ask(*(make(fleet) for make in asks.values())), strict=True)))
    return answers


@pytest.mark.parametrize("model", MODELS)
def test_every_ask_is_answered_as_the_plain_loop_answers_it(model: str) -> None:
    people = classes(*MODELS[model])
    expected = walk(loop := LoopFleet(people, seed=3, dtype=torch.float64), ASKS)
    for chunk in (None, 3):
        fleet = StackedFleet(people, seed=3, dtype=torch.float64, chunk=chunk)
        for t, answers in enumerate(walk(fleet, ASKS)):
            for name, answer in answers.items():
                close(answer, expected[t][name], f"{model}, round {t}, {name}, chunk {chunk}")
        assert fleet.ledger.totals() == loop.ledger.totals()
        for memory in ("model", "mine", "student"):
            for client in range(4):
                ours, theirs = fleet.buffers_of(client, memory), loop.buffers_of(client, memory)
                for name, value in theirs.items():
                    torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9)


def test_absent_clients_leave_zeros_at_their_places() -> None:
    people = classes()
    both = []
    for fleet in (LoopFleet(people, seed=3, dtype=torch.float64), StackedFleet(people, seed=3, dtype=torch.float64)):
        fleet.begin(0)
        fleet.present[1] = False
        both.append(dict(zip(ASKS, fleet.ask(*(make(fleet) for make in ASKS.values())), strict=True)))
        assert not both[-1]["fresh"].ok[1]
        assert both[-1]["fresh"].why == ["ok", "absent", "ok", "ok"]
        assert (both[-1]["fresh"].rows[1] == 0).all()
        assert both[-1]["fresh"].rows[0].any()
        lonely = both[-1]["midpoints"].gram[0]  # the pair (0, 1)
        assert lonely[0, 0] > 0
        assert not lonely[1].any()
        assert not lonely[:, 1].any()
    for name in ASKS:
        close(both[1][name], both[0][name], name)


def test_two_architectures_and_three_tasks() -> None:
    people = classes([mlp, linear, batchnorm], n=5)
    asks: dict[str, Callable[[Fleet], Ask]] = {
        "fit": lambda f: Fit(
            f.everyone, Own("model", shared=False), Plan(epochs=1, momentum=0.9, **QUICK), give="nothing"
        ),
        "loss": lambda f: Loss(f.everyone, Own("model", shared=False), 5),
        "predict": lambda f: Predict(f.everyone, Own("model", shared=False)),
        "evaluate": lambda f: Evaluate(f.everyone, Own("model", shared=False)),
        "distil": lambda f: Fit(
            f.everyone,
            Own("model"),
            Plan(steps=2, **QUICK),
            give="nothing",
            distil=Distil(targets(f), "public", 1.0, batch=4),
        ),
    }
    fleets = [F(people, seed=1, dtype=torch.float64) for F in (LoopFleet, StackedFleet)]
    expected, answers = walk(fleets[0], asks), walk(fleets[1], asks)
    for t in range(3):
        for name in asks:
            close(answers[t][name], expected[t][name], name)
    for a, b in zip(*(f.reveal(Own("model")) for f in fleets), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_other_tasks(task: str) -> None:
    people = other(task)
    asks = {
        "fit": lambda f: Fit(f.everyone, f.initial(), Plan(epochs=1, **QUICK)),
        "gradient": lambda f: Gradient(f.everyone, f.initial()),
        "evaluate": lambda f: Evaluate(f.everyone, f.initial(False)),
    }
    expected = walk(LoopFleet(people, seed=1, dtype=torch.float64), asks)
    answers = walk(StackedFleet(people, seed=1, dtype=torch.float64), asks)
    for t in range(3):
        for name in asks:
            close(answers[t][name], expected[t][name], name)


def other(task: str) -> Population:
    g = torch.Generator().manual_seed(0)

    def some(m: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randn(m, 1, generator=g)
        return torch.randn(m, 6, generator=g), y if task == "regression" else (y[:, 0] > 0).long()

    return population(
        [Client(f"c{i}", some(12 + 5 * i), some(6), some(9 + i)) for i in range(3)],
        model=lambda: torch.nn.Linear(6, 1),
        task=task,
    )


def test_single_precision_agrees_after_one_phase_on_a_linear_model() -> None:
    people = classes(linear)
    asks = {name: make for name, make in ASKS.items() if "Adam" not in name}
    expected = walk(LoopFleet(people, seed=3), asks, 1)[0]
    for name, answer in walk(StackedFleet(people, seed=3), asks, 1)[0].items():
        close(answer, expected[name], name, atol=1e-5)


def test_augmentation_is_keyed_by_sample_and_not_by_place() -> None:
    from coterie.data.augment import Augment

    people = classes(*MODELS["groupnorm"])
    from dataclasses import replace

    shaky = replace(people, transform=Augment(crop=1, fill=0.0, flip=True))
    expected = walk(LoopFleet(shaky, seed=3, dtype=torch.float64), ASKS, 2)
    plain = walk(LoopFleet(people, seed=3, dtype=torch.float64), ASKS, 2)
    assert not torch.equal(plain[0]["fresh"].rows, expected[0]["fresh"].rows)
    for chunk in (None, 1):
        for t, answers in enumerate(walk(StackedFleet(shaky, seed=3, dtype=torch.float64, chunk=chunk), ASKS, 2)):
            for name, answer in answers.items():
                close(answer, expected[t][name], name)


def test_every_kind_of_augmentation_is_the_same_in_both_fleets() -> None:
    from coterie.data.augment import Augment

    draw = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (9 + 4 * i, 3, 6, 6), generator=draw).byte() for i in range(3)]
    people = population(
        [Client(f"c{i}", (x, torch.arange(len(x)) % 3)) for i, x in enumerate(images)],
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3)),
        transform=Augment(crop=2, flip=True, jitter=(0.3, 0.2, 0.4, 0.1), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.2)),
    )
    found = []
    for fleet in (LoopFleet(people, seed=3), StackedFleet(people, seed=3), StackedFleet(people, seed=3, chunk=1)):
        x = fleet.initial(shared=True)
        found.append([fleet.ask(Gradient(fleet.everyone, x, 5, draw=torch.tensor(d))).rows for d in (0, 1)])
    for rows in found[1:]:
        torch.testing.assert_close(rows, found[0], rtol=0, atol=1e-5)
    assert (found[0][0] - found[0][1]).abs().max() > 0.1  # another draw, another batch and other views
