"""Plain values, as a file or a command line has them, to dataclasses and calls; or a sentence saying what is right."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.asks import Plan
from coterie.errors import SettingError
from coterie.settings import build, call, hint, real, whole


@dataclass(frozen=True)
class Inner:
    width: int = 3
    rate: float | None = None


@dataclass(frozen=True)
class Outer:
    rho: float
    kind: Literal["a", "b"] = "a"
    on: bool = False
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    either: int | str = 1
    inner: Inner = field(default_factory=lambda: Inner(5, 0.5))
    plan: Plan = field(default_factory=lambda: Plan(epochs=2, lr=0.3))
    maybe: Plan | None = None
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.rho < 0:
            raise SettingError("rho must be at least 0")


def test_values_arrive_as_the_types_that_are_wanted() -> None:
    made = build(
        Outer,
        {
            "rho": 1,
            "kind": "b",
            "on": True,
            "pair": [2, 3],
            "many": ["x", "y"],
            "either": "word",
            "inner": {"rate": 2},
            "plan": {"lr": 0.1},
            "maybe": {"steps": 4},
        },
        "outer",
    )
    assert (made.rho, type(made.rho)) == (1.0, float)
    assert (made.kind, made.on, made.many, made.either) == ("b", True, ("x", "y"), "word")
    assert made.pair == (2, 3.0)
    assert type(made.pair[1]) is float
    assert made.inner == Inner(5, 2.0)  # what a nested table leaves out is as the outer class has it
    assert made.plan == Plan(epochs=2, lr=0.1)
    assert made.maybe == Plan(steps=4)


def test_steps_replace_epochs_and_the_other_way_round() -> None:
    assert build(Outer, {"rho": 1.0, "plan": {"steps": 7}}, "o").plan == Plan(steps=7, lr=0.3)
    assert build(Outer, {"rho": 1.0, "plan": {"epochs": 7}}, "o").plan == Plan(epochs=7, lr=0.3)


def test_none_may_be_written_in_words() -> None:
    given = {"rho": 1.0, "inner": {"rate": "none"}, "maybe": "none", "plan": {"batch": "none"}}
    made = build(Outer, given, "o")
    assert made.inner.rate is None
    assert made.maybe is None
    assert made.plan.batch is None


def test_a_ready_dataclass_passes() -> None:
    assert build(Outer, {"rho": 1.0, "inner": Inner(9)}, "o").inner == Inner(9)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "outer needs the setting 'rho'"),
        ({"rho": 1.0, "knd": "a"}, "outer has no setting 'knd': did you mean kind?"),
        ({"rho": 1.0, "made": 3}, "outer has no setting 'made'"),
        ({"rho": 1.0, "zzzz": 3}, "there are rho, kind, on"),
        ({"rho": "x"}, r"outer\.rho must be a number, not 'x'"),
        ({"rho": True}, r"outer\.rho must be a number, not True"),
        ({"rho": -1.0}, "outer: rho must be at least 0"),
        ({"rho": 1.0, "kind": "c"}, r"outer\.kind must be one of 'a', 'b', not 'c'"),
        ({"rho": 1.0, "on": 1}, r"outer\.on must be true or false, not 1"),
        ({"rho": 1.0, "pair": [1]}, r"outer\.pair must have 2 entries, not 1"),
        ({"rho": 1.0, "pair": [1.5, 2]}, r"outer\.pair\[0\] must be a whole number, not 1\.5"),
        ({"rho": 1.0, "pair": "ab"}, r"outer\.pair must be a list, not 'ab'"),
        ({"rho": 1.0, "many": ["a", 1]}, r"outer\.many\[1\] must be text, not 1"),
        ({"rho": 1.0, "either": 1.5}, r"outer\.either must be a whole number, not 1\.5"),
        ({"rho": 1.0, "inner": 3}, r"outer\.inner must be a table, not 3"),
        ({"rho": 1.0, "inner": {"width": True}}, r"outer\.inner\.width must be a whole number, not True"),
        ({"rho": 1.0, "inner": {"wdth": 1}}, r"outer\.inner has no setting 'wdth': did you mean width\?"),
        ({"rho": 1.0, "plan": {"lr": -1.0}}, r"outer\.plan: the rate lr must be at least 0"),
        ({"rho": 1.0, "plan": {"steps": 1, "epochs": 1}}, r"outer\.plan: a plan has either steps or epochs"),
        ({"rho": 1.0, "maybe": {"lr": 1.0}}, r"outer\.maybe: a plan has either"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        build(Outer, settings, "outer")


def test_call_finds_names_and_checks_settings() -> None:
    def dirichlet(data: str, *, alpha: float, seed: int = 0) -> tuple[str, float, int]:
        return data, alpha, seed

    table: dict[str, Callable[..., Any]] = {"dirichlet": dirichlet, "iid": lambda data: data}
    assert call("partition", "dirichlet", table, "digits", alpha=0.5) == ("digits", 0.5, 0)
    for name, settings, says in [
        ("dirichlett", {}, "no partition is called 'dirichlett': did you mean dirichlet?"),
        ("xyz", {}, "there are dirichlet, iid"),
        ("dirichlet", {"alpha": 1.0, "sed": 1}, "partition dirichlet has no setting 'sed': did you mean seed?"),
        ("dirichlet", {}, "partition dirichlet needs the setting 'alpha'"),
        ("dirichlet", {"alpha": 1.0, "data": "other"}, "partition dirichlet has no setting 'data'"),
    ]:
        with pytest.raises(SettingError) as caught:
            call("partition", name, table, "digits", **settings)
        assert says in str(caught.value)


def test_hint() -> None:
    assert hint("fedavgg", ["fedavg", "local"]) == "did you mean fedavg?"
    assert hint("qqq", ["fedavg", "local"]) == "there are fedavg, local"
    assert hint("qqq", []) == "there are none"


class Colour(enum.IntEnum):
    RED = 1


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(0, 5))
def test_whole_takes_exactly_its_range(value: int, least: int, span: int) -> None:
    if least <= value <= least + span:
        assert whole("x", value, least, least + span) == value
    else:
        with pytest.raises(SettingError, match=f"x must be a whole number from {least} to {least + span}, not {value}"):
            whole("x", value, least, least + span)


def test_whole_is_whole() -> None:
    assert type(whole("x", np.int32(3), 0)) is int
    assert whole("x", Colour.RED, 0) == 1
    for bad in (True, 1.0, "1", None, 1.5):
        with pytest.raises(SettingError, match="a whole number of at least 0"):
            whole("x", bad, 0)


def test_real_takes_exactly_its_range() -> None:
    assert real("x", 1, 0, 1) == 1.0
    assert type(real("x", 1, 0, 1)) is float
    assert real("x", 0, 0, 1, closed=True) == 0.0
    for bad in (0, -0.1, 1.1, math.nan, math.inf, "1", True, None):
        with pytest.raises(SettingError, match="x must be a number above 0 and at most 1, not"):
            real("x", bad, 0, 1)
    for bad in (math.nan, math.inf, -1):
        with pytest.raises(SettingError, match="at least 0, not"):
            real("x", bad, 0, closed=True)
