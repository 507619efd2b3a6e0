"""One NaN that clipping has spread over all gradients: no layer is blamed, and the anomaly says why."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trackbridge.config import DetectionConfig
from trackbridge.detectors.nonfinite import UNLOCATED
from trackbridge.detectors.watch import Watch
from trackbridge.records import Anomaly, Row, Schema

NAMES = ("train/loss", "grad/norm", "grad/unlocated", "layer/a/grad_norm", "layer/a/grad_nonfinite", "layer/a/weight_nonfinite")


def told(unlocated: float, weights: float = 0.0) -> Anomaly:
    watch = Watch(DetectionConfig())
    values = np.array([2.0, math.nan, unlocated, math.nan, 5.0, weights])
    anomalies = watch.update(Row(0, 0, 0.0, 0, Schema(NAMES), values))
    assert len(anomalies) == 1 and anomalies[0].kind == "nonfinite"
    return anomalies[0]


@pytest.mark.parametrize("weights", [0.0, 2.0])
def test_attribution_is_unknown(weights: float) -> None:
    located, unknown = told(0.0, weights), told(1.0, weights)
    assert UNLOCATED in unknown.notes and UNLOCATED not in located.notes
    assert "layer/a/grad_norm" in repr(located) and "layer/a/grad_norm" not in repr(unknown)
    assert ("layer/a/weight_nonfinite" in repr(unknown)) == (weights > 0)
