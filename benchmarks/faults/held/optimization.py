"""Faults in the optimization and the configuration, done in other ways."""

from __future__ import annotations

import torch

from benchmarks.faults.causes.base import Fault
from benchmarks.faults.causes.optimization import adaptive
from benchmarks.faults.held.network import HIDDEN, resumed_moments
from benchmarks.faults.tasks import Task
from benchmarks.faults.trial import Injection, Trial


class ScheduleLost(Fault):
    """A rate that had decayed to a fiftieth is `size` times the peak again: the scheduler's count was not restored."""

    always = True
    cause, sizes = "lr-discontinuity", (1.0, 4.0)
    lr = 5.0

    def rate(self, trial: Trial, step: int) -> float:
        usual = Injection.rate(self, trial, step)
        return self.size * usual if step >= self.at else usual * max(0.02, 1 - step / 120)


class Dropped(Fault):
    """The optimizer's state is thrown away in the running process."""

    always = True
    cause, lr = "optimizer-state-lost", 3.0
    fits = staticmethod(adaptive)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.optimizer.state.clear()


class WrongUnits(Fault):
    """Resumed with moments of gradients that were `size` times smaller: a checkpoint of before the loss scale was taken out."""

    always = True
    cause, lr, sizes = "optimizer-state-lost", 2.0, (1e-2, 1e-3)
    fits = staticmethod(adaptive)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.resume()
            for state in trial.optimizer.state.values():
                resumed_moments(state, self.size)


class LostShard(Fault):
    """Resumed without the second moment of one layer; its count of steps is there."""

    always = True
    cause, lr = "stale-second-moment", 3.0
    fits = staticmethod(adaptive)

    def prepare(self, trial: Trial) -> None:
        trial.betas = (0.9, 0.999)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.resume()
            trial.optimizer.state[trial.parameter(*HIDDEN)]["exp_avg_sq"].zero_()


class ClipRaised(Fault):
    """The clipping threshold is raised a thousandfold, at a rate `size` times the usual, which only clipping kept stable."""

    cause, sizes, tail = "gradient-explosion", (12.0, 20.0), 60

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.optimizer == "sgd"

    def prepare(self, trial: Trial) -> None:
        trial.lr *= self.size
        trial.clip = 0.2

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.clip = 200.0


class ThroughTime(Fault):
    """The recurrent weights creep up by `size` a step, unclipped: gradients grow with the length of the sequence."""

    cause, sizes, span, tail, gradual = "gradient-explosion", (1.015, 1.02), 50, 20, True

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name == "elman"

    def prepare(self, trial: Trial) -> None:
        trial.clip = None
        trial.lr /= 4

    def after(self, trial: Trial) -> None:
        if self.active(trial.step):
            with torch.no_grad():
                trial.parameter("rnn.weight_hh").mul_(self.size)


class Reduction(Fault):
    """Resumed with a loss that is summed over more samples: `size` times larger."""

    cause, sizes = "config-change", (3.0, 8.0)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.factor = self.size
            trial.resume()


class Betas(Fault):
    """Resumed with a first moment that hardly averages and a second that is all of the last gradient."""

    cause, lr, sizes = "config-change", 4.0, (0.05, 0.2)
    fits = staticmethod(adaptive)

    def before(self, trial: Trial) -> None:
        if trial.step == self.at:
            trial.betas = (0.0, self.size)
            trial.resume()
