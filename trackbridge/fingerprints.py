"""What a batch was, in a few bytes: a fingerprint of its values and statistics of its tokens. Numpy only.

Both are computed on the scribe's thread from host copies, never on the training thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

NGRAM = 8  # a power of two
RAREST = 8
MAX_ELEMENTS = 1 << 20
SAMPLE = 4096
_SAMPLED = "sample-"
_CHUNK = 1 << 18
_DENSE = 1 << 20  # largest span of token values that is counted in a table instead of sorted
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplication mod 2^64 loses nothing


def fingerprint(arrays: Mapping[str, Array]) -> str:
    """32 hexadecimal digits over the values of `arrays` in their order: equal for equal values, whatever device or dtype
    held them.

    BLAKE2b (RFC 7693), 128 bits, over each array's class, shape and values in C order: booleans and integers as int64
    (uint64 values above 2^63 - 1 wrap), floats as float64 with every NaN made the same one, complex numbers as pairs,
    text and dates as their bytes. Names are not part of it; -0.0 differs from 0.0, and the integer 1 from the float 1.0.
    """
    return _digest((array, array.shape) for array in arrays.values())


def sample_fingerprint(samples: Mapping[str, Array], shapes: Mapping[str, Sequence[int]]) -> str:
    """The same over `SAMPLE` evenly spaced elements of each array, for a batch too large to copy: it starts with
    ``sample-``. `samples` are the elements ``array.reshape(-1)[::stride(size)]``, `shapes` the shapes of the arrays."""
    return _SAMPLED + _digest((array, tuple(shapes[name])) for name, array in samples.items())


def stride(size: int) -> int:
    """The distance between the elements of a sample of `size`."""
    return max(1, -(-size // SAMPLE))


def matches(recorded: str, arrays: Mapping[str, Array]) -> bool:
    """Whether `arrays` have the `recorded` fingerprint, of either kind."""
    if not recorded.startswith(_SAMPLED):
        return fingerprint(arrays) == recorded
    samples = {name: array.reshape(-1)[:: stride(array.size)] for name, array in arrays.items()}
    return sample_fingerprint(samples, {name: array.shape for name, array in arrays.items()}) == recorded


def _digest(arrays: Iterable[tuple[Array, tuple[int, ...]]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array, shape in arrays:
        kind = array.dtype.kind
        digest.update(f"{'i' if kind in 'biu' else kind}{shape}".encode())
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            digest.update(_canonical(flat[start : start + _CHUNK]).data)
    return digest.hexdigest()


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
            found[name] = _integers(head)
        elif array.dtype.kind == "f":
            found[name] = {"nonfinite": int(head.size - np.isfinite(head).sum())}
        else:
            continue
        found[name] = known[id(array)] = {"length": int(array.size), "counted": int(head.size), **found[name]}
    return found


def _canonical(flat: Array) -> Array:
    kind = flat.dtype.kind
    if kind in "biu":
        return flat.astype("<i8")
    if kind in "fc":
        floats: Array = flat.astype("<c16" if kind == "c" else "<f8").view("<f8")
        floats[np.isnan(floats)] = np.nan
        return floats
    return np.frombuffer(np.ascontiguousarray(flat).tobytes(), np.uint8)


def _integers(array: Array) -> dict[str, Any]:
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
    repeated = _ngram(array) if counts.size > 1 else None
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


def _ngram(array: Array) -> dict[str, Any] | None:
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)
    length = rows.shape[1]
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
