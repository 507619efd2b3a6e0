"""What may be used of a GPU's memory for a moment: only what the allocator has idle, and nothing of a CUDA graph's."""

from __future__ import annotations

import pytest
import torch

from trackbridge.probes.room import spare_bytes

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

MiB = 1 << 20
DEVICE = torch.device("cuda")


def test_idle_memory_counts_and_that_of_a_graph_does_not() -> None:
    torch.cuda.empty_cache()
    before = spare_bytes(DEVICE)
    held = torch.empty(256 * MiB, dtype=torch.uint8, device=DEVICE)
    assert spare_bytes(DEVICE) < before + 8 * MiB
    del held
    idle = spare_bytes(DEVICE)
    assert idle >= before + 60 * MiB

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(512 * MiB, dtype=torch.uint8, device=DEVICE).fill_(1)
    assert abs(spare_bytes(DEVICE) - before) < 32 * MiB  # to capture a graph gives back what was idle outside of it
    graph.replay()
    torch.cuda.synchronize()
