"""Faults that grow in the network, and those of half precision."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from benchmarks.faults.causes.base import Fault, with_tokens
from benchmarks.faults.tasks import Attention, FusedBlock, Task
from benchmarks.faults.trial import Trial


class HalfOverflow(Fault):
    """fp16 with a loss scaler; one layer's gain `size` times too large: its activations leave fp16's range."""

    cause, sizes, second_sizes, tail = "fp16-overflow", (3e4,), (1e5,), 40

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
    sizes, second_sizes = (2.0**36,), (2.0**42,)

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

    cause, sizes, second_sizes = "attention-logit-growth", (1.18, 1.25), (1.22,)
    lr = 4.0
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

    cause, sizes, second_sizes = "embedding-instability", (1.18, 1.25), (1.22,)
    names: ClassVar[tuple[str, ...]] = ("tok_emb", "wte", "embedding.weight")
    rows: ClassVar[slice] = slice(0, 20)
    fits = staticmethod(with_tokens)


class HeadGrowth(Growing):
    """The output head grows."""

    cause, sizes, second_sizes = "embedding-instability", (1.05, 1.1), (1.08,)
    names: ClassVar[tuple[str, ...]] = ("head.weight", "out.weight")
    fits = staticmethod(with_tokens)


class OutlierUnit(Growing):
    """One unit's incoming weights grow: its activation becomes an outlier."""

    cause, sizes, second_sizes = "activation-outliers", (1.15, 1.2), (1.18,)
    names: ClassVar[tuple[str, ...]] = ("blocks.0.mlp.2.weight", "layers.0.weight", "h.1.down.weight", "body.0.4.weight")
    rows: ClassVar[slice] = slice(3, 4)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "perceptron", "llama", "residual", "wide")


class ScaleGrowth(Fault):
    """The factor of the attention logits grows by `size` a step; no weight does."""

    cause, sizes, second_sizes, gradual, span, tail = "attention-logit-growth", (1.3,), (1.35,), True, 50, 20
    lr = 4.0

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "llama")

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            for module in trial.model.modules():
                if isinstance(module, (Attention, FusedBlock)):
                    module.scale *= self.size


class LogitJump(LogitGrowth):
    """Queries and keys are `size` times too large from one step to the next."""

    sizes, second_sizes, span, gradual = (12.0,), (20.0,), 1, False


class EmbeddingJump(EmbeddingRows):
    """Rows of the embedding are `size` times too large from one step to the next."""

    sizes, second_sizes, span, gradual = (100.0,), (300.0,), 1, False


class HalfCast(Fault):
    """One module's output is kept in half precision and grows by `size` a step, until it does not fit; there is no scaler."""

    cause, sizes, second_sizes, gradual, span, tail = "fp16-overflow", (1.3,), (1.4,), True, 60, 0

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "llama")

    def before(self, trial: Trial) -> None:
        if trial.step != self.at:
            return
        modules = dict(trial.model.named_modules())
        module = next(modules[name] for name in ("blocks.0", "layers.0", "h.1", "body.1") if name in modules)

        def half(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            return (output * self.size ** (trial.step - self.at)).half().float()

        module.register_forward_hook(half, prepend=True)
