"""A model that FSDP2 has sharded is counted as the whole that each rank computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trackbridge.flops.counting import count, count_shapes

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x * scale)
        return self.head(self.norm(x))


def main() -> None:
    """On each of two ranks: the counts of the whole model and of its shards, in float32 and in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo")
    tokens, scale = torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 5, 1)
    for dtype in (None, torch.bfloat16):
        model = Net()
        whole = count(model, tokens, scale)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        shards = [type(p).__name__ for p in model.parameters()]
        for _ in range(2):  # before the first pass, when FSDP has prepared nothing, and after it
            found = count_shapes(model, (tokens, scale), {}, full_attention=False)
            model(tokens, scale).sum().backward()
        assert list(found.forward) == [dtype or torch.float32]
        assert list(found.forward.values()) == list(whole.forward.values())
        assert list(found.backward.values()) == list(whole.backward.values())
        assert [type(p).__name__ for p in model.parameters()] == shards
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch needs a GPU")
def test_shards_count_as_the_whole() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
