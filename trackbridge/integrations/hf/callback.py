"""`Callback`: a Trainer's training, recorded."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import UsageError
from trackbridge.integrations import saved
from trackbridge.integrations.hf.finding import Caller, caller
from trackbridge.integrations.hf.training import Training
from trackbridge.run import Run, init
from trackbridge.skip import SkipPlan

logger = logging.getLogger("trackbridge")


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
        if run is not None and not isinstance(run, Run):
            raise UsageError(f"run must be a run of trackbridge.init, not a {type(run).__name__}; settings go by name")
        if run is not None and settings:
            raise UsageError(f"{', '.join(settings)} cannot be set for a run that is there: give them to trackbridge.init")
        TrackbridgeConfig.load(settings.get("settings"), **_without(settings, "settings", "config"))
        self._given = run
        self._settings = settings
        if not isinstance(skip, (SkipPlan, str, Path, type(None))):
            raise UsageError(f"skip takes a SkipPlan or the path of one, not a {type(skip).__name__}")
        self._skip = SkipPlan.load(skip) if isinstance(skip, (str, Path)) else skip
        self._training: Training | None = None
        self.run = run

    # events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = caller()
        if self._training is not None:
            self._end(UsageError("the training ended without a word, and another one began"))
        before = saved.read(Path(found.checkpoint), args.process_index) if found.checkpoint else None
        self.run = run = self._given or init(**self._asked(found, args, before))
        try:
            if before is not None:
                run.load_state_dict(before)
            elif state.global_step:  # a checkpoint that was made without trackbridge
                run.load_state_dict({"step": state.global_step})
            self._training = Training(found, run, self._skip, self._failed)
        except BaseException as error:
            self._finish(error)
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
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
        self._training.run.log({name.replace("eval_", "eval/", 1): value for name, value in numbers.items()})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is None:
            return
        run = self._training.run
        checkpoint = Path(self._training.trainer._get_output_dir(None)) / f"checkpoint-{state.global_step}"
        with run.pause("save"):
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
            training.close()
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        """End the run if it is ours; a run of the user's is the user's to end."""
        if self._given is None and self.run is not None:
            self.run.__exit__(type(error) if error is not None else None, error, None)

    # the run

    def _asked(self, found: Caller, args: Any, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """What `init` is asked for. The user's word goes first."""
        asked: dict[str, Any] = {"config": _config(found.trainer, args)}
        name = getattr(args, "run_name", None)
        if name and name != args.output_dir:  # which is its default in transformers 4
            asked["name"] = name
        if before is not None:
            asked |= {"id": before["run_id"], "resume": "auto"}
        config = {**asked["config"], **(self._settings.get("config") or {})}
        return {**asked, **self._settings, "config": config}


def _config(trainer: Any, args: Any) -> dict[str, Any]:
    """The training arguments as the Trainer's own loggers send them, and the model's configuration, as JSON."""
    found = dict(args.to_dict())
    model = getattr(trainer.model, "config", None)
    if model is not None and hasattr(model, "to_dict"):
        found["model"] = model.to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str, skipkeys=True))
    return plain


def _without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}
