"""What an Accelerator does with losses and updates, heard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim import Optimizer

from trackbridge.errors import UsageError
from trackbridge.integrations.losses import Losses
from trackbridge.integrations.wires import Method, Wires
from trackbridge.watched import named

OWN_ENGINE = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


class Hearing:
    """Calls `micro` with each loss that ``accelerator.backward`` gets, as the user gave it, and `closed` with the losses of a
    step (None with one optimizer) when the last of `optimizers` has really been told to step: at the end of an accumulation,
    whether the loss scaler let it or not."""

    def __init__(
        self,
        accelerator: Any,
        optimizers: Mapping[str, Any],
        wires: Wires,
        micro: Callable[[Tensor], None],
        closed: Callable[[dict[str, Tensor] | None], None],
    ) -> None:
        self._losses = Losses(list(optimizers))
        self._micro = micro
        self._closed = closed
        wires.replace(accelerator, "backward", self._backward)
        last = list(optimizers)[-1]
        for key, optimizer in optimizers.items():
            wires.replace(optimizer, "step", self._stepping(optimizer, key, last=key == last))

    def _backward(self, original: Method) -> Method:
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._losses.backward(loss)
            if not self._losses.several and (heard := self._losses.of_batch()) is not None:
                self._micro(heard)
            return original(loss, *args, **kwargs)

        return backward

    def _stepping(self, optimizer: Any, key: str, *, last: bool) -> Callable[[Method], Method]:
        def make(original: Method) -> Method:
            def step(*args: Any, **kwargs: Any) -> Any:
                found = original(*args, **kwargs)
                if optimizer.gradient_state.sync_gradients:
                    self._losses.update(key)
                    if last:
                        self._closed(self._losses.of_step())
                return found

            return step

        return make


def prepared(accelerator: Any, optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]) -> dict[str, Any]:
    """The optimizers by key, as ``accelerator.prepare`` returned them. Raises `UsageError` for others: their steps under
    accumulation cannot be told apart; and for engines that step by themselves."""
    if accelerator.distributed_type in OWN_ENGINE:
        raise UsageError(f"{accelerator.distributed_type} steps by its own engine: use run.watch and run.step in the loop")
    found: dict[str, Any] = named("optimizer", optimizer, Optimizer)
    for key, one in found.items():
        if not hasattr(one, "gradient_state"):
            raise UsageError(f"optimizer {key!r} was not prepared: call watch with what accelerator.prepare returned")
    return found


def schedules(accelerator: Any) -> dict[str, Any]:
    """The prepared schedules of the learning rate, which a replay must restore."""
    found = accelerator._schedulers
    return {"lr_scheduler" if len(found) == 1 else f"lr_scheduler_{number}": one for number, one in enumerate(found)}
