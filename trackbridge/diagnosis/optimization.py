"""Causes in the optimization: learning rate, exploding gradients, optimizer state."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, in_steps, number


@rule("lr-discontinuity", intervention="lower-lr=0.5")
def lr_discontinuity(view: View, case: Case) -> None:
    jump = view.lr_jump
    if jump is None:
        return
    factor, step = jump
    if factor <= 1.5:
        case.against(SOLID, "train/lr is smooth around the onset")
        return
    case.add(STRONG, f"train/lr rose {number(factor)} times at step {step}, {in_steps(view.onset - step)} before the onset")
    moved = view.rise("optim/update_ratio", 10)
    if moved is not None and moved > 1.5:
        case.add(WEAK, f"optim/update_ratio rose {number(moved)} times")


@rule("gradient-explosion", intervention="clip=1.0")
def gradient_explosion(view: View, case: Case) -> None:
    steps, values = view.series("grad/norm")
    ok = np.isfinite(values) & (steps <= view.onset + 8)
    values = values[ok]
    before = view.before("grad/norm", 100)
    if len(before) < 8 or not len(values):
        return
    calm = float(np.median(before))
    peak = int(np.argmax(values))
    climb = peak
    while climb > 0 and values[climb - 1] < values[climb]:
        climb -= 1
    length, factor = peak - climb, float(values[peak] / max(values[climb], 1e-30))
    if length >= 3 and factor > 5:
        case.add(SOLID, f"grad/norm rose {number(factor)} times over {length} steps without a pause")
    if values[peak] > 10 * calm:
        case.add(WEAK, f"grad/norm reached {number(values[peak])}, {number(values[peak] / calm)} times its median before")
    elif case.supports == []:
        return
    _clipping(view, case, float(values[peak]))
    if view.anomaly.recovered_after is None:
        case.add(WEAK, "it did not recover")
    else:
        case.against(SOLID, f"it recovered by itself after {in_steps(view.anomaly.recovered_after)}")
    jump = view.lr_jump
    if jump is not None and jump[0] > 1.5:
        case.against(SOLID, f"train/lr rose {number(jump[0])} times at step {jump[1]}, before the gradient did")


def _clipping(view: View, case: Case, peak: float) -> None:
    """Whether clipping held the gradient. Where grad/norm is never another number than grad/norm_clipped, it is the optimizer's
    own too, and says nothing about clipping."""
    both = [(row.get("grad/norm"), row.get("grad/norm_clipped")) for row in view.rows]
    if not any(raw is not None and used is not None and used < raw for raw, used in both):
        case.against(0, "clipping is not recorded")
        return
    clipped = view.near("grad/norm_clipped", 8)
    clipped = clipped[np.isfinite(clipped)]
    if len(clipped) and clipped.max() < 0.5 * peak:
        case.against(WEAK, f"clipping held the applied norm at {number(float(clipped.max()))}")
    elif len(clipped):
        case.add(WEAK, f"clipping did not hold it: the applied norm reached {number(float(clipped.max()))}")


@rule("optimizer-state-lost", intervention="reset-momentum")
def optimizer_state_lost(view: View, case: Case) -> None:
    for name in ("optim/exp_avg_norm", "optim/exp_avg_sq_norm"):
        steps, values = view.series(name)
        near = np.flatnonzero((steps >= view.onset - 30) & (steps <= view.anomaly.step + 10))
        near = near[near > 0]
        if not len(near):
            continue
        ratio = values[near] / np.maximum(values[near - 1], 1e-30)
        low = int(np.argmin(ratio))
        limit = 0.3 if name.endswith("sq_norm") else 0.5
        if ratio[low] < limit:
            case.add(SOLID, f"{name} fell to {number(float(ratio[low]))} of its value by step {int(steps[near[low]])}")
        else:
            case.against(WEAK, f"{name} is continuous across the onset")
    if "after_resume" in view.anomaly.notes:
        case.add(SOLID, "the run was resumed shortly before")
    elif case.supports and view.anomaly.attempt == 0:
        case.against(WEAK, "the run was not resumed")


@rule("stale-second-moment", intervention="reset-momentum")
def stale_second_moment(view: View, case: Case) -> None:
    """One layer's second moment is too small for its gradient, though the gradient is as it was."""
    found: list[tuple[float, str, float]] = []
    falls: list[float] = []
    for name in view.family("layer/", "/exp_avg_sq_norm"):
        layer = name.removesuffix("/exp_avg_sq_norm")
        base, near = view.before(name), view.near(name, 10)
        gradient = view.rise(f"{layer}/grad_norm")
        if len(base) < 2 or not len(near) or base[-1] <= 0 or gradient is None:
            continue
        fall = float(min(near[0], base[-1]) / np.median(base))
        falls.append(fall)
        if fall < 0.2 and gradient < 5:
            found.append((fall, layer, gradient))
    if not found or float(np.median(falls)) < 0.5:  # all layers at once is a lost state, not a stale one
        return
    fall, layer, gradient = min(found)
    case.add(
        STRONG,
        f"{layer}: the second moment is {number(fall)} of its usual value, the gradient {number(gradient)} times its own",
    )
    moved = view.rise(f"{layer}/update_ratio", 10)
    if moved is not None and moved > 3:
        case.add(SOLID, f"{layer}: update_ratio rose {number(moved)} times")


@rule("config-change", intervention="rerun")
def config_change(view: View, case: Case) -> None:
    changed = [note for note in view.anomaly.notes if note.startswith("changed: ")]
    for note in changed:
        case.add(SOLID, f"since the attempt before, {note.removeprefix('changed: ')} changed")
    if changed and "after_resume" in view.anomaly.notes:
        case.add(WEAK, "the run was resumed shortly before")
