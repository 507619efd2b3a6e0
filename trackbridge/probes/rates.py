"""Learning rates, as host floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def learning_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """``train/lr`` for the first group of the first optimizer, ``train/lr/<group>`` for each further one.

    A group is called by its "name", else by its number, behind the key of its optimizer when there are several. A rate that
    lives on a device (capturable optimizers) is left out: reading it would wait for the device.
    """
    rates = {}
    for place, (name, rate) in enumerate(_groups(optimizers)):
        if not isinstance(rate, Tensor) or rate.device.type == "cpu":
            rates["train/lr" if place == 0 else f"train/lr/{name}"] = float(rate)
    return rates


def _groups(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, Any]]:
    for key, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            own = str(group.get("name", number))
            yield (f"{key}.{own}" if key else own), group["lr"]
