"""Losses that somebody else's loop back-propagates, and gradients that it scales and clips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Count = Callable[[Any], int]
"""Counts the tokens or samples of a batch."""


class Losses:
    """Which loss belongs to which of several optimizers: what was back-propagated in this batch since another one stepped.

    Losses of one batch and one optimizer are added (a discriminator's on real and on made samples).
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.several = len(keys) > 1
        self._pending: Tensor | None = None
        self._of: dict[str, Tensor] = {}

    def backward(self, loss: Tensor) -> None:
        """`loss`, unscaled and not divided for accumulation, was or will be back-propagated."""
        loss = loss.detach()
        self._pending = loss if self._pending is None else self._pending + loss

    def update(self, key: str) -> None:
        """Optimizer `key` steps now."""
        if self.several and self._pending is not None:
            self._of[key], self._pending = self._pending, None

    def of_batch(self, returned: Tensor | None = None) -> Tensor | None:
        """The loss of a batch, at its end: what the user's code `returned`, else the sum of what it back-propagated. None with
        several optimizers: theirs are the step's."""
        pending, self._pending = self._pending, None
        return None if self.several else pending if returned is None else returned

    def of_step(self) -> dict[str, Tensor] | None:
        """The loss of each optimizer, at the end of a step; None where there is only one, whose losses are the batches'."""
        found, self._of = self._of, {}
        return found or None


def mean(micros: Sequence[tuple[Tensor, int]]) -> Tensor | float:
    """The loss of a step from its micro-batches' losses and weights; of a single one as it is."""
    if len(micros) == 1:
        return micros[0][0]
    return sum(float(loss) * weight for loss, weight in micros) / sum(weight for _, weight in micros)


def scale_of(scaler: Any, optimizer: Any) -> Tensor | None:
    """The loss scale that the gradients of a torch optimizer are still multiplied by; None without one, or once `scaler` (a
    `torch.amp.GradScaler`) has unscaled them."""
    if scaler is None or not scaler.is_enabled():
        return None
    stage = scaler._per_optimizer_states.get(id(optimizer), {}).get("stage")
    return scaler._scale if getattr(stage, "name", "READY") == "READY" else None


def covers(clipped: Sequence[Tensor], watched: Sequence[Tensor]) -> bool:
    """Whether `clipped` are the watched parameters, all of them in their order, and none of them a shard. Then
    `Run.clip_grad_norm_` may clip in torch's place: the same to the bit, and non-finite elements are counted before they spread
    over every gradient."""
    return (
        len(clipped) == len(watched)
        and all(one is other for one, other in zip(clipped, watched, strict=True))
        and not any(hasattr(parameter, "to_local") for parameter in clipped)
    )


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor]) -> Tensor | None:
    """The L2 norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` has it; 0-d, on their device. None where it
    cannot be had without asking other ranks (shards) or without making tables dense (sparse gradients), or there is none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or any(hasattr(gradient, "to_local") or gradient.layout != torch.strided for gradient in gradients):
        return None
    return torch.nn.utils.get_total_norm(gradients)
