"""The run has become slower, and stays so.

Judged per unit of work, so that a larger batch is not a slower one: seconds per token, per sample where tokens are unknown,
per step where nothing is. The median of the latest steps counts: a checkpoint or a slow fetch now and then is no trouble, and
so is a short one.
"""

from __future__ import annotations

import math
from statistics import median
from typing import ClassVar

from trackbridge.config import ThroughputConfig
from trackbridge.detectors.monitors.base import SCHEDULED, Look, Monitor, Sign

_RATES = ("perf/tokens_per_s", "perf/samples_per_s")
_SECONDS = "perf/step_s"
_RECENT = 15
_FIRST = 40  # steps that set the usual pace, after as many of warm-up and compilation
_FOLLOW = 1 / 200
_ACCEPT = 1000  # slow steps after which the pace is the new usual one


class Throughput(Monitor):
    NAME = "throughput"
    KEPT: ClassVar[tuple[str, ...]] = ("series", "recent", "took", "seen", "usual", "slow", "lost", "since", "told", "ended")
    CAUSAL = False

    def __init__(self, config: ThroughputConfig) -> None:
        super().__init__()
        self.config = config
        self.told, self.ended = False, -1
        self.series = ""
        self._start()

    def _start(self) -> None:
        self.recent: list[float] = []  # logarithms of seconds per unit of work
        self.took: list[float] = []
        self.seen = 0
        self.usual = 0.0
        self.slow = 0  # slow steps in a row
        self.lost = 0.0  # the seconds they took
        self.since = 0

    def changed(self, event: str) -> None:
        if event not in SCHEDULED:
            self._start()

    def update(self, look: Look) -> Sign | None:
        seconds = look.finite(_SECONDS)
        name = next((name for name in _RATES if name in look.places), _SECONDS)
        rate = look.finite(name)
        if rate is None or rate <= 0 or seconds is None:
            return None
        if name != self.series:
            self.series = name
            self._start()
        pace = math.log(rate) if name == _SECONDS else -math.log(rate)
        self.seen += 1
        self.recent = [*self.recent, pace][-_RECENT:]
        self.took = [*self.took, seconds][-_RECENT:]
        if self.seen < 2 * _FIRST:
            if self.seen >= _FIRST:
                self.usual += (pace - self.usual) / (self.seen - _FIRST + 1)
            return None
        now = median(self.recent)
        if now - self.usual < -math.log1p(-self.config.drop):
            self.usual += _FOLLOW * (now - self.usual)
            self.slow, self.lost = 0, 0.0
            if self.told:
                self.told, self.ended = False, look.step
            return None
        self.since = look.step if self.slow == 0 else self.since
        self.slow, self.lost = self.slow + 1, self.lost + min(seconds, 3 * median(self.took))  # a checkpoint is not lost time
        if self.slow >= _ACCEPT:
            self.usual, self.slow = now, 0
        if self.told or self.slow < self.config.steps or self.lost < self.config.seconds:
            return None
        self.told, self.ended = True, -1
        sign = 1 if name == _SECONDS else -1
        expected, value = math.exp(sign * self.usual), math.exp(sign * now)
        factor = math.exp(now - self.usual)
        words = f"{factor:.3g} times slower for {self.slow} steps, {self.lost:.0f} s"
        terms = f"{factor:.3g} times slower than the usual {expected:.4g}"
        return Sign("slow", "throughput", name, self.since, value, expected, factor, 0.4, words, terms=terms)

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None
