"""The wall time of a step, with evaluation and saving taken out."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Times from one `lap` to the next, minus pauses. Seconds, from a monotonic clock that tests may inject."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self._paused_at: float | None = None
        self._paused = 0.0

    def lap(self) -> float:
        """Seconds of the step that ends now; the next one starts."""
        now = self._now()
        if self._paused_at is not None:
            self._paused += now - self._paused_at
            self._paused_at = now
        seconds = now - self._started - self._paused
        self._started, self._paused = now, 0.0
        return max(seconds, 0.0)

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self._now()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused += self._now() - self._paused_at
            self._paused_at = None
