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
BLOCK = 1 << 16  # elements of several vectors that take their passes together: squares of them stay in the cache
SMALL = 1 << 11  # elements of a tensor that is joined with others
JOINED = 1 << 15  # elements of those together
LEAST = 1e-30  # a float32 sum of squares below this may have lost some
Array = npt.NDArray[Any]
NORMAL = {np.dtype(kind): float(np.finfo(kind).tiny) for kind in (np.float32, np.float64)}


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


@lru_cache(maxsize=1024)
def _ones(dtype: np.dtype[Any], length: int) -> Array:
    return np.ones(length, dtype)


def dot(a: Array, b: Array) -> float:
    """Sum of the products of two contiguous vectors."""
    n = len(a)
    if n <= DOT:
        return float(np.dot(a, b))
    rows, width = _fold(n)
    whole = rows * width
    if whole < n:
        return dot(a[:whole], b[:whole]) + float(np.dot(a[whole:], b[whole:]))
    found: list[float] = np.matmul(a.reshape(rows, 1, width), b.reshape(rows, width, 1)).ravel().tolist()
    return sum(found)


def total(a: Array) -> float:
    """Sum of a contiguous vector."""
    n = len(a)
    if n <= DOT:
        return float(np.dot(a, _ones(a.dtype, n)))
    rows, width = _fold(n)
    whole = rows * width
    if whole < n:
        return total(a[:whole]) + float(np.dot(a[whole:], _ones(a.dtype, n - whole)))
    found: list[float] = np.matmul(a.reshape(rows, 1, width), _ones(a.dtype, width)).ravel().tolist()
    return sum(found)


def dots(a: Array, b: Array) -> list[float]:
    """`dot` of each row of `a`, shape (k, n), with the same row of `b`, or with its only one; to the bit."""
    k, n = a.shape
    rows, width = (1, n) if n <= DOT else _fold(n)
    whole = rows * width
    left, right = a[:, :whole].reshape(k, rows, 1, width), b[:, :whole].reshape(len(b), rows, width, 1)
    found = [sum(row) for row in np.matmul(left, right).reshape(k, rows).tolist()]
    if whole < n:
        rest = np.matmul(a[:, None, whole:], b[:, whole:, None]).reshape(k).tolist()
        found = [x + y for x, y in zip(found, rest, strict=True)]
    return found


def totals(a: Array) -> list[float]:
    """`total` of each row of `a`, shape (k, n); to the bit."""
    return dots(a, _ones(a.dtype, a.shape[1])[None])


