"""The same causes in further ways, so that rules are judged on causes and not on injections."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.faults.causes.base import Fault, with_tokens
from benchmarks.faults.causes.data import Noise, Shuffled
from benchmarks.faults.causes.hardware import WeightBit
from benchmarks.faults.causes.network import Growing, HalfOverflow
from benchmarks.faults.causes.optimization import RateJump, adaptive
from benchmarks.faults.tasks import KNOWN, VOCABULARY, Batch, Task
from benchmarks.faults.trial import Injection, Trial


class PartlyNoise(Fault):
    """`size` of the samples are garbage."""

    cause, span, sizes, second_sizes = "corrupt-batch", 2, (0.5,), (0.3,)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        generator, x, y = trial.source.generator(-1 - step), x.clone(), y.clone()
        bad = int(self.size * len(x))
        if trial.task.tokens:
            text = torch.randint(VOCABULARY, (bad, x.shape[1] + 1), generator=generator)
            x[:bad], y[:bad] = text[:, :-1], text[:, 1:]
        else:
            x[:bad] = 15 * torch.randn(x[:bad].shape, generator=generator)
        return x, y


class Amplified(Fault):
    """Inputs `size` times too large: a gain that was applied twice."""

    cause, span, sizes, second_sizes = "corrupt-batch", 3, (8.0,), (30.0,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return not task.tokens

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        return (self.size * x if self.active(step) else x), y


class Jumbled(Fault):
    """The tokens of each sample in any order: a reader that mixes its threads."""

    cause, span = "corrupt-batch", 2
    fits = staticmethod(with_tokens)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        text = torch.cat([x, y[:, -1:]], 1)
        order = torch.rand(text.shape, generator=trial.source.generator(-1 - step)).argsort(1)
        text = text.gather(1, order)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class UnseenShuffled(Shuffled):
    """Targets of other samples in a loop that does not show its batches to the recorder."""

    shown = False


class Harder(Fault):
    """Data with more noise from now on."""

    cause = "data-regime-change"

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if step < self.at:
            return x, y
        generator = trial.source.generator(-1 - step)
        if not trial.task.tokens:
            return x + 4 * torch.randn(x.shape, generator=generator), y
        text = torch.cat([x, y[:, -1:]], 1)
        hit = torch.rand(text.shape, generator=generator) < 0.5
        text = torch.where(hit, torch.randint(KNOWN, text.shape, generator=generator), text)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class ScatteredRare(Fault):
    """`size` of the tokens are of forty kinds that never came before."""

    cause, sizes, second_sizes = "rare-token", (0.2,), (0.3,)
    fits = staticmethod(with_tokens)

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        text, generator = torch.cat([x, y[:, -1:]], 1), trial.source.generator(-1 - step)
        hit = torch.rand(text.shape, generator=generator) < self.size
        text = torch.where(hit, KNOWN + torch.randint(40, text.shape, generator=generator), text)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Twice(Fault):
    """Every batch is handed out three times in a row for `size` steps: workers that read the same shard."""

    always, cause, sizes, second_sizes = True, "repeated-batch", (30.0,), (45.0,)

    def batch(self, trial: Trial, step: int) -> Batch:
        inside = self.at <= step < self.at + self.size
        return trial.source.batch(step - (step - self.at) % 3 if inside else step)


class RateRamp(RateJump):
    """`size` times too high within four steps."""

    sizes, second_sizes = (30.0,), (60.0,)

    def rate(self, trial: Trial, step: int) -> float:
        grown = min(max(step - self.at + 1, 0), 4) / 4
        return Injection.rate(self, trial, step) * self.size**grown


class OneRate(RateJump):
    """For one step the rate is `size` times too high."""

    sizes, second_sizes = (100.0,), (300.0,)

    def rate(self, trial: Trial, step: int) -> float:
        return Injection.rate(self, trial, step) * (self.size if step == self.at else 1.0)


class StalePair(Fault):
    """The second moments of two layers are `size` of what they should be."""

    always, cause, sizes, second_sizes, lr = True, "stale-second-moment", (1e-5,), (1e-7,), 3.0
    names = ("mlp.0.weight", "layers.0.weight", "up.weight", "rnn.weight_hh", "body.0.1.weight")
    others = ("mlp.2.weight", "inp.weight", "down.weight", "out.weight", "body.0.4.weight")
    fits = staticmethod(adaptive)

    def prepare(self, trial: Trial) -> None:
        trial.betas = (0.9, 0.999)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            for names in (self.names, self.others):
                parameter = trial.parameter(*names)
                trial.optimizer.state[parameter]["exp_avg_sq"].mul_(self.size)


class Decayed(Fault):
    """Resumed with weight decay `size`."""

    cause, sizes, second_sizes = "config-change", (3.0,), (10.0,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name != "images"

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.decay = self.size if trial.task.optimizer == "adamw" else 100 * self.size
            trial.resume()


class LastRow(WeightBit):
    """A row of a weight is overwritten with `size` and stays so."""

    sizes, second_sizes = (20.0,), (200.0,)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            with torch.no_grad():
                trial.parameter(*self.names)[4].fill_(self.size)


class HeadWord(WeightBit):
    """One weight of the head is overwritten with `size`."""

    sizes, second_sizes, names = (1e3,), (1e4,), ("head.weight", "lm_head.weight", "out.weight", "fc.weight", "final.weight")

    def corrupted(self, value: float) -> float:
        return self.size


class NanWeight(WeightBit):
    """One weight is not a number any more."""

    def corrupted(self, value: float) -> float:
        return math.nan


class QueryGrowth(Growing):
    """Queries alone grow."""

    cause, sizes, second_sizes, lr = "attention-logit-growth", (1.3,), (1.4,), 4.0

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "llama")

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                for name, p in trial.model.named_parameters():
                    if "attn.q.weight" in name:
                        p.mul_(self.size)
                    elif "c_attn" in name:
                        p[: p.shape[1]].mul_(self.size)


class EmbeddingNoise(Growing):
    """The whole embedding takes up noise: `size` more of its own spread every step."""

    cause, sizes, second_sizes = "embedding-instability", (0.08,), (0.15,)
    names: ClassVar[tuple[str, ...]] = ("tok_emb", "wte", "embedding.weight")
    fits = staticmethod(with_tokens)

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                p = trial.parameter(*self.names)
                noise = torch.randn(p.shape, generator=trial.source.generator(-1 - trial.step))
                p.add_(self.size * (trial.step - self.at + 1) ** 0.5 * float(p.std()) * noise * 0.5)


class UnitBias(Growing):
    """One unit's bias creeps up by `size` a step."""

    cause, sizes, second_sizes = "activation-outliers", (0.6,), (1.5,)
    names: ClassVar[tuple[str, ...]] = (
        "blocks.0.mlp.2.bias",
        "layers.0.bias",
        "h.1.down.bias",
        "body.0.4.bias",
        "stack.3.bias",
    )

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name not in ("images", "recurrent")

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                trial.parameter(*self.names)[3] += self.size


