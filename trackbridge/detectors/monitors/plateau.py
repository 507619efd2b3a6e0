"""A loss that no longer falls. Off unless asked for: every loss flattens, and only its owner knows when that is too early.

The mean over a third of `steps` is compared with the best such mean so far. Where the learning rate has decayed, a flat loss is
what the schedule asked for.
"""

from __future__ import annotations

from typing import ClassVar

from trackbridge.config import PlateauConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign

_PARTS = 3
_DECAYED = 0.1  # share of the largest learning rate below which a flat loss is expected


class Plateau(Monitor):
    NAME = "plateau"
    KEPT: ClassVar[tuple[str, ...]] = ("total", "count", "best", "best_at", "parts", "worse", "peak", "told", "ended")
    CAUSAL = False

    def __init__(self, config: PlateauConfig) -> None:
        super().__init__()
        self.config = config
        self.total, self.count = 0.0, 0  # of the present part
        self.best, self.best_at = 0.0, -1
        self.parts = 0
        self.worse = 0  # parts since the best one
        self.peak = 0.0
        self.told = False
        self.ended = -1

    def update(self, look: Look) -> Sign | None:
        loss, rate = look.finite("train/loss"), look.finite("train/lr")
        if rate is not None:
            self.peak = max(self.peak, rate)
        if loss is None:
            return None
        self.total, self.count = self.total + loss, self.count + 1
        if self.count < max(self.config.steps // _PARTS, 1):
            return None
        mean, self.total, self.count = self.total / self.count, 0.0, 0
        self.parts += 1
        if self.parts == 1 or mean < self.best - self.config.least * abs(self.best):
            self.best, self.best_at, self.worse = mean, look.step, 0
            if self.told:
                self.told, self.ended = False, look.step
            return None
        self.worse += 1
        decayed = rate is not None and rate < _DECAYED * self.peak
        if self.told or self.worse < _PARTS or decayed:
            return None
        self.told, self.ended = True, -1
        words = f"the loss has not fallen by {self.config.least:.2g} of itself since step {self.best_at}"
        score = mean / self.best if self.best else 1.0
        terms = f"not below the {self.best:.4g} of step {self.best_at}"
        return Sign("plateau", "plateau", "train/loss", self.best_at + 1, mean, self.best, score, 0.3, words, terms=terms)

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None
