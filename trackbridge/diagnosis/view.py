"""What the record knows around an anomaly, as the rules read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge.records import Anomaly, MicroBatch, Row, StepContext

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LEAST = 8  # values before the onset without which nothing is called unusual


class View:
    """An anomaly with the rows and step contexts around it. "Before" means steps before the onset; what the record does not
    have is None or empty, never a guess."""

    def __init__(self, anomaly: Anomaly, window: Sequence[Row], contexts: Sequence[StepContext] = ()) -> None:
        self.anomaly = anomaly
        self.onset = anomaly.onset
        rows = {row.step: row for row in sorted(window, key=lambda row: row.seq) if row.kind == "step"}
        self.rows = [rows[step] for step in sorted(rows)]  # a repeated step is the newest
        self.contexts = sorted(contexts, key=lambda context: (context.step, context.seq))
        self._series: dict[str, tuple[IntArray, FloatArray]] = {}

    # -- series --------------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every series in the window, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.schema.names))

    def family(self, head: str, tail: str) -> list[str]:
        return [name for name in self.names if name.startswith(head) and name.endswith(tail)]

    def series(self, name: str) -> tuple[IntArray, FloatArray]:
        """(steps, values) of one series; both empty when the record does not have it."""
        if name not in self._series:
            pairs = [(row.step, value) for row in self.rows if (value := row.get(name)) is not None]
            steps = np.array([step for step, _ in pairs], np.int64)
            self._series[name] = (steps, np.array([value for _, value in pairs], np.float64))
        return self._series[name]

    def before(self, name: str, last: int | None = None) -> FloatArray:
        """Finite values before the onset, oldest first; only the `last` ones if given."""
        steps, values = self.series(name)
        found = values[(steps < self.onset) & np.isfinite(values)]
        return found if last is None else found[-last:]

    def near(self, name: str, after: int = 2) -> FloatArray:
        """Values from the onset to `after` steps past it, non-finite ones included."""
        steps, values = self.series(name)
        return values[(steps >= self.onset) & (steps <= self.onset + after)]

    def at(self, name: str) -> float | None:
        """The value at the onset."""
        found = self.near(name, 0)
        return float(found[0]) if len(found) else None

    def jump(self, name: str, after: int = 0) -> float | None:
        """How many robust sigmas, in log space, the largest value near the onset lies above the latest 100 before it. None
        with too little history. Excess kurtosis is taken from its least value, -3."""
        shift = 3.0 if name.endswith("/kurtosis") else 0.0
        base = self.before(name, 100) + shift
        near = self.near(name, after) + shift
        if len(base) < _LEAST or not len(near):
            return None
        if not np.isfinite(near).all():
            return math.inf
        return deviation(math.log(max(float(near.max()), 1e-30)), np.log(np.maximum(base, 1e-30)), 0.05)

    def rise(self, name: str, after: int = 0) -> float | None:
        """The largest finite value near the onset over the median before it."""
        base, near = self.before(name, 100), self.near(name, after)
        near = near[np.isfinite(near)]
        if len(base) < 3 or not len(near) or np.median(base) <= 0:
            return None
        return float(near.max() / np.median(base))

    def growth(self, name: str) -> float | None:
        """The median over the 20 steps before the onset over that of the steps 120 to 40 before it."""
        steps, values = self.series(name)
        ok = np.isfinite(values)
        early = values[ok & (steps >= self.onset - 120) & (steps < self.onset - 40)]
        late = values[ok & (steps >= self.onset - 20) & (steps < self.onset)]
        if len(early) < 2 or not len(late) or np.median(early) <= 0:
            return None
        return float(np.median(late) / np.median(early))

    def step_change(self, name: str, after: int = 10) -> float | None:
        """The first value at or after the onset over the last one before it."""
        base, near = self.before(name, 1), self.near(name, after)
        return float(near[0] / base[0]) if len(base) and len(near) and base[0] > 0 and np.isfinite(near[0]) else None

    # -- batches -------------------------------------------------------------------------------------------------------

    def batch(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of the onset."""
        return next((context.micro for context in self.contexts if context.step == self.onset), ())

    def token_series(self, key: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """One token statistic: of the micro-batches before the onset, at it, and after the anomaly was detected."""
        parts: tuple[list[float], list[float], list[float]] = ([], [], [])
        for context in self.contexts:
            place = 0 if context.step < self.onset else 1 if context.step == self.onset else 2
            if place == 2 and context.step <= self.anomaly.step:
                continue
            for micro in context.micro:
                parts[place].extend(numbers(micro.tokens, key))
        return np.array(parts[0]), np.array(parts[1]), np.array(parts[2])

    @cached_property
    def token_keys(self) -> tuple[str, ...]:
        return tuple(sorted({key for micro in self.batch() for key in keys(micro.tokens)}))

    def odd(self, key: str) -> float | None:
        """Robust z of the worst micro-batch of the onset against those before it. None when unknown."""
        before, now, _ = self.token_series(key)
        if len(before) < _LEAST or not len(now):
            return None
        # Statistics of a batch are counts and bits: less than a percent, or less than one, is no difference.
        least = max(0.01 * float(np.median(np.abs(before))), 1.0 if key != "entropy" else 0.02)
        return max((deviation(float(value), before, least) for value in now), key=abs)

    # -- the anomaly ---------------------------------------------------------------------------------------------------

    @property
    def lead(self) -> int:
        """How many steps the first mover was ahead of the onset, 0 if it was not."""
        mover = self.anomaly.first_mover
        return max(0, self.onset - mover[1]) if mover else 0

    @property
    def passed(self) -> bool:
        """It was over within a few steps."""
        return self.anomaly.recovered_after is not None and self.anomaly.recovered_after <= 5

    @cached_property
    def lr_jump(self) -> tuple[float, int] | None:
        """(factor, step) of the largest change of the learning rate near the onset, beyond its usual change; None if the
        record has no learning rate. 1.0 is no jump."""
        steps, rates = self.series("train/lr")
        if len(steps) < 3:
            return None
        ok = (rates[1:] > 0) & (rates[:-1] > 0)
        ratio = np.where(ok, rates[1:] / np.where(ok, rates[:-1], 1.0), 1.0)
        near = np.flatnonzero((steps[1:] > self.onset - 50) & (steps[1:] <= self.anomaly.step))
        if not len(near):
            return None
        excess = ratio / float(np.median(ratio))
        worst = int(near[np.argmax(np.abs(np.log(excess[near])))])
        return float(excess[worst]), int(steps[worst + 1])

    @cached_property
    def worst_activation(self) -> tuple[str, float] | None:
        """The activation statistic that jumped most at the onset, and by how many sigmas."""
        names = [name for tail in ("/rms", "/max", "/std", "/kurtosis") for name in self.family("act/", tail)]
        jumps = [(name, z) for name in names if (z := self.jump(name)) is not None]
        return max(jumps, key=lambda pair: pair[1]) if jumps else None


def deviation(value: float, base: FloatArray, least: float) -> float:
    """(value - median) / robust sigma of `base`, the sigma at least `least`."""
    middle = float(np.median(base))
    return (value - middle) / max(1.4826 * float(np.median(np.abs(base - middle))), least, 1e-12)


def numbers(tree: Any, key: str) -> Iterable[float]:
    """Every finite number stored under `key` at any depth: token statistics have one entry per tensor of the batch."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key and isinstance(value, (int, float)) and math.isfinite(value):
                yield float(value)
            else:
                yield from numbers(value, key)


def keys(tree: Any) -> Iterable[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name
            else:
                yield from keys(value)


def number(value: float) -> str:
    """A value as evidence shows it: three significant digits."""
    return f"{value:.3g}"


def in_steps(count: int | None) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} step{'' if count == 1 else 's'}"