class HalfInputs(HalfOverflow):
    """fp16, and a module whose output is scaled `size` times by a wrong constant from now on."""

    sizes, second_sizes = (3e5,), (1e6,)

    def before(self, trial: Trial) -> None:
        if trial.step != self.at:
            return
        modules = dict(trial.model.named_modules())
        names = ("blocks.1.mlp.2", "layers.1", "h.2.down", "body.1.4")
        module = next(modules[name] for name in names if name in modules)

        def scaled(_: Any, __: Any, output: Tensor) -> Tensor:
            return output * self.size

        module.register_forward_hook(scaled, prepend=True)


class UnseenAmplified(Noise):
    """Inputs `size` times too large in a loop that does not show its batches; tokens of one kind instead."""

    shown = False

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        if not self.active(step):
            return x, y
        if trial.task.tokens:
            return torch.full_like(x, 77), torch.full_like(y, 77)
        return self.size * x, y


MORE: tuple[type[Fault], ...] = (
    PartlyNoise, Amplified, Jumbled, UnseenShuffled, UnseenAmplified, Harder, ScatteredRare, Twice, RateRamp, OneRate,
    StalePair, Decayed, LastRow, HeadWord, NanWeight, QueryGrowth, EmbeddingNoise, UnitBias, HalfInputs,
)  # fmt: skip
