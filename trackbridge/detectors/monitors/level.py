"""A level that stays up, or a slow climb, that no single value gives away.

The band judges value by value, and a series whose ordinary values are heavy-tailed has a wide one. Two comparisons of
medians do not mind tails:

    step     the latest 6 values against the 24 before them: all are up, and their median by `step` scales
    climb    the latest 12 values against 8 values some 40 steps ago: up by `climb` scales, and on the way in between

A scale is the larger of the median deviation of the 24 values and that of their differences, over sqrt(2): neither a trend nor
correlated noise makes it small. A rise must also be worth `share` of the loss (`factor` times a gradient norm, which grows by
itself while a net learns: it counts only while the loss does not fall).
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from trackbridge.config import LevelConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign

_RECENT, _BASE, _LONG = 6, 24, 48
_KEPT = _LONG + 8
_EVERY = 4  # steps between two looks for a climb
_SIGMA = 1.4826
_LEAST, _LEAST_LOG = 0.009, 0.1  # of the level; in log space: smaller scales are not believed, as in the band
_HIGH, _MUCH = 3.5, 0.5  # scales (of before or after, whichever is noisier) and share of a climb of the loss that tell it too
_LOSS, _NORM = "train/loss", "grad/norm"


class Level(Monitor):
    """Follows ``train/loss`` and ``grad/norm``, the latter on its logarithm."""

    NAME = "level"
    KEPT: ClassVar[tuple[str, ...]] = ("values", "steps", "told", "ended")

    def __init__(self, config: LevelConfig) -> None:
        super().__init__()
        self.config = config
        self.values: dict[str, list[float]] = {}
        self.steps: dict[str, list[int]] = {}
        self.told: dict[str, Any] = {}  # of what is told: series, the level before, half the way back to it, values since
        self.ended = -1

    def changed(self, event: str) -> None:
        """A known change of regime: what was is no measure any more. A resume is none."""
        if event != "resume":
            self.values, self.steps = {}, {}

    def update(self, look: Look) -> Sign | None:
        found = None
        for name in (_LOSS, _NORM):
            value = look.finite(name)
            if value is None or (name == _NORM and value <= 0):
                continue
            values, steps = self.values.setdefault(name, []), self.steps.setdefault(name, [])
            values.append(math.log(value) if name == _NORM else value)
            steps.append(look.step)
            del values[:-_KEPT], steps[:-_KEPT]
            if self.told.get("series") == name:
                self._goes_on(values, look.step)
            elif not self.told and found is None:
                found = self._step(name) or (self._climb(name) if look.step % _EVERY == 0 else None)
        return found

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None

    def _goes_on(self, values: list[float], step: int) -> None:
        """Watch for the way back; a level that is kept for long is how it is now."""
        self.told["since"] += 1
        if median(values[-3:]) < self.told["back"]:
            self.told, self.ended = {}, step
        elif self.told["since"] > _LONG:
            self.told = {}

    def _step(self, name: str) -> Sign | None:
        values = self.values[name]
        if len(values) < _BASE + _RECENT:
            return None
        recent, base = values[-_RECENT:], values[-_BASE - _RECENT : -_RECENT]
        lowest = min(recent)
        if lowest <= base[-1] and lowest <= base[-2]:  # nearly always, and cheap
            return None
        level, height = median(base), median(recent)
        scale = _scale(base, level, self._least(name, level))
        low = lowest <= level + 1.5 * scale or height - level <= self.config.step * scale
        if low or not self._matters(name, level, height, base, self.config.share, self.config.step):
            return None
        return self._sign(name, "shift", -_RECENT, level, height, scale, f"{_RECENT} values in a row")

    def _climb(self, name: str) -> Sign | None:
        values = self.values[name]
        if len(values) < _KEPT:
            return None
        old, middle, recent = values[:8], values[24:32], values[-12:]
        level, between, height = median(old), median(middle), median(recent)
        if between <= level + 0.1 * (height - level) or between >= height:  # a step, or already over
            return None
        base = values[:_BASE]
        scale = _scale(base, median(base), self._least(name, level))
        cfg = self.config
        far = height - level > cfg.climb * scale and self._matters(name, level, height, base, cfg.climb_share, cfg.climb)
        high = name == _LOSS and height - level > _MUCH * abs(level)
        high = high and height - level > _HIGH * max(scale, _scale(values[-_BASE:], height, self._least(name, height)))
        if not (far or high) or (name == _NORM and self._fell()):
            return None
        return self._sign(name, "drift", 0, level, height, scale, f"a climb over {_LONG} values")

    def _fell(self) -> bool:
        """The loss came down while the gradient norm climbed: a net that learns."""
        loss = self.values.get(_LOSS, [])
        if len(loss) < _KEPT:
            return False
        before = median(loss[:8])
        return median(loss[-12:]) < before - _scale(loss[:_BASE], median(loss[:_BASE]), _LEAST * abs(before))

    def _least(self, name: str, level: float) -> float:
        return _LEAST_LOG if name == _NORM else _LEAST * abs(level)

    def _matters(self, name: str, level: float, height: float, base: list[float], share: float, bar: float) -> bool:
        if name == _LOSS:
            return height - level > share * abs(level) and _out_in_logs(level, height, base, bar)
        loss = self.values.get(_LOSS, [])
        falls = len(loss) >= _BASE and median(loss[-8:]) < median(loss[-_BASE:-8])
        return height - level > math.log(self.config.factor) and not falls

    def _sign(self, name: str, kind: str, place: int, level: float, height: float, scale: float, how: str) -> Sign:
        self.told = {"series": name, "level": level, "back": level + 0.25 * (height - level), "since": 0}
        self.ended = -1
        score = (height - level) / scale
        onset = self.steps[name][place if place else 8]
        plain = math.exp if name == _NORM else float
        now, before = plain(height), plain(level)
        severity = min(0.9, math.log10(max(score, 1.0)) / 2)
        words = f"{name} went from {before:.3g} to {now:.3g}, {how}"
        return Sign("level", kind, name, onset, now, before, score, severity, words)


def _out_in_logs(level: float, height: float, base: list[float], bar: float) -> bool:
    """The noise of a small positive loss is a share of it: there the rise must stand out in logarithms too."""
    if min(base) <= 0 or level <= 0:
        return True
    logs = [math.log(value) for value in base]
    return math.log(height / level) > bar * _scale(logs, median(logs), _LEAST)


def _scale(base: list[float], level: float, least: float) -> float:
    spread = median(abs(value - level) for value in base)
    rough = median(abs(b - a) for a, b in pairwise(base)) / math.sqrt(2)
    return max(_SIGMA * spread, _SIGMA * rough, least, 1e-12)
