"""A fit's objects and its step, for a replay of what it trained."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from trackbridge.errors import UsageError
from trackbridge.integrations.lightning.callback import Callback
from trackbridge.integrations.lightning.parts import family, optimizers_of, overrides, scaler_of, state_of, unscaled
from trackbridge.integrations.losses import Count, Losses, mean
from trackbridge.integrations.wires import Method, Wires
from trackbridge.records import MicroBatch
from trackbridge.replay import Rebuilt
from trackbridge.watched import loss_of

_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def rebuild(
    module: Any, train_dataloaders: Any = None, *, datamodule: Any = None, tokens: Count | None = None, **trainer: Any
) -> Rebuilt:
    """What a ``build()`` returns for a fit of `module`, made as it was made for the training.

        def build():
            return trackbridge.lightning.rebuild(MyModule(), accumulate_grad_batches=4, gradient_clip_val=1.0)

    Args:
        module: the LightningModule.
        train_dataloaders, datamodule: as for ``Trainer.fit``; needed where `configure_optimizers` asks for the number of steps,
            and to make batches again from their sample ids.
        tokens: as for the callback: the weight of a micro-batch's loss.
        trainer: the Trainer's arguments that change the arithmetic (precision, accumulation, clipping, strategy), and callbacks
            that change the training. Loggers, checkpoints and progress bars are off; a callback of trackbridge is left out.

    The Trainer prepares itself by its own ``fit()``, up to the point where its loop would begin. A step is that loop's own
    `advance`. Raises `UsageError` where the Trainer does not get there.
    """
    callbacks = trainer.pop("callbacks", None) or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    trainer_class = import_module(family(module)).Trainer
    made = trainer_class(callbacks=[one for one in callbacks if not isinstance(one, Callback)], **{**_QUIET, **trainer})
    if train_dataloaders is None and datamodule is None and not overrides(module, "train_dataloader"):
        train_dataloaders = []
    _prepare(made, module, train_dataloaders, datamodule)
    fetch = _remaking(made)
    model: Any = made.strategy.model
    return Rebuilt(
        model,
        optimizers_of(made),
        _Step(made, tokens),
        scaler=scaler_of(made),
        state=state_of(made),
        fetch=fetch,
        checkpoint=made._checkpoint_connector.restore,
    )


class _Ready(BaseException):
    """The way out of `Trainer.fit` at the right moment."""


def _prepare(trainer: Any, module: Any, loaders: Any, datamodule: Any) -> None:
    """All that ``fit()`` does before it trains, and nothing of what it does after."""
    wires = Wires()
    callbacks: list[Any] = []

    def stage(_: Method) -> Method:
        def run_stage(*args: Any, **kwargs: Any) -> Any:
            nonlocal callbacks
            callbacks, trainer.callbacks = trainer.callbacks, []  # they are not to hear of our way out
            raise _Ready

        return run_stage

    wires.replace(trainer, "_run_stage", stage)
    wires.replace(trainer, "_teardown", lambda _: lambda: None)
    try:
        trainer.fit(module, train_dataloaders=loaders, datamodule=datamodule)
    except _Ready:
        pass
    else:
        raise UsageError("this Trainer's fit() ended before its training began: it cannot be rebuilt")
    finally:
        wires.cut()
    trainer._signal_connector.teardown()
    trainer.callbacks = callbacks
    trainer.training = True
    torch.set_grad_enabled(True)
    module.train()
    module.zero_grad()


class _Step(LightningCallback):
    """One optimizer step, as the Trainer's loop does it. The loss is the mean of the micro-batches', or with several optimizers
    a loss for each."""

    def __init__(self, trainer: Any, tokens: Count | None) -> None:
        self._trainer = trainer
        self._tokens = tokens
        self._losses = Losses(list(optimizers_of(trainer)))
        self._keys = {id(optimizer): key for key, optimizer in optimizers_of(trainer).items()}
        self._returned: list[tuple[Tensor, int]] = []  # the loss of each micro-batch, and its weight
        self._epoch: int | None = None
        strategy = trainer.strategy
        trainer.callbacks.insert(0, self)
        wires = Wires()
        wires.replace(strategy, "training_step", self._noting)
        # What a recorded batch has been through already: only its device may be another one.
        wires.replace(trainer.lightning_module, "_on_before_batch_transfer", lambda _: lambda batch, *args, **kwargs: batch)
        device = strategy.root_device
        wires.replace(strategy, "batch_to_device", lambda _: lambda batch, *args, **kwargs: move_data_to_device(batch, device))
        wires.replace(trainer.fit_loop, "setup_data", lambda _: lambda: None)
        if trainer.fit_loop._combined_loader is None:
            trainer.fit_loop._combined_loader = CombinedLoader([])
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # one that waits for an evaluation, which a replay does not have

    def __call__(self, model: Any, optimizer: Any, batches: Any, index: int) -> Any:
        loop = self._trainer.fit_loop.epoch_loop
        self._returned = []
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            self._go_to(batches.micros[number])
            loop.advance(_Fetched(batch, loop.batch_idx + 1, self._ends_epoch(last)))
        parts = self._losses.of_step()
        if parts is not None:
            return parts
        return mean(self._returned)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if not pl_module.automatic_optimization:
            self._losses.backward(unscaled(trainer, loss))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._losses.update(self._keys.get(id(getattr(optimizer, "optimizer", optimizer)), ""))

    def _go_to(self, micro: MicroBatch) -> None:
        """Let the loop be where it was when it used this batch."""
        fit = self._trainer.fit_loop
        loop = fit.epoch_loop
        if self._epoch is not None and micro.epoch != self._epoch:
            if not loop._num_ready_batches_reached():  # a loader of unknown length: only now the epoch is known to be over
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            fit.on_advance_end()
            fit.on_advance_start()
            loop.reset()
        self._epoch = micro.epoch
        for progress, done in ((loop.batch_progress.current, micro.index), (loop.batch_progress.total, None)):
            done = progress.completed if done is None else done
            progress.ready = progress.started = progress.processed = progress.completed = done

    def _ends_epoch(self, last: bool) -> bool:
        """Whether the next batch is the epoch's last one: by its number, or because the step was closed after it too early."""
        fit = self._trainer.fit_loop
        number = fit.epoch_loop.batch_idx + 2
        early = self._trainer.lightning_module.automatic_optimization and number % self._trainer.accumulate_grad_batches != 0
        return bool(number == fit.max_batches or (last and early))

    def _noting(self, original: Method) -> Method:
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(batch, *args, **kwargs)
            loss = self._losses.of_batch(loss_of(output))
            if loss is not None:
                self._returned.append((loss, 1 if self._tokens is None else self._tokens(batch)))
            return output

        return training_step


class _Fetched:
    """What the loop fetches from: one batch."""

    def __init__(self, batch: Any, index: int, done: bool) -> None:
        self._item = (batch, index, 0)
        self.done = done

    def __next__(self) -> tuple[Any, int, int]:
        return self._item


def _remaking(trainer: Any) -> Callable[[MicroBatch], Any]:
    """Makes a batch again from its samples, by the loader's own collate function and the module's hooks around its transfer."""
    module, strategy = trainer.lightning_module, trainer.strategy
    before, transfer = module._on_before_batch_transfer, strategy.batch_to_device

    def fetch(micro: MicroBatch) -> Any:
        loader = trainer.fit_loop._data_source.dataloader()
        batch = loader.collate_fn([loader.dataset[sample] for sample in micro.sample_ids or ()])
        return transfer(before(batch, dataloader_idx=0), dataloader_idx=0)

    return fetch
