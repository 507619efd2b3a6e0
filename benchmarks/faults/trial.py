"""One recorded training: the loop a user would write, with places where an injection reaches in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trackbridge
from benchmarks.faults.tasks import Batch, Source, Task, warmup

DECAY = 0.01


class Unrecorded:
    """Stands where the recorder would, and does nothing: for the twin of a trial."""

    id, anomalies = "", ()

    def batches(self, loader: Any) -> Any:
        return loader

    def clip_grad_norm_(self, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, most)

    def watch(self, model: nn.Module, *_: Any, **__: Any) -> None:
        self.parameters = list(model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def step(self, **_: Any) -> None: ...

    def micro(self, *_: Any, **__: Any) -> None: ...

    def finish(self) -> None: ...

    def load_state_dict(self, _: Any) -> None: ...


class _Pass:
    """A loader: one pass over the batches `first` to `last`."""

    def __init__(self, trial: Trial, first: int, last: int) -> None:
        self.trial, self.first, self.last = trial, first, last

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.first, self.last):
            yield self.trial.task.packed(self.trial.injection.batch(self.trial, number))


class Injection:
    """What is done to a trial from step `at` on, `size` strong, for `span` steps. The base class does nothing."""

    cause = "healthy"
    span = 1
    tail = 30
    """Steps that are trained after the injection."""
    epoch = 1 << 40
    """Batches of one pass over the data."""
    shown = True
    """The loop goes through `run.batches`."""
    always = False
    """A fault even where the loss does not show it."""

    def __init__(self, at: int, size: float) -> None:
        self.at, self.size = at, size

    def active(self, step: int) -> bool:
        return self.at <= step < self.at + self.span

    def prepare(self, trial: Trial) -> None:
        """Before the run begins."""

    def batch(self, trial: Trial, step: int) -> Batch:
        """The batch of `step`."""
        return trial.source.batch(step)

    def rate(self, trial: Trial, step: int) -> float:
        return trial.lr * warmup(step)

    def before(self, trial: Trial) -> None:
        """Before the forward pass."""

    def gradients(self, trial: Trial) -> None:
        """After the backward pass, before clipping."""

    def after(self, trial: Trial) -> None:
        """After the optimizer's step."""


class Trial:
    """A model, its optimizer and its data while they are trained and, given a `folder`, recorded. `run` is the recorder."""

    def __init__(self, task: Task, seed: int, lr: float, folder: Path | None = None) -> None:
        torch.manual_seed(seed)
        self.task, self.seed, self.lr, self.folder = task, seed, task.lr * lr, folder
        self.source: Source = task.source(seed, task.batch)
        self.clip = task.clip
        self.decay, self.drop, self.smoothing, self.factor = DECAY, 0.0, 0.0, 1.0
        self.betas = (0.9, 0.98)
        self.scaler: torch.amp.GradScaler | None = None
        self.micro = 1
        self.step = 0
        self.model = task.model(drop=self.drop)
        self.losses: list[float] = []

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.task.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), self.lr, betas=self.betas, weight_decay=self.decay)
        if self.task.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), self.lr, betas=self.betas, weight_decay=self.decay / 100)
        return torch.optim.SGD(model.parameters(), self.lr, momentum=0.9, weight_decay=self.decay / 100)

    # -- the recorded run

    def begin(self) -> None:
        self.optimizer = self.optimizer_for(self.model)
        self.run = self._init()
        self.watch()

    def _init(self, run_id: str | None = None) -> Any:
        if self.folder is None:
            return Unrecorded()
        return trackbridge.init(
            dir=self.folder,
            id=run_id,
            resume="must" if run_id else "never",
            config={"lr": self.lr, "weight_decay": self.decay, "dropout": self.drop, "label_smoothing": self.smoothing,
                    "loss_factor": self.factor},
            recorder={"max_capsules": 0, "snapshot_every": 0},  # diagnosed afterwards, as sealing does: see `judge`
        )  # fmt: skip

    def watch(self) -> None:
        self.run.watch(self.model, self.optimizer, scaler=self.scaler)

    def resume(self, *, optimizer: bool = True, detector: bool = True) -> None:
        """Stop and go on in a new attempt, from a checkpoint with or without the optimizer's state."""
        weights, moments, ours = self.model.state_dict(), self.optimizer.state_dict(), self.run.state_dict()
        self.run.finish()
        self.model = self.task.model(drop=self.drop)
        self.model.load_state_dict(weights)
        self.optimizer = self.optimizer_for(self.model)
        if optimizer:
            options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(moments)
            for group, own in zip(self.optimizer.param_groups, options, strict=True):
                group.update(own)  # the new configuration wins, as it does where a script sets it from its arguments
        self.run = self._init(self.run.id)
        self.watch()
        if detector:
            self.run.load_state_dict(ours)
        self.feed = self._feed()

    def parameter(self, *parts: str) -> nn.Parameter:
        """The first parameter whose name has one of `parts`."""
        return next(p for part in parts for name, p in self.model.named_parameters() if part in name)

    # -- the loop

    def train(self, injection: Injection, steps: int) -> Any:
        """Train `steps` steps. Returns the run directory."""
        logging.getLogger("trackbridge").setLevel(logging.ERROR)
        self.injection = injection
        injection.prepare(self)
        self.begin()
        self.feed = self._feed()
        while self.step < steps:
            injection.before(self)
            self._one_step()
            self.step += 1
        self.run.finish()
        return None if self.folder is None else self.run.dir

    def _feed(self) -> Iterator[Batch]:
        """Batches from the present step on; a pass over the loader is an epoch, where the injection has epochs."""
        number = self.step * self.micro
        while True:
            last = number - number % self.injection.epoch + self.injection.epoch
            batches = _Pass(self, number, last)
            yield from self.run.batches(batches) if self.injection.shown else batches
            number = last

    def _one_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.injection.rate(self, self.step)
        total: Any = 0.0
        for _ in range(self.micro):
            x, y = self.task.unpacked(next(self.feed))
            if self.scaler is not None:
                with torch.autocast("cpu", torch.float16):
                    output = self.model(x)
            else:
                output = self.model(x)
            loss = self.factor * self.task.loss(output, y, self.smoothing)
            (loss if self.scaler is None else self.scaler.scale(loss)).div(self.micro).backward()
            if self.micro > 1:
                self.run.micro(loss.detach(), tokens=x.numel() if self.task.tokens else None, samples=len(x))
            total = total + loss.detach() / self.micro
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.injection.gradients(self)
        if self.clip is not None:
            self.run.clip_grad_norm_(self.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(total))
        self.injection.after(self)
        if self.micro > 1:
            self.run.step()
        else:
            self.run.step(loss=total, tokens=x.numel() if self.task.tokens else None, samples=len(x))
