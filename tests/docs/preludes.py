"""What fragments on the pages take for granted: somebody's model, loader, run. Python source by page, run before its blocks."""

from __future__ import annotations

from typing import Any

LOOP = """
import numpy as np
import torch
import trackbridge
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
dataset = torch.randn(64, 8)
loader = torch.utils.data.DataLoader(dataset, batch_size=16)
batch = dataset[:16]
loss = model(batch).square().mean()
"""

CHECKED = '''
class _Checked:
    """In place of the package where a page only shows settings: they are read and the trackers looked up, nothing starts."""

    def __getattr__(self, name):
        return getattr(_package, name)

    def init(self, settings=None, **given):
        from trackbridge.backends.resolve import resolve
        from trackbridge.config import TrackbridgeConfig

        given.pop("config", None)
        resolve(TrackbridgeConfig.load(settings, **given).backend)

import trackbridge as _package
trackbridge = _Checked()
'''

RUN = """
run = trackbridge.init(id="fragment")
run.watch(model, optimizer)
"""

PLAIN = (
    LOOP
    + """
import wandb

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)

    def forward(self, x, y=None):
        predicted = self.body(x)
        return predicted if y is None else {"loss": (predicted.squeeze(1) - y).square().mean()}

model = WithLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(dataset, dataset.sum(1)), batch_size=16)
generator, discriminator = nn.Linear(8, 2), nn.Linear(2, 1)
of_generator = torch.optim.Adam(generator.parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters())
g_loss, d_loss, ACCUMULATE = torch.tensor(1.0), torch.tensor(2.0), 2
"""
)

TITAN = (
    LOOP
    + RUN
    + """
from types import SimpleNamespace

schedulers = torch.optim.lr_scheduler.ConstantLR(optimizer)
trainer = SimpleNamespace(model_parts=[model], optimizers=[optimizer], schedulers=schedulers)
"""
)

HUGGING = """
import json
import torch
from tests.integrations.hf_kit import Counting, arguments, model as make_model
from pathlib import Path
from transformers import Trainer

model, args, dataset = make_model(), arguments(Path("out"), max_steps=2, save_strategy="steps", save_steps=1), Counting()
make_trainer = lambda: Trainer(model, args, train_dataset=dataset)
Path("skip.json").write_text(json.dumps({"format_version": 1, "skips": []}))
"""

LIGHTNING = (
    LOOP
    + RUN
    + """
import warnings
from functools import partial

import lightning

warnings.filterwarnings("ignore", module="lightning")
quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
Trainer = partial(lightning.Trainer, max_epochs=1, accelerator="cpu", devices=1, **quiet)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(8, 1)

    def training_step(self, batch, number):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return loader

module, datamodule = Module(), Data()
fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()

def step(model, batch):
    return model(batch).square().mean()
"""
)

ACCELERATE = (
    LOOP
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
done = 2

def step(model, batch):
    return model(batch).square().mean()
"""
)

PRELUDES: dict[str, str] = {
    "docs/backends.md": LOOP + CHECKED,
    "docs/detection.md": LOOP + RUN + CHECKED + "steps, loss = np.arange(200), np.ones(200)\n",
    "docs/going-on.md": LOOP + RUN,
    "docs/integrations/huggingface.md": HUGGING,
    "docs/integrations/accelerate.md": ACCELERATE,
    "docs/integrations/lightning.md": LIGHTNING,
    "docs/integrations/plain.md": PLAIN,
    "docs/integrations/torchtitan.md": TITAN,
}


def of(page: str) -> str:
    return PRELUDES.get(page, "")


def close(runs: list[Any]) -> None:
    """Ends what a page began and did not end."""
    for run in runs:
        run.finish(20)
