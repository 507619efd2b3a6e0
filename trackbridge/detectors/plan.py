"""Which series of a row are judged, and where they are: worked out once per schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trackbridge.detectors import nonfinite
from trackbridge.detectors.base import IntArray
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.records import Schema

_WIDE = ("/grad_norm", "/kurtosis", "/update_ratio")


def tracked(name: str) -> bool:
    """True for the series that have a band: those that raise anomalies, and per-layer ones that explain them."""
    return is_loss(name) or is_global_gradient(name) or (name.startswith(("layer/", "act/")) and name.endswith(_WIDE))


def followed(schema: Schema) -> list[str]:
    """The tracked series of a schema. The norm before clipping says more; the clipped one counts only where it is alone."""
    silent = "grad/norm_clipped" if "grad/norm" in schema.names else ""
    return [name for name in schema.names if tracked(name) and name != silent]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one schema maps to the detector's columns. Holds the schema so that its `id` stays taken."""

    schema: Schema
    places: dict[str, int]  # of every series, in the row
    columns: IntArray  # places of the followed series
    positions: IntArray  # their columns in the detector
    counts: IntArray  # places of the non-finite counters
    losses: IntArray
    skipped: int  # place of optim/skipped, or -1
    guarded: tuple[int, ...]  # places of the counts of updates and batches that the guard held back
    clipping: tuple[int, int]  # places of grad/norm and grad/norm_clipped, or -1
    witness: int  # column in the detector of the global gradient norm, or -1
    layers: IntArray  # columns in the detector of the per-layer gradient norms

    @classmethod
    def of(cls, schema: Schema, names: Sequence[str], series: Sequence[str]) -> Plan:
        """The plan of `schema`, of whose series `names` are followed; `series` are the detector's columns."""
        where = {name: i for i, name in enumerate(series)}
        places = {name: i for i, name in enumerate(schema.names)}
        return cls(
            schema,
            places,
            np.array([places[name] for name in names], np.int64),
            np.array([where[name] for name in names], np.int64),
            nonfinite.counters(schema),
            nonfinite.losses(schema),
            places.get("optim/skipped", -1),
            tuple(places[name] for name in ("guard/held", "guard/dropped") if name in places),
            (places.get("grad/norm", -1), places.get("grad/norm_clipped", -1)),
            next((where[name] for name in names if is_global_gradient(name)), -1),
            np.array([where[name] for name in names if name.endswith("/grad_norm")], np.int64),
        )
