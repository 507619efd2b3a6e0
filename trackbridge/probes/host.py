"""Memory of the host process and of the device, read from counters that exist anyway. Nothing is reset, nothing waits."""

from __future__ import annotations

import psutil
import torch

EVERY = 10


class HostSampler:
    """Host memory every `EVERY` steps, device memory every step. Absent where there is no CUDA device in use, never 0."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()  # those of the watched models
        self._process = psutil.Process()
        self._largest: dict[torch.device, int] = {}

    def sample(self, step: int) -> dict[str, float]:
        """``host/rss_bytes`` and ``mem/*`` (summed over the CUDA devices of the watched models) at the end of `step`."""
        found: dict[str, float] = {}
        if step % EVERY == 0:
            found["host/rss_bytes"] = float(self._process.memory_info().rss)
        allocated = reserved = 0
        for device in self.devices:
            if device.type == "cuda":
                held = torch.cuda.memory_stats_as_nested_dict(device)
                now = held["allocated_bytes"]["all"]["current"]
                self._largest[device] = max(now, self._largest.get(device, 0))
                allocated, reserved = allocated + now, reserved + held["reserved_bytes"]["all"]["current"]
        if reserved:
            found["mem/allocated_bytes"] = float(allocated)
            found["mem/reserved_bytes"] = float(reserved)
            found["mem/sampled_max_bytes"] = float(sum(self._largest.values()))
            found["mem/fragmentation"] = 1.0 - allocated / reserved
        return found
