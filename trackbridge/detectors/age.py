"""Gains that depend on how many values a series has seen: one number for all series where all are of one age, as they mostly
are, else one per series. The same arithmetic either way, to the bit."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from trackbridge.detectors.base import BoolArray, FloatArray, IntArray

Gain: TypeAlias = float | FloatArray


def ages(seen: IntArray) -> float | FloatArray:
    """Values seen so far, as float64: one number if it is the same for all."""
    if seen.size and np.count_nonzero(seen == seen[0]) == seen.size:
        return float(seen[0])
    return seen.astype(np.float64)


def at_least(gain: Gain, least: float) -> Gain:
    return max(gain, least) if isinstance(gain, float) else np.maximum(gain, least)


def at_most(gain: Gain, most: float) -> Gain:
    return min(gain, most) if isinstance(gain, float) else np.minimum(gain, most)


def grown(age: float | FloatArray, values: int, among: BoolArray) -> BoolArray:
    """Those `among` the series that have seen as many values."""
    if isinstance(age, float):
        return among if age >= values else np.zeros_like(among)
    return among & (age >= values)
