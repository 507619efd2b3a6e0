"""The one detector behind every alarm: a robust band around each series, all series at once.

Per series, in its unit of judgement (`units`), with ``u = (x - expected) / scale`` and ``psi = clip(u, -c, c)``:

    level    += slope + a * scale * psi          slope += b * scale * psi          (Holt's smoothing, Huber's psi)
    calm     += d * scale * psi_calm             a slower level, steadier where the series is stationary
    expected  = calm, but no further than `calm_band` sigmas from level + slope
    scale    *= sqrt(1 + g * (psi^2 / E[psi^2] - 1))
    steady       the same, slower; the scale in use is steady, but no further than `steady_band` from scale
    tail     += h * ((min(|u|, 3.5) - 2)+ / 2 - tail)      mean excess over two sigmas; Gaussian noise has 0.0083

A value is out of band when ``u > bar * (1 + span * (t - 1) / (t + 1)) * (1 + (young / seen)^2)`` with ``t = max(1, tail /
tail_free)``: a series whose ordinary batches are heavy-tailed gets a wider band. So does a young one: its scale is an estimate
from few values, so that quantiles are wider, as Student's are beside Gaussian ones. The tail is learned from values *inside*
the band, and from the first of a cluster only, so a spike does not raise the bar for the next one. Values out of band teach
nothing. Excursions below the band are silent, and the band follows after `accept_below` values: for everything we judge, less
is good news.

An excursion that stays settled (its fast and slow averages agree to within the noise) for `accept_after` values is a lasting
new level: the band moves there and says "shift" once. One that never settles is accepted after `patience` values.

Slow rises that never leave the band are found by two `Lean` statistics, over some 15 and, for the run-level series, some
100 values.

Sources: Huber, Robust Statistics (1981), for psi and the scale equation; Holt (1957; Int. J. Forecasting 20, 2004) for level
and slope; Gelper, Fried, Croux, "Robust forecasting with exponential and Holt-Winters smoothing" (2010) for joining them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.base import BoolArray, FloatArray, IntArray, Verdict
from trackbridge.detectors.lean import Lean
from trackbridge.detectors.state import SeriesState
from trackbridge.detectors.units import Units, is_global_gradient, is_loss

_TAIL_CAP = 3.5
_TAIL_PRIOR = 0.0125  # a new series counts as mildly heavy-tailed until `_TAIL_START` values have spoken
_TAIL_START = 100
_FALLING = -1.0  # sigmas below its base at which a loss counts as falling
_DRIFT_SCALES = 3.0  # scales of the global gradient norm that make a drift of it in any case
_TAIL_OF_SPIKE = 20  # values after an excursion in which no drift begins
_YOUNG_SCALE = 8.0  # a young series' scale forgets its first, steep values this much faster than 1 / seen


@dataclass(frozen=True, slots=True)
class Tuning:
    """The gains, chosen on real curves by cross-validation over families (docs/detection.md); not a user's business."""

    level_gain: float = 0.2
    slope_gain: float = 0.005
    calm_gain: float = 0.05
    calm_band: float = 0.3
    scale_gain: float = 1 / 45
    steady_gain: float = 1 / 400
    steady_band: float = 0.3
    clip: float = 2.0
    tail_gain: float = 1 / 800
    tail_free: float = 0.0125
    tail_span: float = 5.0
    young: float = 26.0
    accept_below: int = 5
    settled: float = 1.5


def clipped_second_moment(c: float) -> float:
    """E[min(Z^2, c^2)] for a standard normal Z."""
    inside = math.erf(c / math.sqrt(2)) - 2 * c * math.exp(-c * c / 2) / math.sqrt(2 * math.pi)
    return inside + c * c * math.erfc(c / math.sqrt(2))


