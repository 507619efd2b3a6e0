"""The training process's view of the shipper: start it, ask how far it is, wait for it within bounds."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trackbridge import shipper
from trackbridge.backends.base import BackendConfig
from trackbridge.errors import ReferenceNotFoundError
from trackbridge.records import RunInfo
from trackbridge.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class FinishReport:
    """What `Run.finish` left behind. `unshipped` counts records by backend kind; `lost` counts rows and step contexts that
    never reached the journal (a full disk, a scribe that fell behind)."""

    unshipped: dict[str, int]
    closed: bool
    directory: Path
    lost: int = 0

    def __bool__(self) -> bool:
        return self.closed and not self.unshipped and not self.lost

    def __str__(self) -> str:
        if self.lost:
            rest = replace(self, lost=0)
            return f"trackbridge: {self.lost} rows or step contexts were lost before they reached {self.directory}. {rest}"
        if self:
            return f"trackbridge: everything is delivered; the record is in {self.directory}"
        left = ", ".join(f"{count} records for {kind}" for kind, count in self.unshipped.items()) or "the last capsule"
        return f"trackbridge: not delivered yet: {left}. Run: trackbridge sync {self.directory}"


class Delivery:
    """One child process for the trackers, and a thread for backends that belong in this process (the console).

    The child is started here and never talked to again: the journal is the queue, its cursors are the answer.
    """

    def __init__(self, directory: RunDirectory, info: RunInfo, backends: Sequence[BackendConfig], *, in_process: bool) -> None:
        self._directory = directory
        self._info = info
        self._backends = list(backends)
        near = [backend for backend in backends if in_process or backend.in_process]
        far = [backend for backend in backends if backend not in near]
        self._child: subprocess.Popen[bytes] | None = shipper.start(directory.path, os.getpid()) if far else None
        self._near = shipper.Shipper(directory.path, near, follow=True, parent=os.getpid()) if near else None
        self._thread: threading.Thread | None = None
        if self._near is not None:
            self._thread = threading.Thread(target=self._near.run, name="trackbridge-shipper", daemon=True)
            self._thread.start()

    @property
    def urls(self) -> dict[str, str]:
        found = {backend.kind: backend.where(self._info) for backend in self._backends}
        return {kind: where for kind, where in found.items() if where}

    def wait(self, deadline: float) -> dict[str, int]:
        """Wait until `deadline` (monotonic seconds) for delivery. Returns what is unshipped, by kind."""
        left = max(deadline - time.monotonic(), 0.1)
        if self._thread is not None:
            self._thread.join(left)
        if self._child is not None:
            try:
                self._child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                pass
        kinds = {backend.kind for backend in self._backends}
        if kinds and not self._directory.file.exists():
            raise ReferenceNotFoundError(f"the run directory {self._directory.path} was removed during the run")
        return {s.kind: s.lag for s in shipper.status(self._directory.path) if s.kind in kinds and s.lag > 0}
