"""`scan`: the anomalies of a run that was logged by something else, or before trackbridge was there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.watch import Watch
from trackbridge.errors import UsageError
from trackbridge.records import Anomaly, FloatArray, Row, Schema
from trackbridge.scan.columns import Choice, choose
from trackbridge.scan.sources import Points, find

__all__ = ["Scan", "scan"]

LOSS, NORM, RATE = "train/loss", "grad/norm", "train/lr"


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found. `steps` (int64), `loss` and `grad_norm` (float64, NaN where a step has none; None: not logged) have one
    element per step that has a loss or a norm; `columns` says which of the source's columns they are."""

    source: str
    columns: dict[str, str]
    steps: np.ndarray
    loss: FloatArray
    grad_norm: FloatArray | None
    anomalies: list[Anomaly]


def scan(
    ref: str | Path,
    *,
    loss: str | None = None,
    step: str | None = None,
    grad_norm: str | None = None,
    settings: DetectionConfig | None = None,
) -> Scan:
    """Read the curve that `ref` names, whole and unsampled, and judge it causally, as if it came step by step.

    Args:
        ref: a CSV file, a TensorBoard log folder, an offline W&B run (folder or ``.wandb`` file), a trackbridge run folder,
            ``wandb:ENTITY/PROJECT/RUN_ID``, ``mlflow:RUN_ID`` or ``tensorboard:LOGDIR``.
        loss, step, grad_norm: the source's own names of these, where they cannot be guessed.

    Raises:
        UsageError: the reference is of no known form, holds nothing, or there is no loss; names the columns there are.
        ReferenceNotFoundError: nothing is there.
        MissingExtraError: the tracker's package is not installed.
    """
    source = find(str(ref), step)
    if not (columns := source.columns()):
        raise UsageError(f"{source.where} has no columns or no rows: there is nothing to judge")
    chosen = choose(columns, Choice(loss, grad_norm))
    if loss is None and len(several := source.runs(chosen[LOSS])) > 1:
        more = ", ..." if len(several) > 10 else ""
        raise UsageError(f"{source.where} holds {len(several)} runs, scan one of: {', '.join(several[:10])}{more}")
    series = {ours: source.read(theirs) for ours, theirs in chosen.items()}
    if not series[LOSS]:
        raise UsageError(f"{chosen[LOSS]!r} of {source.where} holds no number; name another column with --loss")
    steps = sorted({at for name in (LOSS, NORM) for at in series.get(name, {})})
    watch = Watch(settings)
    found: dict[str, Anomaly] = {}
    for row in _rows(steps, series):
        found.update({anomaly.id: anomaly for anomaly in watch.update(row)})
    found.update({anomaly.id: anomaly for anomaly in watch.finish()})
    norm = _column(steps, series[NORM]) if NORM in series else None
    return Scan(source.where, chosen, np.array(steps, np.int64), _column(steps, series[LOSS]), norm, list(found.values()))


def _rows(steps: list[int], series: dict[str, Points]) -> Iterator[Row]:
    schemas: dict[tuple[str, ...], Schema] = {}
    for number, step in enumerate(steps):
        names = tuple(name for name, points in series.items() if step in points)
        schema = schemas.setdefault(names, Schema(names))
        yield Row(number, step, 0.0, 0, schema, np.array([series[name][step] for name in names], np.float64))


def _column(steps: list[int], points: Points) -> FloatArray:
    return np.array([points.get(step, np.nan) for step in steps], np.float64)
