"""What a monitor is: one row in, at most one sign out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trackbridge.detectors.base import IntArray
from trackbridge.records import Row, StepContext

_SCHEMAS = 64  # remembered at most
SCHEDULED = ("lr_restart", "epoch")  # changes of regime after which a step is as much work as before


@dataclass(frozen=True, slots=True)
class Sign:
    """What a monitor has found, for one `Anomaly`. `fault` is the stable name that begins its note, a hypothesis' name where
    there is one; `words` the rest of that note, one line. `score` is a ratio to what is
    allowed, in the monitor's own sense, which `terms` says."""

    fault: str
    kind: str
    series: str
    onset: int
    value: float
    expected: float
    score: float
    severity: float
    words: str
    earliest: int | None = None
    """Where what is measured now and then was seen late: the first step at which it may have happened. Else the onset."""
    terms: str = ""
    """What was expected, in the monitor's own terms, to be read after the value: "30 times the 0.001 before". ""
    where `score` is in sigmas of the series' own noise."""

    @property
    def note(self) -> str:
        return f"{self.fault}: {self.words}"


class Look:
    """One step row as monitors read it. `places` maps the row's names to their positions; `context` is the step's, where it is
    known; `resumed` says that the run was resumed less than `after_resume` steps ago."""

    __slots__ = ("context", "places", "resumed", "row", "step")

    def __init__(self, row: Row, places: Mapping[str, int], context: StepContext | None, resumed: bool) -> None:
        self.row = row
        self.step = row.step
        self.places = places
        self.context = context
        self.resumed = resumed

    def get(self, name: str) -> float | None:
        """The value of `name`; None when the row does not have it."""
        place = self.places.get(name)
        return None if place is None else float(self.row.values[place])

    def finite(self, name: str) -> float | None:
        """The value of `name`; None when the row does not have it, or it is NaN or infinite."""
        value = self.get(name)
        return value if value is not None and abs(value) < float("inf") else None


class Monitor:
    """Base of the monitors. A subclass names its state in `KEPT`: attributes that are JSON as they are.

    The detector laws hold for monitors as for the band: a NaN never enters the state, no randomness, no clock, constant memory,
    and a monitor restored from its state continues as if never stopped.
    """

    NAME: ClassVar[str]
    KEPT: ClassVar[tuple[str, ...]]
    CAUSAL: ClassVar[bool] = True
    """What it tells can make the loss leave its band: then the two are one event."""

    def __init__(self) -> None:
        self._schemas: dict[int, tuple[Mapping[str, int], tuple[str, ...], IntArray]] = {}

    def columns(self, look: Look) -> tuple[tuple[str, ...], IntArray]:
        """The row's series that `follows` says yes to, and their positions; worked out once per schema."""
        known = self._schemas.get(id(look.places))
        if known is None:
            if len(self._schemas) >= _SCHEMAS:
                self._schemas.clear()
            names = tuple(name for name in look.places if self.follows(name))
            known = look.places, names, np.array([look.places[name] for name in names], np.int64)
            self._schemas[id(look.places)] = known  # holds the mapping, so that its id stays taken
        return known[1:]

    def follows(self, name: str) -> bool:
        """Whether this monitor reads the series `name`; for those that use `columns`."""
        return False

    def update(self, look: Look) -> Sign | None:
        """Judge one step. A sign is returned once, at the step where the fault is certain."""
        raise NotImplementedError

    def over(self) -> int | None:
        """After an `update`: the step at which what was told has ended, None while it goes on or if it has no end."""
        return None

    def changed(self, event: str) -> None:
        """A change of regime that the run knows of begins now; `event` as in `Watch.note`."""

    def waiting(self, seconds: float, step: int) -> Sign | None:
        """No step has come for `seconds`; `step` is the one that is awaited."""
        return None

    def regime(self) -> str | None:
        """After an `update`: a known change of regime that began at this step (see `Watch.note`), None almost always."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, and a copy: the monitor goes on while a checkpoint is written."""
        return {name: _copied(getattr(self, name)) for name in self.KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` has; what it lacks stays as it is, so that an older state fits."""
        for name in self.KEPT:
            if name in state:
                setattr(self, name, _copied(state[name]))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value
