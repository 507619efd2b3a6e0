"""Exactly once in W&B: twenty seeded fault schedules (`python -m tests.faults wandb --schedules 200`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.check import SCHEDULES, check, served
from tests.faults.trackers import Tracker


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracker]:
    yield from served("wandb", tmp_path_factory.mktemp("wandb"))


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_every_row_once_and_every_artifact_whole(tracker: Tracker, seed: int, tmp_path: Path) -> None:
    check(tracker, seed, tmp_path)
