"""Single layers that stay out of their band while nothing else is wrong."""

from __future__ import annotations

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.cascade import ahead, beside
from trackbridge.detectors.episodes import severity
from trackbridge.detectors.events import Events
from trackbridge.records import Anomaly, Row

_MOST = 0.3  # severity of an event that the loss does not follow


class Layers:
    """One event of low severity for all of them. Not while the loss is falling: then layers change because the net learns."""

    def __init__(self, band: BandDetector, events: Events) -> None:
        self._band = band
        self._events = events
        self.rested = -1  # until this step no further event is told

    def begin(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        cfg, band, events = self._band.settings.layers, self._band, self._events
        busy = row.step < self.rested or any(sort in events.open for sort in ("excursion", "drift", "nonfinite", "layers"))
        if not cfg.enabled or busy or not verdicts or band.learning():
            return []
        lasting = [
            v for v in verdicts
            if v.kind == "spike" and not band.is_head[v.index] and v.score >= cfg.score and band.run[v.index] == cfg.after
        ]  # fmt: skip
        if not lasting:
            return []
        v = max(lasting, key=lambda v: v.score)
        name = band.series[v.index]
        self.rested = row.step + cfg.rest
        if (owner := events.aftermath.of(v.onset)) is not None:
            owner.episode.join(beside(band, verdicts))
            owner.episode.leans(name, v)
            events.aftermath.moved(owner.episode, row.step)
            return [owner.episode.refreshed()]
        grade = min(severity("spike", v.score), _MOST)
        episode = events.begin("layers", row, "spike", name, v, grade, "the loss does not follow")
        episode.join(ahead(band, v.onset))
        episode.join(beside(band, verdicts))
        return [episode.refreshed()]
