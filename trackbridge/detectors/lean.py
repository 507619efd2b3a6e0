"""Slow rises: how far a series leans away from where it was, judged by how much it usually leans.

    r     = clip((x - base) / scale, -4, 4)
    lean += gain * (r - lean)                  an average over about 2 / gain values
    base += base_gain * (x - base)             follows ten times more slowly
    z     = lean / spread                      spread: robust, of the lean itself, so correlated noise is accounted for

A drift begins when z passes its threshold and the rise matters; it is over when z is small again: either the series came
back, or the base has caught up with a new level. A steady climb keeps z up and stays one drift, however long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from trackbridge.detectors.base import BoolArray, FloatArray, IntArray
from trackbridge.detectors.state import SeriesState

_CLIP = 4.0
_CENTER_GAIN = 0.01
_YOUNG_BASE = 4.0  # a young base looks back over the last quarter of its values, for curves start steep
_SPREAD_CLIP = 2.0
_RELUCTANT = 0.1  # a rise teaches the spread ten times more slowly, or a gradual drift would hide itself
_RELEASE = 2.0  # sigmas of the lean below which a drift is over
_SPREAD_NORM = 0.7737  # E[min(Z^2, 2^2)], Z standard normal


class Lean(SeriesState):
    """The statistic above for n series. `on` marks the drifts under way, `since` the step at which each began."""

    FIRST: ClassVar[dict[str, float | int | bool]] = {
        "base": 0.0, "lean": 0.0, "center": 0.0, "spread": 0.0, "anchor": 0.0, "since": 0, "on": False,
    }  # fmt: skip
    base: FloatArray
    lean: FloatArray
    center: FloatArray
    spread: FloatArray
    anchor: FloatArray
    since: IntArray
    on: BoolArray

    def __init__(self, gain: float, base_gain: float, spread_gain: float, warmup: int, threshold: float) -> None:
        super().__init__()
        self.gain, self.base_gain, self.spread_gain = gain, base_gain, spread_gain
        self.warmup, self.threshold = warmup, threshold
        # What white noise leans: the variance of two exponential averages.
        self.white = math.sqrt(gain / (2 - gain) + base_gain / (2 - base_gain))
        self.z: FloatArray = np.zeros(0)
        self.ended: BoolArray = np.zeros(0, bool)
        self.returned: BoolArray = np.zeros(0, bool)

    def bind(self, series: Sequence[str]) -> None:
        super().bind(series)
        self.ended = np.zeros(len(self.series), bool)
        self.returned = np.zeros(len(self.series), bool)

    def move(self, which: BoolArray, level: FloatArray) -> None:
        """Start again from `level` where `which`."""
        self.base = np.where(which, level, self.base)
        self.lean = np.where(which, 0.0, self.lean)

    def update(
        self, step: int, x: FloatArray, scale: FloatArray, learn: BoolArray, young: FloatArray, eligible: BoolArray,
        factor: FloatArray, material: FloatArray,
    ) -> BoolArray:  # fmt: skip
        """One step. `learn`: values that may teach; `young`: 1 / (values seen + 1); `eligible`: series in which a drift may
        begin; `factor` raises the threshold; `material`: least rise that matters, in the unit of `x`. Returns where a
        drift begins. Sets `z`, `ended` and, where ended, `returned`: it came back to where it began."""
        r = (x - self.base) / scale
        np.clip(r, -_CLIP, _CLIP, out=r)
        gate = learn.astype(float)
        self.lean += gate * np.maximum(self.gain, young) * (r - self.lean)
        self.base += gate * np.minimum(np.maximum(self.base_gain, _YOUNG_BASE * young), 1.0) * (x - self.base)
        np.maximum(self.spread, self.white, out=self.spread)
        self.z = z = self.lean / self.spread
        height = self.lean * scale
        starting = learn & eligible & ~self.on & (z > self.threshold * factor) & (height > material)
        was = self.on
        self.on = (was & ((z > _RELEASE) | ~learn)) | starting
        self.ended = was & ~self.on
        if self.ended.any():
            self.returned = self.base + height - self.anchor < _RELEASE * self.spread * scale
        if starting.any():
            self.anchor = np.where(starting, self.base, self.anchor)
        self.since = np.where(learn & ~self.on & (z <= 1.0), step + 1, self.since)
        dev = self.lean - self.center
        calm = gate * np.where(self.on, 0.0, np.where(z > _SPREAD_CLIP, _RELUCTANT, 1.0))
        bound = _SPREAD_CLIP * self.spread
        np.clip(dev, -bound, bound, out=dev)
        self.center += calm * np.maximum(_CENTER_GAIN, young) * dev
        share = calm * np.minimum(np.maximum(self.spread_gain, 2 * young), 1.0)
        square = self.spread * self.spread
        self.spread = np.sqrt(square + share * (dev * dev / _SPREAD_NORM - square))
        return starting
