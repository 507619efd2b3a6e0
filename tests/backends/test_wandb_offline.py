"""W&B offline: the contract, read back from the run files, and what offline mode promises besides."""

from __future__ import annotations

from pathlib import Path

from wandb_kit import QuickConfig, anomalies, params, points, status

from trackbridge.backends import wandb_file
from trackbridge.records import RunInfo
from trackbridge.testing import BackendContract, ReadBack


class TestWandbOffline(BackendContract):
    signed_zero = True

    def config(self, tmp_path: Path) -> QuickConfig:
        return QuickConfig(mode="offline")

    def read_back(self, config: QuickConfig, run: RunInfo) -> ReadBack:
        held = wandb_file.load(Path(run.directory) / "wandb")
        artifacts = {a.name: {name: Path(file.local).read_bytes() for name, file in a.files.items()} for a in held.artifacts}
        current, superseded = points(held.history)
        found = anomalies(held.summary)
        return ReadBack(current, superseded, artifacts, params(held.config), found, status(held.exit_code))
