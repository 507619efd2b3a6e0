"""Spikes that come back at a fixed distance are one cause: the short last batch of an epoch, an evaluation, a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from trackbridge.detectors.episodes import Episode
from trackbridge.records import Anomaly

BEATS = 4  # consecutive spikes at equal distances that make a rhythm; three could be chance on a coarse logging grid


class Periods:
    """Remembers the latest spikes and says when a new one is the next beat of a rhythm."""

    def __init__(self) -> None:
        self.distance = 0
        self.beats = 0
        self.latest: list[tuple[int, str]] = []  # (onset, id of its anomaly), the last `BEATS` - 1
        self.first = ""  # the anomaly that stands for the rhythm
        self._told: dict[str, Anomaly] = {}  # those of `latest` as they were first told, by their ids

    def beat(self, onset: int) -> Anomaly | None:
        """The first anomaly of the rhythm that a spike from `onset` continues, to be told again with the rhythm in its notes;
        None if it continues none."""
        first = self._told.get(self._continued(onset) or "")
        if first is None:
            return None
        kept = (note for note in first.notes if not note.startswith("periodic: "))
        first = first.updated(notes=(*kept, f"periodic: every {self.distance} steps, {self.beats} times"))
        self._told = {first.id: first}
        return first

    def add(self, onset: int, anomaly: Anomaly) -> None:
        """Note a spike that continues no rhythm."""
        kept = [] if self.first else self.latest
        self.first = ""
        self.latest = [*kept, (onset, anomaly.id)][1 - BEATS :]
        self._told = {id: self._told[id] for _, id in self.latest if id in self._told}
        self._told[anomaly.id] = anomaly

    def _continued(self, onset: int) -> str | None:
        """The id of the anomaly that stands for the rhythm."""
        if self.first and self.latest and onset - self.latest[-1][0] == self.distance:
            self.beats += 1
            self.latest = [(onset, self.first)]
            return self.first
        onsets = [at for at, _ in self.latest] + [onset]
        gaps = {b - a for a, b in pairwise(onsets)}
        if len(onsets) == BEATS and len(gaps) == 1:
            self.distance, self.beats, self.first = gaps.pop(), BEATS, self.latest[0][1]
            self.latest = [(onset, self.first)]
            return self.first
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "periods": {"distance": self.distance, "beats": self.beats, "latest": self.latest, "first": self.first},
            "groups": {id: Episode(anomaly).state() for id, anomaly in self._told.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = state["periods"]
        self.distance, self.beats, self.first = kept["distance"], kept["beats"], kept["first"]
        self.latest = [(onset, id) for onset, id in kept["latest"]]
        self._told = {id: Episode.restore(value).anomaly for id, value in state["groups"].items()}
