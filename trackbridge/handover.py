"""What the training thread hands to the scribe, and the queue between the two: one side never waits, the other only takes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trackbridge.hostcopy import HostCopy
from trackbridge.recorder import RawContext
from trackbridge.records import Artifact, Params, RunEnd
from trackbridge.slab import Slot

BACKLOG_BYTES = 256 << 20
"""Step contexts waiting for the scribe may hold this much; beyond it they are dropped and counted, the rows stay."""


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


Item = ClosedStep | Logged | Params | Artifact | RunEnd | Ask


class Handover:
    """`take` is for the scribe's thread, `submit_step` for the training thread, the rest for any. `contexts_dropped` counts
    steps whose context was not handed over."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.contexts_dropped = 0
        self._submitted_bytes = 0  # written by the training thread only
        self._taken_bytes = 0  # written by the scribe's thread only

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
            if self._submitted_bytes - self._taken_bytes > BACKLOG_BYTES:
                self.contexts_dropped += 1
                context = None
            else:
                self._submitted_bytes += context.nbytes
        self._items.put(ClosedStep(call, step, when, slot, host, context, tokens))

    def submit_facts(self, section: str, facts: Mapping[str, Any]) -> None:
        """What is to be known of the run beside its rows: JSON, under a name of its own."""
        self.submit(Params(-1, time.time(), {section: facts}))

    def later(self, what: Callable[[], Any]) -> None:
        """Have `what` done on the scribe's thread."""
        self.submit(Ask(what))

    def end(self) -> None:
        """Nothing is taken after what was submitted so far."""
        self._items.put(None)

    def take(self, timeout: float) -> Item | None:
        """The next item, None at the end. Raises `queue.Empty` when none comes within `timeout` seconds."""
        item = self._items.get(timeout=timeout)
        if isinstance(item, ClosedStep) and item.context is not None:
            self._taken_bytes += item.context.nbytes
        return item
