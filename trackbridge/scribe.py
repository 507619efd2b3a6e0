"""The one host thread between training and the journal: slot -> row -> journal, and on to `trackbridge.concluding`.

The training thread hands over items through a queue and never waits. Each part that may break (a probe, the recorder's packing,
the detectors, the sealer) is guarded on its own, so that a bug in one of them still leaves the rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

from trackbridge.anomalies import Anomalies
from trackbridge.concluding import Concluder
from trackbridge.errors import Part
from trackbridge.handover import Ask, ClosedStep, Handover, Item, Logged
from trackbridge.journal import JournalWriter
from trackbridge.probes import Instruments
from trackbridge.recorder import Recorder
from trackbridge.records import Row, RunEnd, StepContext
from trackbridge.retention import Retainer
from trackbridge.rowmaker import RowMaker

IDLE_SECONDS = 1.0


class Scribe:
    """Owns both journals of this rank. `anomalies.news` is the only thing that flows back to the training thread.

    `queue` is where everything is handed over; `anomalies` has what was found so far.
    """

    def __init__(
        self,
        queue: Handover,
        *,
        rows: JournalWriter,
        contexts: JournalWriter,
        retainer: Retainer,
        instruments: Instruments,
        recorder: Recorder | None,
        maker: RowMaker,
        concluder: Concluder,
        anomalies: Anomalies,
        attempt: int,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self.anomalies = anomalies
        self._rows = rows
        self._contexts = contexts
        self._retainer = retainer
        self._instruments = instruments
        self._recorder = recorder
        self._maker = maker
        self._concluder = concluder
        self._attempt = attempt
        self._writing = Part("the journal", strict=strict)
        self._recording = Part("the recorder", strict=strict)
        self._counting = Part("histograms", strict=strict)
        self._error: BaseException | None = None
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

    def ask(self, what: Callable[[], Any], timeout: float = 10.0) -> Any:
        """What `what` returns on the scribe's thread, after everything submitted so far. None if it is late or has ended."""
        if not self._thread.is_alive():
            return None
        ask = Ask(what)
        self.queue.submit(ask)
        ask.done.wait(timeout)
        return ask.answer[0] if ask.answer else None

    def watch_state(self) -> Any:
        """The detectors' state after everything submitted so far, for the user's checkpoint. None if it is late."""
        return self.ask(self._concluder.state)

    def resume_watch(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on with the detectors where a checkpoint left them; `step` is the next."""
        self.ask(lambda: self._concluder.resume(state, step))

    @property
    def losses(self) -> dict[str, float]:
        """Series of what was lost so far; empty when nothing was."""
        lost = {}
        if self._rows.rows_lost:
            lost["trackbridge/rows_lost"] = float(self._rows.rows_lost)
        if self.queue.contexts_dropped:
            lost["trackbridge/contexts_dropped"] = float(self.queue.contexts_dropped)
        return lost

    @property
    def counts(self) -> dict[str, float]:
        """`losses`, the rows that had to be thinned, and the capsules that others' severity cost."""
        counted = {}
        if self._retainer.thinned:
            counted["trackbridge/rows_thinned"] = float(self._retainer.thinned)
        counted.update(self.losses)
        if given_up := self.anomalies.given_up:
            counted["trackbridge/capsules_given_up"] = float(given_up)
        return counted

    def close(self, end: RunEnd, timeout: float) -> bool:
        """Everything submitted so far, open capsules, then `end`, then the journals' last fsync. Bounded; False if late: then
        the thread goes on by itself, and `end` is written when it gets there."""
        self._closing = True  # no step is awaited any more
        deadline = time.monotonic() + timeout
        last = Ask(lambda: self._concluder.finish(deadline - time.monotonic()))
        self.queue.submit(last)
        drained = last.done.wait(timeout)
        sealed = drained and self.anomalies.finish(max(deadline - time.monotonic(), 0.0))
        self.queue.submit(end)
        self.queue.end()
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        self._retainer.closed()
        if self._error is not None:
            raise self._error
        return sealed and not self._thread.is_alive()

    # scribe thread

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                with self._writing:
                    self._handle(item)
            except BaseException as error:  # only when strict: shown to the user's thread at close
                self._error = self._error or error
        self._concluder.close()
        self._rows.close()
        self._contexts.close()

    def _next(self) -> Item | None:
        """The next item. While none comes, what was written reaches the disk all the same."""
        while True:
            pause = self._concluder.pause
            try:
                return self.queue.take(IDLE_SECONDS if pause is None else min(pause, IDLE_SECONDS))
            except Empty:
                self._concluder.advance()
                for journal in (self._rows, self._contexts):
                    journal.sync_if_due()
                if not self._pauses and not self._closing:
                    self._concluder.wait(self._clock() - self._since)

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
        reading = self._instruments.read(item.slot)
        row = self._maker.own(item.step, item.time, item.host, reading)
        context: StepContext | None = None
        if self._recorder is not None and item.context is not None and self._recording.alive:
            with self._recording:  # before the row: a step that a killed trainer's journal tells of can be run again
                context = self._recorder.pack(item.context)
                self._contexts.append(context)
        self._concluder.add(item.call, row, reading, item.tokens, context)
        if reading.histograms is not None:
            with self._counting:
                self._rows.append(reading.histograms.record(item.step, item.time, self._attempt))
        self._concluder.advance()

    def _logged(self, item: Logged) -> Row:
        item.copy.wait()
        copied = item.copy.leaves
        numbers = [*item.numbers, *map(float, copied.values())]
        return self._maker.logged(item.step, item.time, (*item.series, *copied), numbers)
