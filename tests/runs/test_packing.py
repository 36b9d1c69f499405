import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coterie.errors import RecordError
from coterie.runs.packing import pack, unpack

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Inner:
    m: Tensor | None
    step: int


@dataclass(frozen=True)
class State:
    x: Tensor
    inner: Inner | None
    many: dict[str, Inner]
    pair: tuple[Tensor, float]
    flags: list[bool]
    name: str


def example() -> State:
    return State(
        x=torch.arange(6.0).reshape(2, 3),
        inner=Inner(None, 3),
        many={"a": Inner(torch.tensor([True, False]), 4), "b/c": Inner(torch.tensor(7), 5)},
        pair=(torch.tensor([1.5], dtype=torch.bfloat16), math.inf),
        flags=[True, False],
        name="x",
    )


def test_a_state_comes_back_as_it_was():
    import json

    tree, tensors = pack(example(), "algorithm")
    back = unpack(json.loads(json.dumps(tree)), tensors, State, CPU)
    assert torch.equal(back.x, example().x)
    assert back.inner == Inner(None, 3)
    assert back.many["b/c"].m.dtype == torch.int64
    assert torch.equal(back.many["a"].m, torch.tensor([True, False]))
    assert back.pair[0].dtype == torch.bfloat16
    assert back.pair[1] == math.inf
    assert (back.flags, back.name) == ([True, False], "x")


def test_memory_order_comes_back_so_that_sums_round_alike():
    x = torch.randn(5, 7).T
    tree, tensors = pack(x)
    back = unpack(tree, {k: v.contiguous() for k, v in tensors.items()}, Tensor, CPU)
    assert torch.equal(back, x)
    assert back.stride() == x.stride()


def test_a_copy_shares_no_memory():
    x = torch.zeros(3)
    tree, tensors = pack(x)
    back = unpack(tree, tensors, Tensor, CPU)
    x += 1
    assert back.sum() == 0


def test_only_types_that_belong_there_are_made():
    tree, tensors = pack(Inner(None, 1))
    with pytest.raises(RecordError, match="Inner"):
        unpack(tree, tensors, Tensor, CPU)


def test_what_is_no_tensor_or_plain_value_is_refused():
    with pytest.raises(RecordError, match="state/x is a Generator"):
        pack({"x": torch.Generator()})
