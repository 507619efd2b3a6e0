"""How a changed replay is judged: is the anomaly still there for the detector that told it, and where did the loss go?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import numpy as np

from trackbridge.capsule import SpikeCapsule
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.lab import Trend
from trackbridge.names import is_wide
from trackbridge.records import Anomaly, Row, Schema
from trackbridge.replay.compare import LOSS

FITTED = 32
"""Steps before the suspected batch that the trend is fitted to, at most."""
WORST = 100.0
"""A step's loss counts as at most this many sigmas above the trend, a non-finite one as this many."""
_GAUSS = 1.4826  # sigma of a normal distribution over its median absolute deviation

Curve = Mapping[int, Mapping[str, float]]
"""{step: {series: value}}; a step that was left out is absent."""


class Judge:
    """Judges curves of one capsule's window against its own history."""

    def __init__(self, capsule: SpikeCapsule, rank: int, guilty: Sequence[int]) -> None:
        self.capsule = capsule
        self.anomaly: Anomaly = capsule.anomaly
        self._guilty = guilty
        self._settings = capsule.section("detection", DetectionConfig)
        recorded = capsule.series(rank)
        self._record: Curve = {step: _judged(values) for step, values in recorded.items()}
        self._history: Curve = {step: _judged(values) for step, values in capsule.history_of(rank).items()}
        self.trend = fit({**self._history, **self._record}, guilty[0], self._settings.floor, self.anomaly)
        # An anomaly may be told by its cause (a lost moment, a rate that jumped). What is to be prevented is what it did to the
        # loss; only where it did nothing to that, the sign itself.
        series = self.anomaly.series
        self._own = series if is_global_gradient(series) else None
        self._known = self._told(self._record)  # whether the detector, with this history, tells what was told then
        if self._known is None and not is_loss(series):
            self._own = series
            self._known = self._told(self._record)

    def remains(self, curve: Curve) -> Anomaly | int | None:
        """What the detector tells of `curve` from the suspected batch on, None when it tells nothing.

        The detector is fed the steps before the window and then the curve. Where that history is too short for it to tell the
        recorded anomaly again, the bar is its threshold over the trend, and the step above it is returned.
        """
        if self._known is not None:
            return self._told(curve)
        for step, values in sorted(curve.items()):
            loss = values.get(LOSS, 0.0)
            if step >= self._guilty[0] and not self.sigmas(step, loss) <= self._settings.threshold:
                return step
        return None

    def sigmas(self, step: int, loss: float) -> float:
        """How far `loss` lies above the trend; infinite for a loss that is not finite."""
        if not math.isfinite(loss):
            return math.inf
        return (loss - self.trend.at(step, self._guilty[0])) / self.trend.sigma

    def distance(self, curve: Curve) -> float:
        """Mean sigmas above the trend from the suspected batch to the end of the window; below it counts as 0."""
        losses = [(step, values[LOSS]) for step, values in curve.items() if step >= self._guilty[0] and LOSS in values]
        if not losses:
            return WORST
        return float(np.mean([min(max(self.sigmas(step, loss), 0.0), WORST) for step, loss in losses]))

    def peak(self, curve: Curve) -> float | None:
        """The largest loss from the suspected batch on; NaN if one is not finite."""
        losses = [values[LOSS] for step, values in curve.items() if step >= self._guilty[0] and LOSS in values]
        if not losses:
            return None
        return max(losses) if all(map(math.isfinite, losses)) else math.nan

    def _told(self, curve: Curve) -> Anomaly | None:
        """The first event that counts: of the anomaly's own series or the loss, or anything that is not finite."""
        watch = Watch(self._settings)
        schemas: dict[tuple[str, ...], Schema] = {}
        events: dict[str, Anomaly] = {}
        for steps in (self._history, curve):
            for step in sorted(steps):
                values = steps[step]
                names = tuple(name for name in values if name in self._shared)
                row = Row(step, step, 0.0, 0, schemas.setdefault(names, Schema(names)), np.array([values[n] for n in names]))
                for anomaly in watch.update(row):
                    events[anomaly.id] = anomaly
        for anomaly in sorted(events.values(), key=lambda event: event.step):
            if anomaly.step >= self._guilty[0] and self._counts(anomaly):
                return anomaly
        return None

    @property
    def _shared(self) -> frozenset[str]:
        """Series that both the record and a replay have: a replay knows no norm before clipping but where it measures it."""
        return frozenset({LOSS, "grad/nonfinite", "optim/skipped", *([self._own] if self._own else [])})

    def _counts(self, anomaly: Anomaly) -> bool:
        return anomaly.kind == "nonfinite" or is_loss(anomaly.series) or anomaly.series == self._own


def fit(curve: Curve, onset: int, floor: float, anomaly: Anomaly) -> Trend:
    """The trend of the loss before `onset`: the median of the slopes between all pairs of points (Theil, 1950; Sen, 1968), the
    median level, and the scaled median absolute deviation, at least `floor` of the level."""
    points = [(step, values[LOSS]) for step, values in sorted(curve.items()) if step < onset and LOSS in values]
    points = [(step, loss) for step, loss in points if math.isfinite(loss)][-FITTED:]
    if len(points) < 4:
        level = points[-1][1] if points else anomaly.expected if math.isfinite(anomaly.expected) else 0.0
        sigma = max(floor * abs(level), math.ulp(1.0))
        return Trend(level=level, slope=0.0, sigma=sigma, first=points[0][0] if points else onset, last=onset - 1)
    slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2))
    level = median(loss - slope * (step - onset) for step, loss in points)
    spread = median(abs(loss - level - slope * (step - onset)) for step, loss in points)
    sigma = max(_GAUSS * spread, floor * abs(level), math.ulp(1.0))
    return Trend(level=level, slope=slope, sigma=sigma, first=points[0][0], last=points[-1][0])


def _judged(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not is_wide(name)}


def gradient_judged(series: str) -> bool:
    """True where the anomaly is one of the norm before clipping, which a trial must then measure itself."""
    return is_global_gradient(series) and series != "grad/norm_clipped"
