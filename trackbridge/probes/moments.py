"""Moments of a tensor's elements, and how two sets of them combine.

A row of `WIDTH` numbers holds what is known of a site in a step: the count n of finite elements, their mean, the sums M2, M3,
M4 of powers of their deviations from the mean, the largest absolute value, the count of non-finite elements, and how often
the module ran. Central moments of parts are combined pairwise (Chan, Golub, LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979; third and fourth order: Pebay, SAND2008-6212), so that the size of the mean
does not matter. Sums over a chunk are in float32, sums of chunks in float64.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge.probes.base import BoolArray
from trackbridge.records import FloatArray

N, MEAN, M2, M3, M4, MAX, NONFINITE, FIRES = range(8)
WIDTH = 8
CHUNK = 1 << 18  # elements: a chunk and its temporaries stay in the cache
STATISTICS = ("mean", "std", "rms", "max", "kurtosis", "nonfinite")


def merge(a: Any, b: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Combine (n, mean, M2, M3, M4) of two disjoint parts: numbers, or arrays of them. An empty part changes nothing."""
    na, mean_a, m2a, m3a, m4a = a
    nb, mean_b, m2b, m3b, m4b = b
    n = na + nb
    whole = n + (n == 0)
    d = mean_b - mean_a
    d_n = d / whole
    product = na * nb
    m2 = m2a + m2b + d * d_n * product
    m3 = m3a + m3b + d * (d_n * d_n) * product * (na - nb) + 3 * d_n * (na * m2b - nb * m2a)
    m4 = (
        m4a
        + m4b
        + d * (d_n * d_n * d_n) * product * (na * na - product + nb * nb)
        + 6 * (d_n * d_n) * (na * na * m2b + nb * nb * m2a)
        + 4 * d_n * (na * m3b - nb * m3a)
    )
    return n, mean_a + d_n * nb, m2, m3, m4


def add_on_cpu(y: Tensor, row: FloatArray) -> None:
    """Merge the elements of `y`, a CPU tensor, into `row`, shape (WIDTH,)."""
    flat = y.reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    row[FIRES] += 1
    part, largest = _central(flat)
    if not all(map(math.isfinite, part)):
        bad = flat.numel() - int(torch.isfinite(flat).sum())
        row[NONFINITE] += bad
        if bad:
            return
    if flat.dtype == torch.float32 and not 1e-30 < part[M4] < math.inf and largest > 0:  # out of float32's range
        part, largest = _central(flat.double())
    row[:MAX] = merge(row[:MAX].tolist(), part) if row[N] else part
    row[MAX] = max(float(row[MAX]), largest)


def _central(x: Tensor) -> tuple[tuple[float, float, float, float, float], float]:
    """(n, mean, M2, M3, M4) and the largest absolute value of a contiguous float tensor. Powers are taken and summed chunk by
    chunk in the tensor's precision, in memory that stays: fresh pages for large temporaries cost more than the arithmetic."""
    low, high = torch.aminmax(x)
    mean = x.mean()
    found = [low, high, mean]
    for chunk in (x,) if len(x) <= CHUNK else torch.split(x, CHUNK):
        deviations, squares = _workspace(len(chunk), x.dtype)
        d = torch.sub(chunk, mean, out=deviations)
        d2 = torch.mul(d, d, out=squares)
        found += (torch.dot(d, d), torch.dot(d2, d), torch.dot(d2, d2))
    least, most, middle, *powers = torch.stack(found).tolist()
    largest = max(most, -least)
    if least == most:
        return (len(x), least, 0.0, 0.0, 0.0), largest
    return (len(x), middle, sum(powers[::3]), sum(powers[1::3]), sum(powers[2::3])), largest


class _Buffers(threading.local):
    """Two buffers of CHUNK elements for each dtype, this thread's own, and views of them by length."""

    def __init__(self) -> None:
        self.whole: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self.views: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}


_buffers = _Buffers()


def _workspace(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    views = _buffers.views.get((length, dtype))
    if views is None:
        if dtype not in _buffers.whole:
            _buffers.whole[dtype] = torch.empty(CHUNK, dtype=dtype), torch.empty(CHUNK, dtype=dtype)
        if len(_buffers.views) > 100:  # as many lengths as there are batches of different shape
            _buffers.views.clear()
        first, second = _buffers.whole[dtype]
        views = _buffers.views[length, dtype] = first[:length], second[:length]
    return views


def add_on_device(y: Tensor, row: Tensor) -> None:
    """`add_on_cpu` for any device, with plain torch operations and no sync. Non-finite elements are set aside.

    Powers are taken of elements scaled to [-1, 1] by a power of two, so that float32 holds them.
    """
    x = y.reshape(-1)
    finite = torch.isfinite(x)
    x = torch.where(finite, x, 0.0).to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().max()
    exponent = torch.frexp(largest).exponent
    x = torch.ldexp(x, -exponent)
    n = finite.sum()
    mean = x.sum() / n.clamp(min=1)
    d = torch.where(finite, x - mean, 0.0)
    d2 = d * d
    sums = torch.stack((mean, d2.sum(), (d2 * d).sum(), (d2 * d2).sum())).to(row)
    part = (n.to(row), *torch.ldexp(sums, exponent * torch.arange(1, 5, device=row.device)).unbind())
    row[:MAX] = torch.stack(merge(row[:MAX].unbind(), part))
    row[MAX:] = torch.stack(
        (torch.maximum(row[MAX], largest.to(row)), row[NONFINITE] + (x.numel() - n).to(row), row[FIRES] + 1)
    )


def finish(rows: FloatArray) -> tuple[FloatArray, BoolArray]:
    """The statistics of sites from their `rows`, shape (S, WIDTH). Returns values and presence, both (6, S).

    Standard deviation and kurtosis are those of the population; kurtosis is excess (0 for a normal distribution) and absent
    for constant data. A site with a non-finite element has its count of them and nothing else.
    """
    n, mean, m2, m4 = rows[:, N], rows[:, MEAN], rows[:, M2], rows[:, M4]
    fired = rows[:, FIRES] > 0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        variance = m2 / n
        std = np.sqrt(variance)
        kurtosis = n * m4 / (m2 * m2) - 3.0
        values = np.stack((mean, std, np.sqrt(mean * mean + variance), rows[:, MAX], kurtosis, rows[:, NONFINITE]))
    clean = fired & (rows[:, NONFINITE] == 0) & (n > 0) & np.isfinite(mean) & np.isfinite(m2)
    varied = clean & (std > 1e-6 * np.abs(mean)) & np.isfinite(kurtosis)  # below that it is rounding
    return values, np.stack((clean, clean, clean, clean, varied, fired))
