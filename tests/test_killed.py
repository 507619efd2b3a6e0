"""The demo's trainer is killed just after its spike: the shipper, or later `trackbridge sync`, delivers all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import trackbridge
from trackbridge import shipper
from trackbridge.backends.wandb_file import load as read_wandb


def trainer(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
        "TRACKBRIDGE_RECORDER__UPLOAD_BATCHES": "true",
    }
    command = [sys.executable, "-m", "trackbridge.demo.train", "--quick", "--steps", "2000"]
    command += ["--backend", "mlflow,tensorboard,wandb", "--dir", str(tmp_path / "runs")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=tmp_path
    )


def shippers(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "trackbridge.shipper" in words and str(run) in words:
            found.append(process)
    return found


def run_until_the_spike(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    process = trainer(tmp_path)
    assert process.stdout is not None
    run = Path()
    for line in process.stdout:
        if line.startswith("run "):
            run = Path(line.split(" in ", 1)[1].strip())
        if ": spike in" in line:
            return process, run
    raise AssertionError("the demo's trainer ended without a spike")


def everything_arrived(tmp_path: Path, run: Path) -> None:
    record = trackbridge.load(run)
    steps, losses = record.series("train/loss")
    anomaly = next(a for a in record.anomalies if a.kind == "spike")
    assert record.status == "killed" and steps[-1] >= anomaly.step
    assert {s.kind: s.lag for s in shipper.status(run)} == {"mlflow": 0, "tensorboard": 0, "wandb": 0}

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (held,) = client.search_runs(experiments, f"tags.`trackbridge.run_id` = '{run.name}'")
    assert held.info.status == "KILLED"
    history = {m.step: m.value for m in client.get_metric_history(held.info.run_id, "train/loss")}
    assert history == dict(zip(steps.tolist(), losses.tolist(), strict=True))

    rows = [(r["trackbridge/step"], r["train/loss"]) for r in read_wandb(run / "wandb").history if "train/loss" in r]
    assert rows == list(zip(steps.tolist(), losses.tolist(), strict=True))
    there = read_wandb(run / "wandb")
    assert there.exit_code not in (0, None) and "spike-capsule" in {artifact.kind for artifact in there.artifacts}

    for ref in (f"mlflow:{held.info.run_id}@{anomaly.step}", f"tensorboard:{run / 'tensorboard'}@{anomaly.step}"):
        capsule = trackbridge.pull(ref, tmp_path / "pulled" / ref.split(":")[0])
        assert capsule.anomaly.step == anomaly.step
        assert capsule.tier == "re-execute", capsule.missing


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.timeout(240)
def test_the_shipper_delivers_what_a_killed_trainer_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    process, run = run_until_the_spike(tmp_path)
    serving = shippers(run)
    kill(process)
    assert len(serving) == 1
    serving[0].wait(timeout=150)
    everything_arrived(tmp_path, run)


@pytest.mark.timeout(240)
def test_sync_delivers_when_the_shipper_was_killed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    process, run = run_until_the_spike(tmp_path)
    for serving in shippers(run):
        for child in serving.children(recursive=True):
            child.kill()
        serving.kill()
    kill(process)
    command = [sys.executable, "-m", "trackbridge.cli", "sync", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, "WANDB_MODE": "offline"})
    assert done.returncode == 0, done.stdout + done.stderr
    everything_arrived(tmp_path, run)
