"""Exactly once, against the real trackers: twenty seeded schedules each. `python -m tests.faults --schedules 200` runs more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import schedule
from tests.faults.__main__ import make
from tests.faults.trackers import Tracker

SCHEDULES = 20


def tracker(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    before = dict(os.environ)
    made = make(name, tmp_path_factory.mktemp(name))
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def tensorboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    yield from tracker("tensorboard", tmp_path_factory)


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    yield from tracker("mlflow", tmp_path_factory)


@pytest.fixture(scope="module")
def wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    yield from tracker("wandb", tmp_path_factory)


def check(tracker: Tracker, seed: int, folder: Path) -> None:
    outcome = schedule.run(tracker, seed, folder)
    print(f"{tracker.name}, seed {seed}, {outcome.rows} rows, {outcome.artifacts} artifacts", *outcome.story, sep="\n  ")
    assert not outcome.faults, outcome.faults


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_tensorboard(tensorboard: Tracker, seed: int, tmp_path: Path) -> None:
    check(tensorboard, seed, tmp_path)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_mlflow(mlflow: Tracker, seed: int, tmp_path: Path) -> None:
    check(mlflow, seed, tmp_path)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_wandb(wandb: Tracker, seed: int, tmp_path: Path) -> None:
    check(wandb, seed, tmp_path)
