"""Tables of a capsule as JSON with columns and data, which MLflow shows as tables and anybody can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trackbridge.capsule import SpikeCapsule
from trackbridge.rundir import dumps

STATISTICS = {
    "layer": ("grad_norm", "grad_max", "weight_norm", "update_ratio"),
    "act": ("kurtosis", "max", "rms"),
}
LAYERS = "tables/layers.json"


def layers(capsule: SpikeCapsule) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows): of each layer and statistic the median before the onset, the value at the onset, and how many times
    the one is the other; what grew most comes first. Absent values are None."""
    columns = ["layer", "statistic", "before", "at the onset", "times", "largest after"]
    frame, onset = capsule.layers, capsule.anomaly.onset
    rows: list[list[Any]] = []
    for family, statistics in STATISTICS.items():
        part = frame[frame["family"] == family]
        for statistic in (name for name in statistics if name in part.columns):
            values = part[["step", "layer", statistic]].dropna()
            before = values[values["step"] < onset].groupby("layer")[statistic].median()
            at = values[values["step"] == onset].set_index("layer")[statistic]
            after = values[values["step"] >= onset].groupby("layer")[statistic].max()
            for layer in part["layer"].unique():
                old, new, most = (_number(series.get(layer)) for series in (before, at, after))
                times = new / old if old and new is not None else None
                rows.append([layer, statistic, old, new, times, most])
    rows.sort(key=lambda row: (row[4] is not None, abs(row[4] or 0.0)), reverse=True)
    return columns, rows


def write(folder: Path, capsule: SpikeCapsule) -> None:
    """``tables/layers.json`` in `folder`, unless there are no layers."""
    columns, rows = layers(capsule)
    if rows:
        path = folder / LAYERS
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps({"columns": columns, "data": rows}), encoding="utf-8")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
