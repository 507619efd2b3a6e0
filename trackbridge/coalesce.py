"""Fewer rows where a tracker takes only so many a minute: which rows stand for which, and what they carry for them.

The budget is about the run's own time (`Row.time`), so what is sent is a function of the journal, whenever it is sent. The
first rows of an attempt are all sent (a short run loses nothing). After that the time is cut into *slots*, as long as the
budget makes them; the rows of one slot are sent as one: the one with the most series, the newest among equals. It carries
``coalesced/rows`` (how many it stands for), the extrema over them (``coalesced/min/...``, ``coalesced/max/...``), and
``nonfinite/...`` counts over all of them. Steps that are slower than a slot are all sent. Wide series come with the first row
of a longer slot of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from trackbridge import names
from trackbridge.records import FloatArray, Row

STEPS, WIDE = 0.35, 0.25
"""Shares of a minute's budget: for the rows of steps (as many again may come from `run.log`), and for wide series."""
FREE_ROWS, FREE_VALUES, FREE_WIDE = 0.3, 0.2, 0.1
"""What an attempt may begin with, as shares. With the minute's own that stays below the budget, with room for anomalies."""
EXTREMA = ("train/loss", "grad/norm")
"""Series whose smallest and largest values are told; of the ``layers/...`` series the largest."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tracker takes from one run in a minute; None: anything."""

    rows: int | None = None
    values: int | None = None

    def __bool__(self) -> bool:
        return self.rows is not None or self.values is not None

    def free(self, position: int, narrow: int) -> bool:
        """True for the rows that an attempt begins with, which are all sent. `position` counts them from 0."""
        return position >= 0 and position < FREE_ROWS * self._rows and position * narrow < FREE_VALUES * self._values

    def free_wide(self, position: int, wide: int) -> bool:
        return 0 <= position * wide < FREE_WIDE * self._values

    def seconds(self, narrow: int) -> float:
        """How long a slot is, for rows of `narrow` values."""
        return 60.0 / STEPS * max(1.0 / self._rows, narrow / self._values)

    def wide_seconds(self, wide: int) -> float:
        return 60.0 / WIDE * wide / self._values

    @property
    def _rows(self) -> float:
        return math.inf if self.rows is None else float(self.rows)

    @property
    def _values(self) -> float:
        return math.inf if self.values is None else float(self.values)


@dataclass
class Gathered:
    """What the rows of a slot had in common. `rows` counts them."""

    rows: int = 0
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)

    def add(self, series: tuple[str, ...], values: FloatArray) -> None:
        """A row's narrow series."""
        self.rows += 1
        finite = np.isfinite(values)
        for at in np.flatnonzero(~finite).tolist():
            self.nonfinite[series[at]] = self.nonfinite.get(series[at], 0) + 1
        for at, name in enumerate(series):
            if finite[at] and (name in EXTREMA or name.startswith(names.LAYERS)):
                value = float(values[at])
                self.high[name] = max(self.high.get(name, value), value)
                if name in EXTREMA:
                    self.low[name] = min(self.low.get(name, value), value)

    def told(self) -> dict[str, float]:
        """The series that say so."""
        return {
            names.COALESCED_ROWS: float(self.rows),
            **{f"{names.COALESCED_MIN}{name}": value for name, value in self.low.items()},
            **{f"{names.COALESCED_MAX}{name}": value for name, value in self.high.items()},
        }


def width(series: tuple[str, ...]) -> int:
    """How many values a coalesced row has of these narrow series."""
    return len(series) + 1 + sum(2 if name in EXTREMA else name.startswith(names.LAYERS) for name in series)


@dataclass
class Slot:
    """Rows of one attempt that are sent as one. `before` is the seq before the first of them."""

    attempt: int
    number: int
    seconds: float
    before: int
    steps: Gathered = field(default_factory=Gathered)
    best: Row | None = None
    logged: dict[tuple[str, ...], Row] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, seconds: float) -> Slot:
        return cls(row.attempt, math.floor(row.time / seconds), seconds, row.seq - 1)

    def holds(self, row: Row) -> bool:
        return row.attempt == self.attempt and math.floor(row.time / self.seconds) == self.number

    def add(self, row: Row) -> None:
        if row.kind == "log":
            self.logged[row.schema.names] = row
        elif self.best is None or len(row.values) >= len(self.best.values):
            self.best = row

    def chosen(self) -> list[Row]:
        """The rows that are sent, in ascending seq."""
        found = [*self.logged.values(), *([self.best] if self.best is not None else [])]
        return sorted(found, key=lambda row: row.seq)
