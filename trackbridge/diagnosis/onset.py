"""What happened in the step of the onset, as far as what is measured in every step tells."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis import trends
from trackbridge.diagnosis.data import input_oddities
from trackbridge.diagnosis.view import JUMPED, LATER, View
from trackbridge.diagnosis.weights import FEW


def in_one_step(view: View) -> bool:
    """Something that is measured in every step jumped at the onset. Between two measurements of a weight there are several
    steps, in which it may as well have grown."""
    if view.first_jump is not None or (view.loss_jump or 0.0) > JUMPED or lone_gradient(view) is not None:
        return True
    return view.anomaly.kind == "nonfinite" or (view.jump("grad/norm") or 0.0) > JUMPED


def lone_gradient(view: View) -> tuple[str, float] | None:
    """(series, sigmas) of the only layer whose gradient jumped at the onset, or at the step before it. An infinity is no jump
    of a healthy number: see `broken_gradients`."""
    for step in (0, 1):
        found: dict[str, float] = {}
        for name in view.family("layer/", "/grad_norm"):
            steps, values = view.series(name)
            z = trends.jump(view.before(name, 100)[: -step or None], values[steps == view.onset - step])
            if z is not None:
                found[name] = z
        if np.isinf(list(found.values())).any():
            continue
        ordered = sorted(found, key=lambda name: found[name], reverse=True)
        if len(ordered) < 2 or found[ordered[0]] < 2 * JUMPED or found[ordered[1]] > JUMPED / 2:
            continue
        if step or (view.loss_jump or 0.0) < JUMPED:
            return ordered[0], found[ordered[0]]
    return None


def broken_gradients(view: View) -> list[str]:
    """Series of the layers whose gradients were not finite at the onset, and had been before, where the loss and every
    activation of the same step were: it began in the backward pass."""
    loss = view.at("train/loss")
    outputs = [view.at(name) or 0.0 for name in view.family("act/", "/nonfinite")]
    if (loss is not None and not np.isfinite(loss)) or any(outputs):
        return []
    found = [name for name in view.family("layer/", "/grad_norm") if len(view.before(name)) >= trends.LEAST]
    return [name for name in found if (now := view.at(name)) is not None and not np.isfinite(now)]


def became(view: View, name: str) -> str:
    """``became infinite`` or ``became NaN``. Clipping divides an infinity by the norm, which leaves a NaN."""
    return "became infinite" if np.inf in (abs(view.at(name) or 0.0), view.at("grad/norm")) else "became NaN"


def still_out(view: View) -> bool:
    """The series that jumped first is still out some steps later."""
    if view.first_jump is None:
        return False
    name = view.first_jump[1]
    shift = 3.0 if name.endswith("/kurtosis") else 0.0
    z = trends.jump(view.before(name, 100) + shift, view.near(name, LATER)[-3:] + shift)
    return z is not None and z > JUMPED


def larger_output(view: View) -> tuple[str, float] | None:
    """(module, factor) where the embedding or the head is the first module that jumped, in all of what it puts out, not in a
    few elements; the batch is as usual; and it lasts. So its weight changed, measured yet or not."""
    first = view.first_jump
    if first is None or not view.batches.known or input_oddities(view) or not still_out(view):
        return None
    site = view.jumps[first[0]][0]
    top, mean = view.rise(f"act/{site}/max"), view.rise(f"act/{site}/rms")
    if not view.is_outer(f"act/{site}/rms") or top is None or mean is None or mean < 2.0 or top > FEW * mean:
        return None
    return site, mean
