"""The one host thread between training and the journal: slot -> row -> detectors -> journal.

The training thread hands over items through a queue and never waits. Each part that may break (a probe, the recorder's packing,
the detectors, the sealer) is guarded on its own, so that a bug in one of them still leaves the rows.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trackbridge.detectors import Watch
from trackbridge.errors import Part
from trackbridge.hostcopy import HostCopy
from trackbridge.journal import JournalWriter
from trackbridge.merging import Concluded, Merger, Sender
from trackbridge.probes import Instruments
from trackbridge.recorder import RawContext, Recorder
from trackbridge.records import Anomaly, Artifact, Hypothesis, Params, Row, RunEnd, StepContext
from trackbridge.rowmaker import RowMaker
from trackbridge.rundir import RunDirectory
from trackbridge.sealer import Sealing
from trackbridge.slab import Slot

logger = logging.getLogger("trackbridge")


class ClosedStep(NamedTuple):
    """What `run.step` hands over: the slot being copied, the host's own numbers, and the step's raw context. `call` numbers the
    calls of this attempt, those that found no slot included; `tokens` were consumed in the step."""

    call: int
    step: int
    time: float
    slot: Slot
    host: Mapping[str, float]
    context: RawContext | None
    tokens: float


@dataclass(frozen=True, slots=True)
class Logged:
    """What `run.log` hands over: series and their numbers, and copies of 0-d tensors on their way to the host."""

    step: int
    time: float
    series: tuple[str, ...]
    numbers: list[float]
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class Ask:
    """Something to do on the scribe's thread, with the answer."""

    what: Callable[[], Any]
    answer: list[Any] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


BACKLOG_BYTES = 256 << 20
"""Step contexts waiting for the scribe may hold this much; beyond it they are dropped and counted, the rows stay."""

IDLE_SECONDS = 1.0
SETTLE_SECONDS = 0.25  # that other ranks' numbers of the newest steps are waited for, before detectors are saved
HISTOGRAMS_AFTER = 3  # steps after a detection, among ranks: by then all have heard of it

Item = ClosedStep | Logged | Params | Artifact | RunEnd | Ask


