"""Memory of the host process and of the device, read from counters that exist anyway. Nothing is reset, nothing waits."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable

import psutil
import torch

EVERY = 10
PAGE = mmap.PAGESIZE


class HostSampler:
    """Host memory and what the device has given to anybody every `EVERY` steps, this process' device memory every step. Absent
    where there is no CUDA device in use, never 0."""

    def __init__(self) -> None:
        self.squeezed = False  # in the newest sample: the allocator had to give memory back since the one before
        self._devices: list[torch.device] = []
        self._resident = Resident()
        self._largest: dict[torch.device, int] = {}
        self._retries: int | None = None
        self._used = DeviceUse()

    def watch(self, devices: Iterable[torch.device]) -> None:
        """The devices of the watched models."""
        self._devices = [device for device in devices if device.type == "cuda"]

    def sample(self, step: int) -> dict[str, float]:
        """``host/rss_bytes`` and ``mem/*`` (summed over the CUDA devices of the watched models) at the end of `step`."""
        found: dict[str, float] = {}
        if step % EVERY == 0:
            found["host/rss_bytes"] = float(self._resident.read())
        devices = self._devices
        if not devices:
            return found
        allocated = reserved = retries = 0
        for device in devices:
            held = torch.cuda.memory_stats_as_nested_dict(device)
            if held:
                now = held["allocated_bytes"]["all"]["current"]
                self._largest[device] = max(now, self._largest.get(device, 0))
                allocated, reserved = allocated + now, reserved + held["reserved_bytes"]["all"]["current"]
                retries += held.get("num_alloc_retries", 0)
        if reserved:
            found["mem/allocated_bytes"] = float(allocated)
            found["mem/reserved_bytes"] = float(reserved)
            found["mem/sampled_max_bytes"] = float(sum(self._largest.values()))
            found["mem/fragmentation"] = 1.0 - allocated / reserved
            found["mem/alloc_retries"] = float(retries)
        self.squeezed = self._retries is not None and retries > self._retries
        self._retries = retries
        used = self._used.take()
        if used is not None:
            found["mem/device_used_bytes"] = float(used)
        if step % EVERY == 0:
            self._used.ask(devices)
        return found

    def close(self) -> None:
        self._used.close()
        self._resident.close()


class Resident:
    """Bytes of this process in host memory. Linux tells it in a file that stays open here: that is six times faster than to
    look the process up each time."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        try:
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # no Linux
            self._file = None

    def read(self) -> int:
        if self._file is None:
            return int(self._process.memory_info().rss)
        return int(os.pread(self._file, 128, 0).split()[1]) * PAGE

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class DeviceUse:
    """How much of the devices' memory is in use by whomever. The driver is asked on a thread of its own: its answer may take a
    millisecond. It is told of this process' own devices, so neither ``CUDA_VISIBLE_DEVICES`` nor MIG can mislead it."""

    def __init__(self, read: Callable[[torch.device], tuple[int, int]] | None = None) -> None:
        """`read` returns (free, total) bytes; default: `torch.cuda.mem_get_info`."""
        self._read = read or torch.cuda.mem_get_info
        self._jobs: queue.SimpleQueue[list[torch.device] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._latest: int | None = None
        self._asked = False
        self._broken = False

    def ask(self, devices: Iterable[torch.device]) -> None:
        """Have it read; what was asked before and is not there yet is not asked again."""
        if self._asked or self._broken:
            return
        self._asked = True
        self._jobs.put(list(devices))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trackbridge-device-use", daemon=True)
            self._thread.start()

    def take(self) -> int | None:
        """Bytes, if there is an answer that nobody has taken."""
        latest, self._latest = self._latest, None
        return latest

    def close(self) -> None:
        self._broken = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (devices := self._jobs.get()) is not None:
            try:
                self._latest = sum(total - free for free, total in map(self._read, devices))
            except RuntimeError:  # a driver that cannot tell: the series is absent
                self._broken = True
            self._asked = False
