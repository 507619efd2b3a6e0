"""Steps whose update a gradient scaler skipped: their gradients say nothing about the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trackbridge.detectors.plan import Plan
from trackbridge.records import Row


class Skips:
    """`count`: of such steps so far."""

    def __init__(self) -> None:
        self.count = 0
        self._latest = -1.0  # optim/skipped, a running count; -1: not seen yet
        self._told: set[int] = set()

    def tell(self, step: int) -> None:
        """`step`, which is still to come, is one."""
        self._told.add(step)

    def skipped(self, row: Row, plan: Plan) -> bool:
        """Whether this step is one. A step that the guard left out is one whose loss was out of band: it is judged like any
        other."""
        skip = row.step in self._told
        self._told.discard(row.step)
        if plan.skipped >= 0:
            now = float(row.values[plan.skipped])
            guarded = any(row.values[i] > 0 for i in plan.guarded)
            skip |= now > max(self._latest, 0.0) and not guarded
            self._latest = now
        self.count += skip
        return skip

    def state_dict(self) -> dict[str, Any]:
        return {"amp_skips": self.count, "skipped": self._latest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._latest = state["amp_skips"], state["skipped"]
