"""MLflow, read back with its own client: a SQLite file, and a real server on loopback that is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trackbridge.backends import mlflow_names
from trackbridge.backends.mlflow import MlflowConfig, fetch_capsule
from trackbridge.errors import ConfigError, ReferenceNotFoundError, Rejected, RetryLater, TrackbridgeError
from trackbridge.records import Params, RunInfo
from trackbridge.testing import BackendContract, ReadBack, anomaly, artifact, deliver, end, newest, row, rows, run_info

CLAMP = 1.7976931348623157e308


@pytest.fixture(autouse=True)
def shipper_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shipper sets in its own process."""
    for name, text in MlflowConfig.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def read_back(config: MlflowConfig, run: RunInfo) -> ReadBack:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(config.uri)
    experiment = client.get_experiment_by_name(config.experiment or run.project)
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`trackbridge.run_id` = '{run.run_id}'")
    run_id, tags = found.info.run_id, found.data.tags
    original = {mlflow_names.key(text): text for tag, text in tags.items() if tag.startswith("trackbridge.name.")}
    history = {original.get(key, key): client.get_metric_history(run_id, key) for key in found.data.metrics}
    attempt_at = {metric.timestamp: int(metric.value) for metric in history["trackbridge/attempt"]}
    split = {name: newest((attempt_at[m.timestamp], m.step, m.value) for m in points) for name, points in history.items()}
    status = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed", "RUNNING": None}[found.info.status]
    names = [tag.removeprefix("trackbridge.artifact.") for tag in tags if tag.startswith("trackbridge.artifact.")]
    prefix = "trackbridge.anomaly."
    return ReadBack(
        series={name: current for name, (current, _) in split.items()},
        superseded={name: old for name, (_, old) in split.items()},
        artifacts={name: download(client, run_id, name) for name in names},
        params={original.get(key, key): text for key, text in found.data.params.items()},
        anomalies={tag.removeprefix(prefix): text for tag, text in tags.items() if tag.startswith(prefix)},
        status=status,  # type: ignore[arg-type]
    )


def download(client: Any, run_id: str, name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(client.download_artifacts(run_id, name, temporary))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- a database


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests here, each with an experiment of its own: creating it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


class TestDatabase(BackendContract):
    infinity = "clamped"

    @pytest.fixture(autouse=True)
    def _uri(self, database: str) -> None:
        self.uri = database

    def config(self, tmp_path: Path) -> MlflowConfig:
        return MlflowConfig(tracking_uri=self.uri, experiment=str(tmp_path), artifact_location=f"{tmp_path}/mlruns")

    def read_back(self, config: MlflowConfig, run: RunInfo) -> ReadBack:
        return read_back(config, run)


# -- a server


class Server:
    """A real `mlflow server` on loopback, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self.port),
                   "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
                   "--artifacts-destination", str(self.folder / "artifacts")]  # fmt: skip
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "server.log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


class TestServer(BackendContract):
    infinity = "clamped"

    @pytest.fixture(autouse=True)
    def _uri(self, server: Server) -> None:
        self.uri = server.uri

    def config(self, tmp_path: Path) -> MlflowConfig:
        return MlflowConfig(tracking_uri=self.uri, experiment=str(tmp_path))

    def read_back(self, config: MlflowConfig, run: RunInfo) -> ReadBack:
        return read_back(config, run)


def test_placeholder() -> None:
    assert json and fetch_capsule and ConfigError and ReferenceNotFoundError and Rejected and RetryLater and TrackbridgeError
    assert Params and anomaly and artifact and deliver and end and row and rows and run_info and CLAMP
