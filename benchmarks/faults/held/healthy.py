"""Controls that no default was chosen on."""

from __future__ import annotations

import torch

from benchmarks.faults.healthy import STEPS, Control
from benchmarks.faults.tasks import Batch
from benchmarks.faults.trial import Trial


class LinearDecay(Control):
    """Down to nothing."""

    def rate(self, trial: Trial, step: int) -> float:
        return trial.lr * min(1.0, (step + 1) / 30) * max(1 - step / STEPS, 0.0)


class MixedLengths(Control):
    """Buckets of another length, or another batch size, at every step."""

    def batch(self, trial: Trial, step: int) -> Batch:
        bucket = int(torch.randint(3, (), generator=trial.source.generator(-1 - step)))
        if trial.task.tokens:
            trial.source.length = (16, 32, 48)[bucket]
        else:
            trial.source.batch_size = trial.task.batch * (2 + bucket) // 3
        return trial.source.batch(step)


class GrowingBatch(Control):
    """Three times as large in the end, in five steps."""

    def batch(self, trial: Trial, step: int) -> Batch:
        trial.source.batch_size = trial.task.batch * (2 + min(step // 100, 4)) // 2
        return trial.source.batch(step)


class WrongLabels(Control):
    """A tenth of the labels are wrong, all the time."""

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        generator = trial.source.generator(-1 - step)
        hit = torch.rand(y.shape, generator=generator) < 0.1
        return x, torch.where(hit, y.flatten()[torch.randperm(y.numel(), generator=generator)].view_as(y), y)


class Regularised(Control):
    """Dropout and label smoothing."""

    def prepare(self, trial: Trial) -> None:
        trial.drop, trial.smoothing = 0.2, 0.1
        trial.model = trial.task.model(drop=trial.drop)


HELD_CONTROLS: tuple[type[Control], ...] = (Control, LinearDecay, MixedLengths, GrowingBatch, WrongLabels, Regularised)
