"""One recorded spike for all replay tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import replays
from trackbridge.capsule import SpikeCapsule
from trackbridge.fetch import pull


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tests share cores; a replay uses the recorded number
    yield replays.record(tmp_path_factory.mktemp("runs"))
    torch.set_num_threads(before)


@pytest.fixture
def capsule(run_dir: Path) -> SpikeCapsule:
    return pull(run_dir)