def root(square: Any) -> float:
    """The absolute value whose rounded square `square` is, exactly; 0 where range was lost. (In radix 2 a correctly rounded
    root of a rounded square gives back what was squared.)"""
    return float(np.sqrt(square)) if NORMAL[square.dtype] <= square < np.inf else 0.0


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
    whole = flat.detach().resolve_neg().numpy() if plain else None
    n = flat.numel()
    count = -(-n // most)
    length = -(-n // count)
    for begin in range(0, n, length):
        yield whole[begin : begin + length] if whole is not None else flat[begin : begin + length].float().numpy()


def summarise(tensors: Sequence[Tensor], *, sums: bool = False, by: float | None = None) -> FloatArray:
    """One pass over `tensors`, of one dtype, none empty. Float64, shape (r, k).

    Rows: norms, largest absolute elements (NaN where there is a NaN), counts of non-finite elements; with `sums`, sums, and
    counts of elements that are not 0. Norms have the bits of `norms`. `by`: see there.
    """
    result = np.zeros((5 if sums else 3, len(tensors)))
    joined, alone = _plan(tuple([tensor.numel() for tensor in tensors]))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for which, starts in joined:
            result[:, which] = _joined(_join([tensors[i] for i in which], by), starts, sums)
        for i in alone:
            result[:, i] = (_with_sums if sums else _alone)(tensors[i].detach().reshape(-1), by)
    return result


def norms(tensors: Sequence[Tensor], *, by: float | None = None) -> FloatArray:
    """Their norms, shape (k,), finite wherever they are as float64. With `by`, contiguous float32 `tensors` are multiplied in
    place by this float32, and looked at while they are at hand."""
    result = np.empty(len(tensors))
    joined, alone = _plan(tuple([tensor.numel() for tensor in tensors]))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for which, starts in joined:
            result[which] = np.sqrt(np.add.reduceat(np.square(_join([tensors[i] for i in which], by)), starts))
        for i in alone:
            flat = tensors[i].detach().reshape(-1)
            squares = 0.0
            for x in _multiplied(flat, by):
                squares += dot(x, x)  # by itself, as `summarise` does: from Python 3.12 on `sum` rounds otherwise
            result[i] = math.sqrt(_safely(flat, squares))
    return result


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """A copy of `vectors`, of one dtype that numpy has, one after the other; `torch.cat` takes longer over strided ones."""
    return torch.from_numpy(np.concatenate([vector.resolve_neg().numpy() for vector in vectors]))


def distances(now: Tensor, old: Tensor, counts: Sequence[int]) -> FloatArray:
    """Norms of the differences of two float32 or float64 vectors, of each of their parts of so many elements."""
    starts = np.cumsum([0, *counts[:-1]], dtype=np.intp)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        apart = np.subtract(now.numpy(), old.numpy(), dtype=np.float64)
        return np.asarray(np.sqrt(np.add.reduceat(np.square(apart, out=apart), starts)))


def row_squares(matrix: Tensor) -> FloatArray:
    """Squared L2 norms of the rows of `matrix`, shape (rows, width). Float64, shape (rows,)."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = _row_squares(matrix, torch.promote_types(matrix.dtype, torch.float32))
        if matrix.dtype != torch.float64 and not LEAST < squares.max() < 1 / LEAST:
            squares = _row_squares(matrix, torch.float64)
    return squares


def _row_squares(matrix: Tensor, dtype: torch.dtype) -> FloatArray:
    found = np.zeros(len(matrix))
    height = max(1, PIECE // matrix.shape[1])
    for begin in range(0, len(matrix), height):
        x = matrix[begin : begin + height].detach().to(dtype).numpy()
        found[begin : begin + len(x)] = np.matmul(x[:, None, :], x[:, :, None]).ravel()
    return found


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


def _multiplied(flat: Tensor, by: float | None) -> Iterator[Array]:
    """`pieces`, multiplied in place on the way."""
    factor = None if by is None else np.float32(by)
    for x in pieces(flat):
        yield x if factor is None else np.multiply(x, factor, out=x)


def _join(tensors: list[Tensor], by: float | None) -> FloatArray:
    """Their elements, one tensor after the other, multiplied in place before."""
    if by is not None:
        torch._foreach_mul_(tensors, by)
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat.detach().double().numpy()


def _joined(x: FloatArray, starts: npt.NDArray[np.intp], sums: bool) -> FloatArray:
    squares = np.add.reduceat(x * x, starts)
    highs, lows = np.maximum.reduceat(x, starts), np.minimum.reduceat(x, starts)
    fine = np.isfinite(highs).all() and np.isfinite(lows).all()
    bad = np.zeros(len(starts)) if fine else np.add.reduceat((~np.isfinite(x)).astype(np.float64), starts)
    found = [np.sqrt(squares), np.maximum(highs, -lows), bad]
    if sums:
        found += [np.add.reduceat(x, starts), np.add.reduceat((x != 0).astype(np.float64), starts)]
    return np.stack(found)


def _alone(flat: Tensor, by: float | None) -> list[float]:
    squares = 0.0
    high, low = -math.inf, math.inf
    for x in _multiplied(flat, by):
        squares += dot(x, x)
        high, low = max(high, float(np.maximum.reduce(x))), min(low, float(np.minimum.reduce(x)))
    return [math.sqrt(_safely(flat, squares)), math.nan if math.isnan(squares) else max(high, -low), _bad(flat, squares)]


def _with_sums(flat: Tensor, by: float | None) -> list[float]:
    squares = added = 0.0
    zeros = 0
    high, low = -math.inf, math.inf
    for x in _multiplied(flat, by):
        n = len(x)
        squares += dot(x, x)
        added += total(x)
        high, low = max(high, float(np.maximum.reduce(x))), min(low, float(np.minimum.reduce(x)))
        other = np.not_equal(x, 0, out=buffers.get("nonzero", n, np.bool_))
        if not np.logical_and.reduce(other):  # to count takes three times as long
            zeros += n - int(np.count_nonzero(other))
    return [
        math.sqrt(_safely(flat, squares)),
        math.nan if math.isnan(squares) else max(high, -low),
        _bad(flat, squares),
        added if math.isfinite(added) else _sum(flat),
        float(flat.numel() - zeros),
    ]


def _bad(flat: Tensor, squares: float) -> float:
    """How many elements are not finite; the sum of their `squares` says whether any can be."""
    if math.isfinite(squares):
        return 0.0
    return float(flat.numel() - sum(np.count_nonzero(np.isfinite(x)) for x in pieces(flat)))


def _safely(flat: Tensor, squares: float) -> float:
    """`squares`, or that sum in float64 where float32 may have overflowed or lost something."""
    if LEAST < squares < math.inf or flat.dtype == torch.float64:
        return squares
    result = 0.0
    for x in pieces(flat):
        wide = x.astype(np.float64)
        result += dot(wide, wide)
    return result


def _sum(flat: Tensor) -> float:
    """The sum in float64."""
    return sum(float(np.add.reduce(x, dtype=np.float64)) for x in pieces(flat))
