"""What says too little alone: a value just beyond its bar that nothing beside it supports. The next value of the same excursion
(beyond `release`) tells it, and it is told with the worst of them; else nothing does.

A loss just beyond its bar needs another witness where there is one: the gradient norm of the same step, as far out either way.
A gradient norm needs the loss, where clipping left no more of it than a usual norm may be; its next value must be beyond that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from trackbridge.config import DetectionConfig
from trackbridge.detectors.base import Verdict

SURE = 1.22  # times the threshold: a loss that is so far out needs nobody


class Held(NamedTuple):
    """What waits."""

    onset: int
    step: int
    value: float
    score: float


class Witness:
    def __init__(self, settings: DetectionConfig) -> None:
        self._settings = settings
        self._held: dict[str, Held] = {}

    def enough_loss(self, name: str, v: Verdict, *, first: bool, far: float, usual: bool) -> bool:
        """Whether a loss out of its band says enough; else it waits. `first`: of its excursion. `far`: plain sigmas above
        expectation. `usual`: so is the gradient norm."""
        enough = not first or not usual or far >= SURE * self._settings.threshold
        if not enough:
            self._hold(name, v)
        return enough

    def enough_norm(self, name: str, v: Verdict, *, first: bool, whole: float, clipped: float) -> bool:
        """Whether a gradient norm out of its band, while the loss is in its own, says enough; else it waits. `whole`,
        `clipped`: before and after clipping, NaN where not known."""
        most = self._settings.grad_least * v.expected
        kept = clipped < whole and clipped <= most
        enough = not (first and kept) and v.value > most
        if not enough:
            self._hold(name, v)
        return enough

    def _hold(self, name: str, v: Verdict) -> None:
        """Keep the worst value of the excursion."""
        known = self._held.get(name)
        if known is None or known.onset != v.onset or known.score < v.score:
            self._held[name] = Held(v.onset, v.step, v.value, v.score)

    def held(self, name: str, onset: int) -> Held | None:
        """What waited in the excursion that is told now."""
        known = self._held.pop(name, None)
        return known if known is not None and known.onset == onset else None

    def state_dict(self) -> dict[str, Any]:
        return {name: list(held) for name, held in self._held.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = {name: Held(*held) for name, held in state.items()}
