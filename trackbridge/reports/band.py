"""The band that an anomaly's series is to stay in once its cause is mended: what a person checks a change against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.units import Units
from trackbridge.records import Anomaly
from trackbridge.reports.known import FloatArray

LATEST = 32
"""Values before the onset that the spread is taken of, at most."""
LEAST = 8
"""Values before the onset without which there is no band."""


@dataclass(frozen=True)
class Band:
    """Below `limit`, in the series' unit: `bar` times `sigma` above what was expected. With `by_factor` sigma is of the
    logarithm."""

    limit: float
    bar: float
    sigma: float
    by_factor: bool


def band(anomaly: Anomaly, before: FloatArray, settings: DetectionConfig) -> Band | None:
    """From the finite values `before` (n,) the onset: the detector's bar over their robust spread about the line they follow,
    which is no less than the detector's floor. The anomaly's own score says nothing of the spread: it is compressed for large
    values. None for an anomaly that did not rise above a known expectation, or with too short a past."""
    if len(before) < LEAST or not math.isfinite(anomaly.expected) or anomaly.value <= anomaly.expected:
        return None
    before = before[-LATEST:]
    units = Units([anomaly.series] * (len(before) + 1), settings)
    judged = units.judged(np.append(before, anomaly.expected), np.ones(len(before) + 1, bool))
    past, expected = judged[:-1], judged[-1:]
    floor = units.relative_floor[-1] * abs(expected[0]) + units.fixed_floor[-1]
    sigma = np.array([max(_spread(past), floor)])
    bar = Units([anomaly.series], settings).bars(np.ones(1), sigma)
    limit = units.plain(float((expected + bar * sigma)[0]), 0)
    return Band(limit, float(bar[0]), float(sigma[0]), bool(units.log[0]))


def _spread(past: FloatArray) -> float:
    """Scaled median absolute deviation from a line (slope by Theil and Sen): a loss that falls is no noise."""
    x = np.arange(len(past), dtype=np.float64)
    first, second = np.triu_indices(len(past), 1)
    rest = past - float(np.median((past[second] - past[first]) / (x[second] - x[first]))) * x
    return 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
