"""The training process's view of the shipper: start it, see that it lives, wait for it within bounds."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trackbridge import shipper
from trackbridge.backends.base import BackendConfig
from trackbridge.errors import ReferenceNotFoundError, UsageError
from trackbridge.records import RunInfo
from trackbridge.rundir import RunDirectory

logger = logging.getLogger("trackbridge")

RESTARTS = 5
"""How often a shipper that died is started again in one attempt."""
_FIRST_PAUSE = 1.0  # seconds before the first restart; doubled each time
_DONE = (0, 1)  # exit statuses of a shipper that ended by its own decision
_USAGE = 2


@dataclass(frozen=True, slots=True)
class FinishReport:
    """What `Run.finish` left behind. `unshipped` counts records by backend kind; `lost` counts rows and step contexts that
    never reached the journal (a full disk, a scribe that fell behind); `refused` counts, by backend kind, records that the
    tracker will never take."""

    unshipped: dict[str, int]
    closed: bool
    directory: Path
    lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.closed and not (self.unshipped or self.lost or self.refused)

    def __str__(self) -> str:
        if self.lost:
            rest = replace(self, lost=0)
            return f"trackbridge: {self.lost} rows or step contexts were lost before they reached {self.directory}. {rest}"
        if self.refused:
            rest = replace(self, refused={})
            kinds = ", ".join(f"{kind} refuses {count} records for good" for kind, count in self.refused.items())
            return f"trackbridge: {kinds} (see {self.directory / 'shipper' / 'dead-letters.jsonl'}). {rest}"
        if self:
            return f"trackbridge: everything is delivered; the record is in {self.directory}"
        records = ", ".join(f"{count} records for {kind}" for kind, count in self.unshipped.items())
        left = records or "the last capsule or artifact"
        return f"trackbridge: not delivered yet: {left}. Run: trackbridge sync {self.directory}"


class Delivery:
    """One child process for the trackers, and a thread for backends that belong in this process (the console, a run of the
    user's that we joined, all of them with ``shipping="thread"``).

    The child is never talked to: the journal is the queue, its cursors are the answer. A thread sleeps until the child ends,
    and starts another one if that was no decision of its own (killed, out of memory): at most `RESTARTS` times.
    """

    def __init__(self, directory: RunDirectory, info: RunInfo, backends: Sequence[BackendConfig], *, in_process: bool) -> None:
        self._directory = directory
        self._info = info
        self._backends = list(backends)
        near = [backend.nearby() for backend in backends if in_process or backend.in_process]
        far = [backend for backend in backends if not (in_process or backend.in_process)]
        secrets = {name: value for backend in far for name, value in backend.secrets().items()}
        kinds = [backend.kind for backend in far]
        self._child = Child(lambda: shipper.start(directory.path, os.getpid(), secrets, kinds), directory.path) if far else None
        self._near = shipper.Shipper(directory.path, near, follow=True, parent=os.getpid()) if near else None
        self._thread: threading.Thread | None = None
        if self._near is not None:
            self._thread = threading.Thread(target=self._near.run, name="trackbridge-shipper", daemon=True)
            self._thread.start()

    @property
    def urls(self) -> dict[str, str]:
        found = {backend.kind: backend.where(self._info) for backend in self._backends}
        return {kind: where for kind, where in found.items() if where}

    def native(self, kind: str, timeout: float) -> Any:
        """The SDK's own run object of a tracker that is served in this process. Raises `UsageError` where there is none."""
        if kind not in {backend.kind for backend in self._backends}:
            raise UsageError(f"this run has no backend {kind!r}; it has: {', '.join(b.kind for b in self._backends) or 'none'}")
        if self._near is None or not self._near.serves(kind):
            raise UsageError(
                f"{kind!r} is served by the shipper process, where its run object is; pass shipping='thread' to init (or "
                "join=True to write into a run of your own)"
            )
        deadline = time.monotonic() + timeout
        while (native := self._near.native(kind)) is None:
            if time.monotonic() > deadline:
                raise UsageError(f"{kind!r} has no open run object yet: its tracker does not answer, or its SDK has none")
            time.sleep(0.02)
        return native

    def wait(self, deadline: float) -> dict[str, int]:
        """Wait until `deadline` (monotonic seconds) for delivery. Returns what is unshipped, by kind."""
        left = max(deadline - time.monotonic(), 0.1)
        if self._thread is not None:
            self._thread.join(left)
        if self._child is not None:
            self._child.wait(max(deadline - time.monotonic(), 0.1))
        kinds = {backend.kind for backend in self._backends}
        if kinds and not self._directory.file.exists():
            raise ReferenceNotFoundError(f"the run directory {self._directory.path} was removed during the run")
        return {s.kind: s.lag for s in shipper.status(self._directory.path) if s.kind in kinds and s.lag > 0}

    def refused(self) -> dict[str, int]:
        """How many records each tracker has refused for good, by kind; without those that have refused none."""
        kinds = {backend.kind for backend in self._backends}
        return {s.kind: s.dead_letters for s in shipper.status(self._directory.path) if s.kind in kinds and s.dead_letters}


class Child:
    """A shipper process that is started again when it dies. `start` starts one. `pid` is that of the newest."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], directory: Path, *, pause: float = _FIRST_PAUSE) -> None:
        self._start = start
        self._directory = directory
        self._pause = pause
        self._over = threading.Event()  # it ended for good
        self._hurry = threading.Event()  # the run has ended: no more pauses
        self.restarts = 0
        self._process = start()  # here: what prevents it is told to the user
        threading.Thread(target=self._keep_alive, name="trackbridge-child", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Wait until the shipper has ended for good. False if it has not."""
        self._hurry.set()
        return self._over.wait(seconds)

    def _keep_alive(self) -> None:
        try:
            while (code := self._process.wait()) not in _DONE and self._again(code):
                self._process = self._start()
        except OSError as error:  # no memory for a process, say
            logger.error("trackbridge: cannot start the shipper again: %s; later: %s", error.strerror or error, self._command)
        finally:
            self._over.set()

    def _again(self, code: int) -> bool:
        """Say what happened; True, after a pause, when another try makes sense."""
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        if code == _USAGE or self.restarts >= RESTARTS:
            logger.error(
                "trackbridge: the shipper ended %s (see %s); nothing is lost, deliver it later with: %s",
                how, self._directory / "shipper" / "shipper.log", self._command,
            )  # fmt: skip
            return False
        logger.warning("trackbridge: the shipper ended %s; starting it again", how)
        self._hurry.wait(self._pause * 2.0**self.restarts)
        self.restarts += 1
        return True

    @property
    def _command(self) -> str:
        return f"trackbridge sync {self._directory}"
