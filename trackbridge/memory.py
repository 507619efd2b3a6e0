"""Snapshots of the CUDA allocator, for torch's memory viewer: what held the memory, and which line allocated it.

Off unless asked for (``memory={"snapshots": N}``): to know the lines, torch notes the stack of every allocation. Taken on a
thread of its own, when memory creeps up, when the allocator had to give memory back to get any, when the run ends because there
was none, at the steps that the settings name, and by `Run.memory_snapshot`. Bounded in number, history and bytes.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trackbridge.config import MemorySnapshotsConfig
from trackbridge.errors import Part
from trackbridge.records import Anomaly, Artifact
from trackbridge.rundir import RunDirectory

logger = logging.getLogger("trackbridge")

KIND = "memory-snapshot"
FILE = "memory.pickle"  # the viewer reads nothing else; we never read it


class MemorySnapshots:
    """`ask` and `note` are for the training thread and return at once. Without CUDA, or with none allowed, nothing happens."""

    def __init__(
        self,
        config: MemorySnapshotsConfig,
        directory: RunDirectory,
        rank: int,
        tell: Callable[[Artifact], None],
        part: Part,
        *,
        allocator: Any = None,
    ) -> None:
        """`tell` gets each artifact, on another thread. `allocator`: what has `_snapshot` and `_record_memory_history`; by
        default `torch.cuda.memory` where there is a CUDA device."""
        self._config = config
        self._directory = directory
        self._rank = rank
        self._tell = tell
        self._part = part
        self._allocator: Any = allocator or (torch.cuda.memory if torch.cuda.is_available() else None)
        self._left = config.snapshots if self._allocator is not None else 0
        self._jobs: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reasons: set[str] = set()
        self._ours = False

    def start(self) -> None:
        """Have torch note allocations from now on: before the model is built, or what holds the memory has no history. A
        history that the user has switched on stays as it is."""
        if not self._left or not self._config.history or _recording():
            return
        with self._part:
            self._allocator._record_memory_history("all", context="alloc", stacks="python", max_entries=self._config.history)
            self._ours = True

    def ask(self, step: int, why: str, *, again: bool = False) -> bool:
        """A snapshot, soon; each reason gets one, unless `again`. False where there is none to be had."""
        if not self._left or not self._part.alive or (why in self._reasons and not again):
            return False
        self._left -= 1
        self._reasons.add(why)
        self._jobs.put((step, why))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trackbridge-memory", daemon=True)
            self._thread.start()
        return True

    def note(self, step: int, anomalies: Iterable[Anomaly], *, squeezed: bool) -> None:
        """What the step that was closed has shown. `squeezed`: the allocator had to give memory back."""
        if not self._left:
            return
        if step in self._config.at:
            self.ask(step, "asked for at this step", again=True)
        if squeezed:
            self.ask(step, "the allocator had to give memory back")
        for anomaly in anomalies:
            if anomaly.kind == "memory":
                self.ask(anomaly.step, f"{anomaly.series} creeps up")

    def close(self, timeout: float) -> bool:
        """Write what was asked for, at most `timeout` seconds, and end a history of ours. False if something is not written."""
        done = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout)
            done = not self._thread.is_alive()
        if self._ours:
            self._ours = False
            with self._part:
                self._allocator._record_memory_history(None)
        self._left = 0
        return done

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._part.alive:
                with self._part:
                    self._write(*job)

    def _write(self, step: int, why: str) -> None:
        data = fitting(self._allocator._snapshot(), self._config.bytes)
        if data is None:
            logger.warning(
                "trackbridge: the memory snapshot of step %d does not fit in memory.bytes, even without history", step
            )
            return
        name = _free(self._directory, f"memory-{step}" if not self._rank else f"memory-{step}-rank-{self._rank}")
        folder = self._directory.artifacts / name
        part = folder.with_name(f".{name}.part")
        part.mkdir(parents=True)
        try:
            with (part / FILE).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(folder)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            logger.error("trackbridge: the memory snapshot of step %d is lost: %s", step, error.strerror or error)
            return
        relative = folder.relative_to(self._directory.path).as_posix()
        self._tell(Artifact(-1, step, time.time(), name, KIND, relative, {"why": why, "rank": self._rank}))


def fitting(snapshot: dict[str, Any], most: int) -> bytes | None:
    """`snapshot` pickled in at most `most` bytes: the oldest events are left out, half of them at a time. None if what is
    held now alone is larger."""
    traces = [list(trace) for trace in snapshot.get("device_traces", [])]
    while True:
        file = io.BytesIO()
        pickle.dump({**snapshot, "device_traces": traces}, file)
        if file.tell() <= most:
            return file.getvalue()
        if not any(traces):
            return None
        traces = [trace[(len(trace) + 1) // 2 :] for trace in traces]


def _free(directory: RunDirectory, name: str) -> str:
    taken = sum(1 for path in directory.artifacts.glob(f"{name}*") if path.is_dir())
    return f"{name}-{taken}" if taken else name


def _recording() -> bool:
    """Whether somebody has torch note allocations already; False where this torch cannot say."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(enabled is not None and torch.cuda.is_initialized() and enabled())  # type: ignore[no-untyped-call]
