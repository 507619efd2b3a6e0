"""One recording with everything in it at once, and the same training rebuilt: a shuffled loader with two workers, dropout,
AdamW, a schedule, accumulation; stopped and resumed; batches skipped before; and the spike in the second epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import trackbridge
from tests import replays
from tests.training import Setup, setup, train
from trackbridge.replay import Rebuilt
from trackbridge.skip import Skip, SkipPlan

BATCH, ITEMS, MICRO = 4, 96, 2
FIRST, SECOND = 80, 22  # steps of the two attempts
BAD = (1, 11)  # epoch of the second attempt, and the first batch of the bad step in it
STEPS = FIRST + SECOND
SETTINGS: dict[str, Any] = {
    "recorder": {"snapshot_every": 6, "before": 3, "after": 3, "upload_batches": True},
    "parameters": {"weights_every": 3, "moments_every": 3, "histograms_every": 10},
    "detection": {"warmup": 12},
    "strict": True,
}


class Shuffled(Sampler[int]):
    """`RandomSampler`, but that the step whose first batch is `bad` (epoch, number) is made of the nonsense at the end of the
    dataset."""

    def __init__(self, bad: tuple[int, int] | None) -> None:
        self.bad = bad
        self.epoch = 0

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(ITEMS, generator=generator).tolist()
        if self.bad is not None and self.bad[0] == self.epoch:
            at = self.bad[1] * BATCH
            order[at : at + BATCH * MICRO] = range(ITEMS, ITEMS + BATCH * MICRO)
        self.epoch += 1
        yield from order


def data(bad: tuple[int, int] | None) -> DataLoader[Any]:
    start = torch.arange(ITEMS).remainder(32).unsqueeze(1)
    good = (start + torch.arange(9)) % 32
    nonsense = good.flatten()[torch.arange(BATCH * MICRO * 9) * 7 % good.numel()].view(BATCH * MICRO, 9).flip(1)
    return DataLoader(
        TensorDataset(torch.cat((good, nonsense))), BATCH, sampler=Shuffled(bad), num_workers=2, prefetch_factor=2
    )


def record(directory: Path) -> Path:
    """Two attempts of one run; the run directory."""
    run = trackbridge.init(dir=directory, id="hard", **SETTINGS)
    made = setup(run=run)
    train(made, run.batches(data(None)), steps=FIRST, accumulate=MICRO)
    run.finish()
    saved = made.model.state_dict(), made.optimizer.state_dict(), made.schedule.state_dict(), run.state_dict()
    run = trackbridge.init(dir=directory, id="hard", resume="must", **SETTINGS)
    made = setup(seed=5, run=run)
    for part, state in zip((made.model, made.optimizer, made.schedule, run), saved, strict=True):
        part.load_state_dict(state)  # type: ignore[union-attr]
    skip = SkipPlan(skips=(Skip(epoch=0, index=3), Skip(epoch=1, index=1), Skip(epoch=1, index=6)))
    train(made, run.batches(data(BAD), skip=skip, epoch=0), steps=SECOND, accumulate=MICRO)
    run.finish()
    return run.dir


def build() -> Rebuilt:
    made: Setup = setup(seed=99)
    return Rebuilt(made.model, made.optimizer, replays.Step(made), state={"schedule": made.schedule})
