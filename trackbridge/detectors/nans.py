"""NaN and Inf as one event, from the first row that has any to the first that has none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.cascade import ahead
from trackbridge.detectors.episodes import Episode
from trackbridge.detectors.events import Events
from trackbridge.detectors.nonfinite import broken, head, located
from trackbridge.detectors.plan import Plan
from trackbridge.detectors.standing import Standing
from trackbridge.records import Anomaly, Row


class NaNs:
    def __init__(self, band: BandDetector, events: Events) -> None:
        self._band = band
        self._events = events
        self._standing = Standing()

    def update(self, row: Row, plan: Plan, skip: bool) -> list[Anomaly]:
        """`skip`: a gradient scaler skipped this step, so that only a loss counts."""
        bad = broken(row, plan.counts, plan.losses if skip else None)
        bad = self._standing.apart(row, bad, skip=skip)
        episode = self._events.open.get("nonfinite")
        late = episode is not None and row.step > episode.anomaly.step + self._band.settings.cascade_steps
        apart = self._standing.anew(row, bad, late=late, skip=skip)
        if apart is not bad:  # the event under way did not recover
            bad, episode = apart, None
        if not bad.any():
            if episode is None or skip:
                return []
            del self._events.open["nonfinite"]
            return [episode.refreshed(recovered_after=row.step - episode.anomaly.onset)]
        fresh = episode is None
        bad, notes = located(row, bad)
        if episode is None:
            episode = self._begin(row, head(row, bad), notes)
        if row.step <= episode.anomaly.step + self._band.settings.cascade_steps:
            episode.join((row.schema.names[i], row.step, i) for i in np.flatnonzero(bad).tolist())
        return [episode.refreshed()] if fresh or len(episode.members) > episode.told else []

    def state_dict(self) -> dict[str, Any]:
        return {"standing": self._standing.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._standing.load_state_dict(state.get("standing", {}))

    def _begin(self, row: Row, place: int, notes: tuple[str, ...]) -> Episode:
        name, value = row.schema.names[place], float(row.values[place])
        what = Verdict(place, "nonfinite", row.step, row.step, value, self._expected(name), math.inf)
        episode = self._events.begin("nonfinite", row, "nonfinite", name, what, 1.0, *notes)
        episode.join(ahead(self._band, row.step))
        return episode

    def _expected(self, name: str) -> float:
        """The level of a tracked series, 0 for others: counters should be 0."""
        series = self._band.series
        return self._band.expected(series.index(name)) if name in series else 0.0
