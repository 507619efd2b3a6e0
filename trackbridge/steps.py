"""The steps of a run on the training thread: what one call of `run.step` becomes, and is handed to the scribe as.

A step is the slot that the probes' statistics are being copied into, numbers that the host knows by itself, and the context
that a replay needs. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trackbridge.flops.meter import Meter
from trackbridge.guard import HELD
from trackbridge.overhead import Economy, Expense
from trackbridge.pace import Pace
from trackbridge.probes import Instruments
from trackbridge.probes.host import HostSampler
from trackbridge.recorder import Recorder
from trackbridge.scribe import Scribe

logger = logging.getLogger("trackbridge")


class Steps:
    """Closes them. `number` is the next step's; `rows_dropped` counts those that found no slot."""

    def __init__(
        self,
        first: int,
        *,
        scribe: Scribe,
        instruments: Instruments,
        recorder: Recorder | None,
        pace: Pace,
        meter: Meter,
        host: HostSampler,
        expense: Expense,
        economy: Economy | None,
        inert: Callable[[], bool],
    ) -> None:
        self.number = first
        self.rows_dropped = 0
        self._scribe = scribe
        self._queue = scribe.queue
        self._instruments = instruments
        self._recorder = recorder
        self._pace = pace
        self._meter = meter
        self._host = host
        self._expense = expense
        self._economy = economy
        self._inert = inert
        self._calls = 0
        self._went_back = False
        self._guarded: dict[str, float] = {}  # what the guard says of the step under way

    def guarded(self, name: str, value: Tensor | float) -> None:
        """What the guard says of the step under way, for its row."""
        if self._inert():
            return
        if isinstance(value, Tensor):
            self._instruments.set(name, value)
            return
        self._guarded[name] = value
        if name == HELD and value:
            self._instruments.skipped()

    def close(
        self,
        number: int,
        given: Mapping[str, Tensor | float],
        tokens: float | None,
        samples: float | None,
        padded: float | None,
        skipped: bool | None,
        batch: Any,
        batch_index: int | None,
        sample_ids: Sequence[int | str] | None,
    ) -> None:
        """Step `number` ends now. `given` are the user's own numbers of it; the rest is as of `Run.step`."""
        if number < self.number:
            self._say_back(number)
        host: dict[str, float] = {}
        for name, value in given.items():
            if isinstance(value, Tensor):
                self._instruments.set(name, value)
            else:
                host[name] = value
        if skipped:
            self._instruments.skipped()
        if self._guarded:
            host.update(self._guarded)
            self._guarded = {}
        self._measure(host, number, tokens, samples, padded)
        context = None
        if self._recorder is not None:
            context = self._recorder.close_step(number, batch=batch, batch_index=batch_index, sample_ids=sample_ids)
        if self.rows_dropped:
            host["trackbridge/rows_dropped"] = float(self.rows_dropped)
        host.update(self._scribe.counts)
        slot = self._instruments.close(number)
        if slot is None:
            self.rows_dropped += 1
            self._queue.contexts_dropped += context is not None
        else:
            consumed = self._pace.consumed_tokens
            self._queue.submit_step(number, time.time(), slot, host, context, call=self._calls, tokens=consumed)
        self._calls += 1
        self.number = number + 1

    def _measure(
        self, host: dict[str, float], number: int, tokens: float | None, samples: float | None, padded: float | None
    ) -> None:
        """What the host measures by itself, into `host`: rates, pace, what is ours of the step, FLOPs, memory."""
        host.update(self._instruments.lr())
        pace = self._pace
        host.update(pace.close(tokens, samples, number, padded))
        seconds = host["perf/step_s"]
        self._instruments.spent(seconds, host.get("perf/fetch_s", 0.0))
        host.update(self._spent(number, seconds))
        host.update(self._meter.close(seconds, pace.consumed_tokens, steady=pace.steady))
        if (convention := self._meter.convention()) is not None:
            self._queue.submit_facts("perf", convention)
        host.update(self._host.sample(number))

    def _spent(self, number: int, seconds: float) -> dict[str, float]:
        """What of the step was ours; and less of it from now on, where it is more than `max_overhead`."""
        share = self._expense.close(number, seconds)
        if not self._pace.steady:  # the first step, or a compiler's
            return {}
        found = {"trackbridge/overhead_share": share}
        if self._economy is not None:
            self._instruments.rarer(factor := self._economy.close(self._calls, share, seconds))
            found["trackbridge/thinning"] = float(factor)
        return found

    def _say_back(self, number: int) -> None:
        if not self._went_back:
            self._went_back = True
            logger.warning(
                "trackbridge: step %d came after step %d; of a step that was closed twice the later row is shown. After a "
                "rollback this is right; else pass growing numbers to run.step(step=...)",
                number,
                self.number - 1,
            )
