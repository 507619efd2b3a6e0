"""Controls: what looks unusual and is not a fault. Every alarm in them is false."""

from __future__ import annotations

import torch

from benchmarks.faults.tasks import Batch, Task, cosine
from benchmarks.faults.trial import Injection, Trial

STEPS = 600


class Control(Injection):
    """An ordinary run at the task's rate."""

    def __init__(self) -> None:
        super().__init__(STEPS + 1, 0.0)

    @classmethod
    def fits(cls, task: Task) -> bool:
        return True


class LongWarmup(Control):
    def rate(self, trial: Trial, step: int) -> float:
        return trial.lr * min(1.0, (step + 1) / 250)


class Restarts(Control):
    """Cosine with warm restarts every 150 steps."""

    def rate(self, trial: Trial, step: int) -> float:
        return trial.lr * min(1.0, (step + 1) / 20) * cosine(step, 150)


class Curriculum(Control):
    """Longer sequences from step 250 on (a larger batch where there are none), as told by the batches themselves."""

    def batch(self, trial: Trial, step: int) -> Batch:
        if trial.task.tokens:
            trial.source.length = 16 if step < 250 else 48
        else:
            trial.source.batch_size = trial.task.batch // 2 if step < 250 else 2 * trial.task.batch
        return trial.source.batch(step)


class HeavyTails(Control):
    """Some batches are harder: a share of their samples is noise, heavy-tailed over batches."""

    def batch(self, trial: Trial, step: int) -> Batch:
        x, y = trial.source.batch(step)
        generator = trial.source.generator(-1 - step)
        share = min(0.35, 0.02 / (float(torch.rand(1, generator=generator)) + 0.05))
        hit = torch.rand(len(y), generator=generator) < share
        mixed = y[torch.randperm(len(y), generator=generator)]
        return x, torch.where(hit.view(-1, *[1] * (y.dim() - 1)), mixed, y)


class SmallBatches(Control):
    def prepare(self, trial: Trial) -> None:
        trial.source.batch_size = 4
        trial.lr /= 3


class Epochs(Control):
    """The same 60 batches over and over, in another order each time; the last one is short. An evaluation between epochs."""

    epoch = 60

    def batch(self, trial: Trial, step: int) -> Batch:
        number, place = divmod(step, self.epoch)
        order = torch.randperm(self.epoch - 1, generator=torch.Generator().manual_seed(number)).tolist()
        if place < self.epoch - 1:
            return trial.source.batch(order[place])
        x, y = trial.source.batch(self.epoch)
        return x[: len(x) // 2], y[: len(y) // 2]

    def before(self, trial: Trial) -> None:
        if trial.step and trial.step % self.epoch == 0:
            with trial.run.pause("eval"), torch.no_grad():
                trial.model.eval()
                trial.model(trial.source.batch(10**6)[0])
                trial.model.train()


class Accumulation(Control):
    def prepare(self, trial: Trial) -> None:
        trial.micro = 3


class Scaled(Control):
    """fp16 with a loss scaler that seeks its scale: skipped steps at the start and at every growth."""

    @classmethod
    def fits(cls, task: Task) -> bool:
        return task.name in ("transformer", "perceptron", "llama", "residual", "wide")

    def prepare(self, trial: Trial) -> None:
        trial.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=60)


class Resumed(Control):
    """A checkpoint and a resume with everything restored."""

    def before(self, trial: Trial) -> None:
        if trial.step == 300:
            trial.resume()


CONTROLS: tuple[type[Control], ...] = (
    Control, LongWarmup, Restarts, Curriculum, HeavyTails, SmallBatches, Epochs, Accumulation, Scaled, Resumed,
)  # fmt: skip
