"""Gets spike capsules made, beside training: pins the snapshot at once, has a child process seal when the window is full.

Sealing imports pyarrow and pandas, writes parquet and hashes: in this process that would hold the GIL for a third of a
second. So it runs as ``python -m trackbridge.seal`` and reads only the run directory.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trackbridge.config import RecorderConfig
from trackbridge.journal import JournalWriter
from trackbridge.recorder import Recorder
from trackbridge.records import Anomaly
from trackbridge.rundir import RunDirectory

logger = logging.getLogger("trackbridge")

SEALED_KINDS = ("spike", "nonfinite", "divergence", "shift")
"""Anomalies that get a capsule. Slow ones (drift, plateau) have no step that a replay could explain."""


SEAL_SECONDS = 600.0


@dataclass(slots=True)
class _Capsule:
    """One capsule under way. `first` is the first step it must hold."""

    anomaly: Anomaly
    path: str
    first: int
    last: int
    asked: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Sealer:
    """Used by the scribe's thread; its own worker thread waits for disk and child processes.

    `sealed(anomaly, error)` is called on the worker thread when a capsule is ready (`error` None) or could not be made.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: RecorderConfig,
        recorder: Recorder,
        contexts: JournalWriter,
        sealed: Callable[[Anomaly, str | None], None],
    ) -> None:
        self._directory = directory
        self._config = config
        self._recorder = recorder
        self._contexts = contexts
        self._sealed = sealed
        self._capsules: list[_Capsule] = []
        self._waiting: deque[_Capsule] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        self._giving_up = False

    def consider(self, anomaly: Anomaly) -> Anomaly:
        """The anomaly with the capsule it will be in, if it gets one. A neighbour of an open capsule shares it."""
        if anomaly.kind not in SEALED_KINDS or anomaly.capsule is not None:
            return anomaly
        for capsule in self._capsules:
            if not capsule.asked and capsule.first <= anomaly.step <= capsule.last:
                return anomaly.updated(capsule=capsule.path)
        if len(self._capsules) >= self._config.max_capsules:
            return anomaly
        path = plain = f"capsules/spike-{anomaly.step}"
        again = 1
        while any(c.path == path for c in self._capsules) or (self._directory.path / path).exists():
            again += 1  # a resumed attempt, or a loop that rolled back, saw the step before
            path = f"{plain}-{again}"
        first = max(anomaly.onset - self._config.before, 0)
        anomaly = anomaly.updated(capsule=path)
        self._capsules.append(_Capsule(anomaly, path, first, anomaly.step + self._config.after))
        self._contexts.hold(self._hold(first))
        self._run(lambda: self._pin(first, anomaly.onset))
        return anomaly

    def advance(self, step: int) -> None:
        """Seal what is due: the step has passed the end of its window."""
        for capsule in self._capsules:
            if not capsule.asked and step >= capsule.last:
                self._ask(capsule)

    def finish(self, timeout: float) -> bool:
        """Seal everything now. Returns False if not all was done within `timeout` seconds; `trackbridge sync` does the rest."""
        deadline = time.monotonic() + timeout
        for capsule in self._capsules:
            if not capsule.asked:
                self._ask(capsule)
        done = all(capsule.done.wait(max(deadline - time.monotonic(), 0)) for capsule in self._capsules)
        self._giving_up = True
        if not done and self._child is not None:
            self._child.kill()
        return done

    def _ask(self, capsule: _Capsule) -> None:
        capsule.asked = True
        self._contexts.sync()
        self._waiting.append(capsule)
        self._run(self._seal)

    def _pin(self, first: int, onset: int) -> None:
        """A snapshot from before the window, else one up to the onset: frequent snapshots do not reach back far."""
        why_not = self._recorder.pin(first)
        if why_not and self._recorder.pin(onset) is not None:
            logger.info("trackbridge: no snapshot kept for the capsule: %s", why_not)

    def _seal(self) -> None:
        """Seal everything that waits, in one child: its imports cost more than its work."""
        capsules = {}
        while self._waiting and not self._giving_up:
            capsule = self._waiting.popleft()
            capsules[capsule.anomaly.id] = capsule
        if not capsules:
            return
        sealed: set[str] = set()
        complaints = ""
        try:
            printed, complaints = self._child_says(
                [sys.executable, "-m", "trackbridge.seal", str(self._directory.path), *capsules]
            )
            sealed = {line.split("\t")[0] for line in printed.splitlines()}
        except (OSError, subprocess.SubprocessError) as error:
            complaints = str(error)
        finally:
            for name, capsule in capsules.items():
                self._contexts.release(self._hold(capsule.first))
                self._sealed(capsule.anomaly, None if name in sealed else _why(name, complaints))
                capsule.done.set()

    def _child_says(self, command: list[str]) -> tuple[str, str]:
        """Run the child. It has its own session: Ctrl-C is the trainer's; and it imports nothing from the folder we run in."""
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True, env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        try:
            return self._child.communicate(timeout=SEAL_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.communicate()
        finally:
            self._child = None

    def _hold(self, first: int) -> int:
        """The oldest step whose context a capsule that starts at `first` may need: its snapshot is older still."""
        return max(first - self._config.snapshot_every, 0)

    def _run(self, job: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="trackbridge-sealer", daemon=True)
            self._worker.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("trackbridge: a capsule could not be made; training goes on")


def _why(name: str, complaints: str) -> str:
    """What the child said about this capsule, in one line."""
    lines = complaints.strip().splitlines() or ["the sealing process was ended"]
    return next((line for line in lines if line.startswith(f"{name}: ")), lines[-1])
