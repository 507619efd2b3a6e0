"""One small, real training loop that many tests share: everything that moves RNG state or depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A tiny residual language model: embedding, blocks, tied head."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def loader(*, workers: int = 0, batch: int = 4, items: int = 48, **more: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1234)
    start = torch.randint(0, VOCABULARY, (items, 1), generator=generator)
    tokens = (start + torch.arange(9)) % VOCABULARY  # learnable: count upwards
    return DataLoader(TensorDataset(tokens), batch_size=batch, shuffle=True, num_workers=workers, **more)


@dataclass
class Setup:
    """A model with everything a step needs. `run` is a trackbridge run or None."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    run: Any = None
    losses: list[float] = field(default_factory=list)

    def clip(self) -> Tensor:
        if self.run is not None:
            return self.run.clip_grad_norm_(1.0)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = batch[0]
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def setup(seed: int = 0, run: Any = None) -> Setup:
    seed_everything(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    made = Setup(model, optimizer, schedule, run)
    if run is not None:
        run.watch(model, optimizer, state={"schedule": schedule})
    return made


def train(
    made: Setup,
    batches: Iterable[Any],
    *,
    steps: int,
    accumulate: int = 2,
    spoil: Callable[[int, list[Tensor]], list[Tensor]] | None = None,
) -> Setup:
    """`steps` optimizer steps over as many epochs as it takes; noise from python and numpy's RNG moves both."""
    run = made.run
    micro, total = 0, 0.0
    made.model.train()
    while True:
        for batch in batches:
            step = len(made.losses)
            if spoil is not None:
                batch = spoil(step, batch)
            loss = made.loss(batch) + 1e-4 * random.random() + 1e-4 * float(np.random.rand())
            (loss / accumulate).backward()
            total += float(loss.detach())
            if run is not None:
                run.micro(loss, tokens=batch[0].numel())
            micro += 1
            if micro < accumulate:
                continue
            made.clip()
            made.optimizer.step()
            made.optimizer.zero_grad()
            if run is not None:
                run.step()
            made.schedule.step()
            made.losses.append(total / accumulate)
            micro, total = 0, 0.0
            if len(made.losses) == steps:
                return made


def fingerprint(made: Setup) -> dict[str, bytes]:
    """Weights, optimizer state and every RNG state, to the bit."""
    found = {name: value.numpy().tobytes() for name, value in made.model.state_dict().items()}
    for index, state in made.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{k}": v.numpy().tobytes() for k, v in state.items() if isinstance(v, Tensor)}
    found["python"] = repr(random.getstate()).encode()
    found["numpy"] = repr(np.random.get_state(legacy=False)).encode() + np.random.get_state()[1].tobytes()
    found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found
