"""`Callback`: a Trainer's fit, recorded."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback as LightningCallback

from trackbridge.errors import Part
from trackbridge.integrations import saved
from trackbridge.integrations.given import Given
from trackbridge.integrations.ids import SampleIds
from trackbridge.integrations.lightning.training import Training
from trackbridge.integrations.losses import Count
from trackbridge.integrations.wires import Method, Wires
from trackbridge.run import Run


class Callback(LightningCallback):
    """Records what a `Trainer` fits: ``Trainer(callbacks=[trackbridge.lightning.Callback(...)])``.

    Args:
        run: a run of yours, from `trackbridge.init`, which you finish. By default each fit makes its own and finishes it.
        tokens, samples: count a batch, as your module gets it, for tokens per second, and as the weight of a micro-batch's
            loss.
        settings: what `trackbridge.init` takes (``backend="wandb"``, ``project=...``, ``detection={...}``); not with `run`. The
            module's hyperparameters are the run's config unless you say otherwise.

    `run` is that of the fit under way or the last one, None before the first. Its state is in the Trainer's checkpoints: a fit
    that resumes from one (``ckpt_path``) goes on with the run that made it. The Trainer's loggers are left alone. The training
    stops for an anomaly only if ``stop_on_anomaly`` is set.

    It goes to the front of the Trainer's callbacks, so that a batch is recorded before another callback changes it.

    Raises `ConfigError` or `UsageError` for wrong settings, here and not when the training begins.
    """

    def __init__(
        self, run: Run | None = None, *, tokens: Count | None = None, samples: Count | None = None, **settings: Any
    ) -> None:
        self.run = run
        self._given = Given(run, settings)
        self._count = (tokens, samples)
        self._training: Training | None = None
        self._part = Part("the Lightning callback")
        self._fitted: weakref.ref[Any] | None = None  # the Trainer of the last fit
        self._before: dict[str, Any] | None = None  # the state in the checkpoint that this fit resumes from
        self._state: dict[str, Any] = {}  # of the run, as the newest checkpoint has it
        self._ids: SampleIds | None = None
        self._wires = Wires()
        self._pauses = ExitStack()
        self._fetch_began = self._fetch_s = 0.0

    # a fit begins

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self._fitted is None or self._fitted() is not trainer:
            self._before = None  # where another Trainer's fit ended
        self._fitted = weakref.ref(trainer)
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        loop = trainer.fit_loop
        replace = self._wires.replace
        replace(loop, "_load_combined_loader_states", lambda original: self._loading(loop, original))
        replace(loop.epoch_loop, "_on_before_fetch", self._before_fetch)
        replace(loop.epoch_loop, "_on_after_fetch", self._after_fetch)
        replace(trainer, "save_checkpoint", self._saving)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        asked = {} if self._before is None else {"id": self._before["run_id"], "resume": "auto"}
        trial = bool(trainer.fast_dev_run)  # for which Lightning has no loggers either
        self.run = run = self._given.begin(_plain(getattr(pl_module, "hparams", {})), trial=trial, **asked)
        try:
            if self._before is not None:
                saved.resume(run, self._before)
            elif trainer.global_step and self._given.run is None:  # a checkpoint that was made without trackbridge
                run.load_state_dict({"step": trainer.global_step})
            self._training = Training(trainer, pl_module, run, *self._count)
        except BaseException as error:
            self._given.end(run, error)
            raise

    # its batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._training is not None:
            seconds, self._fetch_s = self._fetch_s, 0.0
            self._training.batch_begins(batch, batch_idx, self._ids, seconds)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._training is not None:
            self._training.backward(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._training is not None:
            self._training.before_update(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._training is not None:
            self._training.batch_ends()

    # what is no training

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._training is not None:
            self._pauses.enter_context(self._training.run.pause("eval"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._pauses.close()

    def state_dict(self) -> dict[str, Any]:
        if self._training is not None:
            with self._part:
                self._state = self._training.run.state_dict()
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = dict(state_dict)

    def _saving(self, original: Method) -> Method:
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            training = self._training
            if training is None:
                return original(filepath, *args, **kwargs)
            self._state = {}
            with training.run.pause("save"):
                found = original(filepath, *args, **kwargs)
            if self._state:  # one of weights only is no state to go back to
                with self._part:
                    training.run.checkpoint_saved(filepath, self._state["step"])
            return found

        return save_checkpoint

    # the end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        self._pauses.close()
        self._wires.cut()
        with self._part:
            self._forget_ids()
        if training is None:
            return
        with self._part:
            training.close()
            self._state = training.run.state_dict()
            self._before = None if self._given.run is not None else self._state  # another fit goes on where this one ends
        if type(error).__name__ == "SIGTERMException":  # a SystemExit without a code, by which Lightning leaves
            error = SystemExit("SIGTERM")
        self._given.end(training.run, error)

    def _forget_ids(self) -> None:
        ids, self._ids = self._ids, None
        if ids is not None:
            ids.remove()

    # around a fetch

    def _loading(self, loop: Any, original: Method) -> Method:
        """The loaders are ready, and no iterator is made yet."""

        def load(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            with self._part:
                self._forget_ids()
                loaders = loop._combined_loader.flattened
                self._ids = SampleIds(loaders[0]) if len(loaders) == 1 else None
            return found

        return load

    def _before_fetch(self, original: Method) -> Method:
        def before(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._fetch_began = time.perf_counter()
            return found

        return before

    def _after_fetch(self, original: Method) -> Method:
        def after(*args: Any, **kwargs: Any) -> Any:
            self._fetch_s += time.perf_counter() - self._fetch_began
            return original(*args, **kwargs)

        return after


def _plain(hparams: Any) -> dict[str, Any]:
    """A module's hyperparameters, values that are no plain ones by their text."""
    if not isinstance(hparams, Mapping):
        return {}
    plain = (bool, int, float, str, list, tuple, dict, type(None))
    return {str(name): value if isinstance(value, plain) else str(value) for name, value in hparams.items()}
