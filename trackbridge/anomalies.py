"""Anomalies as they are told: each in its newest version, journalled whenever something changes, news for the user once.

What changes one: the detectors, which see it grow or end; other ranks, which saw it too; its capsule, which is promised, given
up, or sealed and diagnosed. Everything happens on the scribe's thread, but for `news` and where said.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from trackbridge.errors import Part
from trackbridge.journal import JournalWriter
from trackbridge.probes import Instruments
from trackbridge.records import Anomaly, Hypothesis
from trackbridge.rundir import RunDirectory
from trackbridge.sealer import Sealing

logger = logging.getLogger("trackbridge")

HISTOGRAMS_AFTER = 3  # steps after a detection, among ranks: by then all have heard of it


class Anomalies:
    """The anomalies of this rank's attempt, and what its sealer tells of their capsules (`trackbridge.sealer.Telling`).

    `latest` has the newest version of each by its id. `later(what)` has something done on the scribe's thread.
    """

    def __init__(
        self,
        *,
        rows: JournalWriter,
        directory: RunDirectory,
        instruments: Instruments,
        later: Callable[[Callable[[], Any]], None],
        seal: Callable[[Anomalies], Sealing] | None = None,
        world_size: int = 1,
        strict: bool = False,
    ) -> None:
        self.latest: dict[str, Anomaly] = {}
        self._fresh: deque[Anomaly] = deque()
        self._notes: dict[str, tuple[str, ...]] = {}  # what we added to an anomaly's
        self._reports: list[Anomaly] = []  # other ranks', of steps that were not looked at here
        self._rows = rows
        self._directory = directory
        self._instruments = instruments
        self._later = later
        self._world = world_size
        self._sealing = Part("making capsules", strict=strict)
        self._sealer = seal(self) if seal else None

    # the training thread

    def news(self) -> list[Anomaly]:
        """The anomalies found since the last call."""
        found: list[Anomaly] = []
        while self._fresh:
            found.append(self._fresh.popleft())
        return found

    @property
    def given_up(self) -> int:
        """Anomalies whose capsule was not made or not kept, for the sake of more severe ones."""
        return 0 if self._sealer is None else self._sealer.given_up

    # from the detectors

    def tell(self, anomaly: Anomaly, blamed: Callable[[Anomaly], Anomaly] | None = None) -> None:
        """Journal an anomaly and hand it to the user, keeping what we added to an earlier version of it. `blamed` says of a new
        one which ranks it is about."""
        known = self.latest.get(anomaly.id)
        if known is not None:
            ours = tuple(note for note in self._notes.get(anomaly.id, ()) if note not in anomaly.notes)
            anomaly = anomaly.updated(
                capsule=known.capsule, hypotheses=known.hypotheses, ranks=known.ranks, notes=(*anomaly.notes, *ours)
            )
            if self._sealer is not None:
                self._sealer.update(anomaly)
        else:
            found = len(anomaly.notes)
            if blamed is not None:
                anomaly = blamed(anomaly)
            if self._sealer is not None:
                anomaly = self._sealer.consider(anomaly)
                if anomaly.capsule is not None:  # of the step under way, or the next: this one's gradients are gone
                    self.ask_histograms(anomaly.step if self._world > 1 else None)
            self._notes[anomaly.id] = anomaly.notes[found:]
        self._keep(anomaly)
        if known is None:
            self._fresh.append(anomaly)

    def looked_at(self, step: int) -> None:
        """The detectors have seen `step`, and it is in the journal."""
        if self._sealer is not None:
            self._sealer.advance(step)

    # from other ranks

    def listen(self, judged: int | None = None) -> None:
        """What other ranks detected; of later steps than `judged` it is kept until those have been looked at here."""
        if self._sealer is not None and self._sealing.alive:
            with self._sealing:
                self._reports += self._sealer.heard()
                for anomaly in [each for each in self._reports if judged is None or each.step <= judged]:
                    self._reports.remove(anomaly)
                    self._tell_of_others(anomaly)

    def part(self, seconds: float) -> None:
        """This rank detects nothing more; what the others still do within `seconds`."""
        if self._sealer is not None:
            with self._sealing:
                for anomaly in [*self._reports, *self._sealer.part(seconds)]:
                    self._tell_of_others(anomaly)
                self._reports.clear()

    def finish(self, timeout: float) -> bool:
        """Wait for the capsules under way, on any thread. False if they are late."""
        return self._sealer is None or self._sealer.finish(timeout)

    def _tell_of_others(self, anomaly: Anomaly) -> None:
        """An anomaly that another rank detected: news, unless this rank has seen the same."""
        same = None if self._sealer is None else self._sealer.seen_here(anomaly)
        known = None if same is None else self.latest.get(same)
        if known is None:
            self.tell(anomaly)
        elif not set(anomaly.ranks) <= set(known.ranks):
            self._keep(known.updated(ranks=tuple(sorted({*known.ranks, *anomaly.ranks}))))

    # from the sealer

    def sealed(self, anomaly: Anomaly, error: str | None) -> None:
        """On the sealer's thread."""
        if error is not None:
            logger.warning("trackbridge: the capsule of step %d could not be sealed: %s", anomaly.step, error)
            return
        self._later(lambda: self._deliver(anomaly))

    def explained(self, anomaly_id: str, hypotheses: tuple[Hypothesis, ...]) -> None:
        """Also on a thread of its own: what the diagnosis says of an anomaly that has no capsule of its own."""
        self._later(lambda: self._explain(anomaly_id, hypotheses))

    def gave_up(self, path: str, anomaly: Anomaly, why: str) -> None:
        """Every anomaly of the capsule at `path` says that it has none any more."""
        for each in [a for a in self.latest.values() if a.capsule == path] or [anomaly]:
            self._notes[each.id] = (*self._notes.get(each.id, ()), why)
            self._keep(each.updated(capsule=None, notes=(*each.notes, why)))

    def ask_histograms(self, detected: int | None) -> None:
        """Of the next update; of the same one on all ranks when told the step of the detection."""
        self._instruments.ask_histograms(None if detected is None else detected + HISTOGRAMS_AFTER)

    def _explain(self, anomaly_id: str, hypotheses: tuple[Hypothesis, ...]) -> None:
        known = self.latest.get(anomaly_id)
        if known is not None and not known.hypotheses:
            self._keep(known.updated(hypotheses=hypotheses))

    def _deliver(self, anomaly: Anomaly) -> None:
        """A capsule is ready: tell what its diagnosis found, and hand it to the trackers."""
        from trackbridge.seal import artifact_for, hypotheses_in

        latest = self.latest.get(anomaly.id, anomaly)
        if latest.capsule is None or (self._sealer is not None and not self._sealer.settle(latest)):
            return
        capsule = self._directory.path / latest.capsule
        latest = latest.updated(hypotheses=hypotheses_in(capsule))
        self._keep(latest)
        self._rows.append(artifact_for(self._directory.path, latest, capsule))

    def _keep(self, anomaly: Anomaly) -> None:
        """This is its newest version."""
        self.latest[anomaly.id] = anomaly
        self._rows.append(anomaly)
