"""A detector of somebody else's, or a published one, beside our own: by its name in the entry-point group `GROUP`.

An entry point names what makes the detector, a class or a function without arguments::

    [project.entry-points."trackbridge.detectors"]
    my-detector = "my_package:MyDetector"
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from trackbridge import plugins
from trackbridge.detectors.base import Detector, IntArray, Verdict
from trackbridge.detectors.episodes import severity
from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.detectors.plan import tracked

logger = logging.getLogger("trackbridge")

GROUP = "trackbridge.detectors"
_KINDS = ("spike", "drift", "shift", "divergence", "plateau")
_SCHEMAS = 64


class Foreign(Monitor):
    """Hands the followed series of each row to a `Detector`, and tells its verdicts as one event until it has been quiet for
    `quiet` rows. What is not finite is ours to tell. A detector that raises is left out from then on, with its traceback in
    the log, and costs nothing else."""

    KEPT: ClassVar[tuple[str, ...]] = ("told", "calm", "ended")

    def __init__(self, name: str, quiet: int) -> None:
        super().__init__()
        self.NAME = f"detector/{name}"  # type: ignore[misc]
        self.name = name
        self.detector: Detector | None = plugins.load(GROUP, name)()
        self.quiet = quiet
        self.told = False
        self.calm = 0  # rows without a verdict
        self.ended = -1
        self._series: tuple[str, ...] = ()
        self._positions: dict[int, tuple[tuple[str, ...], IntArray]] = {}

    def follows(self, name: str) -> bool:
        return tracked(name)

    def update(self, look: Look) -> Sign | None:
        verdicts = [v for v in self._verdicts(look) if v.kind != "nonfinite"]
        if not verdicts:
            self.calm += 1
            if self.told and self.calm >= self.quiet:
                self.told, self.ended = False, look.step - self.calm + 1
            return None
        self.calm, fresh = 0, not self.told
        self.told, self.ended = True, -1
        return self._sign(max(verdicts, key=lambda v: v.score)) if fresh else None

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None

    def _sign(self, worst: Verdict) -> Sign:
        series, kind = self._series[worst.index], worst.kind if worst.kind in _KINDS else "spike"
        words = f"{series} is {worst.value:.6g} where {worst.expected:.6g} was expected, score {worst.score:.3g}"
        terms = f"expected {worst.expected:.6g}, score {worst.score:.3g} of {self.name}"
        grade = severity(kind, worst.score)
        return Sign(self.name, kind, series, worst.onset, worst.value, worst.expected, worst.score, grade, words, terms=terms)

    def _verdicts(self, look: Look) -> list[Verdict]:
        if self.detector is None:
            return []
        names, columns = self.columns(look)
        try:
            if not set(names) <= set(self._series):
                self._series = (*self._series, *(name for name in names if name not in self._series))
                self.detector.bind(self._series)
                self._positions.clear()
            values, present = np.zeros(len(self._series)), np.zeros(len(self._series), bool)
            positions = self._places(names)
            values[positions], present[positions] = look.row.values[columns], True
            return list(self.detector.update(look.step, values, present))
        except Exception:
            self._leave_out()
            return []

    def _places(self, names: tuple[str, ...]) -> IntArray:
        known = self._positions.get(id(names))
        if known is None:
            if len(self._positions) >= _SCHEMAS:
                self._positions.clear()
            where = {name: i for i, name in enumerate(self._series)}
            known = self._positions[id(names)] = names, np.array([where[name] for name in names], np.int64)
        return known[1]

    def state_dict(self) -> dict[str, Any]:
        own = None if self.detector is None else self.detector.state_dict()
        return {**super().state_dict(), "series": list(self._series), "detector": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The columns are bound first, all of them and in their order: the next row may lack some."""
        super().load_state_dict(state)
        if self.detector is None or state.get("detector") is None:
            return
        try:
            self._positions.clear()
            self._series = tuple(state.get("series", ()))  # a state of an older version has none
            self.detector.bind(self._series)
            self.detector.load_state_dict(state["detector"])
        except Exception:
            self._leave_out()

    def _leave_out(self) -> None:
        """After an exception of the detector, under way."""
        if "PYTEST_CURRENT_TEST" in os.environ:
            raise
        self.detector = None
        logger.exception("trackbridge: the detector %s failed and is left out", self.name)
