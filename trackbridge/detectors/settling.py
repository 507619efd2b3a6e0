"""How an event goes on, row by row, until it is over: its series come back to their bands, or stay at a new level."""

from __future__ import annotations

import numpy as np

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.cascade import beside
from trackbridge.detectors.columns import Columns
from trackbridge.detectors.episodes import Episode, severity
from trackbridge.detectors.events import Events
from trackbridge.detectors.units import is_loss
from trackbridge.records import Anomaly, Row


class Settling:
    """Of the open excursion, the open drift and that of single layers."""

    def __init__(self, band: BandDetector, columns: Columns, events: Events) -> None:
        self._band = band
        self._columns = columns
        self._events = events

    def update(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        self._unsettled(row.step)
        out = []
        for sort in [sort for sort in ("excursion", "drift", "layers") if sort in self._events.open]:
            out += self._go_on(sort, self._events.open[sort], row, verdicts)
        return out

    def _unsettled(self, step: int) -> None:
        """While a run-level series is in a drift that began after a fault, what that fault does is not over."""
        band, aftermath = self._band, self._events.aftermath
        for owner in aftermath.unsettled(step):
            if (band.is_head & band.drifting() & (band.drift_onset >= owner.onset)).any():
                aftermath.moved(owner.episode, step)

    def _go_on(self, sort: str, episode: Episode, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        last = episode.anomaly.step + self._band.settings.cascade_steps
        if row.step <= last:
            episode.join(beside(self._band, verdicts))
        told_by_another = self._worse(sort, episode, row.step, verdicts)
        index = self._band.series.index(episode.anomaly.series)
        if (kind := self._level(sort, episode, index, verdicts)) is not None:
            self._events.close(sort, row.step)
            return [_stays(sort, episode, kind)]
        if self._outside(sort, episode):
            episode.quiet = 0
        elif self._columns.present[index]:
            episode.quiet_since = row.step if episode.quiet == 0 else episode.quiet_since
            episode.quiet += 1
            if episode.quiet >= self._band.settings.quiet:
                self._events.close(sort, row.step)
                over = None if episode.stayed else episode.quiet_since - episode.anomaly.onset
                return [episode.refreshed(recovered_after=over)]
        if told_by_another or (row.step == last and len(episode.members) > episode.told):
            return [episode.refreshed()]
        return []

    def _worse(self, sort: str, episode: Episode, step: int, verdicts: list[Verdict]) -> bool:
        """Note what gets worse. True if the loss has followed, and tells an excursion from now on."""
        followed = False
        for v in verdicts:
            name = self._band.series[v.index]
            if name == episode.anomaly.series and sort != "layers":
                episode.worse(v.value, v.score, step)
                if sort == "excursion":
                    self._events.aftermath.saw(episode, v.score)
            elif is_loss(name) and not is_loss(episode.anomaly.series) and sort == "excursion":
                episode.lead(name, v.value, v.expected, v.score, step)
                followed = True
        return followed

    def _outside(self, sort: str, episode: Episode) -> bool:
        """Some series that counts and takes part is out of its band, or in a drift that began with the event."""
        band = self._band
        drifting = band.drifting()
        active = drifting if sort == "drift" else (band.run > 0) | (drifting & (band.drift_onset >= episode.anomaly.onset))
        if sort != "layers":
            active = active & band.is_head
        return any(band.series[i] in episode.members for i in np.flatnonzero(active).tolist())

    def _level(self, sort: str, episode: Episode, index: int, verdicts: list[Verdict]) -> str | None:
        """The kind of an event that ends at a new level instead of coming back; None if it goes on."""
        if any(v.index == index and v.kind == "shift" for v in verdicts):
            if sort == "drift":
                return "drift"
            before = episode.anomaly.kind if episode.stayed else ""
            return "shift" if self._band.settled[index] and before != "divergence" else "divergence"
        if self._band.stayed()[index] and not self._band.run[index]:
            return "drift" if sort == "drift" else "shift"
        return None


def _stays(sort: str, episode: Episode, kind: str) -> Anomaly:
    """The closing version of an episode that ends at a new level."""
    episode.stayed = True
    if sort == "layers":
        return episode.refreshed(kind=kind)
    return episode.refreshed(kind=kind, severity=max(severity(kind, episode.anomaly.score), episode.anomaly.severity))
