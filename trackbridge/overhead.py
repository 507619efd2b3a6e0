"""What measuring costs, and what is given up where it costs more than the user allows (``max_overhead``).

The cost is measured, not assumed: the training thread's time in our own code, and on CUDA now and then the device's time
between its entry and its exit. A share of the step's time is told at every step; where it stays above the limit, statistics
that move slowly or that only explain are taken more rarely.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from trackbridge import ranks
from trackbridge.config import RAREST
from trackbridge.hostcopy import capturing
from trackbridge.notices import private
from trackbridge.records import RunInfo

logger = logging.getLogger("trackbridge")

SAMPLED = 23  # steps from one in which device time is measured to the next; shares no factor with the usual cadences
MEMORY = 0.1  # weight of a new sample in the device's share

WINDOW = 50  # steps after which the share is judged
RELIEF = 1 / 3  # of the limit: to be twice as often again at most doubles the cost, and then there is room left
CALM = 3  # windows below that before it happens

HEARD_S = 1.0  # how often a rank looks for what rank 0 has decided
AHEAD_S = 5.0  # between the decision and the step from which it holds: by then every rank has heard of it


class _Depth:
    """How deep a thread is in our code, and since when."""

    __slots__ = ("depth", "event", "since")

    def __init__(self) -> None:
        self.depth = 0
        self.since = 0.0
        self.event: Any = None


class _Thread(threading.local):
    """To look something up here is what costs: hence one object, once a call."""

    def __init__(self) -> None:
        self.here = _Depth()


class Expense:
    """Time spent in our own code on the training thread, in seconds. `enter` and `leave` nest; the outermost pair counts.

    Each thread nests for itself. Hooks of a backward pass run on another thread while the training thread waits for it, so they
    count as its own; so does what a thread of the user's calls.
    Measuring inside a compiled graph is invisible here.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.device: torch.device | None = None  # CUDA, to be timed as well
        self._now = now
        self._thread = _Thread()
        self._seconds = 0.0
        self._sampling = False
        self._pairs: list[tuple[Any, Any]] = []
        self._pending: deque[tuple[float, list[tuple[Any, Any]]]] = deque()
        self._device_share: float | None = None

    def enter(self) -> None:
        here = self._thread.here
        here.depth += 1
        if here.depth == 1:
            if self._sampling:
                here.event = self._event()
            here.since = self._now()

    def leave(self) -> None:
        here = self._thread.here
        here.depth -= 1
        if here.depth == 0:
            self._seconds += self._now() - here.since
            if here.event is not None:
                ended = self._event()
                if ended is not None:
                    self._pairs.append((here.event, ended))
                here.event = None

    def close(self, step: int, seconds: float) -> float:
        """Step `step` took `seconds` and ends now: the share of it that was ours.

        On CUDA the greater of the two shares, the host's and the device's: where the device is what the run waits for, only its
        own time delays a step; where the host is, only the host's.
        """
        here = self._thread.here
        if here.depth:  # `run.step` itself: what comes of it belongs to the next
            now = self._now()
            self._seconds += now - here.since
            here.since = now
        own, self._seconds = self._seconds, 0.0
        if self._pairs:
            self._pending.append((seconds, self._pairs))
            self._pairs = []
        if self._pending:
            self._read()
        self._sampling = self.device is not None and step % SAMPLED == SAMPLED - 1
        return max(own / seconds if seconds > 0 else 0.0, self._device_share or 0.0)

    def _read(self) -> None:
        """Take in samples whose events are over. Asks, never waits."""
        while self._pending:
            seconds, pairs = self._pending[0]
            if not pairs[-1][1].query():
                return
            self._pending.popleft()
            share = sum(begun.elapsed_time(ended) for begun, ended in pairs) / 1e3 / seconds if seconds > 0 else 0.0
            known = self._device_share
            self._device_share = share if known is None else known + MEMORY * (share - known)

    def _event(self) -> Any:
        """An event on the current stream; None while that is being captured, where it would be part of the user's graph."""
        if capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class Throttle:
    """Decides from the share of each step how rare is rare enough. `factor` is 1, 2, 4, ... `RAREST`.

    Every `WINDOW` steps the share of the window is judged, its most expensive step left out (a hiccup is no habit): above
    `limit` the factor doubles; below a third of it for `CALM` windows in a row it halves. A cost that stays as it is
    therefore ends in one factor and never swings.
    """

    def __init__(self, limit: float) -> None:
        self.factor = 1
        self.step_s = 0.0  # mean over the last window
        self._limit = limit
        self._own: list[float] = []
        self._total = 0.0
        self._calm = 0
        self._told = self._told_the_rest = False

    def add(self, share: float, seconds: float) -> bool:
        """One ordinary step of `seconds` and our share of it. True when `factor` has changed."""
        if seconds <= 0:
            return False
        self._own.append(share * seconds)
        self._total += seconds
        if len(self._own) < WINDOW:
            return False
        judged = (sum(self._own) - max(self._own)) / self._total
        self.step_s = self._total / len(self._own)
        self._own, self._total = [], 0.0
        before = self.factor
        if judged > self._limit:
            self._calm = 0
            self.factor = min(2 * before, RAREST)
            self._say(judged, before)
        elif judged < self._limit * RELIEF:
            self._calm += 1
            if self._calm >= CALM:
                self._calm = 0
                self.factor = max(before // 2, 1)
        else:
            self._calm = 0
        return self.factor != before

    def _say(self, judged: float, before: int) -> None:
        """Once that it begins, and once that there is nothing left to give up; the rest is in ``trackbridge/thinning``."""
        if not self._told:
            self._told = True
            logger.warning(
                "trackbridge: measuring takes %.2g%% of the step, more than max_overhead allows (%.2g%%): activations, "
                "weights, moments and histograms are taken more rarely (trackbridge/thinning); loss and gradients stay",
                100 * judged, 100 * self._limit,
            )  # fmt: skip
        elif before == RAREST and not self._told_the_rest:
            self._told_the_rest = True
            logger.warning(
                "trackbridge: measuring still takes %.2g%% of the step with everything taken %d times more rarely; what is "
                "left is loss, gradients and recording",
                100 * judged, RAREST,
            )  # fmt: skip


class Concert:
    """What rank 0 decides holds on every rank, from the same call of `run.step` on: else a row of all ranks would hold the
    activations of some. Told through the process group's store, by a thread of its own; the training thread never asks it.

    A rank that hears of it too late follows as soon as it does.
    """

    def __init__(self, store: Any, name: str, *, leader: bool, heard_s: float | None = None) -> None:
        self._store = store
        self._prefix = f"trackbridge/{name}/rarer"
        self._leader = leader
        self._heard_s = HEARD_S if heard_s is None else heard_s
        self._next: tuple[int, int] | None = None  # from which call, what factor; each side of a thread only replaces it
        self._words: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trackbridge-overhead", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Something was decided and does not hold yet."""
        return self._next is not None

    def announce(self, factor: int, call: int) -> None:
        """Rank 0: `factor` holds from `call` on."""
        self._next = call, factor
        self._words.put(f"{call} {factor}")

    def due(self, call: int) -> int | None:
        """The factor that holds from `call` on, if one was announced and its time has come."""
        following = self._next
        if following is None or call < following[0]:
            return None
        self._next = None
        return following[1]

    def close(self) -> None:
        self._stop.set()
        self._words.put(None)

    def _work(self) -> None:
        try:
            for number in range(1 << 30):
                key = f"{self._prefix}/{number}"
                if self._leader:
                    words = self._words.get()
                    if words is None:
                        return
                    self._store.set(key, words)
                else:
                    while not self._store.check([key]):
                        if self._stop.wait(self._heard_s):
                            return
                    call, factor = map(int, self._store.get(key).split())
                    self._next = call, factor
        except (RuntimeError, ValueError) as error:  # the store's errors are RuntimeErrors
            if not self._stop.is_set():
                lines = str(error).strip().splitlines() or [type(error).__name__]
                logger.warning("trackbridge: ranks cannot agree on how rarely to measure any more: %s", lines[0])


class Economy:
    """`Throttle` for one rank, or in concert with others."""

    def __init__(self, throttle: Throttle, concert: Concert | None, *, leader: bool = True) -> None:
        self.factor = 1
        self._throttle = throttle
        self._concert = concert
        self._leader = leader

    def close(self, call: int, share: float, seconds: float) -> int:
        """An ordinary step of `seconds` was closed, the `call`-th of `run.step`; our share of it. The factor from now on."""
        concert = self._concert
        if concert is None:
            self._throttle.add(share, seconds)
            self.factor = self._throttle.factor
            return self.factor
        if self._leader and not concert.pending and self._throttle.add(share, seconds):
            concert.announce(self._throttle.factor, call + max(WINDOW, math.ceil(AHEAD_S / self._throttle.step_s)))
        self.factor = concert.due(call) or self.factor
        return self.factor

    def stop(self) -> None:
        if self._concert is not None:
            self._concert.close()


def economy(run: RunInfo, limit: float) -> Economy:
    """What keeps this rank to `limit`."""
    throttle = Throttle(limit)
    if run.world_size == 1 or (store := ranks.store()) is None:
        return Economy(throttle, None)
    concert = Concert(private(store), f"{run.run_id}/{run.attempt}", leader=run.rank == 0)
    return Economy(throttle, concert, leader=run.rank == 0)
