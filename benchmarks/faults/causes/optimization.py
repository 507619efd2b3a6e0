"""Faults in the optimization and the configuration."""

from __future__ import annotations

import torch

from benchmarks.faults.causes.base import Fault
from benchmarks.faults.tasks import Task
from benchmarks.faults.trial import Injection, Trial


class RateJump(Fault):
    """The learning rate `size` times too high from now on."""

    always = True
    cause, sizes, second_sizes = "lr-discontinuity", (10.0, 50.0), (20.0, 100.0)

    def rate(self, trial: Trial, step: int) -> float:
        return super().rate(trial, step) * (self.size if step >= self.at else 1.0)


class RateBlip(RateJump):
    """The same for eight steps."""

    sizes, second_sizes = (30.0,), (60.0,)

    def rate(self, trial: Trial, step: int) -> float:
        return Injection.rate(self, trial, step) * (self.size if self.at <= step < self.at + 8 else 1.0)


def adaptive(task: Task) -> bool:
    return task.optimizer != "sgd"


class StateLost(Fault):
    """Resumed from a checkpoint without the optimizer's state."""

    cause, lr, sizes, second_sizes, always = "optimizer-state-lost", 3.0, (1.0,), (1.0,), True
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

    cause, sizes, second_sizes = "stale-second-moment", (1e-6, 1e-8), (1e-7, 1e-9)
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

    sizes, second_sizes, span, always = (0.0,), (0.0,), 120, False

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

    cause, sizes, second_sizes, tail = "gradient-explosion", (14.0, 20.0), (16.0, 24.0), 60

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

    cause, sizes, second_sizes, span, tail, gradual = "gradient-explosion", (1.02,), (1.03,), 40, 20, True

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


class Dropout(Fault):
    """Resumed with dropout `size`."""

    cause, sizes, second_sizes = "config-change", (0.7,), (0.8,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name not in ("deep",)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.drop = self.size
            trial.resume()


class Smoothing(Dropout):
    """Resumed with label smoothing `size`."""

    sizes, second_sizes = (0.4,), (0.5,)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name != "residual"

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.smoothing = self.size
            trial.resume()
