"""Values land in the rows they are of, whatever order an optimizer has its parameters in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trackbridge.probes import rows
from trackbridge.probes.rows import Rows, alike
from trackbridge.slab import Field, Slab

SIZE = 8


@pytest.mark.parametrize("through_numpy", [True, False], ids=["cpu", "other devices"])
@given(order=st.permutations(range(SIZE)), count=st.integers(1, SIZE))
def test_each_value_lands_in_its_row(through_numpy: bool, order: list[int], count: int) -> None:
    rows = order[:count]
    slab = Slab([Field("before", 3), Field("a", SIZE), Field("b", SIZE)], torch.device("cpu"))
    one, two = Rows(slab, "a"), Rows(slab, "a", "b")
    for each in (one, two):
        each._array = each._array if through_numpy else None
    values = torch.arange(1.0, 1 + 2 * count).reshape(2, count)
    expected = np.zeros((2, SIZE))
    one.write(rows, values[0])
    expected[0, rows] = values[0]
    assert np.array_equal(slab.device_view("a").numpy(), expected[0])
    two.write(rows, values)
    expected[:, rows] = values
    assert np.array_equal(np.stack((slab.device_view("a").numpy(), slab.device_view("b").numpy())), expected)
    assert not slab.device_view("before").any()


def test_fields_that_do_not_lie_side_by_side_are_refused() -> None:
    slab = Slab([Field("a", SIZE), Field("between", 1), Field("b", SIZE)], torch.device("cpu"))
    with pytest.raises(AssertionError):
        Rows(slab, "a", "b")


KINDS = (
    lambda: torch.randn(3),
    lambda: nn.Parameter(torch.randn(2, 2)),
    lambda: torch.randn(2).double(),
    lambda: torch.randn(2).bfloat16(),
    lambda: torch.zeros(0),
    lambda: torch.zeros(2, dtype=torch.complex64),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.arange(3),
)


@given(st.lists(st.integers(0, len(KINDS) - 1), max_size=6), st.booleans())
def test_tensors_that_are_all_alike_are_grouped_as_any_others(kinds: list[int], same: bool) -> None:
    tensors = [KINDS[kinds[0] if same else kind]() for kind in kinds]
    places = list(range(10, 10 + len(tensors)))
    quick, thorough = alike(places, tensors), rows._sorted(zip(places, tensors, strict=True))
    assert [some for some, _ in quick] == [some for some, _ in thorough]
    for (_, group), (_, other) in zip(quick, thorough, strict=True):
        assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(group, other, strict=True))
