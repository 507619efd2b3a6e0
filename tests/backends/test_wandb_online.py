"""W&B online, against the loopback server: the contract, read back with ``wandb.Api``, and faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb_kit import QuickConfig, anomalies, params, points, status

from tests.wandb_server import KEY, WandbServer
from trackbridge.records import RunInfo
from trackbridge.testing import BackendContract, ReadBack


@pytest.fixture(scope="module")
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server
        assert not server.unknown, f"the client asked for fields the server does not have: {dict(server.unknown)}"


@pytest.fixture(autouse=True)
def fresh(server: WandbServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server.forget()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


class TestWandbOnline(BackendContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: WandbServer) -> None:
        self.server = server

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
