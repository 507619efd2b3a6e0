"""Faults in the data."""

from __future__ import annotations

import math

import torch

from benchmarks.faults.causes.base import Fault, replaced, with_tokens
from benchmarks.faults.tasks import KNOWN, VOCABULARY, Batch, Task
from benchmarks.faults.trial import Trial


class Noise(Fault):
    """A binary file read as text; a sensor's garbage. `size` is the spread of the garbage where data are floats."""

    cause, sizes, second_sizes, span = "corrupt-batch", (4.0, 20.0), (8.0, 60.0), 2

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        generator = trial.source.generator(-1 - step)
        if not trial.task.tokens:
            return self.size * torch.randn(x.shape, generator=generator), y
        text = torch.randint(VOCABULARY, (len(x), x.shape[1] + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class UnseenNoise(Noise):
    """The same in a loop that does not show its batches to the recorder."""

    shown = False


class Stuck(Fault):
    """One token over and over: a file of zeros or padding."""

    cause, sizes, second_sizes, span = "corrupt-batch", (150.0, 60.0), (99.0, 180.0), 2
    fits = staticmethod(with_tokens)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        return (torch.full_like(x, int(self.size)), torch.full_like(y, int(self.size))) if self.active(step) else (x, y)


class NanBatch(Fault):
    """`size` of the values are not numbers."""

    always = True
    cause, sizes, second_sizes = "corrupt-batch", (0.01,), (0.001,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return not task.tokens

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if self.active(step):
            hit = torch.rand(x.shape, generator=trial.source.generator(-1 - step)) < self.size
            hit.view(-1)[0] = True
            x = x.masked_fill(hit, math.nan)
        return x, y


class RareTokens(Fault):
    """`size` of the tokens are ones that never came before."""

    cause, sizes, second_sizes = "rare-token", (0.25, 0.5), (0.35, 0.6)
    fits = staticmethod(with_tokens)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        text = torch.cat([x, y[:, -1:]], 1)
        generator = trial.source.generator(-1 - step)
        hit = torch.rand(text.shape, generator=generator) < self.size
        text = replaced(text, hit, KNOWN + 7 + torch.randint(6, text.shape, generator=generator))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Shuffled(Fault):
    """Targets of other samples."""

    cause, span, sizes, second_sizes = "label-fault", 2, (1.0,), (1.0,)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if self.active(step):
            order = torch.randperm(y.numel(), generator=trial.source.generator(-1 - step))
            y = y.flatten()[order].view_as(y)
        return x, y


class LongShuffled(Shuffled):
    span = 12


class ConstantLabel(Fault):
    """One label for all."""

    cause, span, sizes, second_sizes = "label-fault", 3, (3.0,), (7.0,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return not task.tokens and task.name != "residual"

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        return (x, torch.full_like(y, int(self.size))) if self.active(step) else (x, y)


class Repeated(Fault):
    """The loader hands out one batch `size` times."""

    always = True
    cause, sizes, second_sizes = "repeated-batch", (20.0, 40.0), (30.0,)

    def batch(self, trial: Trial, step: int) -> Batch:
        return trial.source.batch(self.at if self.at <= step < self.at + self.size else step)


class OtherData(Fault):
    """Another distribution from now on."""

    cause, sizes, second_sizes = "data-regime-change", (1.0,), (1.0,)

    def batch(self, trial: Trial, step: int) -> Batch:
        trial.source.regime = int(step >= self.at)
        return trial.source.batch(step)
