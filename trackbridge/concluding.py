"""From this rank's row of a step to the row that is written and looked at: merged with the other ranks', journalled, judged.

On the scribe's thread. What the detectors find goes on to `trackbridge.anomalies`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trackbridge.anomalies import Anomalies
from trackbridge.detectors import Watch
from trackbridge.errors import Part
from trackbridge.journal import JournalWriter
from trackbridge.merging import Concluded, Merger, Sender
from trackbridge.probes.session import Reading
from trackbridge.recorder import Recorder
from trackbridge.records import Row, StepContext

logger = logging.getLogger("trackbridge")
T = TypeVar("T")

SETTLE_SECONDS = 0.25  # that other ranks' numbers of the newest steps are waited for, before detectors are saved


class Concluder:
    """`add` takes this rank's rows in order. Each is concluded at once, or on a leader that merges when `advance` finds that
    the other ranks have sent their part."""

    def __init__(
        self,
        *,
        rows: JournalWriter,
        contexts: JournalWriter,
        recorder: Recorder | None,
        watch: Watch | None,
        merging: Sender | Merger | None,
        anomalies: Anomalies,
        strict: bool = False,
    ) -> None:
        self._rows = rows
        self._contexts = contexts
        self._recorder = recorder
        self._watch = watch
        self._merging = merging
        self._anomalies = anomalies
        self._detecting = Part("anomaly detection", strict=strict)
        self._loaded = False  # the detectors go on from a checkpoint's state, which may be damaged
        self._judged = -1  # the newest step that was looked at for anomalies

    def add(self, call: int, row: Row, reading: Reading, tokens: float, context: StepContext | None) -> None:
        """This rank's `row` of call number `call` of `run.step`, made of `reading`."""
        if isinstance(self._merging, Merger):
            if context is not None:
                self._contexts.append(row)  # what a replay on this rank is compared with
            self._merging.add(call, row, reading, tokens, context)
        else:
            if self._merging is not None:
                self._merging.send(call, row, reading, tokens)
            self._conclude(Concluded(row, context, row))

    @property
    def pause(self) -> float | None:
        """Seconds after which `advance` should be called again; None when no row is held back."""
        return self._merging.pause if isinstance(self._merging, Merger) else None

    def advance(self) -> None:
        """Conclude the rows whose other ranks have sent their part, and hear what those ranks detected."""
        if isinstance(self._merging, Merger):
            for row in self._merging.ready():
                self._conclude(row)
        self._anomalies.listen(None if self.pause is None else self._judged)

    def wait(self, seconds: float) -> None:
        """Nothing has come for `seconds`: is the run stalled?"""
        if self._watch is not None and self._detecting.alive:
            with self._detecting:
                for anomaly in self._asked(self._watch, lambda watch: watch.wait(seconds)):
                    self._anomalies.tell(anomaly)

    def finish(self, seconds: float) -> None:
        """Nothing more is added. What other ranks still send and detect is waited for, `seconds` at most."""
        began = time.monotonic()
        if isinstance(self._merging, Merger):
            for row in self._merging.finish(seconds / 2):
                self._conclude(row)
        elif self._merging is not None:
            self._merging.leave()
        seconds -= time.monotonic() - began
        if self._watch is not None and self._detecting.alive:
            with self._detecting:
                for anomaly in self._asked(self._watch, lambda watch: watch.finish()):
                    self._anomalies.tell(anomaly)
        self._anomalies.part(max(seconds, 0.0))

    def close(self) -> None:
        """Nothing more is read of other ranks."""
        if self._merging is not None:
            self._merging.close()

    # the detectors' state, for the user's checkpoint

    def state(self) -> dict[str, Any]:
        if isinstance(self._merging, Merger):
            for row in self._merging.settle(SETTLE_SECONDS):
                self._conclude(row)
        return {} if self._watch is None else self._asked(self._watch, lambda watch: watch.state_dict())

    def resume(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on with the detectors where a checkpoint left them; `step` is the next."""
        if self._watch is None or not self._detecting.alive:
            return
        if state:
            try:
                Watch(self._watch.settings).load_state_dict(state)  # what fails half way must leave ours as it is
                self._watch.load_state_dict(state)
                self._loaded = True
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                _learned_anew(error)
        self._watch.note("resume", step)

    def _asked(self, watch: Watch, question: Callable[[Watch], T]) -> T:
        """The answer of `watch`. Much of a checkpoint's state is only used once something happens: where it breaks then, the
        detectors forget it, and are asked again."""
        try:
            return question(watch)
        except Exception as error:
            if not self._loaded:
                raise
            _learned_anew(error)
            self._loaded = False
            watch.load_state_dict(Watch(watch.settings).state_dict())
            return question(watch)

    def _conclude(self, done: Concluded) -> None:
        """Write a row and look at it."""
        step = done.row.step
        self._rows.append(done.row)
        if self._watch is not None and self._detecting.alive:
            with self._detecting:
                for anomaly in self._asked(self._watch, lambda watch: watch.update(done.judged, done.context)):
                    self._anomalies.tell(anomaly, done.blamed)
                self._anomalies.looked_at(step)
        self._judged = step
        if self._recorder is not None:
            self._recorder.judged(step)


def _learned_anew(error: Exception) -> None:
    logger.warning("trackbridge: the checkpoint's detector state does not fit (%s); the bands are learned anew", error)
