"""Bins that every histogram of trackbridge shares, and what can be computed from counts alone. Numpy only.

All tensors, steps and ranks use the same edges: 0 and ±2^k, ±1.5 * 2^k for k from `LOW` to `HIGH` - 1, two bins to an
octave. So ranks merge by adding, and the divergence between two steps is a sum over bins. The edges are where the first two
bits of a float's mantissa change, which makes binning exact and a matter of one shift.

| column | what it counts |
|---|---|
| 0 | x <= -2^HIGH |
| 1 ... 112 | negative, the largest first: column 1 is -2^HIGH < x <= -1.5 * 2^(HIGH - 1) |
| `ZERO` = 113 | \\|x\\| < 2^LOW, zero included |
| 114 ... 225 | positive: column 114 is 2^LOW <= x < 1.5 * 2^LOW |
| 226 | x >= 2^HIGH |
| `NONFINITE` = 227 | NaN and infinities |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trackbridge.names import LOCAL
from trackbridge.records import FloatArray, Histograms

LOW, HIGH = -40, 16
_SIDE = 2 * (HIGH - LOW)
ZERO = _SIDE + 1
NONFINITE = 2 * _SIDE + 3
BINS = NONFINITE + 1
CODES = 1024
"""How many codes `code` (the top ten bits of a float32: sign, exponent, first bit of the mantissa) can take."""

WEIGHT, GRAD = "weight", "grad"

Counts = npt.NDArray[np.int64]


def _edges() -> FloatArray:
    sides = np.array([m * 2.0**k for k in range(LOW, HIGH) for m in (1.0, 1.5)] + [2.0**HIGH])
    return np.concatenate(([-np.inf], -sides[::-1], sides, [np.inf]))


EDGES: FloatArray = _edges()
"""float64, shape (NONFINITE + 1,): the finite column b counts what lies between ``EDGES[b]`` and ``EDGES[b + 1]``. The edge
nearer to zero belongs to the bin, so that x and -x always fall into mirrored bins."""


def _columns() -> npt.NDArray[np.intp]:
    """The column of each code."""
    found = np.empty(CODES, np.intp)
    for code in range(CODES):
        negative, exponent, half = code >> 9, (code >> 1 & 255) - 127, code & 1
        place = 2 * (exponent - LOW) + half
        if exponent == 128:
            found[code] = NONFINITE
        elif place < 0:
            found[code] = ZERO
        else:
            side = min(place + 1, _SIDE + 1)
            found[code] = ZERO - side if negative else ZERO + side
    return found


_COLUMN = _columns()


def fold(codes: npt.NDArray[np.integer]) -> Counts:
    """Counts by column, int64 of shape (..., BINS), from counts by code of shape (..., CODES)."""
    counts = np.zeros((*codes.shape[:-1], BINS), np.int64)
    np.add.at(counts.reshape(-1, BINS).T, _COLUMN, codes.reshape(-1, CODES).T)
    return counts


def count(values: npt.NDArray[np.floating]) -> Counts:
    """The histogram of `values` of any shape, int64 of shape (BINS,). What is no float32 is rounded to one first."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    return fold(np.bincount(bits >> 22, minlength=CODES))


def centers() -> FloatArray:
    """A value that stands for each finite column, shape (NONFINITE,): the geometric middle, 0 for `ZERO`, the edge for the
    outermost two."""
    sides = EDGES[ZERO + 1 : -1]
    middle = np.append(np.sqrt(sides[:-1] * sides[1:]), sides[-1])
    return np.concatenate((-middle[::-1], [0.0], middle))


def quantiles(counts: Counts, at: Sequence[float]) -> FloatArray:
    """Quantiles of the finite values to the width of a bin, NaN where there are none. `counts`: shape (BINS,)."""
    below = np.cumsum(counts[:NONFINITE])
    if not below[-1]:
        return np.full(len(at), np.nan)
    places = np.searchsorted(below, np.asarray(at) * below[-1], side="left")
    found: FloatArray = centers()[np.minimum(places, NONFINITE - 1)]
    return found


def divergence(before: Counts, now: Counts) -> float:
    """Kullback-Leibler divergence D(now || before) in nats between two histograms, non-finite values as one more bin.

    Half a count is added to each bin that either of them uses (the Krichevsky-Trofimov estimator, 1981), so that a bin which
    was empty before costs much and not infinitely much. 0 for equal shares, and where both are empty.
    """
    used = (before > 0) | (now > 0)
    if not used.any():
        return 0.0
    p, q = now[used] + 0.5, before[used] + 0.5
    p, q = p / p.sum(), q / q.sum()
    return max(0.0, float((p * np.log(p / q)).sum()))


def merged(ranks: Sequence[Histograms], world_size: int) -> Histograms:
    """The histograms of all ranks together, from one step of each: counts are added, what several ranks hold counts once.

    A shard (``..._local``) becomes the whole tensor, and loses the suffix, when all `world_size` ranks are here and its copies
    are known; else it stays the first rank's. Raises `ValueError` when the records are not of one step.
    """
    first = ranks[0]
    if any((other.step, other.attempt) != (first.step, first.attempt) for other in ranks):
        raise ValueError("histograms of different steps cannot be merged")
    places = [{name: place for place, name in enumerate(record.names)} for record in ranks]
    names, counts = list(first.names), first.counts.copy()
    for row, (name, copies) in enumerate(zip(first.names, first.copies.tolist(), strict=True)):
        if name.endswith(LOCAL) and copies > 0 and len(ranks) == world_size and all(name in place for place in places):
            pieces = [record.counts[place[name]] for record, place in zip(ranks, places, strict=True)]
            counts[row] = np.rint(np.sum(pieces, axis=0) / copies)
            names[row] = name.removesuffix(LOCAL)
    return replace(first, names=tuple(names), counts=counts)


def merge_steps(ranks: Sequence[Sequence[Histograms]], world_size: int) -> list[Histograms]:
    """`merged` step by step. The first rank decides which steps there are."""
    others = [{(record.step, record.attempt): record for record in records} for records in ranks[1:]]
    return [
        merged([record, *(other[key] for other in others if (key := (record.step, record.attempt)) in other)], world_size)
        for record in ranks[0]
    ]
