"""A loop's objects and its step, for a replay of what it trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge.errors import UsageError
from trackbridge.integrations.accelerate.hearing import Hearing, prepared, schedules
from trackbridge.integrations.accelerators import torch_optimizer
from trackbridge.integrations.losses import Count, mean
from trackbridge.integrations.wires import Wires
from trackbridge.replay import Rebuilt


def rebuild(
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
    body: Callable[[Any], object],
    *,
    generators: Mapping[str, Any] | None = None,
    tokens: Count | None = None,
) -> Rebuilt:
    """What a ``build()`` returns for a loop whose `body` is what it does with one batch, from the forward pass to
    ``optimizer.zero_grad()``, inside ``accelerator.accumulate(model)`` where it is used.

        def build():
            training = Training()  # yours: makes and prepares its objects as the script does
            return trackbridge.accelerate.rebuild(training.accelerator, training.model, training.optimizer, training.body)

    `model`, `optimizer`, `generators` and `tokens` are those of `watch`. Raises `UsageError` for what was not prepared.
    """
    optimizers = prepared(accelerator, optimizer)
    return Rebuilt(
        model,
        {key: torch_optimizer(one) for key, one in optimizers.items()},
        _Step(accelerator, optimizers, body, tokens),
        scaler=accelerator.scaler,
        state=schedules(accelerator),
        generators=generators or {},
    )


class _Step:
    """One optimizer step. When it is due is the record's to say: an epoch may have ended before an accumulation was full."""

    def __init__(
        self,
        accelerator: Any,
        optimizers: Mapping[str, Any],
        body: Callable[[Any], object],
        tokens: Count | None,
    ) -> None:
        self._accelerator = accelerator
        self._body = body
        self._tokens = tokens
        self._last = True
        self._weight = 1
        self._micros: list[tuple[Tensor, int]] = []  # the loss of each micro-batch, and its weight
        self._parts: dict[str, Tensor] | None = None
        wires = Wires()
        Hearing(accelerator, optimizers, wires, self._micro, self._closed)
        wires.replace(accelerator, "_do_sync", lambda _: self._sync)

    def __call__(self, model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
        self._micros, self._parts = [], None
        for number, batch in enumerate(batches):
            self._last = number == len(batches) - 1
            self._sync()
            self._weight = 1 if self._tokens is None else self._tokens(batch)
            self._body(send_to_device(batch, self._accelerator.device))
        if self._parts is not None:
            return self._parts
        if not self._micros:
            raise UsageError("the body never called accelerator.backward: it is not what the loop does with a batch")
        return mean(self._micros)

    def _sync(self, *_: Any, **__: Any) -> None:
        self._accelerator.gradient_state._set_sync_gradients(self._last)

    def _micro(self, loss: Tensor) -> None:
        self._micros.append((loss, self._weight))

    def _closed(self, losses: dict[str, Tensor] | None) -> None:
        self._parts = losses
