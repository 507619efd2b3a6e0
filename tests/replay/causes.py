"""Five causes of a spike, each planted in a small real training that is recorded by trackbridge, and that training rebuilt."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trackbridge
from trackbridge.replay import Rebuilt

FEATURES, CLASSES, ITEMS, BATCH = 12, 6, 2048, 128
EARLY, BAD, AFTER = 8, 70, 14
SIDE = (4, 5)  # the side branch's parameters, by number
SETTINGS: dict[str, Any] = {"recorder": {"snapshot_every": 8, "before": 8, "after": 10}}


class Net(nn.Module):
    """A classifier with a second branch that a gate lets in."""

    def __init__(self, width: int, loud: float) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.side = nn.Linear(FEATURES, width)
        self.head = nn.Linear(width, CLASSES)
        self.gate = 1.0
        self.loud = loud

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x))
        return self.head(self.drop(torch.relu(hidden + self.gate * self.side(self.loud * x))))


def samples(seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ITEMS, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=generator)
    return x, (x @ rule).argmax(1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples()), BATCH, shuffle=True, drop_last=True)


@dataclass
class Cause:
    """How a training differs from the plain one. `bad` is the step at which it goes wrong, `loud` how strongly the side branch
    hears its input; `spoil` changes a batch, `gate` and `rate` are functions of the step."""

    bad: int = BAD
    lr: float = 3e-3
    loud: float = 6.0
    spoil: Callable[[int, list[Tensor]], list[Tensor]] = lambda step, batch: batch
    rate: Callable[[int], float] = lambda step: 1.0
    gate: Callable[[int], float] = lambda step: 1.0
    half: bool = False
    width: int = 24
    seed: int = 0


@dataclass
class Training:
    cause: Cause
    seed: int | None = None
    model: Net = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: Any = field(init=False)
    scaler: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.cause.seed if self.seed is None else self.seed)
        self.model = Net(self.cause.width, self.cause.loud)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.cause.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.cause.rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if self.cause.half else None

    def step(self, batch: list[Tensor], index: int) -> Tensor:
        cause, model = self.cause, self.model
        model.gate = cause.gate(index)
        x, y = batch
        with torch.autocast("cpu", torch.float16, enabled=cause.half):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()

    @property
    def more(self) -> dict[str, Any]:
        return {"state": {"schedule": self.schedule}, "scaler": self.scaler}


def batches(run: Any, cause: Cause, data: Iterable[Any], first: int, last: int) -> Iterable[tuple[int, list[Tensor]]]:
    step = first
    while step < last:
        for batch in run.batches(Spoiled(data, cause, step)):
            yield step, batch
            step += 1
            if step == last:
                return


class Spoiled:
    """A loader whose batches are spoiled before anybody sees them."""

    def __init__(self, data: Iterable[Any], cause: Cause, first: int) -> None:
        self.data, self.cause, self.step = data, cause, first

    def __iter__(self) -> Any:
        for batch in self.data:
            yield self.cause.spoil(self.step, batch)
            self.step += 1


def train(run: Any, made: Training, first: int, last: int) -> list[float]:
    run.watch(made.model, made.optimizer, **made.more)
    made.model.train()
    losses = []
    for step, batch in batches(run, made.cause, loader(), first, last):
        loss = made.step(batch, step)
        run.step(loss)
        losses.append(float(loss))
    return losses


def record(directory: Path, cause: Cause, **settings: Any) -> Path:
    """Train with `cause` in it; the run directory."""
    made = Training(cause)
    run = trackbridge.init(dir=directory, strict=True, **{**SETTINGS, **settings})
    train(run, made, 0, cause.bad + AFTER)
    run.finish()
    return run.dir


def resumed(directory: Path, cause: Cause, *, stale: bool = False, lost: bool = False) -> Path:
    """Stop at `cause.bad` and go on from a checkpoint. `stale`: the second moments of one layer in it are of step
    `EARLY`, when that layer's gradient was tiny. `lost`: nobody loads the optimizer's state."""
    made = Training(cause)
    run = trackbridge.init(dir=directory, strict=True, **SETTINGS)
    train(run, made, 0, EARLY)
    early = copy.deepcopy(made.optimizer.state_dict()["state"])
    train(run, made, EARLY, cause.bad)
    content = {"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}
    if stale:
        for number in SIDE:
            content["optimizer"]["state"][number]["exp_avg_sq"] = early[number]["exp_avg_sq"]
    saved = directory / f"step-{cause.bad}.pt"
    torch.save(content, saved)
    run.checkpoint_saved(saved, cause.bad)
    state, name = run.state_dict(), run.id
    run.finish()

    again = Training(cause, seed=3)
    checkpoint = torch.load(saved, weights_only=True)
    again.model.load_state_dict(checkpoint["model"])
    if not lost:
        again.optimizer.load_state_dict(checkpoint["optimizer"])
    run = trackbridge.init(dir=directory, id=name, resume="must", strict=True, **SETTINGS)
    run.load_state_dict(state)
    train(run, again, cause.bad, cause.bad + AFTER + 8)
    run.finish()
    return run.dir


def builder(cause: Cause) -> Callable[[], Rebuilt]:
    """`build` of the training that has `cause` in its code; the batches come from the record."""

    def build() -> Rebuilt:
        made = Training(cause, seed=random.randrange(1 << 30))

        def step(model: Any, optimizer: Any, given: list[Any], index: int) -> Tensor:
            return made.step(given[0], index)

        return Rebuilt(made.model, made.optimizer, step, **made.more)

    return build
