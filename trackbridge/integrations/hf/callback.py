"""`Callback`: a Trainer's training, recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trackbridge.errors import Part, UsageError
from trackbridge.integrations import saved
from trackbridge.integrations.given import Given, log
from trackbridge.integrations.hf.finding import caller
from trackbridge.integrations.hf.training import Training
from trackbridge.run import Run
from trackbridge.skip import SkipPlan


class Callback(TrainerCallback):  # type: ignore[misc]
    """Records what a `Trainer` trains: ``Trainer(..., callbacks=[trackbridge.hf.Callback(...)])``.

    Args:
        run: a run of yours, from `trackbridge.init`, which you finish. By default each training makes its own and finishes it.
        skip: a `SkipPlan` or its file: batches of the training data to leave out.
        settings: what `trackbridge.init` takes (``backend="wandb"``, ``project=...``, ``detection={...}``); not with `run`. The
            training arguments and the model's configuration are the run's config unless you say otherwise.

    `run` is that of the training under way or the last one, None before the first. A training resumed from a checkpoint goes on
    with the run that made it. The training stops for an anomaly only if ``stop_on_anomaly`` is set.

    Raises `ConfigError` or `UsageError` for wrong settings, here and not when the training begins.
    """

    def __init__(self, run: Run | None = None, *, skip: SkipPlan | str | Path | None = None, **settings: Any) -> None:
        self._given = Given(run, settings)
        if not isinstance(skip, (SkipPlan, str, Path, type(None))):
            raise UsageError(f"skip takes a SkipPlan or the path of one, not a {type(skip).__name__}")
        self._skip = SkipPlan.load(skip) if isinstance(skip, (str, Path)) else skip
        self._training: Training | None = None
        self._part = Part("the Hugging Face callback")
        self.run = run

    # events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = caller()
        if self._training is not None:
            self._end(UsageError("the training ended without a word, and another one began"))
        before = saved.read(Path(found.checkpoint), args.process_index) if found.checkpoint else None
        self.run = run = self._given.begin(_config(found.trainer, args), **_asked(args, before))
        try:
            if before is not None:
                saved.resume(run, before)
            elif state.global_step:  # a checkpoint that was made without trackbridge
                run.load_state_dict({"step": state.global_step})
            self._training = Training(found, run, self._skip, self._failed)
        except BaseException as error:
            self._given.end(run, error)
            raise

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.epoch_begins()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._training is not None and self._training.run.agree_to_stop():
            control.should_training_stop = True
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._training is None or args.report_to:  # the Trainer's own loggers have them
            return
        with self._part:
            numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
            log(self._training.run, {name.replace("eval_", "eval/", 1): value for name, value in numbers.items()})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is None:
            return
        run, checkpoint = self._training.run, Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with self._part, run.pause("save"):
            if checkpoint.exists():  # a search over hyperparameters saves elsewhere
                now = run.state_dict()
                saved.write(checkpoint, args.process_index, now)
                if not args.save_only_model:
                    run.checkpoint_saved(checkpoint, now["step"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._end(None)

    # the end

    def _failed(self, error: BaseException) -> None:
        if self._training is not None:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        if training is not None:
            with self._part:
                training.close()
            self._given.end(training.run, error)


def _asked(args: Any, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `init` is asked for: the Trainer's name for the run, and the run that it resumes."""
    asked: dict[str, Any] = {}
    name = getattr(args, "run_name", None)
    if name and name != args.output_dir:  # which is its default in transformers 4
        asked["name"] = name
    if before is not None:
        asked |= {"id": before["run_id"], "resume": "auto"}
    return asked


def _config(trainer: Any, args: Any) -> dict[str, Any]:
    """The training arguments as the Trainer's own loggers send them, and the model's configuration, as JSON."""
    found = dict(args.to_dict())
    model = getattr(trainer.model, "config", None)
    if model is not None and hasattr(model, "to_dict"):
        found["model"] = model.to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str, skipkeys=True))
    return plain
