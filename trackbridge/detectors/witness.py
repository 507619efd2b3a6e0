"""What says too little alone: a value just beyond its bar that nothing beside it supports. The next value of the same excursion
(beyond `release`) tells it, and it is told with the worst of them; else nothing does.

A loss just beyond its bar needs another witness where there is one: the gradient norm of the same step, as far out either way.
A gradient norm needs the loss, where clipping left no more of it than a usual norm may be; its next value must be beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.columns import Columns
from trackbridge.detectors.plan import Plan
from trackbridge.detectors.units import is_loss
from trackbridge.records import Row

_SURE = 1.22  # times the threshold: a loss that is so far out needs nobody
_MOVES = 0.01  # sigmas from its expectation below which a gradient norm stands still


class Held(NamedTuple):
    """What waits."""

    onset: int
    step: int
    value: float
    score: float


class Witness:
    def __init__(self, band: BandDetector, columns: Columns) -> None:
        self._band = band
        self._columns = columns
        self._held: dict[str, Held] = {}

    def enough(self, v: Verdict, row: Row, verdicts: Sequence[Verdict]) -> bool:
        """Whether `v`, of a loss or a gradient norm, says enough with the other `verdicts` of its row; else it waits."""
        if v.kind != "spike":
            return True
        plan = self._columns.plan(row.schema)
        if is_loss(self._band.series[v.index]):
            enough = self._enough_loss(v, plan)
        else:
            beside = any(is_loss(self._band.series[w.index]) for w in verdicts)
            enough = beside or self._enough_norm(v, row, plan)
        if not enough:
            self._hold(v)
        return enough

    def _enough_loss(self, v: Verdict, plan: Plan) -> bool:
        sure = float(self._band.sigmas[v.index]) >= _SURE * self._band.settings.threshold
        return sure or not self._first(v) or not self._usual_gradient(plan)

    def _enough_norm(self, v: Verdict, row: Row, plan: Plan) -> bool:
        """Of a gradient norm while the loss is in its band."""
        whole, clipped = (float(row.values[i]) if i >= 0 else math.nan for i in plan.clipping)
        most = self._band.settings.grad_least * v.expected
        kept = clipped < whole and clipped <= most
        return not (self._first(v) and kept) and v.value > most

    def _first(self, v: Verdict) -> bool:
        """`v` is of the first value of its excursion."""
        return bool(self._band.run[v.index] == 1)

    def _usual_gradient(self, plan: Plan) -> bool:
        """The global gradient norm of this step is known, and in no way unusual. One that stands still, taken after a clip
        that always bites, says nothing."""
        band, at = self._band, plan.witness
        known = at >= 0 and bool(self._columns.present[at]) and int(band.seen[at]) > band.settings.warmup
        return known and _MOVES < abs(float(band.sigmas[at])) < band.settings.threshold

    def _hold(self, v: Verdict) -> None:
        """Keep the worst value of the excursion."""
        name = self._band.series[v.index]
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
