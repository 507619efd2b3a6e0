"""The pieces of a trainer in torchtitan's style: model parts, each wrapped, compiled and sharded; containers of optimizers and
schedulers. Nothing here knows of trackbridge."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

VOCABULARY, WIDTH, HEADS, DEPTH = 256, 64, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.ffn(self.ffn_norm(x))


class Part(nn.Module):
    """Blocks `first` to `last` of the model, with the embedding before the first and the head after the last: what one rank of
    an interleaved pipeline holds. Here a rank holds all parts and runs them one after the other."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first == 0 else None
        self.layers = nn.ModuleDict({str(number): Block() for number in range(first, last)})
        self.norm = nn.RMSNorm(WIDTH) if last == DEPTH else None
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False) if last == DEPTH else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.output is not None and self.norm is not None else x


def save_every_second_matmul() -> Any:
    """Selective activation checkpointing: of the matrix products every second is kept, the rest is computed again."""
    seen = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation != torch.ops.aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def parallelize(part: Part, mesh: DeviceMesh, *, backend: str) -> Part:
    """Checkpoint, then compile, then shard, block by block."""
    for name, block in list(part.layers.items()):
        part.layers[name] = checkpoint_wrapper(block, context_fn=partial(save_every_second_matmul))
        part.layers[name].compile(backend=backend, fullgraph=True)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if mesh.device_type == "cuda" else MixedPrecisionPolicy()
    for block in part.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(part, mesh=mesh, mp_policy=policy)


class Optimizers(Optimizer):
    """One optimizer for each model part, stepped together. An `Optimizer` itself, so that hooks and schedulers find what they
    expect; its own state is empty."""

    def __init__(self, parts: list[Part], **options: Any) -> None:
        self.members = [torch.optim.AdamW(part.parameters(), **options) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], options)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def step(self, closure: Any = None) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): member.state_dict() for number, member in enumerate(self.members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, member in enumerate(self.members):
            member.load_state_dict(state[str(number)])


class Schedulers:
    """Warm-up for each of the optimizers."""

    def __init__(self, optimizers: Optimizers, warmup: int) -> None:
        rise = partial(rate, warmup)
        self.members = [torch.optim.lr_scheduler.LambdaLR(optimizer, rise) for optimizer in optimizers]

    def step(self) -> None:
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return self.members[0].state_dict()  # they are all the same

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member in self.members:
            member.load_state_dict(dict(state))


def rate(warmup: int, step: int) -> float:
    return min(1.0, (step + 1) / warmup)