class BandDetector(SeriesState):
    """See the module's docstring. Memory does not grow with steps."""

    FIRST: ClassVar[dict[str, float | int | bool]] = {
        "level": 0.0, "slope": 0.0, "calm": 0.0, "scale": 0.0, "steady": 0.0, "tail": _TAIL_PRIOR, "fast": 0.0, "slow": 0.0,
        "seen": 0, "run": 0, "still": 0, "onset": 0, "last_out": -1, "rest": 0, "drift_onset": 0, "hot": False,
        "signed": False,
    }  # fmt: skip
    level: FloatArray
    slope: FloatArray
    calm: FloatArray
    scale: FloatArray
    steady: FloatArray
    tail: FloatArray
    fast: FloatArray  # averages over the present excursion
    slow: FloatArray
    seen: IntArray  # finite values so far
    run: IntArray  # length of the present excursion; negative: below the band
    still: IntArray  # latest values of it, in a row, that were settled
    onset: IntArray  # step at which the present or latest excursion above the band began
    last_out: IntArray  # latest step above the band; -1: never
    rest: IntArray  # values since the latest excursion above the band
    drift_onset: IntArray  # step at which the present or latest drift began
    hot: BoolArray  # the latest value was beyond two sigmas
    signed: BoolArray  # some value was not positive

    def __init__(self, settings: DetectionConfig | None = None, tuning: Tuning | None = None) -> None:
        super().__init__()
        self.settings = cfg = settings or DetectionConfig()
        self.tuning = tuning or Tuning()
        self._moment = clipped_second_moment(self.tuning.clip)
        self.drift = Lean(0.15, 0.015, 0.01, 100, cfg.drift_threshold)
        self.slow_drift = Lean(0.02, 0.002, 0.005, 1000, cfg.slow_drift_threshold)
        self.units = Units((), cfg)
        self.heads: IntArray = np.zeros(0, np.int64)
        self._is_loss: BoolArray = np.zeros(0, bool)
        self.settled: BoolArray = np.zeros(0, bool)  # of the latest accepted excursion: settled, or out of patience?

    def bind(self, series: Sequence[str]) -> None:
        super().bind(series)
        self.units = Units(self.series, self.settings)
        heads = [i for i, name in enumerate(self.series) if is_loss(name) or is_global_gradient(name)]
        self.heads = np.array(heads, np.int64)
        self._is_loss = np.array([is_loss(name) for name in self.series], bool).reshape(len(self.series))
        self.drift.bind(self.series)
        self.slow_drift.bind([self.series[i] for i in heads])
        self.settled = np.zeros(len(self.series), bool)

    def update(self, step: int, values: FloatArray, present: BoolArray, widen: float = 1.0) -> list[Verdict]:
        """One step: values (n,) float64, present (n,) bool. Returns a verdict per out-of-band or non-finite series. `widen`
        multiplies the bars, for a step that is known to be noisier than others."""
        cfg, units = self.settings, self.units
        finite = np.isfinite(values)
        ok = present & finite
        x = units.judged(values, ok)
        seen = self.seen
        if seen.size and not seen.all():
            self._begin(ok & (seen == 0), x)
        ahead, own, scale, expected, factor = self._ahead()
        u = (x - expected) / scale
        score = units.skewed(u, scale, expected, factor, self.signed)
        bar = np.maximum(units.bar * (widen * factor), units.least / scale)
        above, below = self._outside(score, bar, ok & (seen >= cfg.warmup))
        learn = ok & ~above & ~below

        verdicts = [
            Verdict(i, "nonfinite", step, step, float(values[i]), self.expected(i), math.inf)
            for i in np.flatnonzero(present & ~finite).tolist()
        ]
        young = np.reciprocal(seen.astype(np.float64) + 1.0)
        self._learn(x, u, ahead, expected, own, scale, learn, young)
        if above.any() or below.any() or self.run.any():
            verdicts += self._excursions(step, x, score, expected, scale, ok, above, below)
        self.signed |= ok & (x <= 0.0)
        self.rest = np.where(above, 0, self.rest + ok)
        verdicts += self._drifts(step, x, scale, learn, young, factor)
        self.seen = seen + ok
        return verdicts

    def _ahead(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """For the next value of each series: (fast level, own scale, scale, expectation, factor of the bar for its tail)."""
        tune, units = self.tuning, self.units
        ahead = self.level + np.where(self.run == 0, self.slope, 0.0) if self.run.any() else self.level + self.slope
        own = np.maximum(self.scale, units.relative_floor * np.abs(ahead) + units.fixed_floor)
        play = tune.steady_band * own
        scale = np.minimum(np.maximum(self.steady, own - play), own + play)
        play = tune.calm_band * scale
        expected = np.minimum(np.maximum(self.calm, ahead - play), ahead + play)
        weight = np.maximum(self.tail, tune.tail_free)
        factor = 1.0 + tune.tail_span * (weight - tune.tail_free) / (weight + tune.tail_free)
        factor *= 1.0 + np.square(tune.young / np.maximum(self.seen, 1))
        return ahead, own, scale, expected, factor

    def upper(self) -> list[float]:
        """The largest next value of each series, in its own unit, that is in its band; infinity before the warm-up is over."""
        _, _, scale, expected, factor = self._ahead()
        most = np.maximum(self.units.bar * factor, self.units.least / scale)
        most = np.where(self.run > 0, np.minimum(most, self.settings.release), most)
        value = expected + self.units.unskewed(most, scale, expected, factor, self.signed) * scale
        ready = self.seen >= self.settings.warmup
        return [self.units.plain(float(v), i) if ready[i] else math.inf for i, v in enumerate(value)]

    def _begin(self, first: BoolArray, x: FloatArray) -> None:
        """Take the first value of a series as its level."""
        if not first.any():
            return
        for state in (self.level, self.calm, self.drift.base):
            state[first] = x[first]
        head = first[self.heads]
        self.slow_drift.base[head] = x[self.heads][head]

    def _outside(self, u: FloatArray, bar: FloatArray, ready: BoolArray) -> tuple[BoolArray, BoolArray]:
        """Where a value is above and below its band; an excursion under way ends only below `release`."""
        above, below = u > bar, u < -bar
        if self.run.any():
            release = np.minimum(self.settings.release, bar)
            above |= (self.run > 0) & (u > release)
            below |= (self.run < 0) & (u < -release)
        return above & ready, below & ready

    def _learn(
        self, x: FloatArray, u: FloatArray, ahead: FloatArray, expected: FloatArray, own: FloatArray, scale: FloatArray,
        learn: BoolArray, young: FloatArray,
    ) -> None:  # fmt: skip
        tune = self.tuning
        gate = learn.astype(float)
        second = learn & (self.seen == 1)
        if second.any():  # the first difference sets the scale
            own = np.where(second, np.maximum(np.abs(u) * scale / math.sqrt(2), own), own)
            scale = np.where(second, own, scale)
            u = np.where(second, np.sign(u), u)
        reach = tune.clip * scale
        move = np.minimum(np.maximum(x - ahead, -reach), reach) * gate
        calm = np.minimum(np.maximum(x - self.calm, -reach), reach) * gate
        self.level += gate * self.slope + np.maximum(tune.level_gain, young) * move
        self.slope += tune.slope_gain * move
        self.calm += np.maximum(tune.calm_gain, young) * calm
        gate *= self.seen > 0
        early = np.minimum(_YOUNG_SCALE * young, 0.5)
        self.scale += gate * (self._rescaled(own, (x - expected) / own, np.maximum(tune.scale_gain, early)) - self.scale)
        self.steady += gate * (self._rescaled(scale, u, np.maximum(tune.steady_gain, early)) - self.steady)

        warm = self.seen >= self.settings.warmup
        size = np.abs(u)
        over = size > 2.0
        count = learn & warm & ~(over & self.hot)  # of a cluster over two sigmas only the first value counts
        excess = np.where(over, (np.minimum(size, _TAIL_CAP) - 2.0) / 2, 0.0)
        gain = np.maximum(tune.tail_gain, 1.0 / (np.maximum(self.seen - self.settings.warmup, 0) + _TAIL_START))
        self.tail += count * gain * (excess - self.tail)
        self.hot = np.where(learn, over, self.hot)

    def _rescaled(self, scale: FloatArray, u: FloatArray, gain: FloatArray) -> FloatArray:
        """`scale` after a residual of `u` scales."""
        square = np.minimum(u * u, self.tuning.clip**2) / self._moment - 1.0
        return np.asarray(scale * np.sqrt(np.maximum(1.0 + gain * square, 0.25)), np.float64)

    def _excursions(
        self, step: int, x: FloatArray, u: FloatArray, expected: FloatArray, scale: FloatArray, ok: BoolArray,
        above: BoolArray, below: BoolArray,
    ) -> list[Verdict]:  # fmt: skip
        cfg, tune = self.settings, self.tuning
        out = above | below
        before = self.run
        run = np.where(above, np.maximum(before, 0) + 1, np.where(below, np.minimum(before, 0) - 1, np.where(ok, 0, before)))
        length = np.abs(run)
        fresh = out & (length == 1)
        self.fast = np.where(fresh, x, np.where(out, self.fast + 0.3 * (x - self.fast), self.fast))
        self.slow = np.where(fresh, x, np.where(out, self.slow + 0.1 * (x - self.slow), self.slow))
        self.onset = np.where(fresh & above, step, self.onset)
        self.last_out = np.where(above, step, self.last_out)
        agree = out & (np.abs(self.fast - self.slow) < tune.settled * scale)
        self.still = np.where(agree, np.where(fresh, 1, self.still + 1), np.where(ok, 0, self.still))
        self.settled = np.where(run > 0, self.still >= cfg.accept_after, length >= tune.accept_below) & out
        accept = self.settled | (out & (length >= cfg.patience))
        verdicts = [
            Verdict(
                i, "shift" if accept[i] else "spike", step, int(self.onset[i]), self.units.plain(float(x[i]), i),
                self.units.plain(float(expected[i]), i), float(u[i]),
            )
            for i in np.flatnonzero(above).tolist()
        ]  # fmt: skip
        if accept.any():
            self.level = np.where(accept, self.fast, self.level)
            self.calm = np.where(accept, self.fast, self.calm)
            self.slope = np.where(accept, 0.0, self.slope)
            self.drift.move(accept, self.fast)
            raised = (accept & above)[self.heads]
            self.slow_drift.move(raised, self.fast[self.heads])
        self.run = np.where(accept, 0, run)
        return verdicts

    def _drifts(
        self, step: int, x: FloatArray, scale: FloatArray, learn: BoolArray, young: FloatArray, factor: FloatArray
    ) -> list[Verdict]:
        units, heads = self.units, self.heads
        size = np.abs(self.drift.base)
        material = units.material + units.material_share * size
        # A series that fell to a new level and creeps up below its former one is still doing better than before.
        material[heads] = np.maximum(material[heads], self.slow_drift.base - self.drift.base[heads])
        # The tail of a spike is no drift.
        eligible = units.drifts & (self.seen >= self.drift.warmup) & ((self.rest >= _TAIL_OF_SPIKE) | (self.last_out < 0))
        if self.learning():
            eligible &= self._is_loss
        widened = np.sqrt(factor)
        under_way = self.drifting()
        # Over some 15 steps the norm of small batches' gradients wanders more than over some 500.
        larger = np.maximum(material, np.minimum(units.gradient_material, _DRIFT_SCALES * scale))
        begun = self.drift.update(step, x, scale, learn, young, eligible, widened, larger)
        slow = self.slow_drift.update(
            step, x[heads], scale[heads], learn[heads], young[heads],
            eligible[heads] & (self.seen[heads] >= self.slow_drift.warmup),
            widened[heads], material[heads],
        )  # fmt: skip
        if not (begun.any() or slow.any()):
            return []
        found = {i: (self.drift, i) for i in np.flatnonzero(begun).tolist()}
        found.update({int(heads[k]): (self.slow_drift, k) for k in np.flatnonzero(slow).tolist() if int(heads[k]) not in found})
        verdicts = []
        for i, (lean, k) in sorted(found.items()):
            if under_way[i]:  # found by the other statistic before
                continue
            self.drift_onset[i] = since = min(int(lean.since[k]), step)
            base = units.plain(float(lean.base[k]), i)
            verdicts.append(Verdict(i, "drift", step, since, units.plain(float(x[i]), i), base, float(lean.z[k])))
        return verdicts

    def learning(self) -> bool:
        """The loss is well below where it was: gradients that grow meanwhile are those of a net that learns."""
        losses = self._is_loss[self.heads]
        fast = self.drift.lean[self.heads][losses]
        return bool((np.minimum(fast, self.slow_drift.lean[losses]) < _FALLING).any())

    def drifting(self) -> BoolArray:
        """Series in a drift, shape (n,)."""
        moving: BoolArray = self.drift.on.copy()
        moving[self.heads] |= self.slow_drift.on
        return moving

    def stayed(self) -> BoolArray:
        """Series whose drift ended at the latest step without coming back to where it began, shape (n,)."""
        up: BoolArray = np.zeros(len(self.series), bool)
        up |= self.drift.ended & ~self.drift.returned
        up[self.heads] |= self.slow_drift.ended & ~self.slow_drift.returned
        return up

    def expected(self, index: int) -> float:
        """The level of one series in its own unit; 0 before its first value."""
        return self.units.plain(float(self.level[index]), index) if self.seen[index] else 0.0

    def relearn(self) -> None:
        """Learn all bands anew from what is known: half a warm-up without alarms, then as usual."""
        self.seen = np.minimum(self.seen, self.settings.warmup // 2)
        self.run = np.zeros_like(self.run)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "drift": self.drift.state_dict(), "slow_drift": self.slow_drift.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drift.load_state_dict(state["drift"])
        self.slow_drift.load_state_dict(state["slow_drift"])
        super().load_state_dict(state)
