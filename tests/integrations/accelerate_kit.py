"""The shared small training (tests/training.py) as an Accelerate loop, and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor

from tests.integrations.plain_loop import loss_of
from tests.replays import data
from tests.training import Model, Setup, fingerprint, seed_everything

STEPS = 60
ACCUMULATE = 2


def fresh() -> None:
    """Accelerate keeps its state for the process; a test starts anew."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Training:
    """An ordinary script's objects; `body` is what its loop does with a batch."""

    def __init__(self, seed: int = 0, loader: Any = None, **accelerator: Any) -> None:
        fresh()
        self.accelerator = Accelerator(**{"cpu": True, "gradient_accumulation_steps": ACCUMULATE, **accelerator})
        seed_everything(seed)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        loader = data() if loader is None else loader
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model.train()

    def body(self, batch: list[Tensor]) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(loss_of(self.model, batch))
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def train(self, loader: Iterable[Any] | None = None, *, steps: int = STEPS) -> Training:
        done = 0
        while done < steps:
            for batch in self.loader if loader is None else loader:
                self.body(batch)
                done += self.accelerator.sync_gradients
                if done == steps:
                    break
        return self

    def state(self) -> dict[str, bytes]:
        """Weights, optimizer state and every RNG state, to the bit."""
        return fingerprint(Setup(self.accelerator.unwrap_model(self.model), self.optimizer, None))
