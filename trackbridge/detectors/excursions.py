"""A loss or a gradient norm leaves its band, or drifts: a new event, the next beat of a rhythm, or a part of an event that is
known. How it goes on: `settling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trackbridge.detectors.aftermath import AGAIN, Owner
from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.cascade import ahead, beside
from trackbridge.detectors.columns import Columns
from trackbridge.detectors.episodes import Episode, severity
from trackbridge.detectors.events import Events
from trackbridge.detectors.periodic import Periods
from trackbridge.detectors.units import is_loss
from trackbridge.detectors.witness import Witness
from trackbridge.records import Anomaly, Row

_SUDDEN = 5  # a rise found by its lean within this many steps of its onset is a spike, not a drift


class Excursions:
    """`causes`: the sorts of events that an excursion may go on with."""

    def __init__(self, band: BandDetector, columns: Columns, events: Events, causes: Sequence[str]) -> None:
        self._band = band
        self._events = events
        self._causes = causes
        self._witness = Witness(band, columns)
        self._periods = Periods()

    def begin(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        """At most one excursion and one drift begin at a row, told by the loss rather than the gradient norm."""
        heads = [v for v in verdicts if self._band.is_head[v.index] and v.kind != "shift"]
        heads = [v for v in heads if self._witness.enough(v, row, verdicts)]
        new: dict[str, Verdict] = {}
        for v in sorted(heads, key=lambda v: (not is_loss(self._name(v)), -v.score)):
            sudden = v.kind != "drift" or v.step - v.onset <= _SUDDEN
            new.setdefault("excursion" if sudden else "drift", v)
        out = []
        for sort, v in new.items():
            if not self._told(sort, v):
                out += self._tell(row, sort, v, verdicts)
        return out

    def _told(self, sort: str, v: Verdict) -> bool:
        """It belongs to what is under way: a jump, too, that is only the noise on top of a drift."""
        under_way = self._events.open
        if sort in under_way or (sort == "drift" and "excursion" in under_way):
            return True
        drift = under_way.get("drift")
        noise = drift is not None and self._name(v) in drift.members
        return noise and v.score < AGAIN * float(self._band.units.bar[v.index])

    def _tell(self, row: Row, sort: str, v: Verdict, verdicts: list[Verdict]) -> list[Anomaly]:
        owner = self._events.aftermath.of(v.onset)
        if owner is not None and not (owner.worst and v.score > AGAIN * owner.worst):
            return self._follow(row, sort, v, verdicts, owner)
        if sort == "drift":
            drift = self._events.begin(sort, row, "drift", self._name(v), v, severity("drift", v.score))
            return [self._joined(drift, v, verdicts)]
        if (first := self._periods.beat(v.onset)) is not None:
            return [first]
        fresh = self._joined(self._excursion(row, v), v, verdicts)
        self._periods.add(v.onset, fresh)
        return [fresh]

    def _excursion(self, row: Row, v: Verdict) -> Episode:
        """A new one, or that which told what caused it."""
        cause = self._events.take(self._causes, v.onset)
        if cause is None:
            return self._events.begin("excursion", row, "spike", self._name(v), v, severity("spike", v.score))
        cause.become("spike", self._name(v), v.value, v.expected, v.score, row.step)
        self._events.open["excursion"] = cause
        return cause

    def _joined(self, episode: Episode, v: Verdict, verdicts: list[Verdict]) -> Anomaly:
        self._waited(episode, v)
        episode.join(ahead(self._band, v.onset))
        episode.join(beside(self._band, verdicts))
        return episode.refreshed()

    def _waited(self, episode: Episode, v: Verdict) -> None:
        """What waited for a witness may have been worse."""
        if (held := self._witness.held(self._name(v), v.onset)) is not None:
            episode.worse(held.value, held.score, held.step)

    def _follow(self, row: Row, sort: str, v: Verdict, verdicts: list[Verdict], owner: Owner) -> list[Anomaly]:
        """An excursion or a drift that is the effect of a fault by name. The first excursion tells the event from then on; a
        further one, and a drift, is a note."""
        episode, name, aftermath = owner.episode, self._name(v), self._events.aftermath
        told = episode.told
        episode.join(ahead(self._band, v.onset))
        episode.join(beside(self._band, verdicts))
        aftermath.moved(episode, row.step)
        if sort == "drift":
            return [episode.refreshed()] if episode.leans(name, v) or len(episode.members) > told else []
        if not owner.worst:
            episode.become("spike", name, v.value, v.expected, v.score, row.step)
        else:
            episode.again(name, v, is_loss(name) and not is_loss(episode.anomaly.series))
        self._waited(episode, v)
        aftermath.saw(episode, v.score)
        self._events.move(episode, sort)
        return [episode.refreshed(recovered_after=None)]

    def _name(self, v: Verdict) -> str:
        return self._band.series[v.index]

    def state_dict(self) -> dict[str, Any]:
        return {**self._periods.state_dict(), "waiting": self._witness.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._periods.load_state_dict(state)
        self._witness.load_state_dict(state.get("waiting", {}))
