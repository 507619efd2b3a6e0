"""The one detector behind every alarm: a robust band around each series, all series at once.

Per series it keeps a level with a slope (Holt's linear smoothing), a scale and a tail quantile, each learned from
clipped residuals (Huber's psi), so that one outlier moves nothing far. With ``u = (x - level - slope) / scale``:

    level += slope + a * scale * clip(u, -c, c)        a = max(level_gain, 1 / seen)
    slope += b * scale * clip(u, -c, c)
    scale *= sqrt(1 + g * (clip(u)^2 / rho - 1))       rho = E[clip(Z)^2] for Z ~ N(0, 1)
    tail  += h * (1[u > tail] - 2%)                    the 98% quantile of u; 2.05 for Gaussian noise

A value is out of band when ``u > threshold * max(1, tail / tail_free)``: a series whose ordinary batches are heavy-tailed
gets a wider band, learned from values *inside* the band, so a spike never raises the bar for the next one. Out of band
values teach nothing. Downward excursions are treated alike but are silent: for a loss they are good news.

An excursion that settles (its fast and slow averages agree to within the noise) for `accept_after` values is a lasting new
level: the band moves there and says "shift" once. One that never settles is accepted after `patience` values as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.base import BoolArray, FloatArray, IntArray, Verdict

TAIL = 0.98
_GAUSS_TAIL = 2.0537  # 98% quantile of the standard normal distribution
_FLOATS = ("level", "slope", "scale", "tail", "fast", "slow")
_INTS = ("seen", "run", "onset", "last_out")


def clipped_second_moment(c: float) -> float:
    """E[min(Z^2, c^2)] for a standard normal Z."""
    inside = math.erf(c / math.sqrt(2)) - 2 * c * math.exp(-c * c / 2) / math.sqrt(2 * math.pi)
    return inside + c * c * math.erfc(c / math.sqrt(2))


def logarithmic(name: str) -> bool:
    """True for norms, ratios and maxima: positive, multiplicative noise, judged on their logarithm."""
    return name.endswith(("norm", "norm_clipped", "_ratio", "grad_max", "/rms", "/std", "/max"))


class BandDetector:
    """See the module's docstring. State is one array per quantity, shape (n,); memory does not grow with steps."""

    def __init__(self, settings: DetectionConfig | None = None) -> None:
        self.settings = settings or DetectionConfig()
        self.series: tuple[str, ...] = ()
        self._where: dict[str, int] = {}
        self._rho = clipped_second_moment(self.settings.clip)
        for name in _FLOATS:
            setattr(self, name, np.zeros(0))
        for name in _INTS:
            setattr(self, name, np.zeros(0, np.int64))
        self._loaded: dict[str, dict[str, float]] = {}

    level: FloatArray
    slope: FloatArray
    scale: FloatArray
    tail: FloatArray
    fast: FloatArray
    slow: FloatArray
    seen: IntArray
    run: IntArray  # length of the present excursion; negative: below the band
    onset: IntArray  # step at which the present or latest excursion above the band began
    last_out: IntArray  # latest step above the band, -1: never
    settled: BoolArray  # of the latest accepted excursion: did it settle, or was patience exhausted?

    def bind(self, series: Sequence[str]) -> None:
        """Set the columns. Series known from before (or from a loaded state) keep their state; new ones start empty."""
        old = {name: i for i, name in enumerate(self.series)}
        self.series = tuple(series)
        n = len(self.series)
        if len(set(self.series)) != n:
            raise ValueError("series names must be unique")
        kept = [(i, old[name]) for i, name in enumerate(self.series) if name in old]
        to, src = np.array([i for i, _ in kept], np.int64), np.array([j for _, j in kept], np.int64)
        for name in (*_FLOATS, *_INTS):
            before = getattr(self, name)
            now = np.zeros(n, before.dtype)
            now[to] = before[src]
            setattr(self, name, now)
        fresh = np.ones(n, bool)
        fresh[to] = False
        self.tail[fresh] = _GAUSS_TAIL
        self.last_out[fresh] = -1
        for i in np.flatnonzero(fresh).tolist():
            for key, value in self._loaded.pop(self.series[i], {}).items():
                getattr(self, key)[i] = value
        self.settled = np.zeros(n, bool)
        self._log = np.array([logarithmic(name) for name in self.series], bool)
        self._any_log = bool(self._log.any())

    def update(self, step: int, values: FloatArray, present: BoolArray) -> list[Verdict]:
        """One step: values (n,) float64, present (n,) bool. Returns a verdict per out-of-band or non-finite series."""
        cfg = self.settings
        finite = np.isfinite(values)
        broken = present & ~finite
        ok = present & finite
        x = np.where(ok, values, 0.0)
        if self._any_log:
            np.log(np.maximum(x, 1e-30), out=x, where=self._log)

        first = ok & (self.seen == 0)
        if first.any():
            self.level[first] = x[first]
            self.scale[first] = self._floor(x)[first]
        expected = self.level + np.where(self.run == 0, self.slope, 0.0)
        error = x - expected
        scale = np.maximum(self.scale, self._floor(expected))
        u = error / scale
        ready = self.seen >= cfg.warmup
        bar = cfg.threshold * np.maximum(1.0, self.tail / cfg.tail_free)
        inside = np.where(self.run == 0, bar, np.minimum(bar, cfg.release))
        above = ok & ready & (u > np.where(self.run > 0, inside, bar))
        below = ok & ready & (u < -np.where(self.run < 0, inside, bar))
        learn = ok & ~above & ~below

        verdicts = [
            Verdict(i, "nonfinite", step, step, float(values[i]), float(self._back(expected, i)), math.inf)
            for i in np.flatnonzero(broken).tolist()
        ]
        self._learn(learn, u, scale)
        if above.any() or below.any() or self.run.any():
            verdicts += self._excursions(step, x, u, expected, scale, ok, above, below)
        self.seen += ok
        return verdicts

    def _floor(self, level: FloatArray) -> FloatArray:
        cfg = self.settings
        floor = cfg.floor * np.abs(level) + 1e-12
        return np.where(self._log, cfg.log_floor, floor) if self._any_log else floor

    def _learn(self, learn: BoolArray, u: FloatArray, scale: FloatArray) -> None:
        cfg = self.settings
        seen = self.seen
        young = 1.0 / (seen + 1.0)
        # The first difference sets the scale; before `warmup` the clip is wide so that a bad start is forgotten.
        second = learn & (seen == 1)
        if second.any():
            scale = np.where(second, np.maximum(np.abs(u) * scale / math.sqrt(2), scale), scale)
            u = np.where(second, np.sign(u), u)
        step = scale * np.clip(u, -cfg.clip, cfg.clip)
        clipped = np.minimum(u * u, cfg.clip**2)
        gain = np.maximum(cfg.scale_gain, 2.0 * young)
        grown = scale * np.sqrt(np.maximum(1.0 + gain * (clipped / self._rho - 1.0), 0.25))
        moved = self.level + self.slope + np.maximum(cfg.level_gain, young) * step
        self.level = np.where(learn, moved, self.level)
        self.slope = np.where(learn, self.slope + cfg.slope_gain * step, self.slope)
        self.scale = np.where(learn & (seen > 0), grown, self.scale)
        rise = np.where(u > self.tail, TAIL, TAIL - 1.0)
        self.tail = np.where(learn & (seen >= cfg.warmup), np.maximum(self.tail + cfg.tail_gain * rise, 1.0), self.tail)

    def _excursions(
        self, step: int, x: FloatArray, u: FloatArray, expected: FloatArray, scale: FloatArray, ok: BoolArray,
        above: BoolArray, below: BoolArray,
    ) -> list[Verdict]:  # fmt: skip
        cfg = self.settings
        before = self.run
        run = np.where(above, np.maximum(before, 0) + 1, np.where(below, np.minimum(before, 0) - 1, np.where(ok, 0, before)))
        started = (np.abs(run) == 1) & (above | below)
        self.fast = np.where(started, x, np.where(above | below, self.fast + 0.3 * (x - self.fast), self.fast))
        self.slow = np.where(started, x, np.where(above | below, self.slow + 0.1 * (x - self.slow), self.slow))
        self.onset = np.where(started & above, step, self.onset)
        self.last_out = np.where(above, step, self.last_out)
        long_enough = np.where(run > 0, cfg.accept_after, cfg.accept_below)
        self.settled = (np.abs(run) >= long_enough) & (np.abs(self.fast - self.slow) < cfg.settled * scale)
        accept = (above | below) & (self.settled | (np.abs(run) >= cfg.patience))
        verdicts = [
            Verdict(
                i, "shift" if accept[i] else "spike", step, int(self.onset[i]), float(self._back(x, i)),
                float(self._back(expected, i)), float(u[i]),
            )
            for i in np.flatnonzero(above).tolist()
        ]  # fmt: skip
        if accept.any():
            self.level = np.where(accept, self.fast, self.level)
            self.slope = np.where(accept, 0.0, self.slope)
        self.run = np.where(accept, 0, run)
        return verdicts

    def _back(self, values: FloatArray, i: int) -> float:
        """`values[i]` in the series' own unit."""
        return math.exp(min(values[i], 700.0)) if self._log[i] else float(values[i])

    def expected(self, index: int) -> float:
        """The value expected next of one series, in its own unit."""
        return self._back(self.level + self.slope, index)

    def relearn(self) -> None:
        """Learn all bands anew from what is known: half a warm-up without alarms, then as usual."""
        self.seen = np.minimum(self.seen, self.settings.warmup // 2)
        self.run = np.zeros_like(self.run)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"version": 1, "series": list(self.series)}
        for name in (*_FLOATS, *_INTS):
            state[name] = getattr(self, name).tolist()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = (*_FLOATS, *_INTS)
        self._loaded = {series: {name: state[name][i] for name in names} for i, series in enumerate(state["series"])}
        bound, self.series = self.series, ()
        for name in names:
            setattr(self, name, getattr(self, name)[:0])
        self.bind(bound or tuple(state["series"]))
