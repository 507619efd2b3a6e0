"""W&B online: the contract, with the real client against the loopback server, read back with ``wandb.Api``."""

from __future__ import annotations

from pathlib import Path

import pytest
from wandb_kit import QuickConfig, anomalies, params, points, status

from tests.wandb_server import WandbServer
from trackbridge.records import RunInfo
from trackbridge.testing import BackendContract, ReadBack


class TestWandbOnline(BackendContract):
    @pytest.fixture(autouse=True)
    def _server(self, wandb_server: WandbServer) -> None:
        self.server = wandb_server

    def config(self, tmp_path: Path) -> QuickConfig:
        return QuickConfig(base_url=self.server.url)

    def read_back(self, config: QuickConfig, run: RunInfo) -> ReadBack:
        import wandb

        held = wandb.Api({"base_url": self.server.url}).run(f"{self.server.entity}/{run.project}/{run.run_id}")
        current, superseded = points(held.scan_history())
        artifacts = {}
        for artifact in held.logged_artifacts():
            folder = Path(artifact.download(root=str(Path(run.directory) / "back" / artifact.name)))
            files = [path for path in folder.rglob("*") if path.is_file()]
            artifacts[artifact.name.split(":")[0]] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        code = self.server.run(run.project, run.run_id).exit_code if held.state != "running" else None
        return ReadBack(current, superseded, artifacts, params(held.config), anomalies(held.summary._json_dict), status(code))
