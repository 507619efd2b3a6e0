"""Token statistics agree with a plain count, and a kept batch needs none that were written down."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbridge import tokens, tree
from trackbridge.records import MicroBatch
from trackbridge.tokens import NGRAM, token_statistics, tokens_of


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


def test_a_run_lies_in_one_row_also_of_an_array_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin and end alike hold no run that goes from one to the next."""
    monkeypatch.setattr(tokens, "MAX_ELEMENTS", 1000)
    rows = np.random.default_rng(0).permutation(20 * 64).reshape(20, 64) + 10
    rows[:, :4], rows[:, -4:] = [5, 6, 7, 8], [1, 2, 3, 4]
    found = token_statistics({"x": rows})["x"]
    assert found["counted"] == 1000 and "ngram" not in found
    rows[:, 20:28] = range(8)
    assert token_statistics({"x": rows})["x"]["ngram"] == {"tokens": list(range(8)), "count": 1000 // 64}
    long = np.tile(np.arange(50), 60).reshape(1, 3000)
    assert token_statistics({"x": long})["x"]["ngram"]["count"] == 20


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


def test_of_a_recorded_batch_they_are_those_written_down_or_those_of_the_batch() -> None:
    skeleton, leaves = tree.pack({"ids": np.array([[3, 3, 5]]), "w": np.ones(2, np.float32), "name": "x"})
    arrays = tree.to_numpy(leaves)
    kept = MicroBatch(skeleton=skeleton, tensors=arrays)
    assert tokens_of(kept) == token_statistics({"ids": np.array([[3, 3, 5]]), "w": np.ones(2, np.float32)})
    assert tokens_of(MicroBatch(tokens={"ids": {"length": 9}}, skeleton=skeleton, tensors=arrays)) == {"ids": {"length": 9}}
    assert tokens_of(MicroBatch(fingerprint="sample-00")) == {}
    assert tokens_of(MicroBatch(skeleton=skeleton, tensors={})) == {}  # of a damaged record
