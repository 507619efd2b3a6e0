"""In which unit a series is judged, and with which bar.

Norms, ratios and maxima vary by factors, so they are judged on their logarithm; excess kurtosis likewise, after adding
the 3 that makes it positive. A loss is judged as it is: its noise is additive and it may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.base import BoolArray, FloatArray, IntArray

_FACTORS = ("norm", "norm_clipped", "_ratio", "grad_max", "/rms", "/std", "/max")
_ADDITIVE = 0.05  # noise up to this share of the level counts as additive, whatever it is: its skew is too small to matter
_SKEW = 0.2  # of a loss whose noise is smaller than half of itself no more is taken for skew
_EXPONENTIAL = 0.4  # skew of noise as large as the level: exponential values pass 4.5 about as rarely as Gaussian ones
_MOST = 1e100  # larger values count as this, so that squares stay finite
_LEAST = 1e-30  # a gradient of exactly zero is this far down, not minus infinity


def by_factor(name: str) -> bool:
    """True for series that are judged on their logarithm."""
    return name.endswith((*_FACTORS, "/kurtosis"))


def is_loss(name: str) -> bool:
    return name == "train/loss" or name.startswith("train/loss/")


def is_global_gradient(name: str) -> bool:
    return name in ("grad/norm", "grad/norm_clipped")


class Units:
    """Per-series unit, least scale and bar, as vectors over the bound series."""

    def __init__(self, series: Sequence[str], settings: DetectionConfig) -> None:
        n = len(series)
        self.log: BoolArray = np.array([by_factor(name) for name in series], bool).reshape(n)
        self.offset: FloatArray = np.array([3.0 * name.endswith("/kurtosis") for name in series]).reshape(n)
        self.any_log = bool(self.log.any())
        self.any_offset = bool(self.offset.any())
        self.relative_floor: FloatArray = np.where(self.log, 0.0, settings.floor)
        self.fixed_floor: FloatArray = np.where(self.log, settings.log_floor, 1e-12)
        whole = np.array([is_global_gradient(name) for name in series], float).reshape(n)
        self.least: FloatArray = math.log(settings.grad_least) * whole
        self._least_at: IntArray = np.flatnonzero(self.least)
        self._plain_at: IntArray = np.flatnonzero(~self.log)
        self.material: FloatArray = np.where(self.log, settings.log_drift, 0.0)
        self.material_share: FloatArray = np.where(self.log, 0.0, settings.least_drift)
        bars = [
            settings.threshold if is_loss(name) else settings.grad_threshold if is_global_gradient(name)
            else settings.layer_threshold
            for name in series
        ]  # fmt: skip
        self.bar: FloatArray = np.array(bars, float).reshape(n)
        self.gradient_material: FloatArray = settings.grad_drift * whole
        # The size of an update follows the learning rate, so it drifts by design.
        self.drifts: BoolArray = np.array([not name.endswith("_ratio") for name in series], bool).reshape(n)

    def judged(self, values: FloatArray, ok: BoolArray) -> FloatArray:
        """`values` in the unit of judgement, 0 where not `ok`."""
        x = np.where(ok, values, 0.0)
        np.minimum(np.maximum(x, -_MOST, out=x), _MOST, out=x)
        if self.any_log:
            if self.any_offset:
                x += self.offset
            np.maximum(x, _LEAST, out=x, where=self.log)
            np.log(x, out=x, where=self.log)
        return x

    def bars(self, factor: FloatArray, scale: FloatArray) -> FloatArray:
        """Scales above expectation that are out of band."""
        bar: FloatArray = self.bar * factor
        for i in self._least_at:
            bar[i] = max(bar[i], self.least[i] / scale[i])
        return bar

    def skewed(
        self, u: FloatArray, scale: FloatArray, expected: FloatArray, factor: FloatArray, signed: BoolArray
    ) -> FloatArray:
        """`u` sigmas above expectation as a series with noise in proportion to itself means them: at most
        ``factor * log(1 + r u) / r``. r is the scale as a share of the level, beyond `_ADDITIVE` and at most `_SKEW`; or
        `_EXPONENTIAL` of that share (at most 1), where it is more. Such noise has a long upper side, which is no spike.
        `factor` is what the bar is raised by for a heavy tail, which is the same long side seen another way: a value must be
        beyond the raised bar as it is, and beyond the plain bar by factors.

        A small loss is of that kind; one that was ever zero or negative (`signed`) is not, nor what is judged on its logarithm,
        nor one that is expected to be negative."""
        at = self._plain_at
        if not at.size:
            return u
        part, heavy = u[at], factor[at]
        skew, r = self._skew(part, scale[at], expected[at], signed[at])
        if not skew.any():
            return u
        score: FloatArray = u.copy()
        score[at] = np.where(skew, np.minimum(part, heavy * np.log1p(r * np.maximum(part, 0.0)) / r), part)
        return score

    def unskewed(
        self, u: FloatArray, scale: FloatArray, expected: FloatArray, factor: FloatArray, signed: BoolArray
    ) -> FloatArray:
        """The deviation in scales that `skewed` makes `u` of."""
        skew, r = self._skew(u, scale, expected, signed)
        skew &= ~self.log
        by_factors = np.expm1(np.minimum(r * np.maximum(u, 0.0) / factor, 700.0)) / r
        return np.where(skew, np.maximum(u, by_factors), u)

    def _skew(self, u: FloatArray, scale: FloatArray, expected: FloatArray, signed: BoolArray) -> tuple[BoolArray, FloatArray]:
        """Which series, none of them judged on its logarithm, have such noise, and their r (1 for the others)."""
        share = scale / np.maximum(expected, 1e-30)
        skew = ~signed & (expected > 0) & (share > _ADDITIVE) & (u > 0)
        r = np.maximum(np.minimum(share - _ADDITIVE, _SKEW), _EXPONENTIAL * np.minimum(share, 1.0))
        return skew, np.where(skew, r, 1.0)

    def plain(self, judged: float, index: int) -> float:
        """A judged number back in the series' own unit."""
        return math.exp(min(judged, 700.0)) - float(self.offset[index]) if self.log[index] else judged
