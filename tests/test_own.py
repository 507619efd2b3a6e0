"""The user's own scalars: what `run.log` is given, as series and numbers."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbridge import names
from trackbridge.errors import UsageError
from trackbridge.misuse import Misuse, Use
from trackbridge.own import MOST, OwnScalars


class Word(str, Enum):
    A = "a"


NUMBERS = st.one_of(
    st.floats(allow_nan=False),
    st.integers(-(2**53), 2**53),
    st.booleans(),
    st.floats(-1e6, 1e6).map(np.float64),
    st.floats(-1e6, 1e6).map(lambda x: torch.tensor(x, dtype=torch.float64)),
)


def accepting() -> Use:
    use = Misuse().of()
    use.accepted = True
    return use


def read(own: OwnScalars, values: dict[Any, Any], use: Use | None = None) -> dict[str, float]:
    series, numbers, tensors = own.read(values, use or accepting())
    assert all(type(number) is float for number in numbers) and not tensors  # none is on another device here
    return dict(zip(series, numbers, strict=True))


@given(st.lists(st.dictionaries(st.sampled_from("abcde").map(lambda name: f"mine/{name}"), NUMBERS), max_size=8))
def test_a_set_of_names_that_was_there_before_gives_the_same(calls: list[dict[str, Any]]) -> None:
    own = OwnScalars()
    for values in calls:
        assert read(own, values) == {name: float(value) for name, value in values.items()} == read(OwnScalars(), values)


def test_names_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name once was compared with the whole catalogue at every call: 75 ms for 500."""
    asked: list[str] = []
    real = names.describe
    monkeypatch.setattr(names, "describe", lambda name: (asked.append(name), real(name))[1])
    own, values = OwnScalars(), {f"own/{i}": float(i) for i in range(500)}
    for _ in range(5):
        assert len(read(own, values)) == 500
    assert len(asked) == 500


def test_what_is_wrong_is_refused_also_under_names_that_are_known() -> None:
    own = OwnScalars()
    read(own, {"a": 1.0, "b": 2.0})
    assert read(own, {"a": "text", "b": 3.0}) == {"b": 3.0}
    assert read(own, {"a": torch.ones(3), "b": 3}) == {"b": 3.0}
    assert read(own, {"a": 4.0, "b": 5.0}) == {"a": 4.0, "b": 5.0}
    assert read(own, {"a": torch.tensor(6), "b": torch.tensor([7.0], requires_grad=True)}) == {"a": 6.0, "b": 7.0}
    first = Misuse().of()
    with pytest.raises(UsageError, match="a must be a number"):
        own.read({"a": "text", "b": 3.0}, first)


@pytest.mark.parametrize("values", [{"a b": 1.0, "a?b": 2.0}, {"train/loss": 1.0}, {"layer/x/grad_norm": 2.0}])
def test_a_name_that_cannot_be_is_refused_every_time(values: dict[str, float]) -> None:
    own = OwnScalars()
    for _ in range(3):
        with pytest.raises(UsageError):
            own.read(values, Misuse().of())
        assert len(read(own, values)) == len(values) - 1


def test_keys_that_are_equal_but_read_otherwise() -> None:
    own = OwnScalars()
    assert read(own, {1: 1.0}) == {"1": 1.0}
    assert read(own, {True: 1.0}) == {"True": 1.0}
    assert read(own, {1.0: 1.0}) == {"1.0": 1.0}
    assert read(own, {"a": 1.0}) == {"a": 1.0}
    assert read(own, {Word.A: 1.0}) == {"Word.A": 1.0}


def test_names_that_differ_at_every_call_are_not_kept_for_ever() -> None:
    own = OwnScalars()
    for step in range(3 * MOST):
        assert read(own, {f"mine/{step}": 1.0}) == {f"mine/{step}": 1.0}
    assert len(own._series) <= MOST


def test_every_series_of_the_catalogue_is_described() -> None:
    for metric in names.CATALOGUE:
        assert names.describe(metric.name.replace("<", "x").replace(">", "y")) is metric


class Turning(dict[str, float]):
    """Iterates one way once and the other way afterwards."""

    def __iter__(self) -> Any:
        self.asked = not getattr(self, "asked", False)
        return iter(["a", "b"] if self.asked else ["b", "a"])

    def keys(self) -> Any:
        return list(iter(self))


def test_a_mapping_that_changes_while_it_is_read_puts_no_number_under_another_name() -> None:
    own = OwnScalars()
    for number in (float, int):
        for _ in range(4):
            assert read(own, Turning(a=number(1), b=number(2))) == {"a": 1.0, "b": 2.0}


class Hostile:
    def __str__(self) -> str:
        raise OSError("no name")


@pytest.mark.parametrize(
    "values", [{Hostile(): 1.0}, {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}]
)
def test_what_raises_when_looked_at_is_left_out(values: dict[Any, Any]) -> None:
    own = OwnScalars()
    with pytest.raises(UsageError):
        own.read(values, Misuse().of())
    assert read(own, {**values, "fine": 1.0}) == {"fine": 1.0}


def test_a_value_in_a_mode_without_values_is_left_out() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert read(OwnScalars(), {"x": torch.ones(()), "y": 1.0}) == {"y": 1.0}
