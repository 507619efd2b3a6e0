"""A gradient scaler whose scale collapses: half precision can no longer hold the gradients.

A scaler starts too high and searches: the halvings before its first calm stretch are part of that, and no part of a later fall.
After it, one halving now and then is normal (the scale grows until it overflows); many without growth in between are not.
"""

from __future__ import annotations

from typing import ClassVar

from trackbridge.config import LossScaleConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign

FAULT = "fp16-overflow"


class LossScale(Monitor):
    NAME = "loss_scale"
    KEPT: ClassVar[tuple[str, ...]] = ("last", "high", "high_at", "still", "settled", "told", "ended")

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__()
        self.config = config
        self.last = 0.0
        self.high = 0.0  # the scale from which the present fall began
        self.high_at = 0  # the step of its last use
        self.still = 0  # rows since the scale last fell
        self.settled = False
        self.told = False
        self.ended = -1

    def update(self, look: Look) -> Sign | None:
        cfg = self.config
        scale = look.finite("train/loss_scale")
        if scale is None or scale <= 0:
            return None
        fell = 0 < scale < self.last
        self.still = 0 if fell else self.still + 1
        if self.still >= cfg.calm and not self.settled:
            self.settled, self.high = True, scale
        if self.still >= cfg.within or (not fell and (scale > self.last or self.high == 0)):
            self.high, self.high_at = scale, look.step  # what fell before has no part in the next fall
            if self.told:
                self.told, self.ended = False, look.step
        elif not fell and scale == self.high:
            self.high_at = look.step
        self.last = scale
        collapsed = fell and (self.high / scale >= cfg.fall or scale < cfg.least)
        if not (self.settled and collapsed and not self.told):
            return None
        self.told, self.ended = True, -1
        return Sign(
            FAULT, "shift", "train/loss_scale", self.high_at + 1, scale, self.high, self.high / scale, 0.6,
            f"the loss scale fell from {self.high:g} to {scale:g} in {look.step - self.high_at} steps",
            terms=f"{self.high / scale:g} times less than the {self.high:g} of {look.step - self.high_at} steps before",
        )  # fmt: skip

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None
