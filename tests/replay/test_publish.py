"""What the lab found reaches the trackers as a new version of the capsule, through the journal like everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import trackbridge
from tests.replay import causes
from tests.replay.test_counterfactual import CAUSES
from trackbridge import history
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.cli import app
from trackbridge.errors import UsageError
from trackbridge.fetch import pull
from trackbridge.journal import JournalReader
from trackbridge.records import Artifact
from trackbridge.rundir import RunDirectory
from trackbridge.seal import artifact_for
from trackbridge.shipping.publish import publish

BUILD = "tests.replay.test_counterfactual:build"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def test_a_replay_is_published_where_its_run_is(tmp_path: Path, database: str) -> None:
    torch.set_num_threads(1)
    cause = CAUSES["bad-batch"].cause
    mlflow = MlflowConfig(tracking_uri=database, artifact_location=f"{tmp_path}/mlruns")
    run = causes.record(tmp_path / "runs", cause, backend=["tensorboard", mlflow])
    trackbridge_id = history.load(run).info.run_id
    assert pull(f"mlflow:{trackbridge_id}", tmp_path / "before").counterfactuals is None

    command = ["replay", str(run), "--build", BUILD, "--try", "skip-batch,lower-lr=0.5", "--publish"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "tensorboard: delivered" in shown.stderr and "mlflow: delivered" in shown.stderr
    here = pull(run)
    for reference in (f"mlflow:{trackbridge_id}", f"tensorboard:{run}"):
        there = pull(reference, tmp_path / reference.partition(":")[0])
        assert there.counterfactuals == here.counterfactuals and there.replay == here.replay
        assert there.replay is not None and there.replay.verdict == "exact"
    record = trackbridge.load(run)
    assert [artifact.name for artifact in record.artifacts] == [record.artifacts[0].name] * 2
    assert record.status == "finished" and not record.damage


def test_a_run_that_is_being_recorded_is_left_alone(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path)
    run.step(1.0)
    directory = RunDirectory(run.dir)
    with pytest.raises(UsageError, match="still being recorded"):
        publish(directory, Artifact(-1, 0, 0.0, "spike", "spike-capsule", "capsules/spike-1"))
    run.finish()
    seq = publish(directory, Artifact(-1, 0, 0.0, "spike", "spike-capsule", "capsules/spike-1"))
    last = JournalReader(directory.rows()).read()[-1]
    assert isinstance(last, Artifact) and last.seq == seq


def test_a_capsule_that_is_nobodys_is_not_published(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = causes.record(tmp_path / "runs", CAUSES["bad-batch"].cause)
    copy = pull(run, tmp_path / "copy")
    shown = CliRunner().invoke(app, ["replay", str(copy.path), "--build", BUILD, "--publish"])
    assert shown.exit_code == 3 and "is not in its run's folder" in shown.stderr
    assert artifact_for(run, copy.anomaly, pull(run).path).kind == "spike-capsule"
