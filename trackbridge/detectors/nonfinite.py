"""NaN and Inf as events: in any series of the row, or counted by the probes inside gradients and activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trackbridge.detectors.base import BoolArray, IntArray
from trackbridge.detectors.episodes import Episode
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.records import Anomaly, Row, Schema

_COUNTERS = ("/grad_nonfinite", "/weight_nonfinite", "/nonfinite")
_TOTALS = ("grad/nonfinite", "param/nonfinite")
UNLOCATED = "attribution unknown: all gradients are non-finite in every element, and were not counted before clipping"


def counters(schema: Schema) -> IntArray:
    """Places of the series that count non-finite elements."""
    return np.array(
        [
            i for i, name in enumerate(schema.names)
            if name in _TOTALS or (name.startswith(("layer/", "act/")) and name.endswith(_COUNTERS))
        ],
        np.int64,
    )  # fmt: skip


def losses(schema: Schema) -> IntArray:
    """Places of the losses: what must be finite even in a step whose update a gradient scaler skipped."""
    return np.array([i for i, name in enumerate(schema.names) if is_loss(name)], np.int64)


def broken(row: Row, counts: IntArray, only: IntArray | None) -> BoolArray:
    """Which series of the row are non-finite or count non-finite elements; only those at `only`, if given."""
    bad = ~np.isfinite(row.values)
    if counts.size:
        bad[counts] |= row.values[counts] > 0
    if only is not None:
        kept = np.zeros_like(bad)
        kept[only] = bad[only]
        return kept
    return bad


def located(row: Row, bad: BoolArray) -> tuple[BoolArray, tuple[str, ...]]:
    """`bad` without the gradients of single layers where ``grad/unlocated`` says that they do not tell where it began, and then
    a note that says so."""
    names = row.schema.names
    if "grad/unlocated" not in names or not row.values[names.index("grad/unlocated")]:
        return bad, ()
    silent = np.array([name.startswith("layer/") and name.rpartition("/")[2].startswith("grad_") for name in names])
    return bad & ~silent, (UNLOCATED,)


def begin(name: str, row: Row, bad: BoolArray, expected: Callable[[str], float], notes: tuple[str, ...]) -> Episode:
    """The event `name` that starts with this row. It is told by the loss if that is affected, else the gradient norm, else the
    first series affected in the order of the row."""
    names = row.schema.names

    def rank(i: int) -> tuple[int, int]:
        return (0 if is_loss(names[i]) else 1 if is_global_gradient(names[i]) else 2, i)

    head = min(np.flatnonzero(bad).tolist(), key=rank)
    anomaly = Anomaly(
        id=name, kind="nonfinite", step=row.step, onset=row.step, severity=1.0,
        series=names[head], value=float(row.values[head]), expected=expected(names[head]), score=math.inf,
        attempt=row.attempt, time=row.time, notes=notes,
    )  # fmt: skip
    return Episode(anomaly)


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
