"""Accelerate: the plain loop's series, anomalies and capsule; nothing changed; an exact replay."""

from __future__ import annotations

from pathlib import Path

import pytest

import trackbridge
from tests.integrations.accelerate_kit import ACCUMULATE, STEPS, Training, loss_of
from tests.integrations.plain_loop import assert_the_same_series, assert_the_same_spike
from tests.replays import SETTINGS, data
from tests.training import setup
from trackbridge import replay
from trackbridge.replay import Rebuilt


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = Training()
    run = trackbridge.init(dir=tmp_path_factory.mktemp("accelerate"), strict=True, **SETTINGS)
    loader = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
    training.train(loader)
    run.finish()
    return run.dir


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training as a plain loop."""
    run = trackbridge.init(dir=tmp_path_factory.mktemp("plain"), strict=True, **SETTINGS)
    made = setup()
    run.watch(made.model, made.optimizer, state={"lr_scheduler": made.schedule})
    made.model.train()
    loader, step = run.batches(data()), 0
    while step < STEPS:
        for number, batch in enumerate(loader):
            loss = loss_of(made.model, batch)
            (loss / ACCUMULATE).backward()
            run.micro(loss)
            if number % ACCUMULATE == ACCUMULATE - 1:
                run.clip_grad_norm_(1.0)
                made.optimizer.step()
                run.step()
                made.schedule.step()
                made.optimizer.zero_grad()
                step += 1
                if step == STEPS:
                    break
    run.finish()
    return run.dir


def test_the_series_are_the_plain_loops(recorded: Path, plain: Path) -> None:
    assert_the_same_series(recorded, plain)


def test_the_anomalies_and_the_capsule_are_the_plain_loops(recorded: Path, plain: Path) -> None:
    assert_the_same_spike(recorded, plain)


def test_watched_and_unwatched_end_in_the_same_bits(tmp_path: Path) -> None:
    training = Training()
    run = trackbridge.init(dir=tmp_path, strict=True, **SETTINGS)
    loader = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
    watched = training.train(loader, steps=8).state()
    run.finish()
    assert watched == Training().train(steps=8).state()


def build() -> Rebuilt:
    training = Training(seed=99)
    return trackbridge.accelerate.rebuild(training.accelerator, training.model, training.optimizer, training.body)


def test_the_replay_is_exact(recorded: Path) -> None:
    report = replay.rerun(trackbridge.pull(recorded), build)
    assert report.verdict == "exact", report
