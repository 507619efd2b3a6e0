"""A run directory as a trainer would write it, without a training."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np

from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Row, RunEnd, RunStatus, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile

NAMES = Schema(("train/loss", "grad/norm", "layer/head.weight/grad_norm"))


class Trainer:
    """Writes the journal of one rank. Its attempt is alive as long as this process."""

    def __init__(self, folder: Path, *, rank: int = 0, world_size: int = 1) -> None:
        self.directory = RunDirectory(folder)
        self.rank = rank
        attempt = Attempt(
            number=0, start_step=0, time=time.time(), pid=os.getpid(), host=socket.gethostname(), world_size=world_size
        )
        self.directory.write(RunFile(project="p", run_id="live", name="live", created=1.7e9, attempts=[attempt]))
        self.writer = JournalWriter(self.directory.rows(rank), segment_bytes=1 << 20, fsync_seconds=60)
        self.step = 0

    def train(self, steps: int, value: float = 2.0) -> None:
        for _ in range(steps):
            self.writer.append(Row(-1, self.step, 1.7e9, 0, NAMES, np.array([value, 1.0 + self.rank, 0.5])))
            self.step += 1
        self.writer.sync()

    def spike(self) -> None:
        at = self.step
        self.train(3, 9.0)
        first = ("train/loss", at)
        self.writer.append(Anomaly("a", "spike", at, at, 0.9, "train/loss", 9.0, 2.0, 40.0, first, (first,), time=1.7e9))
        self.writer.sync()

    def finish(self, status: RunStatus = "finished", error: str | None = None) -> None:
        self.writer.append(RunEnd(-1, 1.7e9, status, 0, error))
        self.writer.close()
