"""A recorded spike in the shared small training, and the same training rebuilt for a replay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import trackbridge
from tests.training import Setup, loader, setup, train
from trackbridge.capsule import SpikeCapsule
from trackbridge.replay import Rebuilt

STEPS = 60
BAD = 52
ACCUMULATE = 2
SETTINGS: dict[str, Any] = {
    "recorder": {"snapshot_every": 16, "before": 3, "after": 4},
    "parameters": {"weights_every": 4, "moments_every": 4},
    "detection": {"warmup": 16},
}


BATCH = 4
ITEMS = 48


class WithNonsense(Sampler[int]):
    """A new permutation of the good samples in each epoch, as `RandomSampler` draws it; the samples of the planned step are the
    bad ones at the end of the dataset."""

    def __init__(self, bad_step: int, accumulate: int) -> None:
        self.samples = BATCH * accumulate
        self.epoch, self.place = divmod(bad_step * self.samples, ITEMS)

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(ITEMS, generator=generator).tolist()
        if self.epoch == 0:
            order[self.place : self.place + self.samples] = range(ITEMS, ITEMS + self.samples)
        self.epoch -= 1
        yield from order


def data(*, workers: int = 0, bad_step: int = BAD, accumulate: int = ACCUMULATE, **more: Any) -> DataLoader[Any]:
    good = loader().dataset[:][0]  # type: ignore[index]
    bad = good.flatten()[torch.arange(16 * 9) * 7 % (ITEMS * 9)].view(16, 9).flip(1)
    sampler = WithNonsense(bad_step, accumulate)
    return DataLoader(TensorDataset(torch.cat((good, bad))), BATCH, sampler=sampler, num_workers=workers, **more)


def record(directory: Path, *, workers: int = 0, accumulate: int = ACCUMULATE, steps: int = STEPS, **changes: Any) -> Path:
    """Train with a spike; the run directory."""
    settings = {**SETTINGS, **changes}
    run = trackbridge.init(dir=directory, strict=True, **settings)
    made = setup(run=run)
    train(made, run.batches(data(workers=workers, accumulate=accumulate)), steps=steps, accumulate=accumulate)
    run.finish()
    return run.dir


def build() -> Rebuilt:
    """The training's objects and its step, without trackbridge."""
    made = setup(seed=99)
    return Rebuilt(made.model, made.optimizer, Step(made), state={"schedule": made.schedule})


class Step:
    def __init__(self, made: Setup) -> None:
        self.made = made

    def __call__(self, model: Any, optimizer: Any, batches: list[Any], index: int) -> float:
        total = 0.0
        for batch in batches:
            loss = self.made.loss(batch) + 1e-4 * random.random() + 1e-4 * float(np.random.rand())
            (loss / len(batches)).backward()
            total += float(loss.detach())
        self.made.clip()
        optimizer.step()
        optimizer.zero_grad()
        self.made.schedule.step()
        return total / len(batches)


def capsule(run_dir: Path) -> SpikeCapsule:
    return trackbridge.pull(run_dir)
