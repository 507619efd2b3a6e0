"""The gradient's norm before clipping, measured without the user's help: as the last backward pass of a step leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trackbridge.replay.rebuilt import Rebuilt


class GradientNorm:
    """`values` maps a step to the global L2 norm of its accumulated gradient, unscaled. One sync per step: a replay is not in a
    hurry."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self._squares: dict[int, Tensor] = {}

    @contextmanager
    def watching(self, rebuilt: Rebuilt) -> Iterator[None]:
        handles = [
            parameter.register_post_accumulate_grad_hook(self._seen)  # type: ignore[no-untyped-call]
            for model in rebuilt.models.values()
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _seen(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._squares[id(parameter)] = parameter.grad.detach().double().square().sum()

    def close(self, step: int, scale: float) -> None:
        """The step is over; `scale` is the loss scale that was in force."""
        squares, self._squares = self._squares, {}
        if squares:
            self.values[step] = sum(map(whole, squares.values())) ** 0.5 / scale


def whole(number: Tensor) -> float:
    """A 0-d tensor as a number; of a sharded one over all ranks, where plain ``float()`` knows this rank's part only."""
    full = getattr(number, "full_tensor", None)
    return float(number if full is None else full())
