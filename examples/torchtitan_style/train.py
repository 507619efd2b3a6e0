"""A trainer in torchtitan's style, watched: FSDP2, several model parts, a container of optimizers, every block compiled by
itself, selective activation checkpointing.

    torchrun --nproc-per-node 2 examples/torchtitan_style/train.py               # gloo on CPU, or NCCL where there are GPUs
    torchrun --nproc-per-node 2 examples/torchtitan_style/train.py --bad-at 40   # a batch of noise: a spike, a capsule
    cd examples/torchtitan_style && torchrun --nproc-per-node 2 -m trackbridge.cli replay RUN_DIR@40 --build train:build
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from parts import DEPTH, VOCABULARY, Optimizers, Part, Schedulers, parallelize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import trackbridge
from trackbridge.replay import Rebuilt

BATCH, LENGTH = 4, 32


class Trainer:
    def __init__(self, compile_backend: str | None = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        torch.manual_seed(1)  # the same weights on every rank before they are sharded
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        backend = compile_backend or ("inductor" if self.device.type == "cuda" else "aot_eager")
        parts = [Part(0, DEPTH // 2), Part(DEPTH // 2, DEPTH)]
        self.model_parts = [parallelize(part.to(self.device), mesh, backend=backend) for part in parts]
        self.optimizers = Optimizers(self.model_parts, lr=3e-3)
        self.schedulers = Schedulers(self.optimizers, warmup=10)

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = x = tokens.to(self.device)
        for part in self.model_parts:
            x = part(x[:, :-1]) if x is tokens else part(x)
        return nn.functional.cross_entropy(x.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build() -> Rebuilt:
    """For ``trackbridge replay``: the same objects, and one step with them."""
    trainer = Trainer()

    def step(model: Any, optimizers: Any, batches: list[Any], index: int) -> float:
        (tokens,) = batches
        loss = trainer.loss(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_([p for part in model for p in part.parameters()], 1.0)
        optimizers.step()
        trainer.schedulers.step()
        optimizers.zero_grad()
        return float(loss.detach())

    return Rebuilt(trainer.model_parts, trainer.optimizers, step, state={"schedulers": trainer.schedulers})


def batches(steps: int, bad_at: int) -> list[Tensor]:
    """This rank's batches: bytes that count upwards by one, so that there is something to learn; noise at `bad_at`."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for step in range(steps):
        start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
        found.append(torch.randint(0, VOCABULARY, tokens.shape, generator=generator) if step == bad_at else tokens)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--bad-at", type=int, default=-1)
    arguments.add_argument("--compile-backend", default=None)
    arguments.add_argument("--dir", default="runs")
    arguments.add_argument("--id", default=None)
    given = arguments.parse_args()
    trainer = Trainer(given.compile_backend)

    with trackbridge.init(backend=["tensorboard"], dir=given.dir, id=given.id, config=vars(given)) as run:
        run.watch(trainer.model_parts, trainer.optimizers, state={"schedulers": trainer.schedulers})
        for tokens in run.batches(batches(given.steps, given.bad_at)):
            loss = trainer.loss(tokens)
            loss.backward()
            norm = nn.utils.clip_grad_norm_([p for part in trainer.model_parts for p in part.parameters()], 1.0)
            trainer.optimizers.step()
            trainer.schedulers.step()
            trainer.optimizers.zero_grad()
            run.step(loss=loss, grad_norm=norm.full_tensor(), tokens=tokens[:, 1:].numel())
    if dist.get_rank() == 0:
        print(f"{run.dir}: loss {float(loss.detach()):.3f} after {given.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
