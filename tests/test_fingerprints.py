"""Fingerprints depend on values alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trackbridge.fingerprints import fingerprint, matches, sample_fingerprint, stride

INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
small = hnp.arrays(np.int8, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), elements=st.integers(0, 1))


@given(small)
def test_equal_values_of_any_dtype_have_one_fingerprint(array: Any) -> None:
    assert len({fingerprint({"x": array.astype(dtype)}) for dtype in INTEGERS}) == 1
    assert len({fingerprint({"x": array.astype(dtype)}) for dtype in ("float16", "float32", "float64")}) == 1


@given(hnp.arrays(np.float16, hnp.array_shapes(max_side=5), elements=st.floats(width=16)))
def test_floats_keep_their_fingerprint_when_widened(array: Any) -> None:
    with np.errstate(invalid="ignore"):
        assert fingerprint({"x": array}) == fingerprint({"other name": array.astype(np.float64)})


@given(st.data())
def test_one_changed_value_changes_it(data: Any) -> None:
    array = data.draw(hnp.arrays(data.draw(st.sampled_from(["int64", "float64", "uint8"])), st.integers(1, 30)))
    index = data.draw(st.integers(0, array.size - 1))
    changed = array.copy()
    with np.errstate(over="ignore"):
        changed[index] = changed[index] + 1 if array.dtype.kind != "f" else np.nextafter(changed[index], np.inf)
    if not np.array_equal(array, changed, equal_nan=array.dtype.kind == "f"):
        assert fingerprint({"x": array}) != fingerprint({"x": changed})


def test_what_counts_and_what_does_not() -> None:
    a, b = np.arange(6), np.arange(6) * 2
    assert fingerprint({"a": a, "b": b}) == fingerprint({"b": a, "a": b})
    assert fingerprint({"a": a, "b": b}) != fingerprint({"a": b, "b": a})
    assert fingerprint({"a": a}) != fingerprint({"a": a.reshape(2, 3)})
    assert fingerprint({"a": a}) != fingerprint({"a": a.astype(float)})
    assert fingerprint({"a": np.array([0.0])}) != fingerprint({"a": np.array([-0.0])})
    nans = np.array([0x7FF8000000000000, 0xFFF8000000000001], np.uint64).view(np.float64)
    assert fingerprint({"a": nans[:1]}) == fingerprint({"a": nans[1:]})
    assert fingerprint({"a": b.reshape(2, 3).T}) == fingerprint({"a": np.ascontiguousarray(b.reshape(2, 3).T)})
    assert fingerprint({"a": np.array(["x", "y"])}) != fingerprint({"a": np.array(["x", "z"])})
    big = np.arange(600_000)  # more than one chunk
    assert fingerprint({"a": big}) == fingerprint({"a": big.astype(np.int32)})


def test_the_fingerprint_is_fixed() -> None:
    """It is compared between runs and versions."""
    arrays = {"i": np.arange(5), "f": np.array([[0.5, np.nan]], np.float32), "c": np.array(1j), "s": np.array("é")}
    assert fingerprint(arrays) == "3714ef8b466ee200dfafade9d4d1e537"


def test_a_sample_stands_for_a_large_array() -> None:
    array = np.arange(50_000).reshape(500, 100)
    samples = {"x": array.reshape(-1)[:: stride(array.size)]}
    assert 3_000 < samples["x"].size <= 4_096
    recorded = sample_fingerprint(samples, {"x": array.shape})
    assert matches(recorded, {"x": array.astype(np.int32)}) and matches(fingerprint({"x": array}), {"x": array})
    assert not matches(recorded, {"x": array + 1}) and not matches(recorded, {"x": array.T})
    assert not matches(recorded, {"x": array.reshape(-1)}) and not matches(fingerprint({"x": array}), {"x": array + 1})
