"""The shared small training (tests/training.py) as a LightningModule, and what it is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import trackbridge
from tests.integrations.plain_loop import loss_of
from tests.replays import SETTINGS, data
from tests.training import Model, Setup, fingerprint, seed_everything

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
STEPS = 60
ACCUMULATE = 2


class Lit(pl.LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Model()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(*callbacks: pl.Callback, steps: int = STEPS, **more: Any) -> pl.Trainer:
    given = {"max_steps": steps, "max_epochs": -1, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 1.0}
    return pl.Trainer(callbacks=list(callbacks), **{**QUIET, **given, **more})


def callback(directory: Path, **changes: Any) -> trackbridge.lightning.Callback:
    return trackbridge.lightning.Callback(dir=directory, strict=True, **{**SETTINGS, **changes})


def fit(*callbacks: pl.Callback, seed: int = 0, loader: DataLoader[Any] | None = None, **more: Any) -> pl.Trainer:
    """A fit of `Lit` with the planned spike."""
    seed_everything(seed)
    made = Lit()
    fitted = trainer(*callbacks, **more)
    fitted.fit(made, data() if loader is None else loader)
    return fitted


def state(fitted: pl.Trainer) -> dict[str, bytes]:
    """Weights, optimizer state and every RNG state, to the bit."""
    return fingerprint(Setup(fitted.lightning_module, fitted.optimizers[0], None))
