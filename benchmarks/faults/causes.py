"""What is injected. Each class is one way of one cause; `sizes` are those of the development part, `held_sizes` the others.

An injection does what the fault itself does (a bit is flipped, a state is not loaded, a file is read as text), never what the
fault looks like in the record.
"""

from __future__ import annotations

import math
import struct
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.faults.tasks import KNOWN, VOCABULARY, Batch, Task
from benchmarks.faults.trial import Injection, Trial


class Fault(Injection):
    sizes: ClassVar[tuple[float, ...]] = (1.0,)
    held_sizes: ClassVar[tuple[float, ...]] = (1.0,)
    lr: ClassVar[float] = 1.0
    gradual = False
    """The cause grows over `span` steps before it shows in the loss: it has precursors."""

    @classmethod
    def fits(cls, task: Task) -> bool:
        return True


def with_tokens(task: Task) -> bool:
    return task.tokens


def _replaced(value: Tensor, where: Tensor, by: Tensor) -> Tensor:
    return torch.where(where, by, value)


# -- data


class Noise(Fault):
    """A binary file read as text; a sensor's garbage. `size` is the spread of the garbage where data are floats."""

    cause, sizes, held_sizes, span = "corrupt-batch", (4.0, 20.0), (8.0, 60.0), 2

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        generator = trial.source.generator(-1 - step)
        if not trial.task.tokens:
            return self.size * torch.randn(x.shape, generator=generator), y
        text = torch.randint(VOCABULARY, (len(x), x.shape[1] + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Stuck(Fault):
    """One token over and over: a file of zeros or padding."""

    cause, sizes, held_sizes, span = "corrupt-batch", (150.0, 60.0), (99.0, 180.0), 2
    fits = staticmethod(with_tokens)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        return (torch.full_like(x, int(self.size)), torch.full_like(y, int(self.size))) if self.active(step) else (x, y)


class NanBatch(Fault):
    """`size` of the values are not numbers."""

    always = True
    cause, sizes, held_sizes = "corrupt-batch", (0.01,), (0.001,)

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

    cause, sizes, held_sizes = "rare-token", (0.25, 0.5), (0.35, 0.6)
    fits = staticmethod(with_tokens)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        text = torch.cat([x, y[:, -1:]], 1)
        generator = trial.source.generator(-1 - step)
        hit = torch.rand(text.shape, generator=generator) < self.size
        text = _replaced(text, hit, KNOWN + 7 + torch.randint(6, text.shape, generator=generator))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Shuffled(Fault):
    """Targets of other samples."""

    cause, span, sizes, held_sizes = "label-fault", 2, (1.0,), (1.0,)

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

    cause, span, sizes, held_sizes = "label-fault", 3, (3.0,), (7.0,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return not task.tokens and task.name != "residual"

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        return (x, torch.full_like(y, int(self.size))) if self.active(step) else (x, y)


class Repeated(Fault):
    """The loader hands out one batch `size` times."""

    always = True
    cause, sizes, held_sizes = "repeated-batch", (20.0, 40.0), (30.0,)

    def batch(self, trial: Trial, step: int) -> Batch:
        return trial.source.batch(self.at if self.at <= step < self.at + self.size else step)


class OtherData(Fault):
    """Another distribution from now on."""

    cause, sizes, held_sizes = "data-regime-change", (1.0,), (1.0,)

    def batch(self, trial: Trial, step: int) -> Batch:
        trial.source.regime = int(step >= self.at)
        return trial.source.batch(step)


# -- optimization


class RateJump(Fault):
    """The learning rate `size` times too high from now on."""

    always = True
    cause, sizes, held_sizes = "lr-discontinuity", (10.0, 50.0), (20.0, 100.0)

    def rate(self, trial: Trial, step: int) -> float:
        return super().rate(trial, step) * (self.size if step >= self.at else 1.0)


class RateBlip(RateJump):
    """The same for eight steps."""

    sizes, held_sizes = (30.0,), (60.0,)

    def rate(self, trial: Trial, step: int) -> float:
        return Injection.rate(self, trial, step) * (self.size if self.at <= step < self.at + 8 else 1.0)


def adaptive(task: Task) -> bool:
    return task.optimizer != "sgd"


class StateLost(Fault):
    """Resumed from a checkpoint without the optimizer's state."""

    cause, lr, sizes, held_sizes, always = "optimizer-state-lost", 3.0, (1.0,), (1.0,), True
    fits = staticmethod(adaptive)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.resume(optimizer=False)


class MomentsZeroed(StateLost):
    """A restore that brings back the count of steps and not the moments: nothing corrects for their being zero."""

    def prepare(self, trial: Trial) -> None:
        trial.betas = (0.9, 0.999)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.resume()
            for state in trial.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()


class StaleMoment(Fault):
    """One layer's second moment is that of a time when it hardly had a gradient: `size` of what it should be."""

    cause, sizes, held_sizes = "stale-second-moment", (1e-6, 1e-8), (1e-7, 1e-9)
    lr, always = 3.0, True
    fits = staticmethod(adaptive)

    def prepare(self, trial: Trial) -> None:
        trial.betas = (0.9, 0.999)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            parameter = trial.parameter("mlp.0.weight", "layers.1.weight", "up.weight", "rnn.weight_hh", "body.1.1.weight")
            trial.optimizer.state[parameter]["exp_avg_sq"].mul_(self.size)


class Frozen(StaleMoment):
    """A layer gets no gradient for `span` steps, then its usual one."""

    sizes, held_sizes, span, always = (0.0,), (0.0,), 120, False

    def prepare(self, trial: Trial) -> None:
        trial.betas = (0.9, 0.9)

    def before(self, trial: Trial) -> None:
        pass

    def gradients(self, trial: Trial) -> None:
        if self.at - self.span <= trial.step < self.at:
            grad = trial.parameter("mlp.0.weight", "layers.1.weight", "up.weight", "rnn.weight_hh", "body.1.1.weight").grad
            assert grad is not None
            grad.zero_()


class Unclipped(Fault):
    """Clipping is gone, at a rate `size` times the usual, which only clipping kept stable."""

    cause, sizes, held_sizes, tail = "gradient-explosion", (14.0, 20.0), (16.0, 24.0), 60

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.optimizer == "sgd"

    def prepare(self, trial: Trial) -> None:
        trial.lr *= self.size
        trial.clip = 0.25

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.clip = None


class Deepening(Fault):
    """Every layer's gain creeps up by `size` a step, as an unnormalised deep network's does: gradients grow with its power."""

    cause, sizes, held_sizes, span, tail, gradual = "gradient-explosion", (1.02,), (1.03,), 40, 20, True

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("deep", "wide")

    def prepare(self, trial: Trial) -> None:
        trial.clip = None

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                for name, p in trial.model.named_parameters():
                    if name.endswith("weight") and p.dim() == 2:
                        p.mul_(self.size)


# -- numerics


class HalfOverflow(Fault):
    """fp16 with a loss scaler; one layer's gain `size` times too large: its activations leave fp16's range."""

    cause, sizes, held_sizes, tail = "fp16-overflow", (3e4,), (1e5,), 40

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "perceptron", "llama", "residual", "wide")

    def prepare(self, trial: Trial) -> None:
        trial.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            with torch.no_grad():
                trial.parameter("mlp.0.weight", "layers.1.weight", "up.weight", "body.1.1.weight").mul_(self.size)


class ScaleTooHigh(HalfOverflow):
    """The loss scale itself is `size`."""

    always = True
    sizes, held_sizes = (2.0**36,), (2.0**42,)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            assert trial.scaler is not None
            trial.scaler._scale.fill_(self.size)  # type: ignore[union-attr]


class Growing(Fault):
    """Part of a weight grows by `size` a step for `span` steps."""

    gradual, span, tail = True, 50, 20
    rows: ClassVar[slice] = slice(None)
    names: ClassVar[tuple[str, ...]] = ()

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                for name in self.names:
                    for own, p in trial.model.named_parameters():
                        if name in own:
                            p[self.rows].mul_(self.size)


class LogitGrowth(Growing):
    """Queries and keys grow: attention logits with their product."""

    cause, sizes, held_sizes = "attention-logit-growth", (1.12, 1.18), (1.15,)
    names: ClassVar[tuple[str, ...]] = ("attn.q.weight", "attn.k.weight")

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "llama")

    def after(self, trial: Trial) -> None:
        super().after(trial)
        if self.active(trial.step):
            with torch.no_grad():
                for name, p in trial.model.named_parameters():
                    if "c_attn" in name:
                        p[: 2 * p.shape[1]].mul_(self.size)


class EmbeddingRows(Growing):
    """The rows of the most frequent tokens grow."""

    cause, sizes, held_sizes = "embedding-instability", (1.12, 1.18), (1.15,)
    names: ClassVar[tuple[str, ...]] = ("tok_emb", "wte", "embedding.weight")
    rows: ClassVar[slice] = slice(0, 20)
    fits = staticmethod(with_tokens)


class HeadGrowth(Growing):
    """The output head grows."""

    cause, sizes, held_sizes = "embedding-instability", (1.05, 1.1), (1.08,)
    names: ClassVar[tuple[str, ...]] = ("head.weight", "out.weight")
    fits = staticmethod(with_tokens)


class OutlierUnit(Growing):
    """One unit's incoming weights grow: its activation becomes an outlier."""

    cause, sizes, held_sizes = "activation-outliers", (1.15, 1.2), (1.18,)
    names: ClassVar[tuple[str, ...]] = ("blocks.0.mlp.2.weight", "layers.0.weight", "h.1.down.weight", "body.0.4.weight")
    rows: ClassVar[slice] = slice(3, 4)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "perceptron", "llama", "residual", "wide")


