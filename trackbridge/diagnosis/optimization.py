"""Causes in the optimization: learning rate, exploding gradients, optimizer state."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis.data import lr_change
from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, number


@rule("lr-discontinuity", intervention="lower-lr=0.5")
def lr_discontinuity(view: View, case: Case) -> None:
    steps, rates = view.series("train/lr")
    if len(steps) < 2:
        return
    ok = (rates[1:] > 0) & (rates[:-1] > 0)
    jump = np.where(ok, rates[1:] / np.where(rates[:-1] > 0, rates[:-1], 1.0), 1.0)
    near = (steps[1:] > view.onset - 50) & (steps[1:] <= view.anomaly.step)
    if not near.any():
        return
    # In a warm-up the rate grows by the same amount each step: a jump must stand out from the growth around it.
    usual = float(np.median(jump))
    ratio = np.where(near, jump / usual, 1.0)
    worst = int(np.argmax(np.abs(np.log(ratio))))
    if ratio[worst] > 1.5:
        late = view.onset - int(steps[worst + 1])
        case.add(STRONG, f"train/lr rose {number(jump[worst])} times at step {steps[worst + 1]}, {late} steps before the onset")
        moved = view.peak_ratio("optim/update_ratio")
        if moved is not None and moved > 1.5:
            case.add(WEAK, f"optim/update_ratio rose {number(moved)} times")
    elif case.supports == []:
        case.against(SOLID, "train/lr is smooth around the onset")


@rule("gradient-explosion", intervention="clip=1.0")
def gradient_explosion(view: View, case: Case) -> None:
    before = view.before("grad/norm", 40)
    near = view.near("grad/norm", 3)
    if len(before) < 8 or not len(near):
        return
    finite = near[np.isfinite(near)]
    calm = float(np.median(before[: len(before) // 2]))
    peak = float(finite.max()) if len(finite) else float("inf")
    growth = float(np.median(before[-3:])) / calm if calm > 0 else 1.0
    if growth > 1.5:
        case.add(SOLID, f"grad/norm had grown {number(growth)} times in the steps before the onset")
    if peak > 10 * calm:
        case.add(WEAK, f"grad/norm reached {number(peak)}, {number(peak / calm)} times its median before")
        clipped = view.near("grad/norm_clipped", 3)
        if len(clipped) and np.nanmax(clipped) < 0.5 * peak:
            case.against(SOLID, f"clipping held the applied norm at {number(float(np.nanmax(clipped)))}")
        else:
            case.add(WEAK, "the record shows no clipping")
    if case.supports and view.anomaly.recovered_after is None and view.anomaly.kind in ("divergence", "nonfinite", "spike"):
        case.add(WEAK, "did not recover")
    change = lr_change(view)
    if case.supports and change is not None and change > 1.5:
        case.against(SOLID, f"train/lr rose {number(change)} times at the onset, before the gradient did")


@rule("optimizer-state-lost", intervention="reset-momentum")
def optimizer_state_lost(view: View, case: Case) -> None:
    for name in ("optim/exp_avg_norm", "optim/exp_avg_sq_norm"):
        steps, values = view.series(name)
        near = np.flatnonzero((steps >= view.onset - 20) & (steps <= view.anomaly.step))
        near = near[near > 0]
        if not len(near):
            continue
        ratio = values[near] / np.maximum(values[near - 1], 1e-30)
        low = int(np.argmin(ratio))
        if ratio[low] < 0.5:
            at = int(steps[near[low]])
            case.add(SOLID, f"{name} fell to {number(ratio[low])} of its value at step {at}")
        else:
            case.against(WEAK, f"{name} is continuous across the onset")
    if case.supports or "after_resume" in view.anomaly.notes:
        if "after_resume" in view.anomaly.notes:
            case.add(SOLID, "the run was resumed shortly before")
        elif view.anomaly.attempt == 0:
            case.against(WEAK, "the run was never resumed")


@rule("stale-second-moment", intervention="reset-momentum")
def stale_second_moment(view: View, case: Case) -> None:
    worst, lag = "", 1.0
    for name in view.ending("/exp_avg_sq_norm"):
        layer = name.removesuffix("/exp_avg_sq_norm")
        gradient, moment = view.near(f"{layer}/grad_norm", 0), view.before(name, 1)
        base_g, base_v = view.before(f"{layer}/grad_norm"), view.before(name)
        if not len(gradient) or not len(moment) or len(base_g) < 8 or moment[0] <= 0:
            continue
        usual = np.median(base_g) ** 2 / max(float(np.median(base_v)), 1e-30)
        ratio = float(gradient[0] ** 2 / moment[0] / max(usual, 1e-30))
        if ratio > lag:
            worst, lag = layer, ratio
    if lag > 30:
        fell = view.before(f"{worst}/exp_avg_sq_norm")
        case.add(WEAK, f"{worst}: squared gradient over second moment is {number(lag)} times its usual value")
        if len(fell) >= 4 and fell[-1] < 0.3 * fell[0]:
            case.add(SOLID, f"{worst}: the second moment had decayed to {number(fell[-1] / fell[0])} of its value")
        moved = view.peak_ratio(f"{worst}/update_ratio")
        if moved is not None and moved > 3:
            case.add(SOLID, f"{worst}: update_ratio rose {number(moved)} times")