class Scribe:
    """Owns both journals of this rank. `news` is the only thing that flows back to the training thread."""

    def __init__(
        self,
        *,
        rows: JournalWriter,
        contexts: JournalWriter,
        instruments: Instruments,
        recorder: Recorder | None,
        watch: Watch | None,
        directory: RunDirectory,
        attempt: int,
        maker: RowMaker,
        merging: Sender | Merger | None = None,
        seal: Callable[[Scribe], Sealing] | None,
        world_size: int = 1,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fresh: deque[Anomaly] = deque()
        self.latest: dict[str, Anomaly] = {}
        self._rows = rows
        self._contexts = contexts
        self._instruments = instruments
        self._recorder = recorder
        self._watch = watch
        self._directory = directory
        self._attempt = attempt
        self._sealer = seal(self) if seal else None
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._maker = maker
        self._merging = merging
        self._judged = -1  # the newest step that was looked at for anomalies
        self._reports: list[Anomaly] = []  # other ranks', of steps that were not
        self._writing = Part("the journal", strict=strict)
        self._recording = Part("the recorder", strict=strict)
        self._detecting = Part("anomaly detection", strict=strict)
        self._counting = Part("histograms", strict=strict)
        self._sealing = Part("making capsules", strict=strict)
        self._notes: dict[str, tuple[str, ...]] = {}  # what we added to an anomaly's
        self._world = world_size
        self._error: BaseException | None = None
        self._submitted_bytes = 0  # written by the training thread only
        self._handled_bytes = 0  # written by the scribe's thread only
        self.contexts_dropped = 0
        self._clock = clock
        self._since = clock()  # when the newest step came, or the newest pause ended
        self._pauses = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="trackbridge-scribe", daemon=True)
        self._thread.start()

    # training thread

    def pause(self) -> None:
        """No step is to be expected until `resume`. Nests."""
        self._pauses += 1

    def resume(self) -> None:
        self._since = self._clock()
        self._pauses -= 1

    def submit(self, item: Item) -> None:
        self._items.put(item)

    def submit_step(
        self,
        step: int,
        when: float,
        slot: Slot,
        host: Mapping[str, float],
        context: RawContext | None,
        *,
        call: int,
        tokens: float = 0.0,
    ) -> None:
        """Hand over a closed step; its context only if there is room for it."""
        if context is not None:
            if self._submitted_bytes - self._handled_bytes > BACKLOG_BYTES:
                self.contexts_dropped += 1
                context = None
            else:
                self._submitted_bytes += context.nbytes
        self._items.put(ClosedStep(call, step, when, slot, host, context, tokens))

    def ask(self, what: Callable[[], Any], timeout: float = 10.0) -> Any:
        """What `what` returns on the scribe's thread, after everything submitted so far. None if it is late or has ended."""
        if not self._thread.is_alive():
            return None
        ask = Ask(what)
        self.submit(ask)
        ask.done.wait(timeout)
        return ask.answer[0] if ask.answer else None

    def news(self) -> list[Anomaly]:
        """The anomalies found since the last call."""
        found: list[Anomaly] = []
        while self._fresh:
            found.append(self._fresh.popleft())
        return found

    @property
    def losses(self) -> dict[str, float]:
        """Series of what was lost so far; empty when nothing was."""
        lost = {}
        if self._rows.rows_lost:
            lost["trackbridge/rows_lost"] = float(self._rows.rows_lost)
        if self.contexts_dropped:
            lost["trackbridge/contexts_dropped"] = float(self.contexts_dropped)
        return lost

    @property
    def counts(self) -> dict[str, float]:
        """`losses`, and the capsules that others' severity cost."""
        counted = self.losses
        if self._sealer is not None and self._sealer.given_up:
            counted["trackbridge/capsules_given_up"] = float(self._sealer.given_up)
        return counted

    def watch_state(self) -> dict[str, Any]:
        """The detectors' state, for the user's checkpoint. Call through `ask`."""
        if isinstance(self._merging, Merger):
            for row in self._merging.settle(SETTLE_SECONDS):
                self._conclude(row)
        return self._watch.state_dict() if self._watch is not None else {}

    def resume_watch(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on with the detectors where a checkpoint left them. Call through `ask`."""
        if self._watch is None or not self._detecting.alive:
            return
        if state:
            try:
                self._watch.load_state_dict(state)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                logger.warning(
                    "trackbridge: the checkpoint's detector state does not fit (%s); the bands are learned anew", error
                )
        self._watch.note("resume", step)

    def close(self, end: RunEnd, timeout: float) -> bool:
        """Everything submitted so far, open capsules, then `end`, then the journals' last fsync. Bounded; False if late: then
        the thread goes on by itself, and `end` is written when it gets there."""
        self._closing = True  # no step is awaited any more
        deadline = time.monotonic() + timeout
        last = Ask(lambda: self._finish_watch(deadline - time.monotonic()))
        self.submit(last)
        drained = last.done.wait(timeout)
        sealed = drained and (self._sealer is None or self._sealer.finish(max(deadline - time.monotonic(), 0.0)))
        self.submit(end)
        self._items.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        if self._error is not None:
            raise self._error
        return sealed and not self._thread.is_alive()

    # scribe thread

    def _next(self) -> Item | None:
        """The next item. While none comes, what was written reaches the disk all the same."""
        while True:
            pause = self._merging.pause if isinstance(self._merging, Merger) else None
            try:
                return self._items.get(timeout=IDLE_SECONDS if pause is None else min(pause, IDLE_SECONDS))
            except queue.Empty:
                self._merge()
                for journal in (self._rows, self._contexts):
                    journal.sync_if_due()
                self._listen()
                self._wait()

    def _wait(self) -> None:
        """Nothing comes: is the run stalled?"""
        if self._watch is not None and self._detecting.alive and not self._pauses and not self._closing:
            with self._detecting:
                for anomaly in self._watch.wait(self._clock() - self._since):
                    self._tell(anomaly)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                with self._writing:
                    self._handle(item)
            except BaseException as error:  # only when strict: shown to the user's thread at close
                self._error = self._error or error
        if self._merging is not None:
            self._merging.close()
        self._rows.close()
        self._contexts.close()

    def _handle(self, item: Item) -> None:
        match item:
            case ClosedStep():
                self._step(item)
            case Logged():
                self._rows.append(self._logged(item))
            case Ask():
                try:
                    item.answer.append(item.what())
                finally:
                    item.done.set()
            case _:
                self._rows.append(item)

    def _step(self, item: ClosedStep) -> None:
        self._since = self._clock()
        if item.context is not None:
            self._handled_bytes += item.context.nbytes
        reading = self._instruments.read(item.slot)
        row = self._maker.own(item.step, item.time, item.host, reading)
        context: StepContext | None = None
        if self._recorder is not None and item.context is not None and self._recording.alive:
            with self._recording:  # before the row: a step that a killed trainer's journal tells of can be run again
                context = self._recorder.pack(item.context)
                self._contexts.append(context)
        if isinstance(self._merging, Merger):
            if context is not None:
                self._contexts.append(row)  # what a replay on this rank is compared with
            self._merging.add(item.call, row, reading, item.tokens, context)
        else:
            if self._merging is not None:
                self._merging.send(item.call, row, reading, item.tokens)
            self._conclude(Concluded(row, context, row))
        if reading.histograms is not None:
            with self._counting:
                self._rows.append(reading.histograms.record(item.step, item.time, self._attempt))
        self._merge()
        self._listen()

    def _merge(self) -> None:
        """Write the rows whose other ranks have sent their part."""
        if isinstance(self._merging, Merger):
            for row in self._merging.ready():
                self._conclude(row)

    def _conclude(self, done: Concluded) -> None:
        """Write a row and look at it."""
        row = done.row
        self._rows.append(row)
        if self._watch is not None and self._detecting.alive:
            with self._detecting:
                for anomaly in self._watch.update(done.judged, done.context):
                    if anomaly.id not in self.latest:
                        found, anomaly = anomaly, done.blamed(anomaly)
                        self._notes[anomaly.id] = anomaly.notes[len(found.notes) :]
                    self._tell(anomaly)
                if self._sealer is not None:
                    self._sealer.advance(row.step)
        self._judged = row.step
        if self._recorder is not None:
            self._recorder.judged(row.step)

    def _logged(self, item: Logged) -> Row:
        item.copy.wait()
        copied = item.copy.leaves
        numbers = [*item.numbers, *map(float, copied.values())]
        return self._maker.logged(item.step, item.time, (*item.series, *copied), numbers)

    def _tell(self, anomaly: Anomaly) -> None:
        """Journal an anomaly and hand it to the user, keeping what we added to an earlier version of it."""
        known = self.latest.get(anomaly.id)
        if known is not None:
            ours = tuple(note for note in self._notes.get(anomaly.id, ()) if note not in anomaly.notes)
            anomaly = anomaly.updated(
                capsule=known.capsule, hypotheses=known.hypotheses, ranks=known.ranks, notes=(*anomaly.notes, *ours)
            )
            if self._sealer is not None:
                self._sealer.update(anomaly)
        elif self._sealer is not None:
            found, anomaly = anomaly, self._sealer.consider(anomaly)
            self._notes[anomaly.id] = (*self._notes.get(anomaly.id, ()), *anomaly.notes[len(found.notes) :])
            if anomaly.capsule is not None:  # of the step under way, or the next: this one's gradients are gone
                self.ask_histograms(anomaly.step if self._world > 1 else None)
        self.latest[anomaly.id] = anomaly
        self._rows.append(anomaly)
        if known is None:
            self._fresh.append(anomaly)

    def _finish_watch(self, seconds: float) -> None:
        began = time.monotonic()
        if isinstance(self._merging, Merger):
            for row in self._merging.finish(seconds / 2):
                self._conclude(row)
        elif self._merging is not None:
            self._merging.leave()
        seconds -= time.monotonic() - began
        if self._watch is not None and self._detecting.alive:
            with self._detecting:
                for anomaly in self._watch.finish():
                    self._tell(anomaly)
        if self._sealer is not None:
            with self._sealing:
                for anomaly in [*self._reports, *self._sealer.part(max(seconds, 0.0))]:
                    self._tell_of_others(anomaly)
                self._reports.clear()

    def _listen(self) -> None:
        """What other ranks detected."""
        if self._sealer is not None and self._sealing.alive:
            with self._sealing:
                self._reports += self._sealer.heard()
                held_back = isinstance(self._merging, Merger) and self._merging.pause is not None
                for anomaly in [each for each in self._reports if not held_back or each.step <= self._judged]:
                    self._reports.remove(anomaly)
                    self._tell_of_others(anomaly)

    def _tell_of_others(self, anomaly: Anomaly) -> None:
        """An anomaly that another rank detected: news, unless this rank has seen the same."""
        same = None if self._sealer is None else self._sealer.seen_here(anomaly)
        known = None if same is None else self.latest.get(same)
        if known is None:
            self._tell(anomaly)
        elif not set(anomaly.ranks) <= set(known.ranks):
            self.latest[known.id] = known.updated(ranks=tuple(sorted({*known.ranks, *anomaly.ranks})))
            self._rows.append(self.latest[known.id])

    # what the sealer tells: `sealed` on its own thread, the rest on the scribe's

    def sealed(self, anomaly: Anomaly, error: str | None) -> None:
        if error is not None:
            logger.warning("trackbridge: the capsule of step %d could not be sealed: %s", anomaly.step, error)
            return
        self.submit(Ask(lambda: self._deliver(anomaly)))

    def explained(self, anomaly_id: str, hypotheses: tuple[Hypothesis, ...]) -> None:
        """Also on a thread of its own: what the diagnosis says of an anomaly that has no capsule of its own."""
        self.submit(Ask(lambda: self._explain(anomaly_id, hypotheses)))

    def gave_up(self, path: str, anomaly: Anomaly, why: str) -> None:
        """Every anomaly of the capsule at `path` says that it has none any more."""
        for each in [a for a in self.latest.values() if a.capsule == path] or [anomaly]:
            self._notes[each.id] = (*self._notes.get(each.id, ()), why)
            self.latest[each.id] = each.updated(capsule=None, notes=(*each.notes, why))
            self._rows.append(self.latest[each.id])

    def ask_histograms(self, detected: int | None) -> None:
        """Of the next update; of the same one on all ranks when told the step of the detection."""
        self._instruments.ask_histograms(None if detected is None else detected + HISTOGRAMS_AFTER)

    # scribe thread again

    def _explain(self, anomaly_id: str, hypotheses: tuple[Hypothesis, ...]) -> None:
        known = self.latest.get(anomaly_id)
        if known is not None and not known.hypotheses:
            self.latest[anomaly_id] = known.updated(hypotheses=hypotheses)
            self._rows.append(self.latest[anomaly_id])

    def _deliver(self, anomaly: Anomaly) -> None:
        """A capsule is ready: tell what its diagnosis found, and hand it to the trackers."""
        from trackbridge.seal import artifact_for, hypotheses_in

        latest = self.latest.get(anomaly.id, anomaly)
        if latest.capsule is None or (self._sealer is not None and not self._sealer.settle(latest)):
            return
        capsule = self._directory.path / latest.capsule
        latest = latest.updated(hypotheses=hypotheses_in(capsule))
        self.latest[latest.id] = latest
        self._rows.append(latest)
        self._rows.append(artifact_for(self._directory.path, latest, capsule))
