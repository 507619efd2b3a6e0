"""The trainer of a schedule: a process that journals rows until it ends or is killed. No torch: it starts at once."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Artifact, Params, Row, RunEnd, RunStatus, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile
from trackbridge.shipping.cursor import first_free_seq

T0 = 1_750_000_000.0
USUAL = Schema(("train/loss", "grad/norm", "layer/a/grad_norm", "act/h/rms"))
EVAL = Schema(("eval/loss",))


@dataclass(frozen=True)
class Life:
    """One attempt. `end` None: it goes on until it is killed. `full_disk`: steps in which the disk takes nothing."""

    number: int
    start_step: int
    steps: int
    end: RunStatus | None
    full_disk: range
    seed: int


def begin(path: str, life: Life) -> RunDirectory:
    directory = RunDirectory(path)
    begun, host = T0 + 10_000.0 * life.number, socket.gethostname()
    attempt = Attempt(number=life.number, start_step=life.start_step, time=begun, pid=os.getpid(), host=host)
    if directory.file.exists():
        file = directory.read()
        file.attempts.append(attempt)
    else:
        file = RunFile(project="faults", run_id=directory.path.name, name="a run", created=T0, attempts=[attempt])
    directory.write(file)
    return directory


def train(path: str, life: Life) -> None:
    directory = begin(path, life)
    rng = random.Random(life.seed)
    begun = time.monotonic()
    writer = JournalWriter(
        directory.rows(), segment_bytes=1 << 14, fsync_seconds=1e9, floor=first_free_seq(directory),
        clock=lambda: 100.0 * (time.monotonic() - begun),  # a full disk is tried again after a hundredth of a second
    )  # fmt: skip
    now = T0 + 10_000.0 * life.number
    writer.append(Params(-1, now, {"config": {"attempt": life.number}}))
    step = life.start_step
    while life.end is None or step < life.start_step + life.steps:
        if step >= life.start_step + 2 * life.steps:
            time.sleep(0.01)  # enough: killed while it computes
            continue
        now += 0.3
        _disk(full=step in life.full_disk, room=rng.randrange(40, 3000), directory=directory)
        values = [rng.random(), rng.gauss(0.0, 1.0) if rng.random() > 0.03 else float("nan"), rng.random(), rng.random()]
        writer.append(Row(-1, step, now, life.number, USUAL, np.array(values)))
        if rng.random() < 0.05:
            writer.append(Row(-1, step, now, life.number, EVAL, np.array([rng.random()]), "log"))
        if rng.random() < 0.04:
            writer.append(Anomaly(f"spike-{life.number}-{step}", "spike", step, step, 1.0, "train/loss", 9.0, 1.0, 9.0,
                                  attempt=life.number, time=now))  # fmt: skip
        if rng.random() < 0.04 and step not in life.full_disk:
            writer.append(_artifact(directory, rng, life.number, step, now))
        step += 1
        time.sleep(0.0005)
    _disk(full=False, room=0, directory=directory)
    writer.append(RunEnd(-1, now + 1.0, life.end, life.number))
    writer.close()


def _artifact(directory: RunDirectory, rng: random.Random, attempt: int, step: int, now: float) -> Artifact:
    name = f"files-{attempt}-{step}"
    folder = directory.artifacts / name
    (folder / "deep").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(b'{"n": 1}')
    (folder / "deep" / "noise.bin").write_bytes(rng.randbytes(rng.randrange(1, 60_000)))
    return Artifact(-1, step, now, name, "file", f"artifacts/{name}")


def _disk(*, full: bool, room: int, directory: RunDirectory) -> None:
    """A full disk, as far as a process can have one of its own: no file may grow any more. A write may be cut off half way."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    newest = max((path.stat().st_size for path in Path(directory.rows()).glob("*.tbj")), default=0)
    if not full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    elif resource.getrlimit(resource.RLIMIT_FSIZE)[0] == most:
        resource.setrlimit(resource.RLIMIT_FSIZE, (newest + room, most))
