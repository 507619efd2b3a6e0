"""The examples of plain loops, as they stand in examples/plain: run there, and what they leave looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trackbridge
from trackbridge.backends import wandb_file
from trackbridge.history import RunRecord
from trackbridge.journal import JournalReader
from trackbridge.records import StepContext
from trackbridge.rundir import RunDirectory

EXAMPLES = Path(__file__).parents[2] / "examples" / "plain"
TOGETHER = ("auto_step", "gan", "accumulation", "iterable")


def python(cwd: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all but the one with W&B ran, one after the other in one process."""
    where = tmp_path_factory.mktemp("plain")
    files = [str(EXAMPLES / f"{name}.py") for name in TOGETHER]
    said = python(where, "-c", f"import runpy\nfor file in {files!r}: runpy.run_path(file, run_name='__main__')")
    assert said.count("loss ") == 3 and "g 0." in said
    return where


def record(folder: Path, name: str) -> RunRecord:
    found = trackbridge.load(folder / "runs" / name)
    assert found.status == "finished"
    return found


def contexts(folder: Path, name: str) -> list[StepContext]:
    read = JournalReader(RunDirectory(folder / "runs" / name).contexts()).read()
    return [context for context in read if isinstance(context, StepContext)]


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*TOGETHER, "own_wandb"}


def test_auto_step_has_every_step_its_loss_and_its_batch(folder: Path) -> None:
    found = record(folder, "auto-step")
    steps, losses = found.series("train/loss")
    assert steps.tolist() == list(range(64)) and losses[-1] < 0.2 * losses[0]
    assert len(found.series("layer/body.0.weight/grad_norm")[0]) == 64
    assert all(context.micro for context in contexts(folder, "auto-step")), "the model's inputs are the batch"


def test_of_two_networks_both_are_watched_and_a_step_is_one_of_each(folder: Path) -> None:
    found = record(folder, "gan")
    g, d, total = (found.series(name)[1] for name in ("train/loss/g", "train/loss/d", "train/loss"))
    assert np.allclose(g + d, total) and len(total) == 64
    for name in ("layer/g.0.weight/grad_norm", "layer/d.0.weight/grad_norm"):
        assert np.all(found.series(name)[1] > 0), name
    assert found.series("optim/applied")[1][-1] == 2 * 64


def test_a_step_of_accumulation_is_the_mean_of_its_micro(folder: Path) -> None:
    found = record(folder, "accumulation")
    assert len(found.series("train/loss")[0]) == 2048 // 16 // 4
    assert {len(context.micro) for context in contexts(folder, "accumulation")} == {4}
    assert np.all(found.series("grad/norm")[1] >= 0.999 * found.series("grad/norm_clipped")[1])


def test_batches_of_an_iterable_dataset_are_known_by_number_and_content(folder: Path) -> None:
    found = contexts(folder, "iterable")
    assert [context.micro[0].index for context in found] == list(range(64))
    assert len({str(context.micro[0].fingerprint) for context in found}) == 64


def test_a_wandb_run_of_ones_own_keeps_all_its_steps_beside_ours(tmp_path: Path) -> None:
    said = python(tmp_path, str(EXAMPLES / "own_wandb.py"))
    assert "everything is delivered" in said and "mine knows it: plain/own-wandb" in said
    (mine,) = (tmp_path / "wandb").glob("offline-run-*")
    history = wandb_file.load(mine).history
    assert [row["_step"] for row in history if "my/loss" in row] == list(range(32)), "none dropped (B1, wandb#2258)"
    ours = wandb_file.load(tmp_path / "runs" / "own-wandb" / "wandb").history
    losses = record(tmp_path, "own-wandb").series("train/loss")[1].tolist()
    assert [row["train/loss"] for row in ours if "train/loss" in row] == losses
    assert [row["my/loss"] for row in history if "my/loss" in row] == pytest.approx(losses)
