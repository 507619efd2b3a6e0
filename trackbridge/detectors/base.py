"""What a detector is: values of many series at one step in, verdicts out.

Detector laws (property tests in tests/detectors/test_laws.py): a non-finite value is always a verdict and never enters the
state; flagged values do not teach the baseline, but a lasting new level is accepted after a few; permuting the series
permutes the verdicts; a detector restored from its state continues as if never stopped. No randomness, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One series stands out at one step. `index` is its position in the bound series; `onset` the step at which the
    excursion began; `expected` the robust local level; `score` the distance from it in robust sigmas (inf for nonfinite).
    """

    index: int
    kind: str
    step: int
    onset: int
    value: float
    expected: float
    score: float


class Detector(Protocol):
    def bind(self, series: Sequence[str]) -> None:
        """Name the columns. Called again with more names when new series appear; known names keep their state."""

    def update(self, step: int, values: FloatArray, present: BoolArray) -> Sequence[Verdict]:
        """Judge one step. `values` is float64 (n,), `present` bool (n,); an absent series is untouched."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as JSON-able values (floats round-trip exactly through repr)."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, in any order of series."""
