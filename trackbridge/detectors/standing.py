"""What stays NaN for long, apart from what breaks later."""

from __future__ import annotations

from typing import Any

import numpy as np

from trackbridge.detectors.base import BoolArray
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.records import Row


class Standing:
    """What has been broken for long, and so must not hide that the loss or the gradient norm breaks now."""

    def __init__(self) -> None:
        self._latest: set[str] = set()  # broken in the latest row
        self._standing: set[str] = set()  # broken since before the present event began

    def apart(self, row: Row, bad: BoolArray, *, skip: bool) -> BoolArray:
        """`bad` without what stands; what is finite again stands no more. A step that was skipped shows losses only."""
        if not self._standing:
            return bad
        names = row.schema.names
        stands = np.array([name in self._standing for name in names], bool)
        self._standing -= {names[i] for i in np.flatnonzero(stands & ~bad).tolist() if not skip or is_loss(names[i])}
        left: BoolArray = bad & ~stands
        return left

    def anew(self, row: Row, bad: BoolArray, *, late: bool, skip: bool) -> BoolArray:
        """`bad` of a new event, where a loss or the gradient norm broke in this row, too `late` for the event under way: what
        was broken in the row before stands from now on. Else `bad` itself."""
        before = self._latest
        if not before and not bad.any():
            return bad
        now = {row.schema.names[i] for i in np.flatnonzero(bad).tolist()}
        self._latest = now | {name for name in before if skip and not is_loss(name)}
        if late and any(is_loss(name) or is_global_gradient(name) for name in now - before):
            self._standing |= now & before
            return self.apart(row, bad, skip=skip)
        return bad

    def state_dict(self) -> dict[str, Any]:
        return {"latest": sorted(self._latest), "standing": sorted(self._standing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._latest, self._standing = set(state.get("latest", ())), set(state.get("standing", ()))
