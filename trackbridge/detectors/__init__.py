"""Anomaly detection: `Watch` for a live run, `detect` for arrays. Both run the same code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from trackbridge.config import DetectionConfig
from trackbridge.detectors.watch import Watch
from trackbridge.errors import ConfigError, UsageError, nearest
from trackbridge.records import Anomaly, Row, Schema

__all__ = ["Watch", "detect"]


def detect(
    steps: Sequence[int] | npt.ArrayLike,
    loss: Sequence[float] | npt.ArrayLike,
    grad_norm: Sequence[float] | npt.ArrayLike | None = None,
    settings: DetectionConfig | dict[str, Any] | None = None,
) -> list[Anomaly]:
    """The anomalies of a finished curve, in order of detection, judged causally: the very code that watches a live run.

    `steps` and `loss` have shape (n,); `grad_norm` too, NaN-free where it is unknown is not possible, so leave it out.
    Raises `UsageError` when the lengths differ and `ConfigError` for bad settings.
    """
    at = np.asarray(steps, np.float64).ravel()
    columns = [np.asarray(loss, np.float64).ravel()]
    names = ["train/loss"]
    if grad_norm is not None:
        columns.append(np.asarray(grad_norm, np.float64).ravel())
        names.append("grad/norm")
    if any(len(column) != len(at) for column in columns):
        raise UsageError(f"steps and values differ in length: {[len(at), *map(len, columns)]}; pass one value per step")
    watch = Watch(_settings(settings))
    schema = Schema(tuple(names))
    found: dict[str, Anomaly] = {}
    for i, values in enumerate(np.stack(columns, axis=1)):
        for anomaly in watch.update(Row(i, int(at[i]), 0.0, 0, schema, values)):
            found[anomaly.id] = anomaly
    for anomaly in watch.finish():
        found[anomaly.id] = anomaly
    return list(found.values())


def _settings(given: DetectionConfig | dict[str, Any] | None) -> DetectionConfig:
    if given is None or isinstance(given, DetectionConfig):
        return given or DetectionConfig()
    try:
        return DetectionConfig(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        hint = nearest(key, DetectionConfig.model_fields) if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"detection setting {key!r}: {first['msg'].lower()}{hint}") from None
