"""The events under way: at most one of a sort, each told once by its id, and what every new one carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trackbridge.detectors.aftermath import CAUSE, Aftermath
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.episodes import Episode
from trackbridge.detectors.monitors import Regime, Sign
from trackbridge.records import Anomaly, Row


class Events:
    """`open`: the episodes under way by their sort: "nonfinite", "excursion" (spike, shift, divergence), "drift", "layers", or
    the name of a monitor. `latest`: the latest excursion that is over, whose cause may be seen only now."""

    def __init__(self, after_resume: int, regime: Regime) -> None:
        self.open: dict[str, Episode] = {}
        self.latest: Episode | None = None
        self.aftermath = Aftermath()
        self.resumed = -1
        self._after_resume = after_resume
        self._regime = regime
        self._ids: set[str] = set()  # outlives `load_state_dict`: a loop that rolls back may see a step twice

    def begin(
        self, sort: str, row: Row, kind: str, series: str, what: Verdict | Sign, severity: float, *notes: str, terms: str = ""
    ) -> Episode:  # fmt: skip
        """A new event, detected at `row`: `what` in `series`. It takes the place of an open one of its sort."""
        anomaly = Anomaly(
            id=self._name(row, kind), kind=kind, step=row.step, onset=what.onset, severity=severity, series=series,
            value=what.value, expected=what.expected, score=what.score, attempt=row.attempt, time=row.time,
            notes=(*self._known(row.step), *notes), terms=terms,
        )  # fmt: skip
        self.open.pop(sort, None)
        episode = self.open[sort] = Episode(anomaly)
        return episode

    def move(self, episode: Episode, sort: str) -> None:
        """`episode` goes on as the open one of `sort`."""
        for other in [other for other, each in self.open.items() if each is episode]:
            del self.open[other]
        episode.quiet, episode.quiet_since = 0, -1
        self.open[sort] = episode

    def take(self, sorts: Iterable[str], onset: int) -> Episode | None:
        """The open event of the first of `sorts` that began shortly before `onset`. It is no longer one of its own then."""
        for sort in sorts:
            episode = self.open.get(sort)
            if episode is not None and onset - CAUSE <= episode.anomaly.onset <= onset:
                return self.open.pop(sort)
        return None

    def close(self, sort: str, step: int) -> None:
        episode = self.open.pop(sort)
        self.aftermath.moved(episode, step)
        if sort == "excursion":
            self.latest = episode

    def finish(self) -> list[Anomaly]:
        """All that is open, as it is known when the run ends: it did not recover."""
        closed = [episode.refreshed() for episode in self.open.values()]
        self.open.clear()
        return closed

    def recent(self, step: int) -> bool:
        """The run was resumed shortly before `step`."""
        return self.resumed >= 0 and step - self.resumed <= self._after_resume

    def _known(self, step: int) -> tuple[str, ...]:
        """Notes on what is unusual about a step, whatever happens in it."""
        known = ("after_resume",) if self.recent(step) else ()
        return (*known, self._regime.words) if self._regime.words else known

    def _name(self, row: Row, kind: str) -> str:
        """An id that this process has not given before."""
        plain = f"{row.attempt}-{row.step}-{kind}"
        name, again = plain, 1
        while name in self._ids:
            again += 1
            name = f"{plain}-{again}"
        self._ids.add(name)
        return name

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": {sort: episode.state() for sort, episode in self.open.items()},
            "resumed": self.resumed,
            "aftermath": self.aftermath.state_dict(),
            "latest": self.latest.state() if self.latest is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        episodes: dict[str, Episode] = {}  # one event is one object, whoever holds it
        self.open = {sort: Episode.known(kept, episodes) for sort, kept in state["open"].items()}
        self.resumed = state["resumed"]
        self.aftermath.load_state_dict(state.get("aftermath", {}), episodes)
        latest = state.get("latest")
        self.latest = Episode.known(latest, episodes) if latest else None
