"""A Trainer's objects and its step, for a replay of what it trained."""

from __future__ import annotations

import contextlib
import functools
import inspect
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from trackbridge.errors import UsageError
from trackbridge.integrations.accelerators import torch_optimizer
from trackbridge.records import MicroBatch
from trackbridge.replay import Rebuilt


def rebuild(trainer: Any) -> Rebuilt:
    """What a ``build()`` returns for a training of `trainer`, made as it was made for the training.

        def build():
            return trackbridge.hf.rebuild(make_trainer())

    The Trainer prepares itself by its own ``train()``, up to the point where its loop would begin; none of its callbacks is
    called. Raises `UsageError` for what is no Trainer or does not get there.
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(f"rebuild takes a transformers.Trainer, as build() makes it, not a {type(trainer).__name__}")
    _prepare(trainer)
    schedule = trainer.lr_scheduler
    return Rebuilt(
        trainer.model_wrapped,
        torch_optimizer(trainer.optimizer),
        functools.partial(_step, trainer),
        scaler=trainer.accelerator.scaler,
        state={"lr_scheduler": schedule} if hasattr(schedule, "state_dict") else {},
        fetch=functools.partial(_fetch, trainer),
        checkpoint=functools.partial(_load, trainer),
    )


# What the loop of this version of transformers hands to it.
_DEVICE = "device" in inspect.signature(Trainer.get_batch_samples).parameters


class _Ready(Exception):  # noqa: N818 - the way out of `Trainer.train` at the right moment
    pass


class _Stop(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise _Ready


def _prepare(trainer: Any) -> None:
    handler = trainer.callback_handler
    handler.callbacks, kept = [_Stop()], handler.callbacks
    try:
        trainer.train()
    except _Ready:
        pass
    else:
        raise UsageError("this Trainer's train() ended before its training began: it cannot be rebuilt")
    finally:
        handler.callbacks = kept
        trainer.is_in_train = False


def _step(trainer: Any, model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
    """One optimizer step, as the Trainer's loop does it. The loss is the sum of what `training_step` gives: each is already
    its part of the step's."""
    accelerator, args = trainer.accelerator, trainer.args
    trainer.state.global_step = index
    device = (args.device,) if _DEVICE else ()
    samples, items = trainer.get_batch_samples(iter(batches), len(batches), *device)
    trainer.current_gradient_accumulation_steps = len(samples)
    loss = None
    for number, inputs in enumerate(samples):
        last = number == len(samples) - 1
        accelerator.gradient_state._set_sync_gradients(last)
        with contextlib.nullcontext() if last else accelerator.no_sync(model=model):
            part = trainer.training_step(model, inputs, items)
        loss = part if loss is None else loss + part
    if args.max_grad_norm is not None and args.max_grad_norm > 0:
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    trainer.optimizer.step()
    waits = hasattr(trainer.lr_scheduler, "best")  # for an evaluation: a schedule by plateau
    if not accelerator.optimizer_step_was_skipped and not waits:
        trainer.lr_scheduler.step()
    model.zero_grad()
    return loss


def _fetch(trainer: Any, micro: MicroBatch) -> Any:
    """The batch of these samples, by the Trainer's own loader."""
    loader = trainer.callback_handler.train_dataloader
    return loader.collate_fn([loader.dataset[sample] for sample in micro.sample_ids or ()])


def _load(trainer: Any, checkpoint: Path) -> None:
    """A checkpoint of the Trainer's, as its own resume loads it."""
    if not checkpoint.is_dir():
        raise FileNotFoundError(2, "no such checkpoint", str(checkpoint))
    trainer._load_from_checkpoint(str(checkpoint))
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    if hasattr(trainer, "_load_scaler"):
        trainer._load_scaler(str(checkpoint))
