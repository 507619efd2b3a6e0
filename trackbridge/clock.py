"""The wall time of a step, with evaluation and saving taken out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class StepClock:
    """Times from one `lap` to the next, minus pauses. Seconds, from a monotonic clock that tests may inject."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self._pauses = 0
        self._paused_at = 0.0
        self._paused = 0.0

    @property
    def paused(self) -> bool:
        return self._pauses > 0

    def lap(self) -> float:
        """Seconds of the step that ends now; the next one starts."""
        now = self._now()
        if self._pauses:
            self._paused += now - self._paused_at
            self._paused_at = now
        seconds = now - self._started - self._paused
        self._started, self._paused = now, 0.0
        return max(seconds, 0.0)

    def pause(self) -> None:
        """Stand still until as many `resume`."""
        if not self._pauses:
            self._paused_at = self._now()
        self._pauses += 1

    def resume(self) -> float:
        """Go on; returns how long the outermost pause was, 0 inside another one."""
        self._pauses = max(self._pauses - 1, 0)
        if self._pauses:
            return 0.0
        seconds = self._now() - self._paused_at
        self._paused += seconds
        return seconds


def compiled_graphs() -> int:
    """How many graphs the compiler has made in this process: a step in which it grows measures the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"].get("unique_graphs", 0) if dynamo is not None else 0
