"""Published spike scores, as detectors to compare ours with. They raise alarms only where `detection.detectors` names them.

All are a rolling z-score: (x - mean) / std over a window of the latest values, the present one left out, spikes left in.
Like ours they call a non-finite value a verdict and keep it out of the window; the originals do not (OLMo's rule goes blind
for a whole window after one NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trackbridge.detectors.base import BoolArray, FloatArray, Verdict


class RollingScore:
    """(x - mean) / std of the last `window` values above `threshold`, once `least` values have been seen."""

    def __init__(self, window: int, threshold: float, least: int, ddof: int = 0) -> None:
        self.window, self.threshold, self.least, self.ddof = window, threshold, least, ddof
        self.series: tuple[str, ...] = ()
        self._past = np.zeros((window, 0))
        self._seen = np.zeros(0, np.int64)

    def bind(self, series: Sequence[str]) -> None:
        """Set the columns; series known from before keep their window."""
        old = {name: i for i, name in enumerate(self.series)}
        past, seen = self._past, self._seen
        self.series = tuple(series)
        self._past = np.zeros((self.window, len(self.series)))
        self._seen = np.zeros(len(self.series), np.int64)
        for i, name in enumerate(self.series):
            if name in old:
                self._past[:, i], self._seen[i] = past[:, old[name]], seen[old[name]]

    def update(self, step: int, values: FloatArray, present: BoolArray) -> list[Verdict]:
        finite = np.isfinite(values)
        verdicts = [
            Verdict(i, "nonfinite", step, step, float(values[i]), 0.0, math.inf)
            for i in np.flatnonzero(present & ~finite).tolist()
        ]
        filled = np.minimum(self._seen, self.window)
        held = np.arange(self.window)[:, None] < filled
        count = np.maximum(filled, 1)
        mean = np.sum(self._past, axis=0, where=held) / count
        square = np.sum((self._past - mean) ** 2, axis=0, where=held) / np.maximum(filled - self.ddof, 1)
        x = np.clip(np.where(finite, values, 0.0), -1e100, 1e100)
        score = (x - mean) / np.maximum(np.sqrt(square), 1e-12)
        ok = present & finite
        for i in np.flatnonzero(ok & (filled >= self.least) & (score > self.threshold)).tolist():
            verdicts.append(Verdict(i, "spike", step, step, float(values[i]), float(mean[i]), float(score[i])))
        where = np.flatnonzero(ok)
        self._past[self._seen[where] % self.window, where] = x[where]
        self._seen += ok
        return verdicts

    def state_dict(self) -> dict[str, Any]:
        return {"series": list(self.series), "past": self._past.tolist(), "seen": self._seen.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        bound = self.series or tuple(state["series"])
        self.series = tuple(state["series"])
        self._past = np.array(state["past"]).reshape(self.window, len(self.series))
        self._seen = np.array(state["seen"], np.int64)
        self.bind(bound)


def olmo() -> RollingScore:
    return RollingScore(128, 6.0, 64, ddof=1)


def z_500() -> RollingScore:
    return RollingScore(500, 3.5, 20)


def z_100() -> RollingScore:
    return RollingScore(100, 2.0, 20)


def trainscope() -> RollingScore:
    return RollingScore(200, 3.5, 30, ddof=1)


REFERENCES: dict[str, Callable[[], RollingScore]] = {
    "OLMo spike score, 6 sigma of 128": olmo,
    "z > 3.5 of the last 500": z_500,
    "z > 2 of the last 100": z_100,
    "trainscope z-score, 3.5 of 200": trainscope,
}
