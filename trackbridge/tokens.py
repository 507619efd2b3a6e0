"""Statistics of the tokens in a batch, as JSON. Numpy only.

A batch that is kept says all of it by itself, so they are worked out when somebody asks: a capsule is sealed, a cause is looked
for. To do it at every step took the scribe a quarter of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge import tree
from trackbridge.errors import TrackbridgeError
from trackbridge.records import MicroBatch

Array: TypeAlias = npt.NDArray[Any]

NGRAM = 8  # a power of two
RAREST = 8
MAX_ELEMENTS = 1 << 20
_DENSE = 1 << 20  # largest span of token values that is counted in a table instead of sorted
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplication mod 2^64 loses nothing


def tokens_of(micro: MicroBatch) -> Mapping[str, Any]:
    """`token_statistics` of a recorded batch: as they were written down, else of the batch itself. Empty where neither is
    there, or the batch is damaged."""
    if micro.tokens or micro.tensors is None or micro.skeleton is None:
        return micro.tokens
    try:
        return token_statistics(tree.values(micro.skeleton, micro.tensors))
    except TrackbridgeError:
        return {}


def token_statistics(arrays: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """Statistics by array name, as JSON. Arrays of other kinds than integers and floats are left out; of larger ones than
    `MAX_ELEMENTS` the first that many elements count (`counted` says how many).

    Integers: `length`, `unique`, `min`, `max`, `top` ([token, its share]), `rarest` (up to 8 [token, count], the higher
    token first among equals: vocabularies are ordered by frequency), `entropy` in bits, and `ngram`: the most repeated run
    of 8 tokens inside a row (`tokens`, `count`), absent when none repeats.
    Floats: `length`, `nonfinite`.
    """
    found: dict[str, dict[str, Any]] = {}
    known: dict[int, dict[str, Any]] = {}  # labels are often the inputs
    for name, array in arrays.items():
        if id(array) in known:
            found[name] = known[id(array)]
            continue
        head = array if array.size <= MAX_ELEMENTS else array.reshape(-1)[:MAX_ELEMENTS]
        if array.dtype.kind in "iu" and array.size:
            found[name] = _integers(head, array.shape[-1] if array.ndim else 1)
        elif array.dtype.kind == "f":
            found[name] = {"nonfinite": int(head.size - np.isfinite(head).sum())}
        else:
            continue
        found[name] = known[id(array)] = {"length": int(array.size), "counted": int(head.size), **found[name]}
    return found


def _integers(array: Array, width: int) -> dict[str, Any]:
    """Of an array, or of the first elements of one, whose rows have `width` elements."""
    flat = array.reshape(-1)
    low, high = int(flat.min()), int(flat.max())
    values, base, counts = _count(flat, low, high)
    share = counts / flat.size
    top = int(counts.argmax())
    # Fewest first; among equals the higher token. Only as many as are shown are sorted in full.
    fewest = np.argpartition(counts, RAREST)[:RAREST] if counts.size > RAREST else np.arange(counts.size)
    candidates = np.flatnonzero(counts <= counts[fewest].max())
    order = candidates[np.lexsort((-candidates, counts[candidates]))][:RAREST]
    statistics: dict[str, Any] = {
        "unique": int(counts.size),
        "min": low,
        "max": high,
        "top": [base + int(values[top]), float(share[top])],
        "rarest": [[base + int(values[index]), int(counts[index])] for index in order],
        "entropy": float(max(0.0, -(share * np.log2(share)).sum())),
    }
    repeated = _ngram(flat, width) if counts.size > 1 else None
    return statistics if repeated is None else {**statistics, "ngram": repeated}


def _count(flat: Array, low: int, high: int) -> tuple[Array, int, Array]:
    """(values, base, counts): the distinct values, ascending, are ``base + values``."""
    if high - low >= _DENSE:
        values, counts = np.unique(flat, return_counts=True)
        return values, 0, counts
    distance = flat.astype(np.uint64) - np.uint64(low % 2**64)  # right mod 2^64 for signed and unsigned alike
    table = np.bincount(distance.astype(np.int64))
    present = np.flatnonzero(table)
    return present, low, table[present]


def _ngram(flat: Array, width: int) -> dict[str, Any] | None:
    length = min(width, flat.size)
    rows = flat[: flat.size // length * length].reshape(-1, length)  # of a row that was cut off nothing counts
    if length < NGRAM:
        return None
    keys, run = _mix(rows.astype(np.uint64)), 1
    while run < NGRAM:  # a polynomial hash of every run, mod 2^64, of two halves each
        keys = keys[:, :-run] * np.uint64(pow(int(_BASE), run, 2**64)) + keys[:, run:]
        run *= 2
    ordered = np.sort(keys, axis=None)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, ordered.size))
    best = int(counts.argmax())
    if counts[best] < 2:
        return None
    row, column = np.argwhere(keys == ordered[starts[best]])[0]
    return {"tokens": [int(token) for token in rows[row, column : column + NGRAM]], "count": int(counts[best])}


def _mix(words: Array) -> Array:
    """Spread small integers over 64 bits (the finalizer of splitmix64: Steele, Lea and Flood 2014)."""
    mixed = words + _BASE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    spread: Array = mixed ^ (mixed >> np.uint64(31))
    return spread
