"""The whole way, per tracker: recorded, delivered, pulled from the tracker alone, run again in a fresh process, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import replays_hard
from tests.wandb_server import WandbServer
from trackbridge import shipper
from trackbridge.backends.base import BackendConfig
from trackbridge.backends.held import MANIFEST
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.backends.wandb import WandbConfig
from trackbridge.fetch import pull
from trackbridge.replay import ReplayReport

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of `tests.replays_hard`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return replays_hard.record(tmp_path_factory.mktemp("runs"))
    finally:
        torch.set_num_threads(threads)


def delivered(directory: Path, backend: BackendConfig) -> None:
    report = shipper.sync(directory, [backend], timeout=90)
    assert report.complete, str(report)


def exact_elsewhere(reference: str, directory: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """Pull in a process that knows nothing of the run directory, and replay there."""
    moved = directory.with_name("moved-away")
    directory.rename(moved)
    try:
        code = (
            "import torch; torch.set_num_threads(1)\n"
            "from trackbridge import pull, replay\nfrom tests.replays_hard import build\n"
            f"capsule = pull({reference!r}, {str(tmp_path / 'pulled')!r})\n"
            "print(capsule.path)\nprint(replay.rerun(capsule, build).model_dump_json())"
        )
        known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=known, check=False)
    finally:
        moved.rename(directory)
    assert done.returncode == 0, done.stderr[-3000:]
    path, text = done.stdout.splitlines()[-2:]
    report = ReplayReport.model_validate_json(text)
    assert report.verdict == "exact", report.to_markdown()
    assert report.restart_step < report.anomaly_step < report.last_step and len(report.steps) >= 10
    (original,) = directory.glob("capsules/spike-*")
    assert _digests(Path(path)) == _digests(original), "every file as it was sealed"


def _digests(capsule: Path) -> dict[str, str]:
    files = json.loads((capsule / MANIFEST).read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


def test_the_recording_has_it_all(hard: Path) -> None:
    """Resumed, skipped batches before the spike, the second epoch, workers, accumulation: else the tests below prove less."""
    capsule = pull(hard)
    assert capsule.attempt == 1 and capsule.tier == "re-execute" and capsule.missing == []
    frame = capsule.batches.frame
    bad = frame[frame["step"] == capsule.step]
    assert list(zip(bad["epoch"], bad["index"], strict=True)) == [(1, 11), (1, 12)] and set(frame["workers"]) == {2}
    assert set(frame["epoch"]) == {0, 1}, "the window crosses the epoch's end"
    second = frame[frame["epoch"] == 1]["index"].tolist()
    assert 1 not in second and 6 not in second and {0, 2, 5, 7} <= set(second), "batches 1 and 6 were skipped"


def test_tensorboard(hard: Path, tmp_path: Path) -> None:
    delivered(hard, TensorboardConfig(logdir=tmp_path / "logs"))
    exact_elsewhere(f"tensorboard:{tmp_path / 'logs'}@96", hard, tmp_path, {})


def test_mlflow(hard: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    delivered(hard, MlflowConfig(tracking_uri=uri, experiment="hard", artifact_location=str(tmp_path / "artifacts")))
    exact_elsewhere("mlflow:hard", hard, tmp_path, {"MLFLOW_TRACKING_URI": uri})


def test_wandb(hard: Path, tmp_path: Path, wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    delivered(hard, WandbConfig(entity="team"))
    reference = "wandb:team/trackbridge/hard@96"
    exact_elsewhere(reference, hard, tmp_path, {})
    _resumes(wandb_server, reference, hard, tmp_path)


def _resumes(server: WandbServer, reference: str, hard: Path, tmp_path: Path) -> None:
    """What an interrupted pull has brought is not fetched again: the server has other bytes now, and nobody notices."""
    from trackbridge.backends import wandb_fetch

    dest = tmp_path / "resumed"
    where, step = reference.removeprefix("wandb:").split("@")
    first = wandb_fetch.fetch_capsule(where, int(step), dest)
    part = dest / f".{first.name}.part"
    first.rename(part)
    (part / "window.parquet").unlink()
    lost = (part / "layers.parquet").read_bytes()
    for key, value in server.storage.items():
        if value == lost:
            server.storage[key] = b"?" * len(lost)
    again = wandb_fetch.fetch_capsule(where, int(step), dest)
    assert (again / "layers.parquet").read_bytes() == lost and (again / "window.parquet").exists()
    assert not part.exists()
    shutil.rmtree(dest)
