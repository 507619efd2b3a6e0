"""Reductions of CPU tensors, by the calling thread alone.

torch hands every operation on more than 32768 elements to its pool, and a dot product of fewer: to wake the others and to wait
for them costs more than the arithmetic of a statistic, and a hundred times more while a core is busy with something else.
numpy's loops are vectorised as well and stay here. What is read is read piece by piece, so that all passes after the first find
it in the cache. Small tensors are joined: a call for each would cost more than its elements.

Dot products are of at most `DOT` elements at once, in the tensor's precision (below that no BLAS uses threads, and float32
keeps its digits); they are added up in float64. The same tensor gives the same bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trackbridge.records import FloatArray

PIECE = 1 << 17  # elements
DOT = 1 << 13
SMALL = 1 << 11  # elements of a tensor that is joined with others
JOINED = 1 << 15  # elements of those together
LEAST = 1e-30  # a float32 sum of squares below this may have lost some
Array = npt.NDArray[Any]


class Buffers(threading.local):
    """Arrays of this thread that stay: fresh pages for temporaries cost more than the arithmetic."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype[Any]], Array] = {}

    def get(self, name: str, length: int, dtype: Any) -> Array:
        """At least `length` elements are there; the first `length` of them."""
        key = name, np.dtype(dtype)
        array = self._arrays.get(key)
        if array is None or len(array) < length:
            array = self._arrays[key] = np.ones(max(length, PIECE), dtype)
        return array[:length]


buffers = Buffers()
_ones = {np.dtype(kind): np.ones(DOT, kind) for kind in (np.float32, np.float64)}


def dot(a: Array, b: Array) -> float:
    """Sum of the products of two contiguous vectors."""
    n = len(a)
    if n <= DOT:
        return float(np.dot(a, b))
    rows, width = _fold(n)
    whole = rows * width
    parts = np.matmul(a[:whole].reshape(rows, 1, width), b[:whole].reshape(rows, width, 1))
    return _sum_of(parts) + (float(np.dot(a[whole:], b[whole:])) if whole < n else 0.0)


def total(a: Array) -> float:
    """Sum of a contiguous vector."""
    n, ones = len(a), _ones[a.dtype]
    if n <= DOT:
        return float(np.dot(a, ones[:n]))
    rows, width = _fold(n)
    whole = rows * width
    parts = np.matmul(a[:whole].reshape(rows, 1, width), ones[:width].reshape(1, width, 1))
    return _sum_of(parts) + (float(np.dot(a[whole:], ones[: n - whole])) if whole < n else 0.0)


def _sum_of(parts: Array) -> float:
    found: list[float] = parts.ravel().tolist()
    return sum(found)


