"""Ranks that should hold the same parameters and do not: silent corruption.

Data-parallel replicas start equal and apply equal updates, so their bits stay equal. What breaks that is a fault of memory, of
an arithmetic unit or of a link, or a loop that updates ranks differently. It need not show in the loss and does not go away:
every all-reduce from then on mixes gradients of two models.
"""

from __future__ import annotations

from typing import ClassVar

from trackbridge.detectors.monitors.base import Look, Monitor, Sign

FAULT = "hardware-fault"
SERIES = "param/replicas_differ"


class Replicas(Monitor):
    """Follows the count of parameters whose checksums differ between ranks; only merged rows have it, on its own cadence."""

    NAME = "replicas"
    KEPT: ClassVar[tuple[str, ...]] = ("clean", "told", "ended")

    def __init__(self) -> None:
        super().__init__()
        self.clean = -1  # the newest step at which all were equal
        self.told = False
        self.ended = -1

    def update(self, look: Look) -> Sign | None:
        count = look.finite(SERIES)
        if count is None:
            return None
        if count <= 0:
            self.clean = look.step
            if self.told:
                self.told, self.ended = False, look.step
            return None
        if self.told:
            return None
        self.told, self.ended = True, -1
        since = f"since step {self.clean}" if self.clean >= 0 else "from the start"
        words = f"{count:g} parameters differ in their bits between ranks that should hold the same, {since}"
        terms = "where ranks hold the same parameters and none may differ"
        return Sign(FAULT, "divergence", SERIES, look.step, count, 0.0, count, 0.9, words, self.clean + 1, terms)

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None
