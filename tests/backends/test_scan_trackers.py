"""`scan` on what the trackers' own SDKs have written, with nothing of trackbridge in the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from wandb_kit import Connect

from tests.detectors.kit import loss_curve
from tests.wandb_server import WandbServer
from trackbridge import pull
from trackbridge.errors import ReferenceNotFoundError, TrackbridgeError, UsageError
from trackbridge.records import RunInfo
from trackbridge.scan import Scan, scan
from trackbridge.testing import deliver, end, rows

STEPS = 300
LOGGED = """
import sys, numpy as np, wandb
loss = np.load(sys.argv[1])
settings = wandb.Settings(x_disable_stats=True, console="off")
with wandb.init(project="old", id="before", dir=sys.argv[2], settings=settings) as run:
    for i, value in enumerate(loss):
        run.log({"train/loss": value, "train/global_step": 10 * i, "note": "text"})
        if i % 10 == 0:
            run.log({"val_loss": 3.0})
"""


@pytest.fixture
def loss() -> np.ndarray:
    curve = loss_curve(STEPS)
    curve[200:203] += 2
    curve[250] = np.nan
    return curve


def found_all(found: Scan, column: str, scale: int = 1) -> None:
    assert found.columns == {"train/loss": column} and len(found.steps) == STEPS
    assert [(a.kind, a.onset) for a in found.anomalies] == [("spike", 200 * scale), ("nonfinite", 250 * scale)]


def logged_with_wandb(loss: np.ndarray, folder: Path, **env: str) -> None:
    np.save(folder / "loss.npy", loss)
    command = [sys.executable, "-c", LOGGED, str(folder / "loss.npy"), str(folder)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_wandb_offline(loss: np.ndarray, tmp_path: Path) -> None:
    logged_with_wandb(loss, tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    found_all(scan(tmp_path / "wandb", step="train/global_step"), "train/loss", 10)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-before.wandb")
    assert scan(file, loss="val_loss").columns == {"train/loss": "val_loss"}


def test_wandb_online(loss: np.ndarray, tmp_path: Path, wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    logged_with_wandb(loss, tmp_path, WANDB_ENTITY=wandb_server.entity)
    found_all(scan(f"wandb:{wandb_server.entity}/old/before", step="train/global_step"), "train/loss", 10)
    with pytest.raises(ReferenceNotFoundError, match="there is no run"):
        scan(f"wandb:{wandb_server.entity}/old/absent")
    with pytest.raises(UsageError, match="ENTITY/PROJECT/RUN_ID"):
        scan("wandb:before")


def test_our_own_rows_online_are_at_our_step(
    wandb_server: WandbServer, connect: Connect, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at W&B's count of rows."""
    backend = connect(run)
    deliver(backend, rows(range(100, 110)))
    backend.close(end(10), timeout=20)
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    assert scan(f"wandb:{wandb_server.entity}/{run.project}/{run.run_id}").steps.tolist() == list(range(100, 110))


def test_mlflow(loss: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    run = client.create_run(client.create_experiment("old")).info.run_id
    client.log_batch(run, [Metric("loss", float(v), 1000 + i, i) for i, v in enumerate(loss)])
    client.log_metric(run, "val_loss", 3.0)
    found_all(scan(f"mlflow:{run}"), "loss")
    with pytest.raises(ReferenceNotFoundError, match="has no run"):
        scan("mlflow:0123456789")


def test_tensorboard(loss: np.ndarray, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "logs")
    for i, value in enumerate(loss):
        writer.add_scalar("Loss/train", value, i)
        writer.add_scalar("Loss/val", 3.0, i)
    writer.close()
    found_all(scan(tmp_path / "logs"), "Loss/train")
    found_all(scan(f"tensorboard:{tmp_path / 'logs'}"), "Loss/train")
    other = SummaryWriter(tmp_path / "logs" / "second")
    other.add_scalar("Loss/train", 1.0, 0)
    other.close()
    found_all(scan(tmp_path / "logs", loss="Loss/train"), "Loss/train")
    assert len(scan(tmp_path / "logs", loss="second:Loss/train").steps) == 1


def test_tensorboard_tensors(loss: np.ndarray, tmp_path: Path) -> None:
    """TensorFlow 2 writes scalars as tensors."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util import tensor_util

    writer = EventFileWriter(str(tmp_path))
    for i, value in enumerate(loss):
        tensor = tensor_util.make_tensor_proto(np.float32(value))
        writer.add_event(Event(step=i, summary=Summary(value=[Summary.Value(tag="epoch_loss", tensor=tensor)])))
    writer.close()
    found_all(scan(tmp_path), "epoch_loss")


def test_a_folder_of_mlflow(loss: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLflow that refuses such a store is one line with the way out; told to take it, its runs are read."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", folder := (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(folder)  # an earlier test may have told MLflow of another one for good
    name = client.create_run(client.create_experiment("old")).info.run_id
    client.log_batch(name, [Metric("train_loss", float(value), 1000 + i, i) for i, value in enumerate(loss)])
    found_all(scan(f"mlflow:{name}"), "train_loss")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other := (tmp_path / "other").as_uri())  # MLflow keeps what it opened
    try:
        MlflowClient(other)
    except MlflowException:
        for read in (scan, pull):
            with pytest.raises(TrackbridgeError, match="MLFLOW_ALLOW_FILE_STORE=true") as caught:
                read(f"mlflow:{name}")
            assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
