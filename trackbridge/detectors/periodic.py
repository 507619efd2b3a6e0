"""Spikes that come back at a fixed distance are one cause: the short last batch of an epoch, an evaluation, a checkpoint."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

BEATS = 4  # consecutive spikes at equal distances that make a rhythm; three could be chance on a coarse logging grid


class Periods:
    """Remembers the onsets of the latest spikes and says when a new one is the next beat of a rhythm."""

    def __init__(self) -> None:
        self.distance = 0
        self.beats = 0
        self.latest: list[tuple[int, str]] = []  # (onset, id of its anomaly), the last `BEATS` - 1
        self.first = ""  # the anomaly that stands for the rhythm

    def beat(self, onset: int) -> str | None:
        """The id of the anomaly that stands for the rhythm `onset` continues, or None if it continues none."""
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

    def add(self, onset: int, id: str) -> None:
        """Note a spike that continues no rhythm."""
        kept = [] if self.first else self.latest
        self.first = ""
        self.latest = [*kept, (onset, id)][1 - BEATS :]

    def state_dict(self) -> dict[str, Any]:
        return {"distance": self.distance, "beats": self.beats, "latest": self.latest, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.distance, self.beats, self.first = state["distance"], state["beats"], state["first"]
        self.latest = [(onset, id) for onset, id in state["latest"]]
