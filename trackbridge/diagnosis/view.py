"""What the record knows around an anomaly, as the rules read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trackbridge.records import Anomaly, MicroBatch, Row, StepContext

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class View:
    """An anomaly with the rows and step contexts around it. "Before" means steps before the onset; a quantity the record
    does not have is None or empty, never a guess."""

    def __init__(self, anomaly: Anomaly, window: Sequence[Row], contexts: Sequence[StepContext] = ()) -> None:
        self.anomaly = anomaly
        self.onset = anomaly.onset
        self.rows = sorted((row for row in window if row.kind == "step"), key=lambda row: (row.step, row.seq))
        self.contexts = sorted(contexts, key=lambda context: context.step)
        self._series: dict[str, tuple[IntArray, FloatArray]] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every series in the window, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.schema.names))

    def ending(self, suffix: str) -> list[str]:
        return [name for name in self.names if name.endswith(suffix)]

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
        """Values from the onset to `after` steps past it."""
        steps, values = self.series(name)
        return values[(steps >= self.onset) & (steps <= self.onset + after)]

    def at(self, name: str, step: int | None = None) -> float | None:
        """The value at one step (the onset by default)."""
        steps, values = self.series(name)
        place = np.flatnonzero(steps == (self.onset if step is None else step))
        return float(values[place[0]]) if len(place) else None

    def peak_ratio(self, name: str, after: int = 2) -> float | None:
        """Largest value near the onset over the median before; None without both."""
        base, near = self.before(name), self.near(name, after)
        if len(base) < 3 or not len(near):
            return None
        middle = float(np.median(base))
        top = float(np.max(np.where(np.isnan(near), math.inf, near)))
        return top / middle if middle > 0 else None

    def band(self, name: str) -> tuple[float, float] | None:
        """(median, robust sigma) of the values before the onset; None when fewer than 8."""
        base = self.before(name)
        if len(base) < 8:
            return None
        middle = float(np.median(base))
        spread = 1.4826 * float(np.median(np.abs(base - middle)))
        return middle, max(spread, 1e-3 * abs(middle), 1e-12)

    def context(self, step: int) -> StepContext | None:
        return next((context for context in self.contexts if context.step == step), None)

    def batch(self, step: int | None = None) -> tuple[MicroBatch, ...]:
        context = self.context(self.onset if step is None else step)
        return context.micro if context else ()

    @cached_property
    def lead(self) -> int:
        """How many steps the first mover was ahead of the onset, 0 if it was not."""
        mover = self.anomaly.first_mover
        return max(0, self.onset - mover[1]) if mover else 0


def number(value: float) -> str:
    """A value as evidence shows it: three significant digits."""
    return f"{value:.3g}"
