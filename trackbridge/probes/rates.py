"""Learning rates, as host floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def learning_rates(optimizers: Mapping[str, Optimizer], *, of: Optimizer | None = None) -> dict[str, float]:
    """``train/lr`` for the first group of the first optimizer, ``train/lr/<group>`` for each further one; only those `of` one
    optimizer if it is given.

    A group is called by its "name", else by its number, behind the key of its optimizer when there are several. A rate that
    lives on a device (capturable optimizers) is left out: reading it would wait for the device.
    """
    rates = {}
    for place, (owner, name, rate) in enumerate(_groups(optimizers)):
        if (of is None or owner is of) and (not isinstance(rate, Tensor) or rate.device.type == "cpu"):
            rates["train/lr" if place == 0 else f"train/lr/{name}"] = float(rate)
    return rates


def _groups(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[Optimizer, str, Any]]:
    for key, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            own = str(group.get("name", number))
            yield optimizer, (f"{key}.{own}" if key else own), group["lr"]
