"""A Lightning training with one bad batch, recorded; then the bad step is run again, bit for bit.

    python train.py                                           # seconds on a CPU
    trackbridge replay runs/RUN_ID --build train:build        # the command that it prints

Two lines are trackbridge's: the import and the callback.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trackbridge

STEPS, BAD = 80, 66
TRAINER: dict[str, Any] = {"accelerator": "cpu", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}


class Counting(pl.LightningModule):
    """Learns to count upwards modulo 32."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Embedding(32, 32), nn.Dropout(0.1), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 32, (2 * STEPS * 8, 1), generator=generator)
    tokens = (start + torch.arange(9)) % 32
    bad = slice(2 * BAD * 8, 2 * BAD * 8 + 16)
    tokens[bad] = torch.randint(0, 32, tokens[bad].shape, generator=generator)  # sixteen samples of noise
    return DataLoader(TensorDataset(tokens), batch_size=8)


def build() -> trackbridge.replay.Rebuilt:
    """The training's objects, for ``trackbridge replay``."""
    return trackbridge.lightning.rebuild(Counting(), **TRAINER)


def main(directory: str) -> trackbridge.Run | None:
    torch.manual_seed(0)
    callback = trackbridge.lightning.Callback(dir=directory, backend="tensorboard", recorder={"after": 4})
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(callbacks=[callback], max_epochs=1, **quiet, **TRAINER)
    trainer.fit(Counting(), batches())
    return callback.run


if __name__ == "__main__":
    run = main(sys.argv[1] if len(sys.argv) > 1 else "runs")
    assert run is not None
    for anomaly in run.anomalies:
        sys.stdout.write(f"{anomaly}\n")
    sys.stdout.write(f"trackbridge replay {run.dir} --build train:build\n")
