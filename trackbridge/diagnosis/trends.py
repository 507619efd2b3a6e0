"""How single series moved around an onset: jumps in one step, growth over many."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LEAST = 8
"""Values before the onset without which nothing is called unusual."""
SPAN = 48
"""Steps before the onset over which growth is measured, against as many before those."""
_TINY = 1e-30
_LATEST = 4  # values before the onset that a leap is measured from


def deviation(value: float, base: FloatArray, least: float) -> float:
    """(value - median) / robust sigma of `base`, the sigma at least `least`."""
    middle = float(np.median(base))
    return (value - middle) / max(1.4826 * float(np.median(np.abs(base - middle))), least, 1e-12)


def logs(values: FloatArray) -> FloatArray:
    return np.asarray(np.log(np.maximum(values, _TINY)), np.float64)


def jump(base: FloatArray, near: FloatArray) -> float | None:
    """How many robust sigmas, in log space, the largest of `near` lies above `base`; infinite if it is not finite, None with
    too little history."""
    if len(base) < LEAST or not len(near):
        return None
    if not np.isfinite(near).all():
        return math.inf
    return deviation(math.log(max(float(near.max()), _TINY)), logs(base), 0.05)


def leap(base: FloatArray, near: FloatArray) -> float | None:
    """The same, of one step alone: above the largest of the latest few values and what they rise in a step. What has been
    growing from step to step has not leapt, however far it has come from where it was."""
    if len(base) < LEAST or not len(near):
        return None
    if not np.isfinite(near).all():
        return math.inf
    past = logs(base)
    steps = np.diff(past)
    expected = float(past[-_LATEST:].max()) + max(float(np.median(steps[-_LATEST:])), 0.0)
    rough = 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)
    return (math.log(max(float(near.max()), _TINY)) - expected) / max(rough, 0.05)


def off_line(value: float, base: FloatArray, least: float) -> float:
    """`deviation` of the next value from the line that `base` follows (slope and middle by Theil, Indag. Math. 12, 1950, and
    Sen, J. Am. Stat. Assoc. 63, 1968): a loss that falls fast hides a rise from a level."""
    x = np.arange(len(base), dtype=np.float64)
    first, second = np.triu_indices(len(base), 1)
    slope = float(np.median((base[second] - base[first]) / (x[second] - x[first])))
    return deviation(value - slope * len(base), base - slope * x, least)


def moved(base: FloatArray, near: FloatArray) -> float | None:
    """How far, in robust sigmas of log space, the farthest of `near` lies from `base` and from the latest few of it, up or
    down, whichever is less: what had been growing has not moved now. Infinite if one is not finite, None without enough
    history."""
    if len(base) < LEAST or not len(near):
        return None
    if not np.isfinite(near).all():
        return math.inf
    past = logs(base)
    latest, rough = float(np.median(past[-4:])), 1.4826 * float(np.median(np.abs(np.diff(past))))
    far = [(abs(deviation(value, past, 0.03)), abs(value - latest) / max(rough, 0.03)) for value in logs(near).tolist()]
    return float(max(min(pair) for pair in far))


def growth(steps: IntArray, values: FloatArray, onset: int) -> float | None:
    """How many times larger a positive series was just before `onset` than `SPAN` steps earlier, beyond what it grew over the
    same time before that. None with too little history; about 1 when nothing happened."""
    ok = np.isfinite(values) & (values > 0)
    steps, values = steps[ok], values[ok]
    cadence = int(np.median(np.diff(steps))) if len(steps) > 2 else 0
    if not cadence:
        return None
    reach = max(5, cadence + cadence // 2)  # steps whose median stands for one time
    span = min(SPAN, (onset - int(steps[0]) - reach) // 2)  # of a young run as much as it has, twice
    if span < max(2 * reach, 16):
        return None
    late = _around(steps, values, onset - reach, onset - 1)
    middle = _around(steps, values, onset - span - reach, onset - span + reach)
    early = _around(steps, values, onset - 2 * span - reach, onset - 2 * span + reach)
    if late is None or middle is None or early is None:
        return None
    return late / middle / max(middle / early, 1.0)


def climb(steps: IntArray, rates: FloatArray, onset: int, last: int, span: int = 8) -> tuple[float, int] | None:
    """(factor, its first step) of a rise within `span` steps to more than there ever was, that began up to 16 steps before
    `onset` or at it, and before which there was none: a warm-up goes on rising, a restart comes back to a former peak."""
    near = np.flatnonzero((steps >= onset - 16) & (steps <= last))
    if not len(near):
        return None
    top = int(near[np.argmax(rates[near])])
    base = max(top - span, 0)
    if base < span or rates[base] <= 0 or rates[base - span] <= 0 or rates[top] < 1.2 * rates[:base].max():
        return None
    factor = float(rates[top] / rates[base] / max(rates[base] / rates[base - span], 1.0) ** 2)
    risen = np.flatnonzero(rates[base : top + 1] > 1.05 * rates[base])
    first = int(steps[base + risen[0]]) if len(risen) else onset + 1
    return (factor, first) if factor > 1.5 and first <= onset else None


def stand_out(changes: FloatArray) -> npt.NDArray[np.bool_]:
    """Which of a series' changes are several times as large as their neighbours: a warm-up's equal ones are not."""
    size = np.abs(changes)
    found = np.zeros(len(size), bool)
    for k in np.flatnonzero(size > 0).tolist():
        beside = np.concatenate((size[max(k - 4, 0) : k], size[k + 1 : k + 5]))
        found[k] = not len(beside) or size[k] > 3.0 * np.sort(beside)[-2 if len(beside) > 1 else -1]
    return found


def largest_share(steps: IntArray, values: FloatArray, first: int, last: int) -> tuple[float, float] | None:
    """(total, share) of a positive series' rise from just before `first` to its highest point up to `last`: `total` in log
    space, `share` the part of the largest single step. A jump has a share near 1, growth a small one. None without a rise or
    with too few values."""
    ok = np.isfinite(values) & (values > 0)
    steps, values = steps[ok], values[ok]
    base, near = logs(values[steps < first][-5:]), logs(values[(steps >= first) & (steps <= last)])
    if len(base) < 3 or len(near) < 4:
        return None
    start = float(np.median(base))
    top = int(np.argmax(near))
    total = float(near[top]) - start
    if total <= 0:
        return None
    increments = np.diff(np.concatenate(([start], near[: top + 1])))
    return total, float(increments.max() / total)


def _around(steps: IntArray, values: FloatArray, first: int, last: int) -> float | None:
    found = values[(steps >= first) & (steps <= last)]
    return float(np.median(found)) if len(found) else None


def step_change(steps: IntArray, values: FloatArray, onset: int, after: int) -> tuple[float, float] | None:
    """(factor, sigmas) between the last value before `onset` and the first from it to `after` steps past it, the sigmas in
    terms of the usual changes between two such values. None with too little history."""
    ok = np.isfinite(values) & (values > 0)
    before = logs(values[ok & (steps < onset)])
    near = logs(values[ok & (steps >= onset) & (steps <= onset + after)])
    if len(before) < 4 or not len(near):
        return None
    change = float(near[0] - before[-1])
    return math.exp(min(change, 700.0)), deviation(change, np.diff(before[-16:]), 0.005)
