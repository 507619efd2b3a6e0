"""A spike in a `Trainer`: caught, resumed over, pulled, and replayed in a process that has only the build function."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trackbridge
from tests.integrations.hf_kit import SETTINGS, Counting, InOrder, contexts, fingerprint, status, trainer
from trackbridge import replay
from trackbridge.errors import UsageError

ROOT = Path(__file__).parents[2]
EVERY, SAVED, BAD, STEPS = 4, 28, 30, 36


def make(out: Any, *callbacks: Any, **changes: Any) -> Any:
    data = Counting(480, bad=range(8 * BAD, 8 * BAD + 8))
    return trainer(Path(out), *callbacks, data=data, kind=InOrder, max_steps=STEPS, learning_rate=1e-2, **changes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A training that was resumed from step 28, in the middle of an epoch: two attempts of one run, which end in the same."""
    directory = tmp_path_factory.mktemp("recorded")
    first = trackbridge.hf.Callback(dir=directory / "runs", strict=True, **SETTINGS)
    saving = {"save_strategy": "steps", "save_steps": EVERY}
    made = make(directory / "out", first, **saving)
    made.train()
    straight = fingerprint(made)
    second = trackbridge.hf.Callback(dir=directory / "runs", strict=True, **SETTINGS)
    made = make(directory / "out", second, **saving)
    made.train(resume_from_checkpoint=str(directory / "out" / f"checkpoint-{SAVED}"))
    assert second.run.id == first.run.id and fingerprint(made) == straight
    assert [a.step for a in first.run.anomalies] == [a.step for a in second.run.anomalies] == [BAD]
    return directory, second.run.id


def test_a_resume_goes_on_with_the_same_run(recorded: tuple[Path, str]) -> None:
    directory, run_id = recorded
    record = trackbridge.load(directory / "runs" / run_id)
    assert record.series("train/loss")[0].tolist() == list(range(STEPS)) and record.status == "finished"
    assert record.series("train/tokens")[1].tolist() == [72.0 * (step + 1) for step in range(STEPS)]
    again = contexts(record.path)[SAVED - STEPS :]
    assert {c.attempt for c in again} == {1}
    micros, numbers = [micro for context in again for micro in context.micro], range(2 * SAVED, 2 * STEPS)
    assert [(m.loader, m.epoch, m.index) for m in micros] == [(0, 0, k) for k in numbers]
    assert [m.sample_ids for m in micros] == [tuple(range(4 * k, 4 * k + 4)) for k in numbers]
    state = json.loads((directory / "out" / f"checkpoint-{SAVED}" / "trackbridge_0.json").read_text())
    assert state["run_id"] == run_id and state["step"] == SAVED


def test_exact_over_the_resume(recorded: tuple[Path, str], tmp_path: Path) -> None:
    """The window begins at the checkpoint: the first step after the resume is in it, whose random state was put back between
    its fetch and its use (D5)."""
    directory, run_id = recorded
    capsule = trackbridge.pull(f"{directory / 'runs' / run_id}@{BAD}")
    assert capsule.tier == "re-execute" and capsule.steps[0] == SAVED, capsule.steps
    own = trackbridge.hf.Callback(dir=tmp_path / "runs")
    report = replay.rerun(capsule, lambda: trackbridge.hf.rebuild(make(tmp_path / "out", own)))
    assert report.verdict == "exact", report
    assert own.run is None and not (tmp_path / "runs").exists()  # a replay is no training


def test_the_example_is_recorded_and_replayed_exactly_in_a_fresh_process(tmp_path: Path) -> None:
    """The whole of `examples/huggingface`: its run, its own `build`, the command that it prints."""
    shutil.copy(ROOT / "examples" / "huggingface" / "train.py", tmp_path)
    said = ran(tmp_path, "train.py")
    spike, command = said.splitlines()[-2:]
    assert spike.startswith("spike of train/loss at step 45")
    assert "exact" in ran(tmp_path, "-m", "trackbridge.cli", *command.split()[1:])


def ran(folder: Path, *command: str) -> str:
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_without_raw_batches_they_are_made_again_of_their_samples(recorded: tuple[Path, str], tmp_path: Path) -> None:
    directory, run_id = recorded
    copy = tmp_path / "capsule"
    shutil.copytree(next((directory / "runs" / run_id / "capsules").glob(f"spike-{BAD}")), copy)
    capsule = trackbridge.pull(copy)
    report = replay.rerun(capsule, lambda: trackbridge.hf.rebuild(make(tmp_path / "out")))
    assert report.verdict == "exact", report


def test_a_changed_training_is_not_exact(recorded: tuple[Path, str], tmp_path: Path) -> None:
    directory, run_id = recorded
    capsule = trackbridge.pull(f"{directory / 'runs' / run_id}@{BAD}")
    for change in ({"max_grad_norm": 0.5}, {"warmup_steps": 3, "weight_decay": 0.1}):
        report = replay.rerun(capsule, lambda change=change: trackbridge.hf.rebuild(make(tmp_path / "out", **change)))  # type: ignore[misc]
        assert report.verdict == "not-reproduced", (change, report)


def test_from_the_trainers_own_checkpoint(recorded: tuple[Path, str], tmp_path: Path) -> None:
    """Where no snapshot is kept, the window begins at the newest checkpoint."""
    directory, _ = recorded
    watching = trackbridge.hf.Callback(dir=tmp_path / "runs", **{**SETTINGS, "recorder": {"snapshot_every": 0}})
    made = make(tmp_path / "out", watching, save_strategy="steps", save_steps=EVERY)
    made.train(resume_from_checkpoint=str(directory / "out" / f"checkpoint-{SAVED - EVERY}"))
    capsule = trackbridge.pull(f"{watching.run.dir}@{BAD}")
    assert capsule.checkpoint is not None and capsule.steps[0] == SAVED
    report = replay.rerun(capsule, lambda: trackbridge.hf.rebuild(make(tmp_path / "out")))
    assert report.verdict == "exact", report


@pytest.mark.parametrize("state", ["none", "damaged"])
def test_a_checkpoint_without_a_run_begins_one_at_its_step(recorded: tuple[Path, str], tmp_path: Path, state: str) -> None:
    directory, run_id = recorded
    checkpoint = Path(shutil.copytree(directory / "out" / f"checkpoint-{SAVED}", tmp_path / "old"))
    (checkpoint / "trackbridge_0.json").unlink()
    if state == "damaged":
        (checkpoint / "trackbridge_0.json").write_text("{")
    watching = trackbridge.hf.Callback(dir=tmp_path / "runs", strict=True)
    made = trainer(tmp_path / "out", watching, data=Counting(480), max_steps=SAVED + 2)
    made.train(resume_from_checkpoint=str(checkpoint))
    assert watching.run.id != run_id and status(watching.run) == "finished"
    assert trackbridge.load(watching.run.dir).series("train/loss")[0].tolist() == [SAVED, SAVED + 1]


def test_rebuild_takes_a_trainer() -> None:
    with pytest.raises(UsageError, match="Trainer"):
        trackbridge.hf.rebuild(torch.nn.Linear(1, 1))
