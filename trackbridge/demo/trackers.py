"""The trackers of the demo, each in a folder of its own, and what each tracker's own reader says was delivered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.backends.base import BackendConfig
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.backends.wandb import WandbConfig
from trackbridge.records import RunInfo


@dataclass(frozen=True)
class Held:
    """What a tracker holds: the loss by step as its reader returns it, and where it keeps the capsules."""

    losses: dict[int, float]
    capsules: list[str]


@dataclass(frozen=True)
class DemoTracker:
    """`number` is the tracker's own number type; `read` asks its own reader; `look` is the command that shows the run."""

    title: str
    config: BackendConfig
    number: type[np.floating[Any]]
    read: Callable[[RunInfo], Held]
    look: Callable[[RunInfo], str]
