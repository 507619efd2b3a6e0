"""Slow rises: how far a series leans away from where it was, judged by how much it usually leans.

    r     = clip((x - base) / scale, -4, 4)
    lean += gain * clip(r - lean, -1.5, 1.5)   an average over about 2 / gain values
    base += base_gain * (x - base)             follows ten times more slowly
    z     = lean / spread                      spread: robust, of the lean itself, so correlated noise is accounted for

A drift begins when z passes its threshold and the rise matters; it is over when z is small again: either the series came
back, or the base has caught up with a new level. A steady climb keeps z up and stays one drift, however long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from trackbridge.detectors.age import Gain, at_least, at_most
from trackbridge.detectors.base import BoolArray, FloatArray, IntArray
from trackbridge.detectors.state import SeriesState

_CLIP = 4.0
_PULL = 1.5  # sigmas that one value may pull at the lean: a single large one is no drift
_CENTER_GAIN = 0.01
_YOUNG_BASE = 4.0  # a young base looks back over the last quarter of its values, for curves start steep
_SPREAD_CLIP = 2.0
_RELUCTANT = 0.1  # a rise teaches the spread ten times more slowly, or a gradual drift would hide itself
_RELEASE = 2.0  # sigmas of the lean below which a drift is over
_SPREAD_NORM = 0.7737  # E[min(Z^2, 2^2)], Z standard normal


class Lean(SeriesState):
    """The statistic above for n series. `on` marks the drifts under way, `since` the step at which each began."""

    FIRST: ClassVar[dict[str, float | int | bool]] = {
        "base": 0.0, "lean": 0.0, "center": 0.0, "spread": 0.0, "anchor": 0.0, "since": 0, "then": 0.0, "on": False,
    }  # fmt: skip
    LATER = frozenset({"then"})
    base: FloatArray
    lean: FloatArray
    center: FloatArray
    spread: FloatArray
    anchor: FloatArray
    since: IntArray
    then: FloatArray  # what the level of the loss was at `since`
    on: BoolArray

    def __init__(self, gain: float, base_gain: float, spread_gain: float, warmup: int, threshold: float) -> None:
        super().__init__()
        self.gain, self.base_gain, self.spread_gain = gain, base_gain, spread_gain
        self.warmup, self.threshold = warmup, threshold
        # What white noise leans: an exponential average of residuals from another one, which has seen the same values.
        base = base_gain / (2 - base_gain)
        both = gain * base / (1 - (1 - gain) * (1 - base_gain))  # their covariance
        self.white = math.sqrt((gain * (1 + base) - 2 * (1 - gain) * both) / (2 - gain))
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
        self, step: int, x: FloatArray, scale: FloatArray, learn: BoolArray, gate: FloatArray | None, young: Gain,
        loss: float, terms: Callable[[], tuple[BoolArray, FloatArray, FloatArray]],
    ) -> BoolArray | None:  # fmt: skip
        """One step. `learn`: values that may teach; `gate`: the same as numbers, None if all; `young`: 1 / (values seen + 1);
        `loss`: the loss's level.
        `terms` is asked only when some z passes the threshold, for: series in which a drift may begin; what raises the
        threshold (>= 1); least rise that matters, in the unit of `x`. Returns where a drift begins, None if nowhere. Sets `z`,
        `ended` and, where ended, `returned`: it came back to where it began."""
        away = x - self.base
        r = away / scale
        np.maximum(r, -_CLIP, out=r)
        np.minimum(r, _CLIP, out=r)
        r -= self.lean
        np.maximum(r, -_PULL, out=r)
        np.minimum(r, _PULL, out=r)
        follow, catch = at_least(young, self.gain), at_most(at_least(_YOUNG_BASE * young, self.base_gain), 1.0)
        r *= follow if gate is None else gate * follow
        r += self.lean
        self.lean = r
        away *= catch if gate is None else gate * catch
        away += self.base
        self.base = away
        np.maximum(self.spread, self.white, out=self.spread)
        self.z = z = self.lean / self.spread
        starting = None
        if np.count_nonzero(z > self.threshold):
            eligible, factor, material = terms()
            starting = learn & eligible & ~self.on & (z > self.threshold * factor) & (self.lean * scale > material)
        begun = starting is not None and np.count_nonzero(starting) > 0
        self._switch(scale, learn, starting if begun else None)
        rest = z <= 1.0
        rest &= learn
        moving = bool(np.count_nonzero(self.on))
        if moving:
            rest &= ~self.on
        np.putmask(self.since, rest, step + 1)
        np.putmask(self.then, rest, loss)
        self._spread(z, gate, young, moving)
        return starting if begun else None

    def _switch(self, scale: FloatArray, learn: BoolArray, starting: BoolArray | None) -> None:
        """Begin and end drifts."""
        was = self.on
        if starting is None and not np.count_nonzero(was):
            if np.count_nonzero(self.ended):
                self.ended = np.zeros_like(was)
            return
        self.on = was & ((self.z > _RELEASE) | ~learn)
        if starting is not None:
            self.on |= starting
        self.ended = was & ~self.on
        if self.ended.any():
            self.returned = self.base + self.lean * scale - self.anchor < _RELEASE * self.spread * scale
        if starting is not None:
            self.anchor = np.where(starting, self.base, self.anchor)

    def _spread(self, z: FloatArray, gate: FloatArray | None, young: Gain, moving: bool) -> None:
        """Learn how much the series usually leans."""
        slow, share = at_least(young, _CENTER_GAIN), at_most(at_least(2 * young, self.spread_gain), 1.0)
        high = z > _SPREAD_CLIP
        if gate is not None or moving or np.count_nonzero(high):
            calm = np.where(self.on, 0.0, np.where(high, _RELUCTANT, 1.0))
            if gate is not None:
                calm *= gate
            slow, share = calm * slow, calm * share
        dev = self.lean - self.center
        bound = _SPREAD_CLIP * self.spread
        np.minimum(dev, bound, out=dev)
        np.negative(bound, out=bound)
        np.maximum(dev, bound, out=dev)
        self.center += slow * dev
        square = self.spread * self.spread
        dev *= dev
        dev /= _SPREAD_NORM
        dev -= square
        dev *= share
        dev += square
        self.spread = np.sqrt(dev)
