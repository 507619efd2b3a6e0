"""NaN and Inf: in any series of the row, or counted by the probes inside gradients and activations."""

from __future__ import annotations

import numpy as np

from trackbridge.detectors.base import BoolArray, IntArray
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.records import Row, Schema

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


def head(row: Row, bad: BoolArray) -> int:
    """The place of the series that tells the event: the loss if that is affected, else the gradient norm, else the first in the
    order of the row."""
    names = row.schema.names

    def rank(i: int) -> tuple[int, int]:
        return (0 if is_loss(names[i]) else 1 if is_global_gradient(names[i]) else 2, i)

    place: int = min(np.flatnonzero(bad).tolist(), key=rank)
    return place
