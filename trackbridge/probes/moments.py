"""Moments of a tensor's elements, and how two sets of them combine.

A row of `WIDTH` numbers holds what is known of a site in a step: the count n of finite elements, their mean, the sums M2, M3,
M4 of powers of their deviations from the mean, the largest absolute value, the count of non-finite elements, and how often
the module ran. Central moments of parts are combined pairwise (Chan, Golub, LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979; third and fourth order: Pebay, SAND2008-6212), so that the size of the mean
does not matter. Sums over a chunk are in float32, sums of chunks in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trackbridge.probes import cpu
from trackbridge.probes.base import BoolArray
from trackbridge.records import FloatArray

N, MEAN, M2, M3, M4, MAX, NONFINITE, FIRES = range(8)
WIDTH = 8
Moments: TypeAlias = "tuple[float, float, float, float, float]"
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
    """Merge the elements of `y`, a CPU tensor, into `row`, shape (WIDTH,). In the calling thread alone, see `cpu`."""
    flat = y.reshape(-1)
    row[FIRES] += 1
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        part, largest = _central(cpu.pieces(flat))
        if not all(map(math.isfinite, part)):
            bad = flat.numel() - sum(int(np.isfinite(x).sum()) for x in cpu.pieces(flat))
            row[NONFINITE] += bad
            if bad:
                return
        if flat.dtype != torch.float64 and not 1e-30 < part[M4] < math.inf and largest > 0:  # out of float32's range
            part, largest = _central(cpu.pieces(flat.double()))
    _add_part(part, largest, row)


def add_all_on_cpu(xs: cpu.Array, rows: Sequence[FloatArray]) -> None:
    """`add_on_cpu` of each of `xs`, float32, shape (k, n), n at most `cpu.PIECE`, to its row of `rows`, to the bit. All of them
    take the same few passes together; one whose sums say that it needs others is looked at by itself."""
    k, n = xs.shape
    if k > 1 and k * n > cpu.BLOCK:
        height = max(1, cpu.BLOCK // n)
        for begin in range(0, k, height):
            add_all_on_cpu(xs[begin : begin + height], rows[begin : begin + height])
        return
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        q = np.multiply(xs, xs, out=cpu.buffers.get("squares", k * n, xs.dtype).reshape(k, n))
        sums = zip(cpu.totals(xs), cpu.totals(q), cpu.dots(q, xs), cpu.dots(q, q), strict=True)
        peaks = map(cpu.root, np.maximum.reduce(q, axis=1))
    for x, row, (s1, s2, s3, s4), peak in zip(xs, rows, sums, peaks, strict=True):
        part = _of_sums(n, 0.0, s1, s2, s3, s4)
        if 4 * s1 * s1 <= n * s2 and peak > 0 and 1e-30 < part[M4] < math.inf:
            row[FIRES] += 1
            _add_part(part, peak, row)
        else:
            add_on_cpu(torch.from_numpy(x), row)


def _add_part(part: Moments, largest: float, row: FloatArray) -> None:
    row[:MAX] = merge(row[:MAX].tolist(), part) if row[N] else part
    row[MAX] = max(float(row[MAX]), largest)


def _central(pieces: Iterable[cpu.Array]) -> tuple[Moments, float]:
    """(n, mean, M2, M3, M4) and the largest absolute value of the elements of all `pieces`. Powers are summed in the pieces'
    precision: of the elements themselves where their mean is small beside their RMS, which spares a pass, else of deviations
    from a piece's own mean."""
    whole: Moments = (0.0, 0.0, 0.0, 0.0, 0.0)
    high, low = -math.inf, math.inf
    for x in pieces:
        n = len(x)
        q = np.multiply(x, x, out=cpu.buffers.get("squares", n, x.dtype))
        s1, s2, peak = cpu.total(x), cpu.total(q), 0.0
        if 4 * s1 * s1 <= n * s2:
            shift, s3, s4, peak = 0.0, cpu.dot(q, x), cpu.dot(q, q), cpu.root(np.maximum.reduce(q))
        else:
            mean = x.dtype.type(s1 / n)
            d = np.subtract(x, mean, out=cpu.buffers.get("deviations", n, x.dtype))
            np.multiply(d, d, out=q)
            shift, s2, s3, s4 = float(mean), cpu.total(q), cpu.dot(q, d), cpu.dot(q, q)
            s1 = cpu.total(d) if shift * shift * n > 256 * s2 else 0.0  # what rounding a mean has left matters if it is large
        if peak > 0:
            high, low = max(high, peak), min(low, -peak)
        else:
            high, low = max(high, float(x.max())), min(low, float(x.min()))
        part = _of_sums(n, shift, s1, s2, s3, s4)
        whole = merge(whole, part) if whole[0] else part
    largest = max(high, -low)
    if low == high:
        return (whole[0], low, 0.0, 0.0, 0.0), largest
    return whole, largest


def _of_sums(n: int, shift: float, s1: float, s2: float, s3: float, s4: float) -> Moments:
    """Of n elements whose deviations from `shift` have these sums of powers."""
    e = s1 / n
    m2 = max(s2 - e * s1, 0.0) if s2 == s2 else s2
    m3 = s3 - 3 * e * s2 + 2 * e * e * s1
    return float(n), shift + e, m2, m3, s4 - 4 * e * s3 + 6 * e * e * s2 - 3 * e * e * e * s1


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
