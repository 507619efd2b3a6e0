"""What of a `Trainer` a run watches and a replay restores."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trackbridge.errors import UsageError

MOCK = "_MockOptimizer"  # what stands for the optimizer of a module that has none


def family(module: Any) -> str:
    """The package that a module's Lightning is of: ``lightning.pytorch``, or ``pytorch_lightning``, which is the same code
    again. Raises `UsageError` for what is no LightningModule."""
    for base in type(module).__mro__:
        if base.__name__ == "LightningModule":
            return base.__module__.removesuffix(".core.module")
    raise UsageError(f"a {type(module).__name__} is no LightningModule")


def overrides(module: Any, method: str) -> bool:
    """Whether a module has its own `method` instead of Lightning's."""
    return not getattr(type(module), method).__module__.startswith(("lightning.", "pytorch_lightning."))


def optimizers_of(trainer: Any) -> dict[str, Optimizer]:
    """The torch optimizers: one under the empty name, several under their numbers."""
    found = [optimizer for optimizer in trainer.optimizers if type(optimizer).__name__ != MOCK]
    return {"": found[0]} if len(found) == 1 else {str(number): optimizer for number, optimizer in enumerate(found)}


def scaler_of(trainer: Any) -> Any:
    """The loss scaler of ``precision="16-mixed"``, else None."""
    return getattr(trainer.precision_plugin, "scaler", None)


def unscaled(trainer: Any, loss: Tensor) -> Tensor:
    """A loss that is about to be back-propagated, as it was before the loss scale: exact, for that is a power of two."""
    scale = getattr(scaler_of(trainer), "_scale", None)
    return loss.detach() if scale is None else loss.detach() / scale


def state_of(trainer: Any) -> dict[str, Any]:
    """Further objects that a replay must restore: where the loop is, and the schedules of the learning rate."""
    configs = trainer.lr_scheduler_configs
    names = ["lr_scheduler"] if len(configs) == 1 else [f"lr_scheduler_{number}" for number in range(len(configs))]
    return {"trainer": Progress(trainer), **{name: config.scheduler for name, config in zip(names, configs, strict=True)}}


class Progress:
    """Where the fit loop is: epoch, batch, counts of updates. What the module sees as `current_epoch` and `global_step`."""

    def __init__(self, trainer: Any) -> None:
        loop = trainer.fit_loop
        self._loop = loop
        self._counts = {
            "epoch": loop.epoch_progress,
            "batch": loop.epoch_loop.batch_progress,
            "optimizer": loop.epoch_loop.automatic_optimization.optim_progress,
            "manual": loop.epoch_loop.manual_optimization.optim_step_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        counts = {name: progress.state_dict() for name, progress in self._counts.items()}
        batches = float(self._loop.max_batches)  # infinity where the loader does not know
        return {**counts, "batches": batches, "stepped": self._loop.epoch_loop._batches_that_stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, progress in self._counts.items():
            progress.load_state_dict(state[name])
        batches = state["batches"]
        self._loop.max_batches = batches if batches == float("inf") else int(batches)
        self._loop.epoch_loop._batches_that_stepped = state["stepped"]
