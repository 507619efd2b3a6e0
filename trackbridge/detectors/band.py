"""The one detector behind every alarm: a robust band around each series, all series at once.

Per series, in its unit of judgement (`units`), with ``u = (x - expected) / scale`` and ``psi = clip(u, -c, c)``:

    level    += slope + a * scale * psi          (Holt's smoothing, Huber's psi)
    slope     = (1 - 1 / n) * (slope + b * scale * psi)    straight in log time: loss curves flatten as they age
    calm     += slope + d * scale * psi_calm     a slower level, steadier where the series is stationary
    expected  = calm + slope, but no further than `calm_band` sigmas from level + slope
    scale    *= sqrt(1 + g * (psi^2 / E[psi^2] - 1))    psi of a young loss or global norm is of u less its mean
    steady       the same, slower; the scale in use is steady, but no further than `steady_band` from scale
    tail     += h * ((min(|u|, 3.5) - 2)+ / 2 - tail)      mean excess over two sigmas; Gaussian noise has 0.0083

A value is out of band when ``u > bar * (1 + span * (t - 1) / (t + 1)) * (1 + (young / seen)^2)`` with ``t = max(1, tail /
tail_free)``: a series whose ordinary batches are heavy-tailed gets a wider band. So does a young one: its scale is an estimate
from few values, so that quantiles are wider, as Student's are beside Gaussian ones. The tail is learned from values *inside*
the band, and from the first of a cluster only, so a spike does not raise the bar for the next one. Values out of band teach
nothing. Excursions below the band are silent, and the band follows after `accept_below` values: for everything we judge, less
is good news. Its scale is doubled then: how much the series varies down there is to be learned.

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
from trackbridge.detectors.age import Gain, ages, at_least, at_most, grown
from trackbridge.detectors.base import BoolArray, FloatArray, IntArray, Verdict
from trackbridge.detectors.lean import Lean
from trackbridge.detectors.state import SeriesState
from trackbridge.detectors.units import Units, is_global_gradient, is_loss

_TAIL_CAP = 3.5
_TAIL_PRIOR = 0.0125  # a new series counts as mildly heavy-tailed until `_TAIL_START` values have spoken
_TAIL_START = 200
_FALLING = -1.0  # sigmas below its base at which a loss counts as falling
_DRIFT_SCALES = 3.0  # scales of the global gradient norm that make a drift of it in any case
_TAIL_OF_SPIKE = 20  # values after an excursion in which no drift begins
_YOUNG_SCALE = 4.0  # a young series' scale forgets its first, steep values this much faster than 1 / seen
_YOUNG_SLOPE = 20.0  # over seen^2: the gain of a young slope, that of a line through about the latest half of its values
_YOUNG_CALM = 10.0  # the slow level is at first over about the latest fifth of the values
_YOUNG_BIAS = 1.5  # the mean of a young series' residuals is that of about the latest three quarters
_OLD = 1000  # values from which on it is left out: the band has long caught up
_FEW = 8  # run-level series that are looked at one by one
_STEEPEST = 0.05  # no slope learns faster
_FALLEN = 2.0  # what the scale is multiplied by when a fall is accepted


@dataclass(frozen=True, slots=True)
class Tuning:
    """The gains, by cross-validation over families of real curves (docs/detection-measured.md); no business of a user."""

    level_gain: float = 0.2
    slope_gain: float = 0.003
    calm_gain: float = 0.02
    calm_band: float = 0.4
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


def _clipped(move: FloatArray, least: FloatArray, most: FloatArray) -> FloatArray:
    np.maximum(move, least, out=move)
    np.minimum(move, most, out=move)
    return move


def _gated(move: FloatArray, gate: FloatArray | None) -> FloatArray:
    if gate is not None:
        move *= gate
    return move


def _near(value: FloatArray, center: FloatArray, play: FloatArray) -> FloatArray:
    """`value`, but no further than `play` from `center`."""
    low = center - play
    np.maximum(value, low, out=low)
    np.add(center, play, out=play)
    np.minimum(low, play, out=low)
    return low


class _Terms:
    """`BandDetector.drift_terms`, worked out only if some series leans far enough."""

    def __init__(self, band: BandDetector, scale: FloatArray, factor: FloatArray) -> None:
        self._band, self._scale, self._factor = band, scale, factor
        self._leans = band.drift.lean, band.slow_drift.lean
        self._bases = band.drift.base, band.slow_drift.base
        self._known: tuple[BoolArray, FloatArray, FloatArray, FloatArray] | None = None

    def _terms(self) -> tuple[BoolArray, FloatArray, FloatArray, FloatArray]:
        if self._known is None:
            self._known = self._band.drift_terms(self._scale, self._factor, self._leans, self._bases)
        return self._known

    def fast(self) -> tuple[BoolArray, FloatArray, FloatArray]:
        eligible, factor, _, larger = self._terms()
        return eligible, factor, larger

    def slow(self) -> tuple[BoolArray, FloatArray, FloatArray]:
        eligible, factor, material, _ = self._terms()
        band, heads = self._band, self._band.heads
        return eligible[heads] & (band.seen[heads] >= band.slow_drift.warmup), factor[heads], material[heads]


class BandDetector(SeriesState):
    """See the module's docstring. Memory does not grow with steps."""

    FIRST: ClassVar[dict[str, float | int | bool]] = {
        "level": 0.0, "slope": 0.0, "calm": 0.0, "scale": 0.0, "steady": 0.0, "bias": 0.0, "tail": _TAIL_PRIOR, "fast": 0.0,
        "slow": 0.0, "seen": 0, "run": 0, "still": 0, "onset": 0, "last_out": -1, "rest": 0, "drift_onset": 0, "hot": False,
        "signed": False,
    }  # fmt: skip
    LATER = frozenset({"bias"})
    level: FloatArray
    slope: FloatArray
    calm: FloatArray
    scale: FloatArray
    steady: FloatArray
    bias: FloatArray  # mean residual of a young series, in scales
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
        self.drift = Lean(0.15, 0.015, 0.005, 100, cfg.drift_threshold)
        self.slow_drift = Lean(0.02, 0.002, 0.005, 1000, cfg.slow_drift_threshold)
        self.units = Units((), cfg)
        self.heads: IntArray = np.zeros(0, np.int64)  # the run-level series: losses and global gradient norms
        self.is_head: BoolArray = np.zeros(0, bool)
        self._is_loss: BoolArray = np.zeros(0, bool)
        self._loss = -1  # the first loss
        self._unborn = True  # some series may have no value yet
        self.sigmas: FloatArray = np.zeros(0)  # of the latest values, above expectation; of an absent series meaningless
        self.settled: BoolArray = np.zeros(0, bool)  # of the latest accepted excursion: settled, or out of patience?

    def bind(self, series: Sequence[str]) -> None:
        super().bind(series)
        self.units = Units(self.series, self.settings)
        heads = [i for i, name in enumerate(self.series) if is_loss(name) or is_global_gradient(name)]
        self.heads = np.array(heads, np.int64)
        self.is_head = np.isin(np.arange(len(self.series)), self.heads)
        self._loss = next((i for i in heads if is_loss(self.series[i])), -1)
        self._is_loss = np.array([is_loss(name) for name in self.series], bool).reshape(len(self.series))
        self.drift.bind(self.series)
        self.slow_drift.bind([self.series[i] for i in heads])
        self.settled = np.zeros(len(self.series), bool)
        self._unborn = True

    def update(self, step: int, values: FloatArray, present: BoolArray, widen: float = 1.0) -> list[Verdict]:
        """One step: values (n,) float64, present (n,) bool. Returns a verdict per out-of-band or non-finite series. `widen`
        multiplies the bars, for a step that is known to be noisier than others."""
        cfg, units = self.settings, self.units
        finite = np.isfinite(values)
        ok = present & finite
        x = units.judged(values, ok)
        if self._unborn:
            self._begin(ok & (self.seen == 0), x)
        age = ages(self.seen)
        away = bool(np.count_nonzero(self.run))
        ahead, calm, own, scale, expected, factor = self._ahead(age, away)
        u = (x - expected) / scale
        self.sigmas = u
        score = units.skewed(u, scale, expected, factor, self.signed)
        bar = units.bars(factor if widen == 1.0 else widen * factor, scale)
        above, below = self._outside(score, bar, grown(age, cfg.warmup, ok), away)
        out = np.count_nonzero(above) > 0 or np.count_nonzero(below) > 0
        learn = ok & ~above & ~below if out else ok

        verdicts = []
        if np.count_nonzero(ok) != np.count_nonzero(present):
            verdicts = [
                Verdict(i, "nonfinite", step, step, float(values[i]), self.expected(i), math.inf)
                for i in np.flatnonzero(present & ~finite).tolist()
            ]
        gate = None if np.count_nonzero(learn) == len(learn) else learn.astype(np.float64)
        young = 1.0 / (age + 1.0)
        self._learn(x, u, ahead, calm, expected, own, scale, learn, gate, age, young)
        if out or away:
            verdicts += self._excursions(step, x, score, expected, scale, ok, above, below)
        self.signed |= ok & (x <= 0.0)
        self.rest += ok
        if out:
            self.rest[above] = 0
        verdicts += self._drifts(step, x, scale, learn, gate, young, factor)
        self.seen += ok
        if self._unborn:
            self._unborn = not self.seen.all()
        return verdicts

    def _ahead(
        self, age: float | FloatArray, away: bool
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """For the next value of each series: (fast level, slow level, own scale, scale, expectation, factor of the bar).
        `away`: some series is in an excursion."""
        tune, units = self.tuning, self.units
        slope = np.where(self.run == 0, self.slope, 0.0) if away else self.slope
        ahead, calm = self.level + slope, self.calm + slope
        own = units.relative_floor * np.abs(ahead)
        own += units.fixed_floor
        np.maximum(self.scale, own, out=own)
        scale = _near(self.steady, own, tune.steady_band * own)
        expected = _near(calm, ahead, tune.calm_band * scale)
        weight = np.maximum(self.tail, tune.tail_free)
        factor = weight - tune.tail_free
        factor *= tune.tail_span
        weight += tune.tail_free
        factor /= weight
        factor += 1.0
        youth = tune.young / at_least(age, 1.0)
        factor *= 1.0 + youth * youth
        return ahead, calm, own, scale, expected, factor

    def upper(self) -> list[float]:
        """The largest next value of each series, in its own unit, that is in its band; infinity before the warm-up is over."""
        _, _, _, scale, expected, factor = self._ahead(ages(self.seen), bool(self.run.any()))
        most = self.units.bars(factor, scale)
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

    def _outside(self, u: FloatArray, bar: FloatArray, ready: BoolArray, away: bool) -> tuple[BoolArray, BoolArray]:
        """Where a value is above and below its band; an excursion under way ends only below `release`."""
        above, below = u > bar, u < -bar
        if away:
            release = np.minimum(self.settings.release, bar)
            above |= (self.run > 0) & (u > release)
            below |= (self.run < 0) & (u < -release)
        above &= ready
        below &= ready
        return above, below

    def _learn(
        self, x: FloatArray, u: FloatArray, ahead: FloatArray, calm: FloatArray, expected: FloatArray, own: FloatArray,
        scale: FloatArray, learn: BoolArray, gate: FloatArray | None, age: float | FloatArray, young: Gain,
    ) -> None:  # fmt: skip
        """`gate` is `learn` as numbers, None if all learn."""
        tune = self.tuning
        if not isinstance(age, float) or age == 1.0:
            second = learn & (self.seen == 1)
            if second.any():  # the first difference sets the scale
                own = np.where(second, np.maximum(np.abs(u) * scale / math.sqrt(2), own), own)
                scale = np.where(second, own, scale)
                u = np.where(second, np.sign(u), u)
        reach = tune.clip * scale
        least = -reach
        move = _gated(_clipped(x - ahead, least, reach), gate)
        slow = _gated(_clipped(x - calm, least, reach), gate)
        along = self.slope if gate is None else gate * self.slope
        self.level += at_least(young, tune.level_gain) * move + along
        self.calm += at_least(at_most(_YOUNG_CALM * young, 1.0), tune.calm_gain) * slow + along
        self.slope += at_least(at_most(_YOUNG_SLOPE * young * young, _STEEPEST), tune.slope_gain) * move
        flatter = at_most(young, 0.5)
        self.slope *= 1.0 - (flatter if gate is None else gate * flatter)
        early = at_most(_YOUNG_SCALE * young, 0.5)
        if not isinstance(age, float):
            born = age > 0
            gate = born.astype(np.float64) if gate is None else gate * born
        if not isinstance(age, float) or age > 0.0:
            rough = x - expected
            rough /= own
            fine = self._unbiased(u, rough, age, learn)
            rough = self._rescaled(own, rough, at_least(early, tune.scale_gain))
            rough -= self.scale
            self.scale += _gated(rough, gate)
            fine = self._rescaled(scale, fine, at_least(early, tune.steady_gain))
            fine -= self.steady
            self.steady += _gated(fine, gate)
        self._tails(u, learn, age)

    def _unbiased(self, u: FloatArray, rough: FloatArray, age: float | FloatArray, learn: BoolArray) -> FloatArray:
        """`u`, and in place `rough`, less the mean residual where a run-level series is young; the mean is then learned. A band
        that follows a steep beginning late has an error, and that is not the noise of the series."""
        at, clip = self.heads, self.tuning.clip
        if isinstance(age, float) and age >= _OLD:
            return u
        fine: FloatArray = u.copy()
        if isinstance(age, float) and len(at) <= _FEW:  # as below; numpy takes 10 to 20 us more for two numbers
            gain = min(_YOUNG_BIAS / (age + 1.0), 0.5)
            added = math.sqrt(1.0 + gain / (2.0 - gain))
            for i in at.tolist():
                bias, own = self.bias[i], u[i]
                rough[i] = (rough[i] - bias) / added
                fine[i] = (own - bias) / added
                if learn[i]:
                    self.bias[i] = bias + gain * (min(max(own, -clip), clip) - bias)
            return fine
        ages = age if isinstance(age, float) else age[at]
        gains = np.where(ages < _OLD, np.minimum(_YOUNG_BIAS / (ages + 1.0), 0.5), 0.0)
        biases, owns = self.bias[at], u[at]
        aways = np.where(gains > 0.0, biases, 0.0)
        wider = np.sqrt(1.0 + gains / (2.0 - gains))  # a mean of few values has noise of its own
        rough[at] = (rough[at] - aways) / wider
        fine[at] = (owns - aways) / wider
        learned = biases + gains * (np.minimum(np.maximum(owns, -clip), clip) - biases)
        self.bias[at] = np.where(learn[at], learned, biases)
        return fine

    def _tails(self, u: FloatArray, learn: BoolArray, age: float | FloatArray) -> None:
        tune = self.tuning
        size = np.abs(u)
        over = size > 2.0
        counts = grown(age, self.settings.warmup, learn)
        np.minimum(size, _TAIL_CAP, out=size)
        size -= 2.0
        np.maximum(size, 0.0, out=size)
        size /= 2
        size -= self.tail
        # Of a cluster over two sigmas only the first value counts.
        gain = at_least(1.0 / (at_least(age - self.settings.warmup, 0.0) + _TAIL_START), tune.tail_gain)
        size *= (counts & ~(over & self.hot)) * gain
        self.tail += size
        np.copyto(self.hot, over, where=learn)

    def _rescaled(self, scale: FloatArray, u: FloatArray, gain: Gain) -> FloatArray:
        """`scale` after a residual of `u` scales. `gain` is at most a half."""
        square = u * u
        np.minimum(square, self.tuning.clip**2, out=square)
        square /= self._moment
        square -= 1.0
        square *= gain
        square += 1.0
        np.sqrt(square, out=square)
        square *= scale
        return square

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
        fell = accept & below
        if fell.any():  # how much a series varies at its new level is not known yet
            self.scale = np.where(fell, _FALLEN * self.scale, self.scale)
            self.steady = np.where(fell, _FALLEN * self.steady, self.steady)
        return verdicts

    def _drifts(
        self, step: int, x: FloatArray, scale: FloatArray, learn: BoolArray, gate: FloatArray | None, young: Gain,
        factor: FloatArray,
    ) -> list[Verdict]:  # fmt: skip
        heads, fast, slow = self.heads, self.drift, self.slow_drift
        terms = _Terms(self, scale, factor)  # of the state before this value
        under_way = (fast.on, slow.on)
        loss = float(self.level[self._loss]) if self._loss >= 0 else 0.0
        begun = fast.update(step, x, scale, learn, gate, young, loss, terms.fast)
        slowly = slow.update(
            step, x[heads], scale[heads], learn[heads], None if gate is None else gate[heads],
            young if isinstance(young, float) else young[heads], loss, terms.slow,
        )  # fmt: skip
        if begun is None and slowly is None:
            return []
        moving = under_way[0].copy()
        moving[heads] |= under_way[1]
        found = {} if begun is None else {i: (fast, i) for i in np.flatnonzero(begun).tolist()}
        for k in () if slowly is None else np.flatnonzero(slowly).tolist():
            found.setdefault(int(heads[k]), (slow, k))
        verdicts = []
        for i, (lean, k) in sorted(found.items()):
            if moving[i]:  # found by the other statistic before
                continue
            self.drift_onset[i] = since = min(int(lean.since[k]), step)
            base = self.units.plain(float(lean.base[k]), i)
            verdicts.append(Verdict(i, "drift", step, since, self.units.plain(float(x[i]), i), base, float(lean.z[k])))
        return verdicts

    def learning(self) -> bool:
        """The loss is well below where it was: gradients that grow meanwhile are those of a net that learns."""
        return self._falls(self.drift.lean, self.slow_drift.lean)

    def _falls(self, fast: FloatArray, slow: FloatArray) -> bool:
        losses = self._is_loss[self.heads]
        return bool((np.minimum(fast[self.heads][losses], slow[losses]) < _FALLING).any())

    def drift_terms(
        self, scale: FloatArray, factor: FloatArray, leans: tuple[FloatArray, FloatArray], bases: tuple[FloatArray, FloatArray]
    ) -> tuple[BoolArray, FloatArray, FloatArray, FloatArray]:
        """What a drift must fulfil to be told: (series in which one may begin, factor of the threshold, least rise that matters
        over some 500 steps, over some 15). `leans` and `bases` are the two statistics' before the value that is judged."""
        units, heads = self.units, self.heads
        material = units.material + units.material_share * np.abs(bases[0])
        # A series that fell to a new level and creeps up below its former one is still doing better than before.
        material[heads] = np.maximum(material[heads], bases[1] - bases[0][heads])
        # The tail of a spike is no drift.
        eligible = units.drifts & (self.seen >= self.drift.warmup) & ((self.rest >= _TAIL_OF_SPIKE) | (self.last_out < 0))
        if self._falls(*leans):
            eligible &= self._is_loss
        elif self._loss >= 0:  # nor one that began before the loss fell to where it is
            fallen = (self.drift.then - self.level[self._loss]) > -_FALLING * scale[self._loss]
            eligible &= self._is_loss | ~fallen
        # Over some 15 steps the norm of small batches' gradients wanders more than over some 500.
        larger = np.maximum(material, np.minimum(units.gradient_material, _DRIFT_SCALES * scale))
        return eligible, np.sqrt(factor), material, larger

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
