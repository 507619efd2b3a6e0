"""A small training on two ranks, under DDP or FSDP2, with a spike; run by torchrun. ``python -m tests.replay.ranks_kit``:

record DIR KIND...                   train and record each kind, nonsense at step `BAD`
replay OUT KIND NAME CAPSULE ...     replay each capsule; the report of each rank goes to OUT/<KIND>-<NAME>-<rank>.json, and of
                                     the ones named "plain" also what changes to it do, to OUT/<KIND>-tries-<rank>.json
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trackbridge
from trackbridge.replay import Rebuilt, rerun, what_if

STEPS, BAD, BATCH, MICRO = 56, 50, 4, 2
TRIES = ("skip-batch", "clip=0.1", "spam=50", "reset-momentum", "restore-optimizer=/nowhere")
SETTINGS: dict[str, Any] = {
    "recorder": {"snapshot_every": 12, "before": 4, "after": 4, "upload_batches": True},
    "parameters": {"weights_every": 4, "moments_every": 4, "histograms_every": 12},
    "detection": {"warmup": 16},
    "strict": True,
}


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(8, 24), nn.Dropout(0.1), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


def wrapped(kind: str) -> nn.Module:
    net = network()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    model = wrapped(kind)
    torch.manual_seed(200 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


def update(model: Any, optimizer: Any, schedule: Any, batches: Any) -> float:
    total = 0.0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        (loss / MICRO).backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    return total / MICRO


def data() -> DataLoader[Any]:
    """Each rank's samples; those of step `BAD` have nonsense targets."""
    generator = torch.Generator().manual_seed(3)
    count = STEPS * MICRO * BATCH * dist.get_world_size()
    x = torch.randn(count, 8, generator=generator)
    y = torch.stack((x.sum(1), x[:, 0], x[:, 1] * 0.5), 1)
    sampler = DistributedSampler(TensorDataset(x), shuffle=False)
    own = list(sampler)[BAD * MICRO * BATCH : (BAD + 1) * MICRO * BATCH]
    y[own] = 60.0
    return DataLoader(TensorDataset(x, y), BATCH, sampler=sampler, num_workers=0)


def record(directory: str, *kinds: str) -> None:
    for kind in kinds:
        _record(kind, directory)


def _record(kind: str, directory: str) -> None:
    model, optimizer, schedule = make(kind)
    run = trackbridge.init(dir=directory, id=kind, **SETTINGS)
    run.watch(model, optimizer, state={"schedule": schedule})
    batches = iter(run.batches(data()))
    for _ in range(STEPS):
        run.step(loss=update(model, optimizer, schedule, (next(batches) for _ in range(MICRO))))
    assert run.finish(150), "sealed"
    dist.barrier()


def build(kind: str) -> Rebuilt:
    model, optimizer, schedule = make(kind)

    def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Tensor | float:
        return update(model, optimizer, schedule, batches)

    return Rebuilt(model, optimizer, step, state={"schedule": schedule})


def replay(out: str, *words: str) -> None:
    for kind, name, path in zip(words[::3], words[1::3], words[2::3], strict=True):
        capsule, made = trackbridge.pull(path), partial(build, kind)
        _write(out, kind, name, rerun(capsule, made))
        if name == "plain":
            _write(out, kind, "tries", what_if(capsule, made, TRIES))


def _write(out: str, kind: str, name: str, report: Any) -> None:
    (Path(out) / f"{kind}-{name}-{dist.get_rank()}.json").write_text(report.model_dump_json())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"record": record, "replay": replay}[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        dist.destroy_process_group()
