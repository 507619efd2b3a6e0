"""A row's values where the band detector wants them: its columns, added as new series appear."""

from __future__ import annotations

import math

import numpy as np

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import BoolArray, FloatArray
from trackbridge.detectors.plan import Plan, followed
from trackbridge.records import Row, Schema

_PLANS = 512  # schemas remembered


class Columns:
    """`values` and `present` have shape (n,), an element per series of the detector; those of the latest row."""

    def __init__(self, band: BandDetector) -> None:
        self._band = band
        self._plans: dict[int, Plan] = {}
        self._resize()

    def plan(self, schema: Schema) -> Plan:
        """Worked out once per schema."""
        return self._plans.get(id(schema)) or self._new(schema)

    def fill(self, row: Row, plan: Plan, judged: bool) -> None:
        """Take over the row's values; none is present if they are not `judged`."""
        self.present[:] = False
        if judged:
            self.values[plan.positions] = row.values[plan.columns]
            self._unclip(row, plan)
            self.present[plan.positions] = True

    def forget(self) -> None:
        """The detector's series have changed."""
        self._plans.clear()
        self._resize()

    def _new(self, schema: Schema) -> Plan:
        wanted, known = followed(schema), set(self._band.series)
        new = [name for name in wanted if name not in known]
        if new:
            self._band.bind((*self._band.series, *new))
            self._resize()
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[id(schema)] = Plan.of(schema, wanted, self._band.series)
        return plan

    def _resize(self) -> None:
        self.values: FloatArray = np.zeros(len(self._band.series))
        self.present: BoolArray = np.zeros(len(self._band.series), bool)

    def _unclip(self, row: Row, plan: Plan) -> None:
        """Layers' gradients are recorded as the optimizer used them; clipping would hide in all of them what one did."""
        if min(plan.clipping) < 0:
            return
        whole, clipped = (float(row.values[i]) for i in plan.clipping)
        if 0 < clipped < whole < math.inf:
            with np.errstate(over="ignore"):
                self.values[plan.layers] *= whole / clipped
