"""Small trainings on several ranks, whose merged rows tests/test_merged.py compares with one process; run by torchrun:
``python -m tests.merged_kit DIR CASE...`` records each case as the run of its name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trackbridge
from tests.fsdp2_here import WITHOUT

STEPS = 3
SETTINGS: dict[str, Any] = {
    "recorder": {"enabled": False},
    "parameters": {"weights_every": 1, "moments_every": 1, "histograms_every": 0},
    "activations": {"sites": ["first", "last"]},
    "strict": True,
}


class Net(nn.Module):
    """Five rows over two or three ranks (uneven, and with three an empty shard of `last`), a frozen layer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(8, 5), nn.Linear(5, 5)
        self.one, self.two = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.two.weight = self.one.weight
        self.last = nn.Linear(5, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(self.two(torch.tanh(self.one(x))))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4 * world, 8, generator=generator) for _ in range(STEPS)]


def train(run: trackbridge.Run, model: nn.Module, batches: list[Tensor], *, own_clip: bool = False) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run.watch(model, optimizer)
    for x in batches:
        loss = 10 * model(x).square().mean()
        loss.backward()
        given = {"grad_norm": nn.utils.clip_grad_norm_(model.parameters(), 0.5)} if own_clip else {}
        if not own_clip:
            run.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, **given)
    run.finish()


def mine() -> list[Tensor]:
    return [x.chunk(dist.get_world_size())[dist.get_rank()] for x in data(dist.get_world_size())]


def started(name: str, **settings: Any) -> trackbridge.Run:
    return trackbridge.init(dir=sys.argv[1], id=name, **{**SETTINGS, **settings})


def sharded(**options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for part in (model.first, model.last):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def ddp() -> None:
    train(started("ddp"), nn.parallel.DistributedDataParallel(net()), mine())


def fsdp() -> None:
    train(started("fsdp"), sharded(), mine())


def fsdp_clipped_by_the_user() -> None:
    train(started("fsdp_clipped_by_the_user"), sharded(), mine(), own_clip=True)


def hybrid() -> None:
    """Parameters on a mesh that replicates, beside one that nobody shards and DDP keeps equal: replicas of two kinds."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    train(started("hybrid"), sharded(mesh=mesh), mine())


def tensor_parallel() -> None:
    """Shards of either dimension, and a bias that is replicated, in one model; the same batch on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(started("tensor_parallel", activations={"sites": "none"}), model, data(1), own_clip=True)


def experts() -> None:
    """Each rank has its own expert under one name, and nothing says so."""
    model = nn.Linear(4, 1, bias=False)
    run = started("experts", activations={"sites": "none"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.watch(model, optimizer)
    model.weight.grad = torch.full((1, 4), ((20, 100)[dist.get_rank() % 2] / 4) ** 0.5)
    optimizer.step()
    run.step(loss=1.0)
    run.finish()


def tokens() -> None:
    """Given to `step`, and to `micro`; with a straggler, by a clock of its own."""
    rank = dist.get_rank()
    run = started("tokens")
    run.step(loss=(9.0, 1.0, 1.0)[rank], tokens=(1, 99, 100)[rank])
    run.micro(loss=(9.0, 1.0, 1.0)[rank], tokens=(1, 99, 100)[rank])
    run.step()
    run.step(loss=torch.tensor(2.5) if rank == dist.get_world_size() - 1 else None)
    run.finish()


def broken() -> None:
    """One rank's batch makes its loss and activations NaN; through the all-reduce every gradient follows."""
    run = started("broken", strict=False)
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run.watch(model, optimizer)
    for step, x in enumerate(mine()):
        if step == 1 and dist.get_rank() == 1:
            x[0, 0] = float("nan")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.zero_grad()  # nothing spreads to the steps after it
        run.step(loss=loss)
    run.finish()


def corrupted() -> None:
    """One bit of one weight flips on the last rank, before the third step; the loss hardly minds."""
    run = started("corrupted", parameters={"checksums_every": 1, "weights_every": 0, "moments_every": 0, "histograms_every": 0})
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run.watch(model, optimizer)
    for step, x in enumerate(mine()):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            model.module.last.weight.detach().view(torch.int32)[0, 0] ^= 1
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
    run.finish()


def left() -> None:
    """The last rank dies in silence after the second step; rank 0 has four."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = started("left", ranks={"wait_seconds": 0.5})
    for step in range(4):
        if step == 2 and rank == world - 1:
            run._scribe.ask(lambda: None)
            os._exit(0)
        run.step(loss=float(rank))
    run.finish()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (ddp, fsdp, fsdp_clipped_by_the_user, hybrid, tensor_parallel, experts, tokens, broken, corrupted, left)
    if case.__name__ not in WITHOUT
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        CASES[name]()
    if sys.argv[-1] == "left":
        os._exit(0)  # without a barrier: one rank is gone
    dist.destroy_process_group()
