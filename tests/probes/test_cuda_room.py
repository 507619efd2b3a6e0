"""What may be used of a GPU's memory for a moment: only what the allocator has idle, and nothing of a CUDA graph's."""

from __future__ import annotations

import pytest
import torch

from tests.probes.kit import Lab
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


def test_a_copy_of_the_weights_asks_the_device_for_nothing() -> None:
    torch.cuda.empty_cache()
    model = torch.nn.Linear(4096, 4096, bias=False, device=DEVICE)
    lab = Lab(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for idle in (False, True):
        if idle:
            del_me = torch.empty(8 * 64 * MiB, dtype=torch.uint8, device=DEVICE)
            del del_me
        model(torch.ones(1, 4096, device=DEVICE)).sum().backward()
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        optimizer.step()
        assert torch.cuda.memory_reserved() < reserved + 32 * MiB
        found.append("optim/update_ratio" in lab.close())
    assert found[-1]
