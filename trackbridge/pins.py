"""What one rank keeps for a capsule under way: its snapshot goes to disk, its step contexts stay in the ring.

Each pin leaves a receipt, ``rank-NNNN/pins/<capsule>.json``: whoever seals the capsule, another process or rank, knows from
it that this rank has done its part, and why there is no snapshot when there is none.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from trackbridge.journal import JournalWriter
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory, dumps, write_atomic

logger = logging.getLogger("trackbridge")


class Pins:
    """`pin` and `release` are for the scribe's thread; writing happens on a thread of its own, which `run` is the way to."""

    def __init__(
        self, directory: RunDirectory, rank: int, recorder: Recorder, contexts: JournalWriter, snapshot_every: int
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._recorder = recorder
        self._contexts = contexts
        self._every = snapshot_every
        self._held: dict[str, tuple[int, int]] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def pin(self, capsule: str, first: int, onset: int, last: int) -> None:
        """Keep the contexts of steps `first` to `last`, and the newest snapshot from before them. `capsule` is its folder's
        name."""
        steps = self._held[capsule] = (max(first - self._every, 0), last)  # its snapshot is older than `first`
        self._contexts.hold(*steps)
        self.run(lambda: self._write(capsule, first, onset))

    def release(self, capsule: str) -> None:
        """The capsule has what it needs of this rank."""
        steps = self._held.pop(capsule, None)
        if steps is not None:
            self._contexts.release(*steps)

    def held(self) -> tuple[str, ...]:
        return tuple(self._held)

    def sync(self) -> None:
        """The contexts reach the disk."""
        self._contexts.sync()

    def run(self, job: Callable[[], None]) -> None:
        """Do `job` on the worker thread, after the jobs before it."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="trackbridge-sealer", daemon=True)
            self._worker.start()
        self._jobs.put(job)

    def wait(self, timeout: float) -> bool:
        """Until every job so far is done; False if that takes longer than `timeout` seconds."""
        if self._worker is None:
            return True
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(timeout)

    def _write(self, capsule: str, first: int, onset: int) -> None:
        """A snapshot from before the window, else one up to the onset: frequent snapshots do not reach back far."""
        why_not = self._recorder.pin(first)
        if why_not is not None and self._recorder.pin(onset) is None:
            why_not = None
        write_atomic(self._directory.pin(capsule, self._rank), dumps({"why_not": why_not}).encode())

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except OSError as error:  # a full disk
                logger.warning("trackbridge: a capsule could not be made: %s; training goes on", error)
            except Exception:
                logger.exception("trackbridge: a capsule could not be made; training goes on")
