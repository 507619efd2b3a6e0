"""The whole demo, quick: train, spike, three trackers, out of MLflow again, the bad step bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trackbridge
from trackbridge.demo import corpus
from trackbridge.demo.picture import loss_picture
from trackbridge.demo.story import Story
from trackbridge.demo.train import Plan, Schedule

pytestmark = pytest.mark.timeout(600)  # half a minute on a quiet machine


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``trackbridge demo --quick --json`` says, from an empty folder."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "trackbridge.cli", "demo", "--quick", "--json", "--dir", "demo-run"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    broken = [promise for promise in found["promises"] if not promise["kept"]]
    assert broken == [], done.stderr
    assert done.returncode == 0, done.stderr
    return {**found, "folder": folder, "said": done.stderr}


def test_the_spike_is_where_the_bad_files_are(told: Any) -> None:
    anomaly, plan = told["anomaly"], Plan.quick()
    assert anomaly["onset"] == plan.bad_at
    assert anomaly["value"] > anomaly["expected"] + 3
    assert anomaly["first_mover"]


def test_every_tracker_has_every_loss_and_the_capsule(told: Any) -> None:
    answers = {answer["title"]: answer for answer in told["trackers"]}
    assert set(answers) == {"MLflow", "TensorBoard", "W&B (offline)"}
    for answer in answers.values():
        assert answer["steps"] == answer["equal"] == Plan.quick().steps
        assert len(answer["capsules"]) == 1 and answer["look"]


def test_no_chart_is_empty_without_a_reason(told: Any) -> None:
    from tests.reports.specs import without_series
    from trackbridge.backends import wandb_file

    directory = told["folder"] / told["directory"]
    sent = {key for row in wandb_file.load(directory / "wandb").history for key in row}
    assert without_series({*sent, *trackbridge.load(directory).names}) == []
    assert "train/loss" in without_series(sent - {"train/loss"}), "it can fail"


def test_the_verdict_is_exact_on_the_capsule_from_mlflow(told: Any) -> None:
    assert told["replay"]["verdict"] == "exact"
    assert Path(told["capsule"]).is_relative_to((told["folder"] / "demo-run" / "pulled").resolve())
    assert Plan.quick().bad_at in [step["step"] for step in told["replay"]["steps"]]


def test_a_difference_in_the_last_bit_would_be_a_broken_promise(told: Any) -> None:
    story = Story(told["folder"] / "demo-run", Plan.quick())
    story.record = trackbridge.load(told["folder"] / told["directory"])
    losses = story.record.series("train/loss")[1]
    losses[7] = np.nextafter(losses[7], np.inf)
    equal = {answer.title: answer.equal for answer in story.delivered()}
    steps = Plan.quick().steps
    assert equal == {"MLflow": steps - 1, "TensorBoard": steps, "W&B (offline)": steps - 1}, "float32 cannot show it"
    assert [promise.kept for promise in story.promises] == [False, True, False]


def test_it_leaves_what_its_documentation_says(told: Any) -> None:
    folder = told["folder"] / "demo-run"
    there = {path.name for path in folder.iterdir()}
    assert {
        "report.html",
        "loss.svg",
        "runs",
        "mlflow.db",
        "mlartifacts",
        "tensorboard",
        "pulled",
        "wandb-report.json",
    } <= there
    assert [path.name for path in told["folder"].iterdir()] == ["demo-run"], "nothing lands beside it"
    assert "spike at" in (folder / "loss.svg").read_text(encoding="utf-8")
    assert "Where it is" in (folder / "report.html").read_text(encoding="utf-8")


def test_it_shows_what_it_promises(told: Any) -> None:
    said = told["said"]
    shown = ("first mover: ", "the run: trackbridge show ", "replay verdict: exact", "report.html")
    for words in (*shown, "mlflow ui", "tensorboard --logdir", "wandb leet"):
        assert words in said


def test_the_corpus_is_split_by_file_and_the_same_each_time() -> None:
    first, second = corpus.read(), corpus.read()
    for part in ("train", "held_out", "binary"):
        assert np.array_equal(getattr(first, part), getattr(second, part))
    assert first.files["train"] > 10 * first.files["held_out"] > 0
    assert np.mean(first.train < 128) > 0.99, "text"
    assert np.mean(first.binary < 128) < 0.9, "not text"


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    schedule = Schedule(warmup=10, steps=100)
    factors = [schedule(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0, abs=0.03)
    assert factors[-1] == pytest.approx(0.1)


def test_a_gap_in_the_loss_is_a_gap_in_the_picture() -> None:
    svg = loss_picture([0, 1, 2, 3], [1.0, float("nan"), 2.0, 3.0], marks=[(1, 1, "<b>")], title="loss")
    assert svg.count("<polyline") == 2
    assert "&lt;b&gt;" in svg and "<b>" not in svg
