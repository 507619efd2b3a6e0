"""One training of a `Trainer`, told to a `Run`: its batches before they are used, its losses, its clipping, its pauses.

The Trainer's events come too late for that (after clipping, with no batch and no loss), so methods of this one Trainer are
replaced while it trains. Each does what it did, with the same arguments; where ours fails, it goes on alone.

| replaced | for |
|---|---|
| `Trainer.get_batch_samples` | the micro-batches of a step, with their sample ids |
| `Trainer.training_step` | the moment before they are used; the raw loss, which the Trainer's log filters when it is NaN |
| `Accelerator.clip_grad_norm_` | the gradient before it is clipped |
| `Trainer.evaluate`, `predict`, `_save_checkpoint` | pauses |
| whatever else a training is inside of | an exception: the run has failed |
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from trackbridge.errors import Part
from trackbridge.intake import Later
from trackbridge.integrations.accelerators import clips_by_torch, torch_optimizer
from trackbridge.integrations.given import warn
from trackbridge.integrations.hf.finding import Caller
from trackbridge.integrations.losses import covers
from trackbridge.integrations.wires import Method, Wires
from trackbridge.run import Run
from trackbridge.skip import SkipPlan

logger = logging.getLogger("trackbridge")

PAUSES = {"evaluate": "eval", "predict": "predict", "_save_checkpoint": "save"}
# What an exception that ends the training comes through: one of these, or a method that is replaced anyway. The first two are
# all of the loop in transformers 5; before, the loop is one function, which is running already.
INSIDE = ("_run_epoch", "_finalize_training", "_maybe_log_save_evaluate")


class Training:
    """The wires between one Trainer and one run, from `on_train_begin` until `close`.

    `failed` is called with an exception that leaves the training, before it goes on to the user.
    """

    def __init__(self, caller: Caller, run: Run, skip: SkipPlan | None, failed: Callable[[BaseException], None]) -> None:
        self.run = run
        self.trainer = caller.trainer
        self._skip = skip
        self._failed = failed
        self._part = Part("the Hugging Face callback")
        self._later = Later(run.intake)
        self._epoch = caller.epoch - 1  # of the pass under way; one more at each `epoch_begins`
        self._iterator: Iterator[Any] | None = None  # the Trainer's own, by which we know its pass
        self._pass: Any = None
        self._feed: Any = None
        self._group = 1  # micro-batches of the step under way
        self._loss: Tensor | None = None
        self._consumed: tuple[int | None, int | None] = (None, None)
        self._norm: Any = None
        self._watch()
        self._wires = Wires()
        self._connect()

    def _watch(self) -> None:
        trainer = self.trainer
        schedule = trainer.lr_scheduler
        self.run.watch(
            trainer.model_wrapped,
            torch_optimizer(trainer.optimizer),
            scaler=trainer.accelerator.scaler,
            state={"lr_scheduler": schedule} if hasattr(schedule, "state_dict") else {},
        )
        self._parameters = list(trainer.model_wrapped.parameters())

    def _connect(self) -> None:
        trainer, replace = self.trainer, self._wires.replace
        replace(trainer, "get_batch_samples", self._fetching)
        replace(trainer, "training_step", self._using)
        replace(trainer.accelerator, "clip_grad_norm_", self._clipping)
        for name, what in PAUSES.items():
            replace(trainer, name, self._pausing(what))
        replace(trainer.callback_handler, "call_event", self._inside)
        for name in INSIDE:
            if hasattr(trainer, name):
                replace(trainer, name, self._inside)

    def close(self) -> None:
        """Every method is what it was."""
        self._wires.cut()
        self._iterator = self._pass = self._feed = None

    # events

    def epoch_begins(self) -> None:
        self._epoch += 1

    def stepped(self) -> None:
        """The optimizer has stepped; the schedule has not."""
        with self._part:
            loss, norm, (tokens, samples) = self._loss, self._norm, self._consumed
            self._loss = self._norm = None
            self._consumed = (None, None)
            warn(self.run.step(loss, tokens=tokens, samples=samples, grad_norm=norm))

    # what is replaced

    def _inside(self, original: Method) -> Method:
        """`original`, whose exception ends the training."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._failed(error)
                raise

        return call

    def _pausing(self, what: str) -> Callable[[Method], Method]:
        def make(original: Method) -> Method:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.run.pause(what):
                    return original(*args, **kwargs)

            return call

        return make

    def _fetching(self, original: Method) -> Method:
        def get_batch_samples(epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any) -> Any:
            iterator = self._passing(epoch_iterator)
            found = original(iterator, num_batches, *args, **kwargs)
            if self._left_over(len(found[0]), num_batches):
                self._later.forget()
                found = original(iter(()), num_batches, *args, **kwargs)
            self._group = max(len(found[0]), 1)
            return found

        return self._inside(get_batch_samples)

    def _passing(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The Trainer's pass over its loader, watched; known again until the Trainer begins another."""
        if self._part.alive and iterator is not self._iterator:
            self._iterator, self._pass = iterator, iterator
            with self._part:
                loader = _not_begun(iterator)
                known = self.trainer.callback_handler.train_dataloader
                self._feed = self.run.intake.feed(
                    iterator if loader is None else loader,
                    skip=self._skip,
                    epoch=self._epoch,
                    known_as=known,
                    observer=self._later,
                )
                self._pass = iter(self._feed)
        return self._pass if iterator is self._iterator else iterator

    def _left_over(self, found: int, wanted: int) -> bool:
        """With a batch skipped, the epoch's last group is short. The Trainer counts batches and would not step after it: its
        gradient would go into the next epoch's first step. It is left out, as an incomplete batch is."""
        if not 0 < found < wanted or self._feed is None or not self._feed.skipped:
            return False
        logger.warning("trackbridge: a batch was skipped, so the last %d of epoch %d make no whole step", found, self._epoch)
        return True

    def _using(self, original: Method) -> Method:
        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = samples = None
            with self._part:
                self._later.tell()
                tokens, samples = self._count(inputs)
            loss = original(model, inputs, *args, **kwargs)
            with self._part:
                if self._group == 1:
                    self._loss, self._consumed = loss, (tokens, samples)
                else:  # what comes back is its part of the step's loss
                    self.run.micro(loss * self._group, samples=samples)
                    had, _ = self._consumed
                    self._consumed = (tokens if had is None else had + (tokens or 0), None)
            return loss

        return self._inside(training_step)

    def _count(self, inputs: Any) -> tuple[int | None, int | None]:
        """(tokens, samples) of a micro-batch, by its shape: to look for padding would wait for the device."""
        value = inputs.get(getattr(self.trainer.model, "main_input_name", "input_ids")) if isinstance(inputs, Mapping) else None
        if not isinstance(value, Tensor) or not value.ndim:
            return None, None
        words = not value.is_floating_point() and value.ndim == 2
        return (value.numel() if words else None), value.shape[0]

    def _clipping(self, original: Method) -> Method:
        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            plain = norm_type == 2 and not kwargs and clips_by_torch(self.trainer.accelerator)
            if plain and covers(parameters, self._parameters):
                self.trainer.accelerator.unscale_gradients()
                return self.run.clip_grad_norm_(max_norm)
            norm = original(parameters, max_norm, norm_type, **kwargs)
            self._norm = norm if isinstance(norm, (Tensor, float)) else None
            return norm

        return self._inside(clip_grad_norm_)


def _not_begun(iterator: Any) -> Any:
    """The loader of accelerate whose ``__iter__`` this is and has not begun, so that another begins the same; else None."""
    if not inspect.isgenerator(iterator) or inspect.getgeneratorstate(iterator) != inspect.GEN_CREATED:
        return None
    loader = inspect.getgeneratorlocals(iterator).get("self")
    return loader if hasattr(loader, "base_dataloader") else None