# -- hardware


def flipped(value: float, bit: int) -> float:
    """A float32 with one bit of its representation flipped."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", word ^ (1 << bit)))[0])


class WeightBit(Fault):
    """The highest exponent bit of one weight flips in memory: it is 2^128 times larger, or not finite any more."""

    cause = "hardware-fault"
    names = (
        "mlp.0.weight",
        "layers.0.weight",
        "body.0.weight",
        "stack.3.weight",
        "up.weight",
        "rnn.weight_ih",
        "body.1.1.weight",
    )

    def corrupted(self, value: float) -> float:
        return flipped(value, 30)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            with torch.no_grad():
                weights = trial.parameter(*self.names).view(-1)
                weights[11] = self.corrupted(float(weights[11]))


class WeightWord(WeightBit):
    """One weight is overwritten with `size`."""

    sizes, held_sizes = (300.0, 1e4), (1e3, 1e5)

    def corrupted(self, value: float) -> float:
        return self.size


class ActivationTile(Fault):
    """For one step a tile of one module's output is `size`: a multiplier that failed once."""

    cause, sizes, held_sizes = "hardware-fault", (3e2, 1e5), (3e3, 1e6)

    def before(self, trial: Trial) -> None:
        if trial.step != self.at:
            return
        modules = dict(trial.model.named_modules())
        names = ("blocks.0", "layers.0", "body.0", "stack.3", "h.1", "rnn", "body.1")
        module = next(modules[name] for name in names if name in modules)

        def hit(_: Any, __: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            bad = tensor.clone()
            tile = bad.view(-1, bad.shape[-1])
            tile[: len(tile) // 4, :8] = self.size
            return (bad, *output[1:]) if isinstance(output, tuple) else bad

        self.handle = module.register_forward_hook(hit, prepend=True)

    def after(self, trial: Trial) -> None:
        if trial.step == self.at:
            self.handle.remove()


# -- code and configuration


class Dropout(Fault):
    """Resumed with dropout `size`."""

    cause, sizes, held_sizes = "config-change", (0.7,), (0.8,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name not in ("deep",)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.drop = self.size
            trial.resume()


class Smoothing(Dropout):
    """Resumed with label smoothing `size`."""

    sizes, held_sizes = (0.4,), (0.5,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name != "residual"

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.smoothing = self.size
            trial.resume()


FAULTS: tuple[type[Fault], ...] = (
    Noise, Stuck, NanBatch, RareTokens, Shuffled, LongShuffled, ConstantLabel, Repeated, OtherData, RateJump, RateBlip,
    StateLost, MomentsZeroed, StaleMoment, Frozen, Unclipped, Deepening, HalfOverflow, ScaleTooHigh, LogitGrowth,
    EmbeddingRows, HeadGrowth, OutlierUnit, WeightBit, WeightWord, ActivationTile, Dropout, Smoothing,
)  # fmt: skip
