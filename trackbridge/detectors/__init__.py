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
from trackbridge.records import Anomaly, FloatArray, Row, Schema

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
    at = _numbers("steps", steps)
    if not np.isfinite(at).all() or (np.abs(at) > 2**53).any():
        raise UsageError("steps must be finite whole numbers")
    columns = [_numbers("loss", loss)]
    names = ["train/loss"]
    if grad_norm is not None:
        columns.append(_numbers("grad_norm", grad_norm))
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


def _numbers(what: str, given: Any) -> FloatArray:
    try:
        return np.asarray(given, np.float64).ravel()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{what} must be a sequence of numbers, one per step, not {type(given).__name__}") from None


def _settings(given: DetectionConfig | dict[str, Any] | None) -> DetectionConfig:
    if given is None or isinstance(given, DetectionConfig):
        return given or DetectionConfig()
    if not isinstance(given, dict):
        raise ConfigError(f"settings must be a DetectionConfig or a dict of its fields, not {type(given).__name__}")
    try:
        return DetectionConfig(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        hint = nearest(key, DetectionConfig.model_fields) if first["type"] == "extra_forbidden" else ""
        if first["type"] == "value_error":
            raise ConfigError(f"detection setting {key!r}: {first['ctx']['error']}") from None
        raise ConfigError(f"detection setting {key!r}: {first['msg'].lower()}{hint}") from None
