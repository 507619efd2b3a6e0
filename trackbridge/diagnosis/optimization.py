"""Causes in the optimization: learning rate, exploding gradients, optimizer state, configuration."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis.onset import in_one_step
from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, in_steps, number, times
from trackbridge.diagnosis.weights import changed_together, changed_weight, largest_share

_TOGETHER = 1.15  # growth of the median weight, beyond its usual one, over some 50 steps
_MANY_OF_IT = 0.5  # of a weight's norm in one element, below which many elements make it
_A_LITTLE = 1.08  # the same where the gradients grew too: weights that are measured every ten steps lag behind
_ROSE = 2.5  # growth of the median gradient
_STALE = 0.3  # of one between two measurements: less than a decay of 0.9 allows in ten steps
_ONE_DID = 3.0  # times the size of a single weight, which then made the gradients by itself
_FELL = 0.6  # of a second moment between two measurements, without its gradient falling as far


@rule("lr-discontinuity", intervention="hold-lr")
def lr_discontinuity(view: View, case: Case) -> None:
    jump = view.lr_jump
    if jump is None:
        return
    factor, step = jump
    if factor <= 1.5:
        if not case.supports:  # a monitor may have seen more
            case.against(SOLID, "train/lr is smooth around the onset")
        return
    side = "before" if step <= view.onset else "after"
    case.add(STRONG, f"train/lr rose {times(factor)} at step {step}, {in_steps(abs(view.onset - step))} {side} the onset")
    steps, rates = view.finite("train/lr")
    before = rates[steps < step]
    if len(before) and factor * before[-1] > 1.2 * before.max():
        case.add(SOLID, "to more than it had ever been")
    moved = view.rise("optim/update_ratio", 10)
    if moved is not None and moved > 1.5:
        case.add(WEAK, f"optim/update_ratio rose {times(moved)}")


@rule("gradient-explosion", intervention="clip=1.0")
def gradient_explosion(view: View, case: Case) -> None:
    steps, values = view.series("grad/norm")
    last = view.rows[-1].step if view.rows else view.onset
    ok = np.isfinite(values) & (steps <= last)
    values = values[ok]
    before = view.before("grad/norm", 100)
    if len(before) < 8 or not len(values):
        return
    calm = float(np.median(before[: max(len(before) - 24, 8)]))
    top = float(values.max())
    peak = int(np.argmax(values >= 0.5 * top))  # the first value that is nearly the largest
    climb = peak
    while climb > 0 and values[max(climb - 3, 0) : climb].min() < 0.9 * values[climb] and values[climb] > 1.5 * calm:
        climb -= 1
    length, factor = peak - climb, float(values[peak] / max(values[climb], 1e-30))
    if length >= 4 and factor > 5:
        case.add(SOLID, f"grad/norm rose {times(factor)} over {length} steps")
    _clipping(view, case)
    if view.common_growth > _TOGETHER:
        case.add(WEAK, f"grad/norm reached {number(top)}, its median before was {number(calm)}")
    elif top > 10 * calm and (case.supports or length >= 3):
        case.add(WEAK, f"grad/norm reached {number(top)}, {times(top / calm)} its median before")
    rises = [f for name in view.family("layer/", "/grad_norm") if (f := view.growth(name)) is not None]
    rose = float(np.median(rises)) if len(rises) >= 4 else 1.0
    grew = view.common_growth > _A_LITTLE and rose > _ROSE
    if not case.supports and not grew:
        return
    if rose > _ROSE:
        case.add(SOLID, f"the gradients of most layers had grown together (median {times(rose)}) before")
    if view.common_growth > _TOGETHER or grew:
        weight = STRONG if view.common_growth > _TOGETHER else SOLID
        case.add(weight, f"the weights of most layers had grown together (median {times(view.common_growth)})")
    if view.lasts or (view.anomaly.recovered_after is None and view.anomaly.kind == "nonfinite"):
        case.add(WEAK, "it did not recover")
    elif view.passed:
        case.against(SOLID, f"it recovered by itself after {in_steps(view.anomaly.recovered_after)}")
    if view.lr_jumped and view.lr_jump is not None:
        case.against(SOLID, f"train/lr rose {times(view.lr_jump[0])} at step {view.lr_jump[1]}, before the gradient did")
    only = view.grown_weights
    if only and len(only) <= max(3, len(view.family("layer/", "/weight_norm")) // 6):
        weight = STRONG if only[0][0] > _ONE_DID else SOLID
        case.against(weight, f"few weights had grown: {only[0][1]} {times(only[0][0])}")
    elif (changed := changed_weight(view)) is not None:
        case.against(SOLID, f"one weight alone changed: {changed[0]} {times(changed[1])}")


def _clipping(view: View, case: Case) -> None:
    """Whether clipping held the gradient before and at the onset. Where grad/norm is never another number than
    grad/norm_clipped, it is the optimizer's own too, and says nothing about clipping."""
    both = [(row.step, raw, used) for row in view.rows
            if (raw := row.get("grad/norm")) is not None and (used := row.get("grad/norm_clipped")) is not None]  # fmt: skip
    held = [(step, used) for step, raw, used in both if used < 0.99 * raw]
    if not held:
        case.against(0, "clipping is not recorded")
        return
    bound = float(np.median([used for _, used in held]))
    lost = view.clipping_lost
    over = [used for step, _, used in both if step >= view.onset - 8 and used > 1.5 * bound]
    if lost is not None:
        case.add(STRONG + WEAK, f"clipping held the gradient at {number(lost[0])} before, and not from step {lost[1]} on")
    elif over:
        case.add(WEAK, f"clipping did not hold it: the applied norm reached {number(max(over))}")
    else:
        case.against(WEAK, f"clipping held the applied norm at {number(bound)}")


