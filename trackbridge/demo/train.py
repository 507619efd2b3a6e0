"""The demo's training script: what a user's own script looks like with trackbridge in it.

``python -m trackbridge.demo.train --backend tensorboard`` trains a byte-level GPT on the standard library's source files.
`build` makes the same objects for a replay: ``trackbridge replay REF --build trackbridge.demo.train:build``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from trackbridge.demo import corpus, stream
from trackbridge.demo.model import ByteGPT

if TYPE_CHECKING:
    from trackbridge.records import Anomaly
    from trackbridge.replay import Rebuilt
    from trackbridge.run import Run

CLIP = 1.0
ACCUMULATE = 2
OnStep: TypeAlias = "Callable[[int, float, Sequence[Anomaly]], None]"


@dataclass(frozen=True)
class Plan:
    """How long, how large, and where the bad files are. `batch` is windows per micro-batch; `bad_at` is a step."""

    steps: int = 200
    bad_at: int = 160
    bad_steps: int = 3
    context: int = 128
    batch: int = 6
    lr: float = 1e-3
    warmup: int = 20
    eval_every: int = 40
    snapshot_every: int = 25

    @classmethod
    def quick(cls) -> Plan:
        """A few seconds of training; for tests."""
        return cls(steps=64, bad_at=48, context=64, batch=4, warmup=10, eval_every=24, snapshot_every=20)


@dataclass
class Schedule:
    """Linear warm-up, then a cosine to a tenth. An object, so that `LambdaLR.state_dict` saves its two numbers."""

    warmup: int
    steps: int

    def __call__(self, step: int) -> float:
        progress = min(1.0, step / self.steps)
        return min(1.0, (step + 1) / self.warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))


class TrainingStep:
    """One optimizer step over its micro-batches, the same code in training (with a run) and in a replay (without)."""

    def __init__(self, schedule: LambdaLR, run: Run | None = None) -> None:
        self.schedule = schedule
        self.run = run

    def __call__(self, model: ByteGPT, optimizer: AdamW, batches: Iterable[Tensor], index: int) -> Tensor:
        """The mean loss of the micro-batches, a 0-d tensor."""
        losses = []
        for window in batches:
            loss = model.loss(window)
            torch.autograd.backward(loss / ACCUMULATE)
            losses.append(loss.detach())
            if self.run:
                self.run.micro(loss=loss, tokens=window[:, 1:].numel())
        if self.run:
            self.run.clip_grad_norm_(CLIP)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        self.schedule.step()
        optimizer.zero_grad()
        return torch.stack(losses).double().mean()  # as the recorded loss is averaged


def objects(plan: Plan) -> tuple[ByteGPT, AdamW, LambdaLR]:
    """A fresh model, its optimizer and the learning rate's schedule."""
    model = ByteGPT()
    optimizer = AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, LambdaLR(optimizer, Schedule(plan.warmup, plan.steps))


def build() -> Rebuilt:
    """The training's objects for a replay; weights, moments and the schedule's numbers come from the capsule."""
    from trackbridge.replay import Rebuilt

    model, optimizer, schedule = objects(Plan())
    return Rebuilt(model, optimizer, TrainingStep(schedule), state={"schedule": schedule})


def train(run: Run, plan: Plan, *, seed: int = 0, on_step: OnStep | None = None) -> dict[str, float]:
    """Train to the plan's end. `on_step` is called with the step, its loss and the anomalies that were just reported.

    Returns the held-out loss (nats per byte) at the start and at the end.
    """
    leave_a_core()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    data = corpus.read()
    loader = stream.training_loader(
        data,
        context=plan.context,
        batch=plan.batch,
        before=plan.bad_at * ACCUMULATE,
        bad=plan.bad_steps * ACCUMULATE,
        after=max(0, plan.steps - plan.bad_at - plan.bad_steps) * ACCUMULATE,
    )
    held_out = stream.held_out_batches(data, context=plan.context, batch=16)
    model, optimizer, schedule = objects(plan)
    run.watch(model, optimizer, state={"schedule": schedule})
    step = TrainingStep(schedule, run)

    def evaluate() -> float:
        with run.pause("eval"), torch.no_grad():
            model.eval()
            loss = float(torch.stack([model.loss(window) for window in held_out]).mean())
            model.train()
        run.log({"eval/loss": loss})
        return loss

    first = evaluate()
    batches = (batch for _ in count() for batch in run.batches(loader))
    for index in range(plan.steps):
        loss = step(model, optimizer, islice(batches, ACCUMULATE), index)
        anomalies = run.step()
        if on_step:
            on_step(index, float(loss), anomalies)
        if (index + 1) % plan.eval_every == 0 and index + 1 < plan.steps:
            evaluate()
    return {"first": first, "last": evaluate()}


def leave_a_core() -> None:
    """Let torch have all cores but one, which the loader's workers and the trackers' process share: threads of a parallel
    region that wait for each other on a core short are many times slower than fewer threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - 1)))


def settings(plan: Plan, directory: Path, backend: Any, seed: int) -> dict[str, Any]:
    """The arguments of `trackbridge.init` for this plan."""
    return {
        "backend": backend,
        "project": "trackbridge-demo",
        "name": "stdlib-gpt",
        "config": {**dataclasses.asdict(plan), "seed": seed, "clip": CLIP, "accumulate": ACCUMULATE},
        "dir": directory,
        "tags": ("demo",),
        "recorder": {"snapshot_every": plan.snapshot_every, "upload_batches": True},  # the data is public
    }


def main(arguments: Sequence[str] | None = None) -> None:
    import trackbridge

    parser = argparse.ArgumentParser(prog="python -m trackbridge.demo.train", description=__doc__)
    parser.add_argument("--backend", default=None, help="a tracker, or several separated by commas; default: journal only")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="the folder of run folders")
    parser.add_argument("--quick", action="store_true", help="a few seconds of training")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--bad-at", type=int, help="the step at which the bad files come")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    plan = Plan.quick() if options.quick else Plan()
    given = {"steps": options.steps, "bad_at": options.bad_at}
    plan = dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})
    with trackbridge.init(**settings(plan, options.dir, options.backend, options.seed)) as run:
        print(f"run {run.id} in {run.dir}", flush=True)

        def report(index: int, loss: float, anomalies: Sequence[Anomaly]) -> None:
            for anomaly in anomalies:
                print(f"step {index}: {anomaly.title} since step {anomaly.onset}", flush=True)
            if index % 10 == 0:
                print(f"step {index}: loss {loss:.4f}", flush=True)

        held_out = train(run, plan, seed=options.seed, on_step=report)
        print(f"held-out loss {held_out['first']:.3f} -> {held_out['last']:.3f}", flush=True)


if __name__ == "__main__":
    main()
