"""Faults by name: what monitors see becomes an event of its own, or a part of the one that it explains or follows."""

from __future__ import annotations

from collections.abc import Mapping

from trackbridge.detectors.aftermath import CAUSE, Owner
from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.episodes import Episode
from trackbridge.detectors.events import Events
from trackbridge.detectors.monitors import Foreign, Level, Look, Monitor, Sign
from trackbridge.detectors.monitors.rule import RuleMonitor
from trackbridge.detectors.units import is_global_gradient, is_loss
from trackbridge.records import FAULTS, UNDER_WAY, Anomaly, Row

_RELEARN = ("lr_restart", "epoch", "batch_size", "sequence_length")


class Faults:
    """`monitors`: by their names, in the order in which they are asked."""

    def __init__(self, monitors: Mapping[str, Monitor], band: BandDetector, events: Events) -> None:
        self._monitors = monitors
        self._band = band
        self._events = events

    def changed(self, event: str) -> None:
        """A known change of regime: "resume", or one after which the bands learn anew; others change nothing."""
        if event in _RELEARN:
            self._band.relearn()
        if event in (*_RELEARN, "resume"):
            for monitor in self._monitors.values():
                monitor.changed(event)

    def update(self, look: Look) -> list[Anomaly]:
        """What the monitors say of this row: new events, ends of such, and notes on the excursion that a fault explains."""
        out = []
        for name, monitor in self._monitors.items():
            sign = monitor.update(look)
            if (event := monitor.regime()) is not None:
                self.changed(event)
            if (end := monitor.over()) is not None:
                out += self._over(name, end, look.step)
            if sign is not None:
                out += self._sign(name, sign, look.row)
        return out

    def waiting(self, seconds: float, awaited: Row) -> list[Anomaly]:
        """What they say of no row coming for `seconds`; `awaited` stands for it."""
        signs = [(name, monitor.waiting(seconds, awaited.step)) for name, monitor in self._monitors.items()]
        return [anomaly for name, sign in signs if sign is not None for anomaly in self._sign(name, sign, awaited)]

    def _over(self, name: str, end: int, step: int) -> list[Anomaly]:
        aftermath = self._events.aftermath
        aftermath.over(name, end)
        episode = self._events.open.pop(name, None)
        if episode is None:
            return []
        aftermath.moved(episode, step)
        return [episode.refreshed(recovered_after=end - episode.anomaly.onset)]

    def _sign(self, name: str, sign: Sign, row: Row) -> list[Anomaly]:
        if name == Level.NAME and "drift" in self._events.open:
            return []  # it is told already
        aftermath, monitor = self._events.aftermath, self._monitors[name]
        fault = monitor.CAUSAL and not isinstance(monitor, (Level, Foreign))  # those see an effect, and know no cause
        earliest = sign.onset if sign.earliest is None else sign.earliest
        effect = self._effect(sign, earliest) if monitor.CAUSAL else None
        if effect is not None:
            if fault:
                aftermath.begin(name, effect, min(earliest, effect.anomaly.onset), effect.anomaly.score)
            return [_explained(effect, sign)]
        owner = None if fault or not monitor.CAUSAL else aftermath.of(row.step if sign.kind == "drift" else sign.onset)
        if owner is not None:
            return [self._seen_too(name, sign, owner, row.step)]
        if (alike := self._alike(name, sign)) is not None:
            alike.seen(sign.note)
            return [alike.refreshed()]
        under_way = self._under_way(sign.onset) if isinstance(self._monitors[name], RuleMonitor) else ()
        notes = (sign.note, *under_way)
        episode = self._events.begin(name, row, sign.kind, sign.series, sign, sign.severity, *notes, terms=sign.terms)
        episode.join([(sign.series, sign.onset, 0)])
        if fault:
            aftermath.begin(name, episode, earliest)
        return [episode.refreshed()]

    def _effect(self, sign: Sign, earliest: int) -> Episode | None:
        """The excursion, under way or just over, that a fault seen only now has caused; or that `sign` sees too."""
        under_way = self._events.open.get("excursion")
        if under_way is not None and (is_loss(sign.series) or is_global_gradient(sign.series)):
            return under_way
        for episode in (under_way, self._events.latest):
            if episode is not None and episode.anomaly.onset - CAUSE <= sign.onset and earliest <= episode.anomaly.onset:
                return episode
        return None

    def _seen_too(self, name: str, sign: Sign, owner: Owner, step: int) -> Anomaly:
        """What a monitor sees of the effects of a fault by name. A level that a series keeps from then on tells the event,
        unless an excursion does."""
        episode, aftermath = owner.episode, self._events.aftermath
        if name == Level.NAME and sign.kind == "shift":
            if not owner.worst:
                episode.become(sign.kind, sign.series, sign.value, sign.expected, sign.score, step)
                aftermath.saw(episode, sign.score)
            self._events.move(episode, name)
        aftermath.moved(episode, step)
        return _explained(episode, sign)

    def _under_way(self, onset: int) -> tuple[str, ...]:
        """What is said of a user's rule that breaks while the effects of a fault by name go on."""
        owner = self._events.aftermath.of(onset)
        known = owner.episode.anomaly.notes if owner is not None else ()
        return tuple(f"{UNDER_WAY}{note}" for note in known if note.partition(": ")[0] in FAULTS)[:1]

    def _alike(self, name: str, sign: Sign) -> Episode | None:
        """The open event of another further detector that tells the same series: one event, however many see it."""
        if not isinstance(self._monitors[name], Foreign):
            return None
        others = [key for key in self._events.open if key != name and isinstance(self._monitors.get(key), Foreign)]
        return next((self._events.open[key] for key in others if self._events.open[key].anomaly.series == sign.series), None)


def _explained(episode: Episode, sign: Sign) -> Anomaly:
    """`episode` with what a monitor says of it."""
    episode.join([(sign.series, sign.onset, 0)])
    episode.seen(sign.note)
    return episode.refreshed()
