"""Faults in the data, done in other ways."""

from __future__ import annotations

import math

import torch

from benchmarks.faults.causes.base import Fault, with_tokens
from benchmarks.faults.tasks import KNOWN, VOCABULARY, Batch, Task
from benchmarks.faults.trial import Trial


class OneBatch(Fault):
    """Damages the batches of `span` steps by `damaged`."""

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        return self.damaged(trial, x, y, trial.source.generator(-1 - step)) if self.active(step) else (x, y)

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        raise NotImplementedError


class CutOff(OneBatch):
    """A file that ends early: the rest of every sample is zeros, tokens of padding among them."""

    cause, span = "corrupt-batch", 2

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        if trial.task.tokens:
            x, y = x.clone(), y.clone()
            x[:, 6:], y[:, 5:] = 0, 0
            return x, y
        flat = x.flatten(1).clone()
        flat[:, flat.shape[1] // 4 :] = 0
        return flat.view_as(x), y


class OtherTokenizer(OneBatch):
    """A shard made with another tokenizer: the same text under other numbers, among them ones that mean nothing here."""

    cause, span = "corrupt-batch", 3
    fits = staticmethod(with_tokens)

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        return (x * 87 + 101) % VOCABULARY, (y * 87 + 101) % VOCABULARY


class NotNormalised(OneBatch):
    """Raw values from 0 to 255 where normalised ones belong."""

    cause, span = "corrupt-batch", 1

    @classmethod
    def fits(cls, task: Task) -> bool:
        return not task.tokens

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        return (40 * x + 128).clamp(0, 255), y


class Infinite(OneBatch):
    """A division by zero in the preprocessing of one sample."""

    cause, span, always = "corrupt-batch", 1, True

    @classmethod
    def fits(cls, task: Task) -> bool:
        return not task.tokens

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        x = x.clone()
        x.view(len(x), -1)[3, 2] = math.inf
        return x, y


class GlitchRows(OneBatch):
    """A few samples are a handful of tokens that never came before, over and over; the others are as ever."""

    cause, span = "rare-token", 1
    sizes = (4.0, 6.0)
    fits = staticmethod(with_tokens)

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        x, y, rows = x.clone(), y.clone(), int(self.size)
        text = KNOWN + 20 + torch.randint(3, (rows, x.shape[1] + 1), generator=generator)
        x[:rows], y[:rows] = text[:, :-1], text[:, 1:]
        return x, y


class OffByOne(OneBatch):
    """Targets one place off: the next class, or the token after the next."""

    cause, span = "label-fault", 3

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        return (x, y.roll(-1, 1)) if trial.task.tokens else (x, (y + 1) % 10)


class Guessed(OneBatch):
    """`size` of the targets are drawn at random."""

    cause, span, sizes = "label-fault", 2, (0.7, 0.9)

    def damaged(self, trial: Trial, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Batch:
        hit = torch.rand(y.shape, generator=generator) < self.size
        return x, torch.where(hit, torch.randint(KNOWN if trial.task.tokens else 10, y.shape, generator=generator), y)


class Alternating(Fault):
    """A loader that hands out the same two batches in turn for `size` steps."""

    cause, sizes, always = "repeated-batch", (24.0, 36.0), True

    def batch(self, trial: Trial, step: int) -> Batch:
        inside = self.at <= step < self.at + self.size
        return trial.source.batch(self.at + (step - self.at) % 2 if inside else step)


class OtherLanguage(Fault):
    """From now on the same kind of text in other words, all of them known; pictures from a brighter camera."""

    cause = "data-regime-change"

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if step < self.at:
            return x, y
        if trial.task.tokens:
            order = torch.randperm(KNOWN, generator=torch.Generator().manual_seed(5))
            return order[x], order[y]
        return 0.7 - 1.6 * x, y
