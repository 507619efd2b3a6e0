"""From verdicts to events: one `Anomaly` per episode, however many series and steps take part in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trackbridge.detectors.base import Verdict
from trackbridge.records import Anomaly

CASCADE = 64  # entries an anomaly carries at most
_EFFECTS = 16  # series whose drift, or leaving its band, has a note of its own


def severity(kind: str, score: float) -> float:
    """0 to 1, for ranking: a tenfold score is half the scale. 5 sigmas 0.35, 10: 0.5, 100 and more: 1. Non-finite is 1,
    a divergence at least 0.9."""
    if kind == "nonfinite":
        return 1.0
    grade = min(1.0, math.log10(max(score, 1.0)) / 2)
    return max(grade, 0.9) if kind == "divergence" else grade


def stage(series: str) -> int:
    """Where in one step a series is made: forward activations, loss, gradients, update. Orders a tie in a cascade."""
    if series.startswith("act/"):
        return 0
    if series.startswith("train/"):
        return 1
    if series.startswith("layer/"):
        return 4 if series.endswith("update_ratio") else 2
    return 3 if series.startswith("grad/") else 4


@dataclass
class Episode:
    """An event under way. `members` maps each series that left its band to (step, stage, place): when it did so, and its
    order within one step. `quiet` counts values back in the band, `quiet_since` is the step of the first of them. `count` is
    how many excursions have followed the first; `least` the severity of the fault that it began with; `stayed` says that a
    new level has been accepted; what left its band before `since`, when that fault began, is no part of it."""

    anomaly: Anomaly
    members: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    quiet: int = 0
    quiet_since: int = -1
    told: int = 0
    count: int = 0
    least: float = 0.0
    stayed: bool = False
    since: int = -1

    def join(self, entries: Iterable[tuple[str, int, int]]) -> None:
        """Note (series, step it left its band, its place in the model's order). Gradients are made in reverse order."""
        for series, step, place in entries:
            if series not in self.members and step >= self.since:
                rank = stage(series)
                self.members[series] = (step, rank, -place if rank == 2 else place)

    def cascade(self) -> tuple[tuple[str, int], ...]:
        """(series, step) in the order in which the step computes them: forward order, then loss, then backward order."""
        ordered = sorted(self.members.items(), key=lambda item: (item[1], item[0]))
        return tuple((name, place[0]) for name, place in ordered[:CASCADE])

    def refreshed(self, **changes: Any) -> Anomaly:
        """The anomaly as it is now known. One that a run went back behind has not ended by itself."""
        if (over := changes.get("recovered_after")) is not None and over < 0:
            changes["recovered_after"] = None
        cascade = self.cascade()
        self.told = len(self.members)
        self.anomaly = self.anomaly.updated(cascade=cascade, first_mover=cascade[0] if cascade else None, **changes)
        return self.anomaly

    def worse(self, value: float, score: float, step: int) -> None:
        """The series got worse than at detection. `value` and `score` stay those of the anomaly's own step; the severity and
        a note follow the peak."""
        grade = severity(self.anomaly.kind, score)
        if grade > self.anomaly.severity:
            kept = tuple(note for note in self.anomaly.notes if not note.startswith("peak "))
            note = f"peak {value:.6g} ({score:.3g} sigma) at step {step}"
            self.anomaly = self.anomaly.updated(severity=grade, notes=(*kept, note))

    def lead(self, series: str, value: float, expected: float, score: float, step: int) -> None:
        """A series that matters more has joined: the anomaly is told by it, as it was at `step`."""
        self._tell(series, value, expected, score, step)
        self.anomaly = self.anomaly.updated(severity=max(severity(self.anomaly.kind, score), self.least))

    def become(self, kind: str, series: str, value: float, expected: float, score: float, step: int) -> None:
        """A fault that was told by its own name now shows in `series`: the same event, told by its effect at `step`."""
        self._tell(series, value, expected, score, step)
        self.least = self.anomaly.severity
        self.anomaly = self.anomaly.updated(kind=kind, severity=max(self.least, severity(kind, score)), recovered_after=None)

    def _tell(self, series: str, value: float, expected: float, score: float, step: int) -> None:
        at = None if step == self.anomaly.step else step
        self.anomaly = self.anomaly.updated(series=series, value=value, expected=expected, score=score, terms="", value_step=at)

    def again(self, series: str, v: Verdict, leads: bool) -> None:
        """Another excursion of the same event: the latest is in a note. `leads`: its series matters more than the event's."""
        self.count += 1
        if leads:
            self._tell(series, v.value, v.expected, v.score, v.step)
        self.worse(v.value, v.score, v.step)
        words = f"{series} {v.value:.6g} where {v.expected:.6g} was expected ({v.score:.3g} sigma) at step {v.step}"
        self._note("not settled", f"{self.count} more excursion{'s' if self.count > 1 else ''}, the latest {words}")

    def leans(self, series: str, v: Verdict) -> bool:
        """What of a fault's effects is told in a note alone. Whether that is news."""
        what = "drifts" if v.kind == "drift" else "is out of its band"
        title = f"effect in {series}"
        effects = [note for note in self.anomaly.notes if note.startswith("effect in ")]
        if len(effects) >= _EFFECTS or any(note.startswith(f"{title}: ") for note in effects):
            return False
        self._note(title, f"{what} from step {v.onset}, {v.value:.6g} where {v.expected:.6g} was expected")
        return True

    def seen(self, note: str) -> None:
        """A monitor sees this event too. Of what it sees again and again, for an event may last as long as the run, the first
        and the latest are told."""
        fault, _, words = note.partition(": ")
        if any(known.startswith(f"{fault}: ") for known in self.anomaly.notes):
            self._note(f"{fault} again", words)
        else:
            self._note(fault, words)

    def _note(self, title: str, words: str) -> None:
        """The one note that begins with `title`."""
        kept = tuple(note for note in self.anomaly.notes if not note.startswith(f"{title}: "))
        self.anomaly = self.anomaly.updated(notes=(*kept, f"{title}: {words}"))

    def state(self) -> dict[str, Any]:
        """JSON-able. Non-finite numbers are written as strings."""
        plain = asdict(self)
        a = plain["anomaly"]
        del a["hypotheses"]
        for key in ("value", "expected", "score"):
            a[key] = a[key] if math.isfinite(a[key]) else str(a[key])
        return plain

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Episode:
        known = {f.name for f in fields(Anomaly)}  # a state may be newer, too
        a = {key: value for key, value in state["anomaly"].items() if key in known}
        for key in ("value", "expected", "score"):
            a[key] = float(a[key])
        a["step"], a["onset"] = int(a["step"]), int(a["onset"])
        a["cascade"] = tuple((name, step) for name, step in a["cascade"])
        a["first_mover"] = tuple(a["first_mover"]) if a["first_mover"] else None
        a["ranks"], a["notes"] = tuple(a["ranks"]), tuple(a["notes"])
        if not all(isinstance(text, str) for text in (*a["notes"], a["id"], a["kind"], a["series"])):
            raise TypeError("a name or a note of an event is no text")
        members = {name: (step, rank, place) for name, (step, rank, place) in state["members"].items()}
        kept = (state["quiet"], state["quiet_since"], state["told"])
        fault = {key: state[key] for key in ("count", "least", "stayed", "since") if key in state}  # a state may be older
        return cls(Anomaly(**a), members, *kept, **fault)

    @classmethod
    def known(cls, state: dict[str, Any], episodes: dict[str, Episode]) -> Episode:
        """`restore`, but one of `episodes`, by the id of their anomaly, where it is among them; else it joins them. Several
        hold an episode, and what one of them does to it the others must see."""
        episode = cls.restore(state)
        return episodes.setdefault(episode.anomaly.id, episode)