@rule("optimizer-state-lost", intervention="restore-optimizer")
def optimizer_state_lost(view: View, case: Case) -> None:
    fell = _moment_falls(view)
    if fell:
        median, at, count = fell
        if median < _FELL:
            case.add(
                STRONG,
                f"the second moments of {count} layers fell together, to {number(median)} of their value (median) by step {at}",
            )
            first = _fall(view, "optim/exp_avg_norm")
            if first is not None and first[0] < 0.75:
                case.add(WEAK, f"optim/exp_avg_norm fell to {number(first[0])} of its value")
        else:
            case.against(SOLID, "the second moments are continuous across the onset")
    if view.resumed and case.supports:
        case.add(SOLID, "the run was resumed shortly before")
    elif view.resumed and not fell:
        case.add(WEAK, "the run was resumed shortly before")
    elif case.supports and view.anomaly.attempt == 0:
        case.against(0, "the run was not resumed")


def _fall(view: View, name: str) -> tuple[float, int] | None:
    """(ratio, step) of the deepest fall between two measurements near the onset."""
    steps, values = view.finite(name)
    near = np.flatnonzero((steps >= view.onset - 30) & (steps <= view.anomaly.step + 10))
    near = near[near > 0]
    if not len(near):
        return None
    ratio = values[near] / np.maximum(values[near - 1], 1e-30)
    low = int(np.argmin(ratio))
    return float(ratio[low]), int(steps[near[low]])


def _moment_falls(view: View) -> tuple[float, int, int] | None:
    """(median ratio over layers, step, layers) of the deepest common fall of second moments."""
    names = view.family("layer/", "/exp_avg_sq_norm") or view.family("optim/", "exp_avg_sq_norm")
    found = [fall for name in names if (fall := _fall(view, name)) is not None]
    if not found:
        return None
    return _upper_median([ratio for ratio, _ in found]), min(found)[1], len(found)


def _upper_median(ratios: list[float]) -> float:
    """What more than half of `ratios` are at most: of two layers one is not most."""
    return float(np.quantile(ratios, 0.5, method="higher"))


@rule("stale-second-moment", intervention="reset-momentum")
def stale_second_moment(view: View, case: Case) -> None:
    """One layer's second moment is too small for its gradient, though the gradient is as it was."""
    together = _moment_falls(view)
    if together is not None and together[0] < _FELL:
        median, at, count = together
        case.against(STRONG, f"those of {count} layers fell together, to {number(median)} of their value by step {at}")
        return
    found: list[tuple[float, str, float]] = []
    falls: list[float] = []
    for name in view.family("layer/", "/exp_avg_sq_norm"):
        layer = name.removesuffix("/exp_avg_sq_norm")
        steps, values = view.finite(name)
        base, recent = values[steps < view.onset - 30], values[(steps >= view.onset - 30) & (steps <= view.onset + 10)]
        usual = float(np.median(base[-8:])) if len(base) > 1 else 0.0
        gradient = view.rise(f"{layer}/grad_norm", 4)
        if usual <= 0 or not len(recent) or gradient is None:
            continue
        fall = float(recent.min()) / usual
        sudden = _fall(view, name)
        falls.append(fall)
        if fall < 0.2 or (sudden is not None and sudden[0] < _STALE):
            found.append((fall, layer, gradient))
    if not found:
        _updated_too_far(view, case)
    if not found or _upper_median(falls) < 0.5:  # all layers at once is a lost state, not a stale one
        return
    fall, layer, gradient = min(found)
    case.add(
        STRONG,
        f"{layer}: the second moment is {number(fall)} of its usual value, the gradient {number(gradient)} times its own",
    )
    moved = view.rise(f"{layer}/update_ratio", 10)
    if moved is not None and moved > 3:
        case.add(SOLID, f"{layer}: update_ratio rose {times(moved)}")
    elif len(found) == 1:
        case.add(WEAK, "no other layer's did so")


def _updated_too_far(view: View, case: Case) -> None:
    """Few weights changed in one step, in many of their elements: as by an update of theirs that was too large. The gradients
    that come of it fill a second moment before it is measured again, so that it may never be seen too small."""
    alone = changed_weight(view)
    share = largest_share(view, alone[0]) if alone is not None else None
    moved = [alone[:2]] if alone is not None and share is not None and share < _MANY_OF_IT else changed_together(view)
    adaptive = all(view.before(name.replace("/weight_norm", "/exp_avg_sq_norm"), 1).size for name, _ in moved)
    if not moved or not adaptive or not in_one_step(view) or view.lr_jumped or view.since_resume is not None:
        return
    if not any(name == grown for name, _ in moved for _, grown in view.grown_weights):
        what = " and ".join(f"{name} {times(factor)}" for name, factor in moved[:2])
        case.add(WEAK, f"{what} in one step, in many elements and others not: by itself or by an update that went too far")


@rule("config-change", intervention="rerun")
def config_change(view: View, case: Case) -> None:
    changed = [note.removeprefix("changed: ") for note in view.anomaly.notes if note.startswith("changed: ")]
    for text in changed[:2]:
        case.add(SOLID, f"since the attempt before, {text} changed".replace("changed changed", "changed"))
    if not changed:
        return
    since = view.since_resume
    if since is not None and since <= 2:
        case.add(STRONG, f"it began {in_steps(since)} after this attempt did")
    elif view.resumed:
        case.add(WEAK, "the run was resumed shortly before")
    if view.lr_jumped and since is not None:
        case.add(WEAK, "the learning rate jumped at the same time")
