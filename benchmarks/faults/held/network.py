"""Faults in the network, its arithmetic and the hardware, done in other ways."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks.faults.causes.base import Fault
from benchmarks.faults.causes.network import Growing
from benchmarks.faults.tasks import Task
from benchmarks.faults.trial import Trial

HIDDEN = (
    "dense_h_to_4h.weight",
    "linear1.weight",
    "convs.1.conv.weight",
    "rnn.weight_hh",
    "layer.0.2.weight",
    "trunk.2.weight",
)
"""A hidden weight of each held-out model."""


def resumed_moments(state: dict[str, Any], size: float) -> None:
    """Scale an Adam state as that of gradients `size` times as large."""
    state["exp_avg"].mul_(size)
    state["exp_avg_sq"].mul_(size**2)


class Halved(Fault):
    """fp16 with a loss scaler."""

    cause, tail = "fp16-overflow", 40

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("parallel", "convolutional", "patches", "tabular")

    def prepare(self, trial: Trial) -> None:
        trial.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)


class GreedyScaler(Halved):
    """The scaler's growth is set so wide that every growth overflows, and its backing off so fine that it takes many steps."""

    always, sizes = True, (2.0**20, 2.0**30)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            assert trial.scaler is not None
            trial.scaler.set_growth_interval(4)
            trial.scaler.set_growth_factor(self.size)
            assert trial.scaler._growth_tracker is not None
            trial.scaler._growth_tracker.zero_()  # it grows when the count is met, not when it is passed


class HotGain(Halved):
    """The hidden layer's gain grows by `size` a step until its output leaves fp16's range."""

    sizes, gradual, span = (1.3, 1.5), True, 60

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                trial.parameter(*HIDDEN).mul_(self.size)


class KeyGrowth(Fault):
    """Keys alone grow by `size` a step."""

    cause, sizes, gradual, span, tail, lr = "attention-logit-growth", (1.3, 1.4), True, 50, 20, 3.0

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("parallel", "encoder", "patches")

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                for name, p in trial.model.named_parameters():
                    if name.endswith(("query_key_value.weight", "in_proj_weight")):
                        third = len(p) // 3
                        p[third : 2 * third].mul_(self.size)


class Positions(Growing):
    """Position embeddings grow."""

    cause, sizes = "embedding-instability", (1.1, 1.15)
    names: ClassVar[tuple[str, ...]] = ("embed_positions", "pos_embed")

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("encoder", "patches")


class HeadJump(Growing):
    """The head is `size` times too large from one step to the next: weights of another vocabulary merged in."""

    cause, sizes, span, gradual = "embedding-instability", (8.0, 20.0), 1, False
    names: ClassVar[tuple[str, ...]] = (
        "embed_out.weight",
        "decoder.weight",
        "to_logits.weight",
        "head.weight",
        "logits.weight",
    )

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name != "residuals"


class NormOutlier(Growing):
    """One gain of a normalisation grows: one feature dwarfs the others."""

    cause, sizes = "activation-outliers", (1.12, 1.18)
    names: ClassVar[tuple[str, ...]] = (
        "layers.1.input_layernorm.weight", "layers.0.norm1.weight", "convs.1.norm.weight", "norms.1.weight",
        "blocks.0.input_layernorm.weight",
    )  # fmt: skip
    rows: ClassVar[slice] = slice(5, 6)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name not in ("elman", "residuals")


class BiasOutlier(Growing):
    """One bias creeps up by `size` a step."""

    cause, sizes = "activation-outliers", (0.5, 1.5)
    names: ClassVar[tuple[str, ...]] = (
        "dense_4h_to_h.bias",
        "linear2.bias",
        "convs.1.conv.bias",
        "rnn.bias_hh",
        "layer.0.2.bias",
    )

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name != "tabular"

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                trial.parameter(*self.names)[7] += self.size


class BadRead(Fault):
    """For one step a row of a hidden weight is read as `size`, in memory it is as it was."""

    cause, sizes = "hardware-fault", (30.0, 500.0)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            with torch.no_grad():
                self.row = trial.parameter(*HIDDEN)[2]
                self.kept = self.row.clone()
                self.row.fill_(self.size)

    def gradients(self, trial: Trial) -> None:
        if trial.step == self.at:
            with torch.no_grad():
                self.row.copy_(self.kept)


class BadReduce(Fault):
    """For one step one layer's gradient is `size` times too large: a reduction that went wrong."""

    cause, sizes = "hardware-fault", (1e3, 1e5)

    def gradients(self, trial: Trial) -> None:
        if trial.step == self.at:
            grad = trial.parameter(*HIDDEN).grad
            assert grad is not None
            grad.mul_(self.size)


class LostTile(Fault):
    """Part of one module's output is zero times infinity for one step."""

    cause = "hardware-fault"

    def before(self, trial: Trial) -> None:
        if trial.step != self.at:
            return
        modules = dict(trial.model.named_modules())
        names = ("layers.1", "encoder.layers.1", "convs.1", "rnn", "blocks.1", "layer.1", "trunk.2")
        module: nn.Module = next(modules[name] for name in names if name in modules)

        def hit(_: Any, __: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            bad = tensor.clone(memory_format=torch.contiguous_format)
            bad.view(-1)[100:164] = float("nan")
            return (bad, *output[1:]) if isinstance(output, tuple) else bad

        self.handle = module.register_forward_hook(hit, prepend=True)

    def after(self, trial: Trial) -> None:
        if trial.step == self.at:
            self.handle.remove()
