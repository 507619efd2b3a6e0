"""No step for a long time: a hung collective, a dead data worker, a file system that does not answer.

There is no row to judge then, so the caller says how long it has been waiting (`waiting`); this is no clock of ours. Gaps that
ended by themselves (an evaluation that was not announced with `run.pause`) teach how long a gap may be.
"""

from __future__ import annotations

from statistics import median
from typing import ClassVar

from trackbridge.config import StallConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign

_RECENT = 31
_LEAST = 10  # steps before the first judgement: the first ones compile
_LONGER = 2.0  # times the longest gap that ended by itself


class Stall(Monitor):
    NAME = "stall"
    KEPT: ClassVar[tuple[str, ...]] = ("recent", "seen", "longest", "told", "ended")
    CAUSAL = False

    def __init__(self, config: StallConfig) -> None:
        super().__init__()
        self.config = config
        self.recent: list[float] = []  # seconds of the latest steps
        self.seen = 0
        self.longest = 0.0
        self.told = False
        self.ended = -1

    def update(self, look: Look) -> Sign | None:
        seconds = look.finite("perf/step_s")
        if seconds is not None:
            self.seen += 1
            self.recent = [*self.recent, seconds][-_RECENT:]
            if self.seen > _LEAST:
                self.longest = max(self.longest, seconds)
        if self.told:
            self.told, self.ended = False, look.step
        return None

    def waiting(self, seconds: float, step: int) -> Sign | None:
        """Nothing has come for `seconds`; `step` is the one that is awaited."""
        if self.told or self.seen <= _LEAST:
            return None
        usual = median(self.recent)
        if seconds < max(self.config.seconds, self.config.factor * usual, _LONGER * self.longest):
            return None
        self.told, self.ended = True, -1
        words = f"no step for {seconds:.0f} s; one takes {usual:.3g} s"
        score, terms = seconds / max(usual, 1e-9), f"where a step takes {usual:.3g} s"
        return Sign("stall", "stall", "perf/step_s", step, seconds, usual, score, 0.8, words, terms=terms)

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None