@lru_cache(maxsize=1024)
def _fold(n: int) -> tuple[int, int]:
    """Rows of at most `DOT` elements that `n` elements make; without a rest if that is easily had."""
    rows = -(-n // DOT)
    for more in range(rows, rows + 9):
        if n % more == 0:
            return more, n // more
    return n // DOT, DOT


def pieces(flat: Tensor, most: int = PIECE) -> Iterator[Array]:
    """A vector as contiguous float32 or float64 arrays of at most `most` elements, of about the same length."""
    plain = flat.dtype in (torch.float32, torch.float64)
    whole = flat.detach().numpy() if plain else None
    n = flat.numel()
    count = -(-n // most)
    length = -(-n // count)
    for begin in range(0, n, length):
        yield whole[begin : begin + length] if whole is not None else flat[begin : begin + length].float().numpy()


def summarise(tensors: Sequence[Tensor], old: Sequence[Tensor] | None = None, *, sums: bool = False) -> FloatArray:
    """One pass over `tensors`, of one dtype, none empty. Float64, shape (r, k).

    Rows: norms, largest absolute elements (NaN where there is a NaN), counts of non-finite elements; with `old`, tensors of the
    same shapes, norms of the differences; or with `sums`, sums, and counts of elements that are not 0. Norms are finite
    wherever they are as float64.
    """
    result = np.zeros((5 if sums else 4 if old is not None else 3, len(tensors)))
    joined, alone = _plan(tuple([tensor.numel() for tensor in tensors]))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for which, starts in joined:
            before = None if old is None else _join([old[i] for i in which])
            result[:, which] = _joined(_join([tensors[i] for i in which]), starts, before, sums)
        for i in alone:
            result[:, i] = _alone(tensors[i], None if old is None else old[i], sums)
    return result


def norms(tensors: Sequence[Tensor]) -> FloatArray:
    """Their norms alone, shape (k,)."""
    result = np.empty(len(tensors))
    joined, alone = _plan(tuple([tensor.numel() for tensor in tensors]))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for which, starts in joined:
            result[which] = np.sqrt(np.add.reduceat(np.square(_join([tensors[i] for i in which])), starts))
        for i in alone:
            flat = tensors[i].reshape(-1)
            result[i] = math.sqrt(_safely(flat, None, sum(dot(x, x) for x in pieces(flat))))
    return result


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...]) -> tuple[list[tuple[list[int], npt.NDArray[np.intp]]], list[int]]:
    """Which tensors are joined, with the place where each begins; and those that are looked at alone."""
    joined: list[tuple[list[int], npt.NDArray[np.intp]]] = []
    which: list[int] = []
    for i in (i for i, size in enumerate(sizes) if size <= SMALL):
        if which and sum(sizes[j] for j in which) + sizes[i] > JOINED:
            joined.append((which, _starts(sizes, which)))
            which = []
        which.append(i)
    if which:
        joined.append((which, _starts(sizes, which)))
    return joined, [i for i, size in enumerate(sizes) if size > SMALL]


def _starts(sizes: Sequence[int], which: Sequence[int]) -> npt.NDArray[np.intp]:
    return np.cumsum([0, *(sizes[i] for i in which[:-1])], dtype=np.intp)


def _join(tensors: Sequence[Tensor]) -> FloatArray:
    """Their elements, one tensor after the other."""
    flat: Tensor = torch._utils._flatten_dense_tensors(list(tensors))  # type: ignore[no-untyped-call]
    return flat.detach().double().numpy()


def _joined(x: FloatArray, starts: npt.NDArray[np.intp], old: FloatArray | None, sums: bool) -> FloatArray:
    squares = np.add.reduceat(x * x, starts)
    highs, lows = np.maximum.reduceat(x, starts), np.minimum.reduceat(x, starts)
    fine = np.isfinite(highs).all() and np.isfinite(lows).all()
    bad = np.zeros(len(starts)) if fine else np.add.reduceat((~np.isfinite(x)).astype(np.float64), starts)
    found = [np.sqrt(squares), np.maximum(highs, -lows), bad]
    if old is not None:
        found.append(np.sqrt(np.add.reduceat(np.square(x - old), starts)))
    elif sums:
        found += [np.add.reduceat(x, starts), np.add.reduceat((x != 0).astype(np.float64), starts)]
    return np.stack(found)


def _alone(tensor: Tensor, old: Tensor | None, sums: bool) -> list[float]:
    flat = tensor.reshape(-1)
    before = None if old is None else old.reshape(-1)
    squares = moved = added = 0.0
    nonzero = 0
    high, low = -math.inf, math.inf
    others = iter(()) if before is None else pieces(before)
    for x in pieces(flat):
        squares += dot(x, x)
        high, low = max(high, float(x.max())), min(low, float(x.min()))
        if before is not None:
            d = np.subtract(x, next(others), out=buffers.get("difference", len(x), x.dtype))
            moved += dot(d, d)
        if sums:
            added += total(x)
            nonzero += np.count_nonzero(np.not_equal(x, 0, out=buffers.get("nonzero", len(x), np.bool_)))
    bad = 0
    if not math.isfinite(squares):
        bad = flat.numel() - sum(np.count_nonzero(np.isfinite(x)) for x in pieces(flat))
    peak = math.nan if math.isnan(squares) else max(high, -low)
    found = [math.sqrt(_safely(flat, None, squares)), peak, float(bad)]
    if before is not None:
        found.append(math.sqrt(_safely(flat, before, moved)))
    elif sums:
        found += [added if math.isfinite(added) else _sum(flat), float(nonzero)]
    return found


def _safely(flat: Tensor, old: Tensor | None, squares: float) -> float:
    """`squares`, or that sum in float64 where float32 may have overflowed or lost something."""
    if LEAST < squares < math.inf or flat.dtype == torch.float64:
        return squares
    others = None if old is None else pieces(old)
    result = 0.0
    for x in pieces(flat):
        wide = x.astype(np.float64)
        if others is not None:
            wide -= next(others)
        result += dot(wide, wide)
    return result


def _sum(flat: Tensor) -> float:
    """The sum in float64."""
    return sum(float(np.add.reduce(x, dtype=np.float64)) for x in pieces(flat))
