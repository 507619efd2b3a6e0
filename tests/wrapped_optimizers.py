"""An optimizer inside of a trainer's: calls of its own `step` are what torch's hooks hear of."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import Optimizer


def accelerated(optimizer: Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    from tests.integrations.accelerate_kit import fresh

    fresh()
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def of_fabric(optimizer: Optimizer) -> Any:
    fabric = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


WRAPPERS = (accelerated, of_fabric)
