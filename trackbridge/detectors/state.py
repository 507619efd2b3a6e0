"""Per-series arrays that follow their series when columns are added, saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np


class SeriesState:
    """Base of the detectors. A subclass names its arrays and their first values in `FIRST`; each becomes an attribute of
    shape (n,), of the first value's type, one element per bound series. Those in `LATER` a state of an older version lacks."""

    FIRST: ClassVar[dict[str, float | int | bool]]
    LATER: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.series: tuple[str, ...] = ()
        self._saved: dict[str, dict[str, Any]] = {}
        for name, first in self.FIRST.items():
            setattr(self, name, np.zeros(0, type(first)))

    def bind(self, series: Sequence[str]) -> None:
        """Set the columns. Series bound before, or found in a loaded state, keep their values; others start anew."""
        old = {name: i for i, name in enumerate(self.series)}
        now = tuple(series)
        if len(set(now)) != len(now):
            raise ValueError("series names must be unique")
        target = np.array([i for i, name in enumerate(now) if name in old], np.int64)
        source = np.array([old[name] for name in now if name in old], np.int64)
        for name, first in self.FIRST.items():
            column = np.full(len(now), first)
            column[target] = getattr(self, name)[source]
            setattr(self, name, column)
        self.series = now
        for i, one in enumerate(now):
            if one not in old:
                for name, value in self._saved.pop(one, {}).items():
                    getattr(self, name)[i] = value

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive JSON exactly."""
        return {"series": list(self.series), **{name: getattr(self, name).tolist() for name in self.FIRST}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`, whatever the order of its series. Series that are not bound yet are kept until they are. Raises
        `KeyError` where something is missing, `TypeError` or `ValueError` where something is no finite number."""
        bound = self.series or tuple(state["series"])
        known = [name for name in self.FIRST if name in state or name not in self.LATER]
        for name in known:
            found = np.asarray(state[name], np.float64)
            if found.shape != (len(state["series"]),) or not np.isfinite(found).all():
                raise ValueError(f"{name} is not a number for each series")
        self._saved = {one: {name: state[name][i] for name in known} for i, one in enumerate(state["series"])}
        self.series = ()
        self.bind(bound)
