"""What travels arrives as it was sent, and anything else is refused in one sentence, whatever the bytes are."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from coterie.asks import (
    OK,
    Answer,
    Ask,
    Distil,
    Drift,
    Evaluate,
    Fit,
    Gradient,
    Loss,
    Own,
    Plan,
    Predict,
    Pull,
)
from coterie.errors import CoterieError
from coterie.fleet import wire

KEYS = ("a", "b", "site 3", "ü/x")
D = 5
CPU = torch.device("cpu")
NONE = torch.empty(0, dtype=torch.long)


def matrix(rows: int, seed: int = 0, width: int = D) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def there(ask: Ask, dtype: torch.dtype = torch.float64) -> Ask:
    """The ask after its way over the wire."""
    arrays: wire.Arrays = {}
    head = wire.write_ask(ask, KEYS, arrays, "0")
    told, got = wire.unseal(wire.seal({"asks": [head]}, arrays), 1 << 20)
    return wire.read_ask(told["asks"][0], got, "0", {k: i for i, k in enumerate(KEYS)}, dtype, CPU)


def row(ask: Any, rows: Tensor, at: Tensor | None, pair: int) -> Tensor:
    if rows.ndim == 1:
        return rows
    if at is None:
        return rows[pair]
    return rows[at[pair].reshape(-1)].mean(0)


def alike(a: Ask, b: Ask) -> None:
    """They mean the same to every pair."""
    assert type(a) is type(b)
    assert torch.equal(a.clients, b.clients)
    assert a.memory == b.memory
    for f in fields(a):
        one, other = getattr(a, f.name), getattr(b, f.name)
        if f.name in ("clients", "at", "group", "slot", "gram_shape", "outputs"):
            continue
        if f.name == "models":
            if isinstance(one, Own):
                assert one == other
                continue
            for pair in range(a.m):
                torch.testing.assert_close(row(a, one, a.at, pair), row(b, other, b.at, pair), rtol=0, atol=1e-12)
        elif isinstance(one, Pull | Drift):
            for pair in range(a.m):
                torch.testing.assert_close(row(a, one.rows, one.at, pair), row(b, other.rows, other.at, pair))
            if isinstance(one, Pull):
                assert torch.equal(torch.as_tensor(one.weight, dtype=torch.float64).expand(a.m),
                                   torch.as_tensor(other.weight, dtype=torch.float64).expand(a.m))  # fmt: skip
        elif isinstance(one, Distil):
            for pair in range(a.m):
                first = one.targets if one.at is None else one.targets[one.at[pair].reshape(-1)]
                assert torch.equal(first, other.targets[other.at[pair].reshape(-1)])
            assert one.how == other.how
        elif isinstance(one, Tensor):
            assert torch.equal(one.to(other.dtype), other)
        elif f.name == "give" and one == "gram":
            assert other == "rows"  # whoever asked forms the products
        else:
            assert one == other


@st.composite
def asks(draw: Any) -> Ask:
    m = draw(st.integers(1, 6))
    clients = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=m, max_size=m)))
    at: Tensor | None = None
    models: Tensor | Own
    match draw(st.sampled_from(["own", "rows", "one", "at", "mean"])):
        case "own":
            models = Own(draw(st.sampled_from(["model", "p"])), draw(st.booleans()))
        case "rows":
            models = matrix(m)
        case "one":
            models = matrix(1)[0]
        case "at":
            models, at = matrix(3), torch.randint(0, 3, (m,))
        case _:
            models, at = matrix(4), torch.randint(0, 4, (m, draw(st.integers(1, 3))))
    common: dict[str, Any] = {"at": at, "memory": draw(st.sampled_from(["", "other"]))}
    draws_ = draw(st.none() | st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=m, max_size=m))
    batched = {"batch": draw(st.none() | st.integers(1, 9)), "draw": draws_ if draws_ is None else torch.tensor(draws_),
               "sampling": draw(st.sampled_from(["fresh", "epoch"]))}  # fmt: skip
    match draw(st.sampled_from(["gradient", "sum", "gram", "loss", "fit", "predict", "evaluate"])):
        case "gradient":
            return Gradient(
                clients, models, sketch=draw(st.none() | st.integers(1, 4)), track=False, **batched, **common
            )
        case "sum":
            weights = draw(st.none() | st.just(torch.rand(m, dtype=torch.float64)))
            return Gradient(clients, models, give="sum", into=torch.arange(m), weights=weights, **batched, **common)
        case "gram":
            return Gradient(clients, models, give="gram", group=torch.arange(m) // 2, track=False, **batched, **common)
        case "loss":
            return Loss(clients, models, buffers=draw(st.sampled_from(["personal", "averaged"])), **batched, **common)
        case "predict":
            return Predict(clients, models, inputs="pool", **common)
        case "evaluate":
            return Evaluate(clients, models, metrics=draw(st.none() | st.just(("accuracy", "loss"))), **common)
    weight = draw(st.sampled_from([0.5, torch.rand(m, dtype=torch.float64)]))
    far = Pull(matrix(3, 1), weight, torch.randint(0, 3, (m,)))
    near = Pull(models, weight, at) if isinstance(models, Tensor) else Pull(matrix(1, 2)[0], weight)
    return Fit(
        clients, models, Plan(steps=3, lr=0.1, momentum=0.5, betas=(0.1, 0.2)),
        give=draw(st.sampled_from(["rows", "update", "nothing"])),
        pull=draw(st.sampled_from([None, far, near])),
        drift=draw(st.sampled_from([None, Drift(matrix(m, 3))])),
        distil=draw(st.sampled_from([None, Distil(torch.rand(4, 7, 3), "pool", 0.3, 5, torch.randint(0, 4, (m, 2))),
                                     Distil(torch.rand(2, 7, 3), "pool"),
                                     Distil(torch.rand(2, 7, 3), "pool", 2.0, 3, loss="cross_entropy", temperature=4,
                                            alone=True)])),
        columns=draw(st.sampled_from([None, torch.tensor([0, 3])])),
        draw=batched["draw"], **common,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(asks())
def test_an_ask_means_the_same_on_the_other_side(ask: Ask) -> None:
    alike(ask, there(ask))


@pytest.mark.parametrize("precision", ["full", "float32", "bfloat16", "float16", "int8"])
def test_an_answer_arrives_whole_and_rounding_is_as_small_as_its_type_says(precision: wire.Precision) -> None:
    ask = Gradient(torch.tensor([0, 1, 2]), matrix(3), 4)
    rows = matrix(3, 5) * torch.tensor([[1e-3], [1.0], [1e2]], dtype=torch.float64)
    answer = Answer(torch.zeros(3, dtype=torch.int8), rows=rows, loss=torch.rand(3, dtype=torch.float64))
    arrays: wire.Arrays = {}
    wire.write_answer(ask, answer, arrays, "0", precision, NONE)
    _, got = wire.unseal(wire.seal({}, arrays), 1 << 20)
    back = wire.read_answer(ask, wire.expected(ask, D, torch.float64), got, "0", precision, NONE)
    assert torch.equal(back.loss, answer.loss)
    worst = {"full": 0, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-10, "int8": 0.5 / 127 + 1e-6}[precision]
    error = (back.rows - rows).abs().amax(1) / rows.abs().amax(1)
    assert (error <= worst).all()
    assert got["0/rows"].element_size() == {"full": 8, "float32": 4, "int8": 1}.get(precision, 2)


def test_values_that_are_not_finite_are_zero_and_not_ok_and_spoil_only_their_own_sum() -> None:
    ask = Gradient(torch.tensor([0, 0, 1]), matrix(3), 4, give="sum", into=torch.tensor([0, 0, 1]))
    sums = matrix(2, 6)
    sums[0, 1] = torch.nan
    answer = Answer(
        torch.zeros(3, dtype=torch.int8), sums=sums, weight=torch.ones(2).double(), loss=torch.ones(3).double()
    )
    arrays: wire.Arrays = {}
    wire.write_answer(ask, answer, arrays, "0", "full", NONE)
    back = wire.read_answer(ask, wire.expected(ask, D, torch.float64), arrays, "0", "full", NONE)
    assert back.ok.tolist() == [False, False, True]
    assert not back.sums[0].any()
    assert back.weight.tolist() == [0, 1]
    assert torch.equal(back.sums[1], sums[1])


WRONG = {
    "missing": lambda a: a.pop("0/rows"),
    "wider": lambda a: a.update({"0/rows": matrix(2, 0, D + 1)}),
    "more pairs": lambda a: a.update({"0/rows": matrix(3)}),
    "another type": lambda a: a.update({"0/rows": matrix(2).float()}),
    "whole numbers": lambda a: a.update({"0/rows": torch.zeros(2, D, dtype=torch.long)}),
    "a reason nobody knows": lambda a: a.update({"0/reason": torch.tensor([0, 77], dtype=torch.int8)}),
    "no reason": lambda a: a.pop("0/reason"),
    "a loss per sample": lambda a: a.update({"0/loss": torch.zeros(2, 9).double()}),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(spoil: Any) -> None:
    ask = Gradient(torch.tensor([0, 1]), matrix(2), 4)
    arrays: wire.Arrays = {}
    answer = Answer(torch.zeros(2, dtype=torch.int8), rows=matrix(2), loss=torch.zeros(2).double())
    wire.write_answer(ask, answer, arrays, "0", "full", NONE)
    spoil(arrays)
    with pytest.raises(wire.WireError):
        wire.read_answer(ask, wire.expected(ask, D, torch.float64), arrays, "0", "full", NONE)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["random", "cut", "flipped"]), st.integers(0, 10_000))
def test_no_bytes_do_more_than_raise_a_wire_error(noise: bytes, how: str, place: int) -> None:
    whole = wire.seal({"a": 1}, {"x": matrix(2)})
    if how == "random":
        block = noise
    elif how == "cut":
        block = whole[: place % len(whole)]
    else:
        block = bytearray(whole)
        block[place % len(block)] ^= 1 + place % 255
        block = bytes(block)
    try:
        head, arrays = wire.unseal(block, 1 << 20)
    except wire.WireError:
        return
    assert isinstance(head, dict)
    assert all(isinstance(v, Tensor) for v in arrays.values())


PLAIN: Any = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({}) | st.just("gram")
)


@settings(max_examples=300, deadline=None)
@given(asks(), st.data())
def test_an_ask_with_anything_exchanged_is_an_ask_or_one_sentence(ask: Ask, data: Any) -> None:
    arrays: wire.Arrays = {}
    head = json.loads(json.dumps(wire.write_ask(ask, KEYS, arrays, "0")))
    for _ in range(data.draw(st.integers(1, 2))):
        if arrays and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(arrays)))
            other = data.draw(st.sampled_from(["gone", "int8", "flat", "negative", "huge"]))
            value = arrays.pop(name)
            if other != "gone":
                arrays[name] = {"int8": value.to(torch.int8), "flat": value.reshape(-1)[:3], "negative": -value - 1,
                                "huge": value.expand(2, *value.shape).repeat(2, *[1] * value.ndim)}[other]  # fmt: skip
                break
        else:
            head[data.draw(st.sampled_from(sorted(head)))] = data.draw(PLAIN)
    try:
        got = wire.read_ask(head, arrays, "0", {k: i for i, k in enumerate(KEYS)}, torch.float64, CPU)
    except CoterieError:
        return
    assert isinstance(got, Ask)


def test_what_is_too_large_is_not_even_read() -> None:
    with pytest.raises(wire.WireError, match="too large"):
        wire.unseal(b"\xff" * 101, 100)
    with pytest.raises(wire.WireError, match="version"):
        wire.unseal(save({"x": torch.zeros(1)}, metadata={"head": '{"wire": 99}'}), 1000)


def test_only_columns_that_may_have_moved_travel() -> None:
    ask = Fit(torch.tensor([0, 1]), matrix(2), Plan(steps=1), give="rows", columns=torch.tensor([1, 4]))
    assert wire.expected(ask, D, torch.float64).fields["rows"][1] == (2, 2)
    stay = replace(ask, models=Own(), at=None)
    assert wire.expected(stay, D, torch.float64).fields["rows"][1] == (2, D)  # nobody here knows the others
    assert OK == 0
