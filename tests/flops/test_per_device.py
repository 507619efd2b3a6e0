"""E7: what a rank counts is its own share, as its peak rate is. Two ranks over gloo, tensor and context parallel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trackbridge.flops import count

ROOT = Path(__file__).parents[2]
TOKENS, WIDTH, HIDDEN = 12, 8, 32


class Attention(nn.Module):
    """A rank's queries, and the keys of all ranks."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k)


def main() -> None:
    """On each of two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo")
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    whole = count(model, x)
    assert whole.model == 6 * TOKENS * 2 * WIDTH * HIDDEN
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    shard = count(parallelize_module(model, init_device_mesh("cpu", (2,)), plan), x)
    assert (shard.model, shard.forward) == (whole.model / 2, {torch.float32: 2 * TOKENS * WIDTH * HIDDEN})

    q, k = (torch.randn(1, 2, TOKENS, WIDTH, requires_grad=True) for _ in range(2))
    mine = q.chunk(2, 2)[torch.distributed.get_rank()]
    assert 2 * count(Attention(), mine, k).model == count(Attention(), q, k).model
    torch.distributed.destroy_process_group()


def test_e7_a_shard_counts_as_a_shard() -> None:
    """NeMo-RL#1015, hf/blog#1649: whole-sequence FLOPs over one device's peak are 156% of it, or 16 times the truth."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
