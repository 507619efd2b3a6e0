"""Transient faults of the hardware."""

from __future__ import annotations

import struct
from typing import Any

import torch

from benchmarks.faults.causes.base import Fault
from benchmarks.faults.trial import Trial


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

    sizes, second_sizes = (300.0, 1e4), (1e3, 1e5)

    def corrupted(self, value: float) -> float:
        return self.size


class ActivationTile(Fault):
    """For one step a tile of one module's output is `size`: a multiplier that failed once."""

    cause, sizes, second_sizes = "hardware-fault", (3e2, 1e5), (3e3, 1e6)

    def before(self, trial: Trial) -> None:
        if trial.step != self.at:
            return
        modules = dict(trial.model.named_modules())
        names = ("blocks.0", "layers.0", "body.0", "stack.3", "h.1", "rnn", "body.1")
        module = next(modules[name] for name in names if name in modules)

        def hit(_: Any, __: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            bad = tensor.clone(memory_format=torch.contiguous_format)
            tile = bad.view(-1, bad.shape[-1])
            tile[: len(tile) // 4, :8] = self.size
            return (bad, *output[1:]) if isinstance(output, tuple) else bad

        self.handle = module.register_forward_hook(hit, prepend=True)

    def after(self, trial: Trial) -> None:
        if trial.step == self.at:
            self.handle.remove()


class GradientWord(WeightBit):
    """One element of one gradient is `size` for one step."""

    sizes, second_sizes = (1e4,), (1e5,)

    def before(self, trial: Trial) -> None:
        pass

    def gradients(self, trial: Trial) -> None:
        if trial.step == self.at:
            grad = trial.parameter(*self.names).grad
            assert grad is not None
            grad.view(-1)[11] = self.size
