"""Fewer points of a series without losing what matters: extremes, non-finite values and chosen windows of steps stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Steps: TypeAlias = npt.NDArray[Any]
Values: TypeAlias = npt.NDArray[np.float64]
Series: TypeAlias = tuple[Steps, Values]
Span: TypeAlias = tuple[int, int]
"""The first and the last step of something, both included."""


def decimate(steps: Steps, values: Values, limit: int, windows: Sequence[Span] = ()) -> Series:
    """About `limit` of the points (at least 2): of each of ``limit // 2`` buckets of consecutive points the least and the
    greatest finite value and the first non-finite one, the first and the last point, and every point whose step is in one
    of `windows`, which come on top. `steps` ascending, int, shape (n,); `values` float64, shape (n,).

    At most ``3 * (limit // 2) + 2`` points and those of the windows.
    """
    count, buckets = len(values), max(1, limit // 2)
    if count <= limit:
        return steps, values
    keep = np.zeros(count, np.bool_)
    keep[[0, -1]] = True
    width = -(-count // buckets)
    finite = np.isfinite(values)
    starts = np.arange(0, count, width)
    for fill, choose in ((np.inf, np.argmin), (-np.inf, np.argmax)):
        padded = np.full(len(starts) * width, fill)
        padded[:count] = np.where(finite, values, fill)
        keep[np.minimum(choose(padded.reshape(-1, width), axis=1) + starts, count - 1)] = True
    bad = np.flatnonzero(~finite)
    if len(bad):
        keep[bad[np.append(True, np.diff(bad // width) > 0)]] = True
    for first, last in windows:
        keep[np.searchsorted(steps, first) : np.searchsorted(steps, last, side="right")] = True
    return steps[keep], values[keep]


def nonfinite_spans(steps: Steps, values: Values, limit: int) -> list[Span]:
    """Where the series is NaN or infinite: spans of recorded steps, ascending, at most `limit` of them.

    Every non-finite step is inside a span. Spans are exact (nothing but non-finite values in them) unless there are more
    than `limit`: then those that are nearest to each other are joined.
    """
    bad = ~np.isfinite(values)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], bad, [False])).astype(np.int8)))
    first, last = edges[::2], edges[1::2] - 1
    if len(first) > limit:
        gaps = first[1:] - last[:-1]
        split = np.sort(np.argsort(gaps, kind="stable")[len(gaps) - (limit - 1) :])
        first, last = first[np.append(0, split + 1)], last[np.append(split, len(last) - 1)]
    return [(int(steps[a]), int(steps[b])) for a, b in zip(first, last, strict=True)]
