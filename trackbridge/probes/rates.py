"""Learning rates, as host floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trackbridge import names


def learning_rates(optimizers: Mapping[str, Optimizer], *, of: Optimizer | None = None) -> dict[str, float]:
    """``train/lr`` for the first group of the first optimizer, ``train/lr/<group>`` for each further one; only those `of` one
    optimizer if it is given.

    A group is called by its "name" if no other one is, else by its number, behind the key of its optimizer when there are
    several. A rate that lives on a device (capturable optimizers) is left out: reading it would wait for the device. So is that
    of an optimizer which has none, or works it out by itself (None).
    """
    rates = {}
    for place, (owner, name, rate) in enumerate(_groups(optimizers)):
        if (of is None or owner is of) and (number := _number(rate)) is not None:
            rates["train/lr" if place == 0 else f"train/lr/{name}"] = number
    return rates


def _groups(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[Optimizer, str, Any]]:
    for key, optimizer in optimizers.items():
        named = [group.get("name") for group in optimizer.param_groups]
        for number, group in enumerate(optimizer.param_groups):
            name = named[number]
            own = str(number) if name is None or named.count(name) > 1 else names.legal(str(name))
            yield optimizer, (f"{key}.{own}" if key else own), group.get("lr")


def _number(rate: Any) -> float | None:
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return float(rate) if isinstance(rate, Real) else None
