"""Memory of the host process and of the device, read from counters that exist anyway. Nothing is reset, nothing waits."""

from __future__ import annotations

import psutil
import torch

EVERY = 10


class HostSampler:
    """Host memory every `EVERY` steps, device memory every step. Absent where there is no CUDA device in use, never 0."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._largest: dict[int, int] = {}

    def sample(self, step: int) -> dict[str, float]:
        """``host/rss_bytes`` and ``mem/*`` (summed over the devices this process uses) at the end of `step`."""
        found: dict[str, float] = {}
        if step % EVERY == 0:
            found["host/rss_bytes"] = float(self._process.memory_info().rss)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found.update(self._device())
        return found

    def _device(self) -> dict[str, float]:
        allocated = reserved = 0
        for device in range(torch.cuda.device_count()):
            held = torch.cuda.memory_reserved(device)
            if held:
                now = torch.cuda.memory_allocated(device)
                self._largest[device] = max(now, self._largest.get(device, 0))
                allocated, reserved = allocated + now, reserved + held
        if not reserved:
            return {}
        return {
            "mem/allocated_bytes": float(allocated),
            "mem/reserved_bytes": float(reserved),
            "mem/sampled_max_bytes": float(sum(self._largest.values())),
            "mem/fragmentation": 1.0 - allocated / reserved,
        }
