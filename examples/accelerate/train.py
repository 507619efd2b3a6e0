"""An Accelerate training with one bad batch, recorded; then the bad step is run again, bit for bit.

    python train.py                                           # or: accelerate launch train.py; seconds on a CPU
    trackbridge replay runs/RUN_ID --build train:build        # the command that it prints

Two lines are trackbridge's: `init` and `watch`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trackbridge

STEPS, BAD = 80, 66


class Training:
    """A script's objects; `body` is what its loop does with a batch."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Embedding(32, 32), nn.Dropout(0.1), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, batches())

    def body(self, batch: list[Tensor]) -> None:
        (tokens,) = batch
        with self.accelerator.accumulate(self.model):
            logits = self.model(tokens[:, :-1])
            self.accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def batches() -> DataLoader[Any]:
    """Counting upwards modulo 32."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 32, (2 * STEPS * 8, 1), generator=generator)
    tokens = (start + torch.arange(9)) % 32
    bad = slice(2 * BAD * 8, 2 * BAD * 8 + 16)
    tokens[bad] = torch.randint(0, 32, tokens[bad].shape, generator=generator)  # sixteen samples of noise
    return DataLoader(TensorDataset(tokens), batch_size=8)


def build() -> trackbridge.replay.Rebuilt:
    """The training's objects, for ``trackbridge replay``."""
    training = Training()
    return trackbridge.accelerate.rebuild(training.accelerator, training.model, training.optimizer, training.body)


def main(directory: str) -> trackbridge.Run:
    torch.manual_seed(0)
    training = Training()
    run = trackbridge.init(dir=directory, backend="tensorboard", recorder={"after": 4})
    loader = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
    for batch in loader:
        training.body(batch)
    run.finish()
    return run


if __name__ == "__main__":
    run = main(sys.argv[1] if len(sys.argv) > 1 else "runs")
    for anomaly in run.anomalies:
        sys.stdout.write(f"{anomaly}\n")
    sys.stdout.write(f"trackbridge replay {run.dir} --build train:build\n")
