"""Runs for the shipper's tests: run directories with a journal, written as a trainer would."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Params, Row, RunEnd, RunStatus, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile

LOSS = Schema(("train/loss", "grad/norm"))


class ARun:
    """A run directory and its journal's writer. `resume` begins another attempt."""

    def __init__(
        self, path: Path, backends: list[dict[str, Any]] | None = None, *, host: str | None = None, **stream: Any
    ) -> None:
        self.directory = RunDirectory(path)
        self.host = host or socket.gethostname()
        self.pid = os.getpid()
        self._file = RunFile(
            project="p",
            run_id=path.name,
            name="a run",
            created=time.time(),
            backends=backends or [],
            settings={"stream": stream},
        )
        self.attempt = -1
        self.journal: JournalWriter
        self.resume(0)

    def resume(self, start_step: int) -> None:
        self.attempt += 1
        life = Attempt(number=self.attempt, start_step=start_step, time=time.time(), pid=self.pid, host=self.host)
        self._file.attempts.append(life)
        self.directory.write(self._file)
        self.journal = JournalWriter(self.directory.rows(), segment_bytes=1 << 14, fsync_seconds=1e9)
        self.journal.append(Params(-1, time.time(), {"config": {"attempt": self.attempt}}))

    def rows(self, steps: range) -> None:
        for step in steps:
            self.journal.append(
                Row(
                    -1,
                    step,
                    time.time(),
                    self.attempt,
                    LOSS,
                    np.array([1000.0 * self.attempt + step, np.nan if step % 7 == 3 else 0.5]),
                )
            )

    def anomaly(self, step: int, capsule: str | None = None) -> None:
        self.journal.append(
            Anomaly(
                f"spike-{step}", "spike", step, step, 1.0, "train/loss", 9.0, 2.0, 30.0, attempt=self.attempt, capsule=capsule
            )
        )

    def end(self, status: RunStatus = "finished") -> None:
        self.journal.append(RunEnd(-1, time.time(), status, self.attempt))
        self.journal.close()


def train(path: str, tracker: str) -> None:
    """A trainer's process: records a spike, starts the shipper, then goes on until it is killed."""
    from trackbridge import shipper

    run = ARun(Path(path), [{"kind": "flaky", "path": tracker, "seed": 1, "faults": 0.05}])
    shipper.start(run.directory.path, os.getpid())
    run.rows(range(40))
    run.anomaly(30, capsule="capsules/spike-30")
    run.rows(range(40, 45))
    print("spiked", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
