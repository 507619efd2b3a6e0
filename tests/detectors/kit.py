"""Curves and rows for the detector tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trackbridge.detectors import Watch
from trackbridge.records import Anomaly, Row, Schema


def loss_curve(steps: int, seed: int = 0, sigma: float = 0.05, start: float = 8.0) -> np.ndarray:
    """A loss that falls as 1 / sqrt(step) to 2, with Gaussian noise."""
    return 2 + start / np.sqrt(np.arange(1, steps + 1)) + sigma * np.random.default_rng(seed).standard_normal(steps)


def rows(series: Mapping[str, Sequence[float] | np.ndarray], start: int = 0, attempt: int = 0) -> list[Row]:
    """Step rows. None leaves a series out of that row; rows with the same series share a schema."""
    schemas: dict[tuple[str, ...], Schema] = {}
    out = []
    for i in range(max(len(values) for values in series.values())):
        now = {name: values[i] for name, values in series.items() if values[i] is not None}
        names = tuple(now)
        schema = schemas.setdefault(names, Schema(names))
        out.append(Row(i, start + i, 1000.0 + i, attempt, schema, np.array([float(v) for v in now.values()])))
    return out


def watch_all(watch: Watch, rows: Iterable[Row], finish: bool = True) -> list[Anomaly]:
    """The latest version of every anomaly, in order of detection."""
    found: dict[str, Anomaly] = {}
    for row in rows:
        for anomaly in watch.update(row):
            found[anomaly.id] = anomaly
    for anomaly in watch.finish() if finish else ():
        found[anomaly.id] = anomaly
    return list(found.values())
