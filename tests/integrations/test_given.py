"""What every integration is given, and what of a trainer's log a run takes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import trackbridge
from trackbridge.errors import ConfigError, UsageError
from trackbridge.integrations.given import Given, log
from trackbridge.run import Run


def test_wrong_settings_and_runs_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="projekt"):
        Given(None, {"projekt": "x"})
    with pytest.raises(UsageError, match="settings go by name"):
        Given("wandb", {})
    with trackbridge.init(dir=tmp_path) as run, pytest.raises(UsageError, match="project cannot be set"):
        Given(run, {"project": "x"})


def test_the_users_word_goes_first_and_of_a_trial_no_tracker_hears(tmp_path: Path) -> None:
    given = Given(None, {"dir": tmp_path, "name": "mine", "config": {"lr": 2.0}, "backend": "tensorboard"})
    run = given.begin({"lr": 1.0, "seed": 3}, trial=True, name="theirs")
    given.end(run, ValueError("no"))
    record = trackbridge.load(run.dir)
    assert record.config == {"lr": 2.0, "seed": 3} and record.info.name == "mine" and record.status == "failed"
    assert not (run.dir / "tensorboard").exists()


def test_an_error_of_ours_at_the_end_is_not_the_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(None, {"dir": tmp_path})
    run = given.begin({})
    with monkeypatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        patch.setattr(Run, "finish", lambda *args, **kwargs: 1 / 0)
        given.end(run)
    given.end(run)
    assert trackbridge.load(run.dir).status == "finished"


def test_what_is_no_scalar_is_said_and_left_out_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trackbridge")
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        log(
            run,
            {"word": "text", "row": torch.ones(3), "train/loss": 1.0, "mine": np.float32(2.5), "more": torch.tensor(3)},
            step=4,
        )
    record = trackbridge.load(run.dir)
    assert [record.series(name)[1].tolist() for name in ("mine", "more")] == [[2.5], [3.0]]
    assert not {"word", "row", "train/loss"} & set(record.names)
    for name in ("word", "row", "train/loss"):
        assert any(name in message for message in caplog.messages), name
