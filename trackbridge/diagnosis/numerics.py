"""Causes in the arithmetic: half-precision overflow, activation outliers."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, number

FP16_MAX = 65504.0


@rule("fp16-overflow", intervention="full-precision")
def fp16_overflow(view: View, case: Case) -> None:
    scales = view.near("train/loss_scale", 3)
    if not len(scales):
        return
    before = view.before("train/loss_scale", 1)
    if len(before) and np.nanmin(scales) < 0.9 * before[0]:
        case.add(SOLID, f"train/loss_scale fell from {number(before[0])} to {number(float(np.nanmin(scales)))} at the onset")
    skipped, earlier = view.near("optim/skipped", 3), view.before("optim/skipped", 1)
    if len(skipped) and len(earlier) and skipped.max() > earlier[0]:
        case.add(SOLID, f"the scaler skipped {int(skipped.max() - earlier[0])} updates at the onset")
    large = [(float(v.max()), name) for name in view.names if name.startswith("act/") and name.endswith("/max")
             if len(v := view.near(name, 0)) and np.isfinite(v).all()]  # fmt: skip
    if large and max(large)[0] > FP16_MAX / 4:
        case.add(SOLID, f"{max(large)[1]} is {number(max(large)[0])}; fp16 ends at 65504")
    if view.anomaly.kind == "nonfinite" and case.supports:
        case.add(WEAK, "non-finite values under a loss scaler")


@rule("activation-outliers", intervention="lower-lr=0.5")
def activation_outliers(view: View, case: Case) -> None:
    mover = view.anomaly.first_mover
    if mover is not None and mover[0].endswith("/kurtosis") and mover[1] < view.onset:
        case.add(STRONG, f"{mover[0]} left its band {view.onset - mover[1]} steps before the onset")
    grown: list[tuple[float, str]] = []
    for name in view.ending("/kurtosis"):
        values = view.before(name)
        if len(values) >= 16:
            first, last = np.median(values[: len(values) // 4]), np.median(values[-4:])
            if last > 5 and last > 2 * max(first, 1.0):
                grown.append((float(last / max(first, 1.0)), name))
    if grown:
        ratio, name = max(grown)
        case.add(SOLID, f"{name} had grown {number(ratio)} times before the onset ({len(grown)} modules grew)")
    elif view.ending("/kurtosis") and case.supports:
        case.against(WEAK, "no module's kurtosis had grown before")
