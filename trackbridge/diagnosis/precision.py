"""Causes in the number format: what fp16 does not hold."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis import nonfinite
from trackbridge.diagnosis.onset import became, broken_gradients
from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import LATER, View, in_steps, number, times

FP16_MAX = 65504.0
_EDGE = FP16_MAX / 8  # what is below does not come to the end of fp16 in a step or two
_STEADY, _FAST, _SOON = 8, 1.1, 40  # steps of growth, its least factor in one, steps ahead


@rule("fp16-overflow", intervention="full-precision")
def fp16_overflow(view: View, case: Case) -> None:
    scales, before = view.near("train/loss_scale", 10), view.before("train/loss_scale", 1)
    if len(scales) and len(before) and scales.min() < 0.9 * before[0]:
        case.add(SOLID, f"train/loss_scale fell from {number(before[0])} to {number(float(scales.min()))} at the onset")
    skipped, earlier = view.near("optim/skipped", 10), view.before("optim/skipped", 1)
    if len(scales) and len(skipped) and len(earlier) and skipped.max() > earlier[0]:
        count = int(skipped.max() - earlier[0])
        case.add(SOLID if count < 4 else STRONG, f"the scaler skipped {count} updates from the onset on")
    edge = _near_the_edge(view)
    if edge is not None:
        case.add(SOLID, f"{edge[1]} had reached {number(edge[0])}; fp16 ends at 65504")
        broken = [name for name in view.family("act/", "/nonfinite") if (np.nan_to_num(view.near(name, 2), nan=1.0) > 0).any()]
        if broken:
            case.add(SOLID, f"{broken[0]} counts what did not fit")
    if view.anomaly.kind == "nonfinite" and case.supports:
        case.add(WEAK, "non-finite values under a loss scaler" if len(scales) else "then values were not finite")
    pace = _pace(view) if len(scales) and edge is None else None
    if pace is not None:
        name, factor, left = pace
        how = f"{name} grows {times(factor)} a step under a loss scaler"
        case.add(SOLID, f"{how}: fp16 does not hold it {in_steps(left)} later")
    gradients = broken_gradients(view)
    if gradients:
        how = f"{gradients[0]} {became(view, gradients[0])} while activations and loss were finite"
        case.add(WEAK, f"{how}: so does a gradient that its format does not hold (fp16 ends at 65504)")
    came = nonfinite.entry(view)
    largest = view.before(f"act/{came.site}/max", 1) if came is not None else np.empty(0)
    if came is not None and len(largest) and largest[0] < _EDGE:
        case.against(STRONG, f"{came.site}, where it began, had put out no more than {number(largest[0])} the step before")
    bad, at = view.batches.nonfinite()
    if bad:
        case.against(STRONG + WEAK, f"the batch of step {at} itself holds {bad} non-finite values")


def _pace(view: View) -> tuple[str, float, int] | None:
    """(series, its growth in a step, steps until it leaves what fp16 holds) of the activation that will do so first, where one
    has been growing from step to step up to the end of the window, and would within `_SOON` steps."""
    found = []
    for name in view.family("act/", "/max"):
        last = view.series(name)[1][-_STEADY - 1 :]
        if len(last) <= _STEADY or not (np.isfinite(last) & (last > 0)).all() or last[-1] >= FP16_MAX:
            continue
        factor = float((last[-1] / last[0]) ** (1 / _STEADY))
        if factor > _FAST and (np.diff(last) > 0).mean() > 0.8:
            found.append((float(np.log(FP16_MAX / last[-1]) / np.log(factor)), factor, name))
    left, factor, name = min(found, default=(np.inf, 0.0, ""))
    return (name, factor, int(np.ceil(left))) if left <= _SOON else None


def _near_the_edge(view: View) -> tuple[float, str] | None:
    """(value, series) of the largest activation around the onset, if it was close to what fp16 holds, and not beyond."""
    found = []
    for name in view.family("act/", "/max"):
        values = np.concatenate((view.before(name, 4), view.near(name, LATER)))
        values = values[np.isfinite(values)]
        if len(values) and _EDGE < values.max() < 1.5 * FP16_MAX:
            found.append((float(values.max()), name))
    return max(found, default=None)
