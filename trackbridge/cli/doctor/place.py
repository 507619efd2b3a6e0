"""The folder of runs: can it be written, how much room and how fast is it, and what in it was never delivered."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trackbridge.cli.common import size
from trackbridge.cli.doctor.finding import Finding
from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import TrackbridgeError

LOW_DISK, NO_DISK = 5e9, 0.5e9
SLOW_DISK = 35e6
"""Bytes a second below which a snapshot of `recorder.snapshot_bytes` (2 GiB) takes a minute to write."""
_SAMPLE_BYTES, _SAMPLE_SECONDS = 64 << 20, 1.0
_RUNS_SECONDS = 5.0


def look(folder: Path, settings: TrackbridgeConfig) -> Iterator[Finding]:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    speed = write_speed(there)
    if isinstance(speed, OSError):
        advice = "pass dir= a folder you can write to, or set TRACKBRIDGE_DIR"
        yield Finding("run folder", "problem", f"{there} cannot be written: {speed.strerror or speed}", advice)
    else:
        runs = len(list(folder.glob("*/run.json")))
        yield Finding("run folder", "ok", f"{folder.absolute()}: {runs} run{'s' * (runs != 1)}")
    yield _room(there, settings)
    if not isinstance(speed, OSError):
        yield _speed(speed)
    if folder.is_dir():
        yield left_over(folder)


def _room(there: Path, settings: TrackbridgeConfig) -> Finding:
    free = shutil.disk_usage(there).free
    recorder = settings.recorder
    most = settings.journal.budget_bytes + recorder.context_bytes + recorder.capsule_bytes
    found = f"{size(free)} free; one run takes {size(most)} at most by its settings"
    advice = "free some space, or lower journal.budget_bytes, recorder.context_bytes and recorder.capsule_bytes"
    if free < LOW_DISK:
        return Finding("disk", "problem" if free < NO_DISK else "note", found, advice)
    return Finding("disk", "ok", found)


def _speed(speed: float) -> Finding:
    if speed >= SLOW_DISK:
        return Finding("disk speed", "ok", f"{size(speed)}/s written and synced")
    advice = "the journal needs far less, but a pinned snapshot of 2 GiB takes minutes: use dir= on a local disk"
    return Finding("disk speed", "note", f"{size(speed)}/s written and synced", advice)


def write_speed(folder: Path) -> float | OSError:
    """Bytes a second that `folder` takes, synced: up to 64 MiB or a second. The error where it takes none. Leaves nothing."""
    block = os.urandom(4 << 20)
    written, begun = 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            while written < _SAMPLE_BYTES and time.perf_counter() - begun < _SAMPLE_SECONDS:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                written += len(block)
    except OSError as error:
        return error
    return written / (time.perf_counter() - begun)


def left_over(folder: Path) -> Finding:
    """Runs of the folder, the newest first, that nobody is recording any more and some tracker still lacks records of."""
    from trackbridge.liveness import trainer_alive
    from trackbridge.rundir import RunDirectory
    from trackbridge.shipper import status

    behind, unread, running, skipped = [], [], 0, 0
    begun = time.perf_counter()
    for path in sorted(folder.glob("*/run.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        run = path.parent
        if time.perf_counter() - begun > _RUNS_SECONDS:
            skipped += 1
            continue
        try:
            attempts = RunDirectory(run).read().attempts
            if attempts and trainer_alive(attempts[-1]):
                running += 1
            elif any(tracker.lag for tracker in status(run)):
                behind.append(run)
        except TrackbridgeError:
            unread.append(run)
    more = f"; {running} running" * bool(running) + f"; {skipped} not looked at" * bool(skipped)
    if unread:
        found = f"{len(unread)} cannot be read: {', '.join(run.name for run in unread[:3])}"
        return Finding("runs left over", "note", found + more, f"trackbridge show {unread[0]} says why")
    if behind:
        found = f"{len(behind)} not wholly delivered: {', '.join(run.name for run in behind[:3])}"
        return Finding("runs left over", "note", found + ", ..." * (len(behind) > 3) + more, f"trackbridge sync {behind[0]}")
    return Finding("runs left over", "ok", f"none{more}")
