"""Fingerprints depend on values alone; token statistics agree with a plain count."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trackbridge.fingerprints import NGRAM, fingerprint, matches, sample_fingerprint, stride, token_statistics

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


def plain_count(rows: list[list[int]]) -> dict[str, Any]:
    flat = [token for row in rows for token in row]
    counts = collections.Counter(flat)
    runs = collections.Counter(tuple(row[i : i + NGRAM]) for row in rows for i in range(len(row) - NGRAM + 1))
    shares = [count / len(flat) for count in counts.values()]
    return {
        "unique": len(counts),
        "share": max(counts.values()) / len(flat),
        "rarest": [[t, c] for t, c in sorted(counts.items(), key=lambda item: (item[1], -item[0]))][:8],
        "entropy": -sum(share * math.log2(share) for share in shares),
        "repeats": max(runs.values(), default=0),
    }


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 30),
    seed=st.integers(0, 10_000),
    span=st.sampled_from([1, 2, 50, 2**40]),
    low=st.sampled_from([0, -100, -(2**62), 2**63 + 5]),
)
def test_token_statistics_agree_with_a_plain_count(rows: int, columns: int, seed: int, span: int, low: int) -> None:
    offsets = np.random.default_rng(seed).integers(0, span, (rows, columns))
    offsets[:, columns // 2 :] = offsets[:, : columns - columns // 2]  # something repeats
    array = (offsets.astype(np.uint64) + np.uint64(low % 2**64)).astype(np.uint64 if low > 0 else np.int64)
    got = token_statistics({"x": array})["x"]
    want = plain_count(array.tolist())
    assert (got["unique"], got["rarest"]) == (want["unique"], want["rarest"])
    assert (got["min"], got["max"], got["length"]) == (int(array.min()), int(array.max()), array.size)
    assert got["top"][1] == pytest.approx(want["share"])
    assert got["entropy"] == pytest.approx(want["entropy"], abs=1e-12)
    if want["repeats"] > 1 and want["unique"] > 1:
        assert got["ngram"]["count"] == want["repeats"]
    else:
        assert "ngram" not in got
    json.dumps(got, allow_nan=False)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
def test_narrow_integers_do_not_wrap(dtype: str) -> None:
    info = np.iinfo(dtype)
    got = token_statistics({"x": np.array([info.min, info.max, info.max], dtype)})["x"]
    assert got["top"] == [info.max, pytest.approx(2 / 3)]
    assert got["rarest"] == [[info.min, 1], [info.max, 2]]


def test_floats_and_other_kinds() -> None:
    arrays = {
        "f": np.array([[1.0, np.nan], [-np.inf, 0.0]], np.float16),
        "b": np.array([True]),
        "s": np.array(["x"]),
        "e": np.array([], np.int64),
        "z": np.array(5),
    }
    got = token_statistics(arrays)
    assert got["f"] == {"length": 4, "counted": 4, "nonfinite": 2}
    assert set(got) == {"f", "z"}
    assert got["z"]["top"] == [5, 1.0] and got["z"]["entropy"] == 0.0


def test_a_planted_repeat_is_the_top_ngram() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (4, 1024))
    phrase = rng.integers(0, 50_000, NGRAM)
    for start in range(100, 1000, 100):
        tokens[2, start : start + NGRAM] = phrase
    assert token_statistics({"x": tokens})["x"]["ngram"] == {"tokens": phrase.tolist(), "count": 9}
    assert "ngram" not in token_statistics({"x": rng.permutation(4096)})["x"]


def test_a_large_array_is_counted_in_part() -> None:
    got = token_statistics({"x": np.zeros(3_000_000, np.uint8)})["x"]
    assert (got["length"], got["counted"]) == (3_000_000, 1 << 20)
