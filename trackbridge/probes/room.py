"""What a probe may use of a device's memory for a moment, without asking the device for any.

Of what the allocator holds, some is idle. A quarter of that is taken at most: in an optimizer's first step Adam makes twice
the weights' size of state out of the same. What is idle in the private pool of a CUDA graph is left alone, though the
allocator counts it as idle: the graph writes there, and no other allocation gets it.
"""

from __future__ import annotations

import torch

_SHARE = 4
_in_graphs: dict[int, tuple[int, int]] = {}  # by device: bytes reserved when it was last asked, idle bytes in private pools


def spare_bytes(device: torch.device) -> int:
    """Bytes for temporaries on a CUDA device. No sync."""
    held = torch.cuda.memory_stats_as_nested_dict(device)
    if not held:
        return 0
    reserved: int = held["reserved_bytes"]["all"]["current"]
    allocated: int = held["allocated_bytes"]["all"]["current"]
    number = torch.cuda.current_device() if device.index is None else device.index
    return max(0, reserved - allocated - _idle_in_graphs(number, reserved)) // _SHARE


def _idle_in_graphs(number: int, reserved: int) -> int:
    """Asked anew when the allocator has got or given back memory: the list of its segments is long."""
    known = _in_graphs.get(number)
    if known is None or known[0] != reserved:
        private = (
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == number and tuple(segment["segment_pool_id"]) != (0, 0)
        )
        known = _in_graphs[number] = reserved, sum(private)
    return known[1]
