"""Group C of the public reports: what detectors got wrong for others, one test per report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import trackbridge
from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.detectors import Watch, detect
from trackbridge.provenance import differences
from trackbridge.records import MicroBatch, StepContext


def test_c1_a_nan_is_an_event_at_its_step() -> None:
    loss = loss_curve(20)
    loss[7] = math.nan
    (event,) = detect(range(20), loss)
    assert (event.kind, event.step, event.onset, event.severity) == ("nonfinite", 7, 7, 1.0)
    assert math.isnan(event.value) and event.recovered_after == 1


def test_c2_ordinary_values_are_no_outliers() -> None:
    loss = np.append(2 + 0.04 * np.random.default_rng(0).standard_normal(64), [2.0, 4.0])
    (event,) = detect(range(66), loss)
    assert (event.kind, event.step) == ("spike", 65)
    assert event.expected == pytest.approx(2.0, abs=0.05)


def test_c4_a_flat_baseline_still_alarms() -> None:
    (event,) = detect(range(51), [1.0] * 50 + [5.0])
    assert (event.kind, event.step) == ("spike", 50)


def test_c4_a_wiggle_above_a_flat_baseline_is_no_event() -> None:
    loss = 1 + 1e-7 * np.random.default_rng(0).standard_normal(60)
    loss[50] = 1.0001
    assert detect(range(60), loss) == []


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_c4_a_lasting_step_is_one_shift(noise: float) -> None:
    loss = np.append(np.ones(100), np.full(200, 2.0)) + noise * np.random.default_rng(1).standard_normal(300)
    (event,) = detect(range(300), loss)
    assert (event.kind, event.onset, event.recovered_after) == ("shift", 100, None)


def test_c5_a_jump_after_a_resume_says_so() -> None:
    loss = loss_curve(400)
    first = Watch()
    watch_all(first, rows({"train/loss": loss}), finish=False)
    second = Watch()
    second.load_state_dict(first.state_dict())
    second.note("resume", 400)
    (event,) = watch_all(second, rows({"train/loss": [3.5, 3.4, 3.1, 2.6, 2.4, 2.4, 2.4, 2.4]}, start=400, attempt=1))
    assert (event.step, event.notes, event.attempt) == (400, ("after_resume",), 1)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_c6_a_slow_drift_is_told_before_the_jump(noise: float) -> None:
    random = np.random.default_rng(2)
    grad = np.exp(noise * random.standard_normal(4000))
    grad[1500:3500] *= 1.001 ** np.arange(2000)
    grad[3500:] *= 1.001**2000
    loss = loss_curve(4000)
    loss[3500:3530] += 4 * 0.85 ** np.arange(30)
    grad[3500:3530] *= 1 + 20 * 0.85 ** np.arange(30)
    events = watch_all(Watch(), rows({"train/loss": loss, "grad/norm": grad}))
    drifts = [e for e in events if e.kind == "drift"]
    spikes = [e for e in events if e.kind != "drift"]
    assert len(drifts) == 1 and 1500 < drifts[0].step < 2300 and drifts[0].series == "grad/norm"
    assert len(spikes) == 1 and spikes[0].onset == 3500
    assert spikes[0].first_mover == ("grad/norm", drifts[0].onset)


def test_c7_scaler_skips_are_no_spikes() -> None:
    steps = 120
    grad = np.exp(0.1 * np.random.default_rng(0).standard_normal(steps)) * 2.2
    grad[:12] = math.inf
    skipped = np.minimum(np.arange(1, steps + 1), 12)
    bad = np.where(np.arange(steps) < 12, 5.0, 0.0)
    watch = Watch()
    series = {
        "train/loss": loss_curve(steps), "grad/norm": grad, "grad/nonfinite": bad, "layer/a/grad_nonfinite": bad,
        "optim/skipped": skipped,
    }  # fmt: skip
    assert watch_all(watch, rows(series)) == []
    assert watch.amp_skips == 12


def test_c7_a_nan_loss_in_a_skipped_step_is_still_an_event() -> None:
    loss = loss_curve(60)
    loss[40] = math.nan
    skipped = np.where(np.arange(60) >= 40, 1, 0)
    (event,) = watch_all(Watch(), rows({"train/loss": loss, "optim/skipped": skipped}))
    assert (event.kind, event.step) == ("nonfinite", 40)


def test_c7_a_steady_norm_of_any_size_is_no_event() -> None:
    assert detect(range(500), loss_curve(500), np.full(500, 2.2)) == []


def test_c8_stairs_down_are_no_spikes_even_when_each_step_rises_a_little() -> None:
    random = np.random.default_rng(0)
    stairs = [np.linspace(level, level * 1.08, 150) for level in (1.0, 0.6, 0.3)]
    assert detect(range(450), np.concatenate(stairs) + 0.01 * random.standard_normal(450)) == []


def test_c8_periodic_spikes_are_one_cause() -> None:
    loss = loss_curve(1200)
    loss[199::100] += 1.5
    events = detect(range(1200), loss)
    assert [e.onset for e in events] == [199, 299, 399]
    assert events[0].notes == ("periodic: every 100 steps, 11 times",)


def test_c9_the_level_of_a_loss_does_not_matter() -> None:
    """The step loss is a mean, so accumulation does not scale it; and if it did, bands follow the scale."""
    loss = loss_curve(800, seed=5)
    loss[600] += 1
    for factor in (1, 4, 8):
        assert [e.step for e in detect(range(800), factor * loss)] == [600]


def test_c5_a_run_resumed_without_its_state_is_not_blind_and_says_after_resume(tmp_path: Path) -> None:
    """The optimizer's state is not restored; nor is ours."""
    for attempt in range(2):
        run = trackbridge.init(dir=tmp_path, id="a", resume="auto", recorder={"enabled": False})
        start = 300 * attempt
        for step, loss in enumerate(loss_curve(600)[start : start + 300]):
            run.step(loss=float(loss) + 2.0 * (attempt == 1 and step < 3))
        run.finish()
    (event,) = trackbridge.load(run.dir).anomalies
    assert (event.onset, event.attempt, event.kind) == (300, 1, "spike") and "after_resume" in event.notes


def test_c6_runs_with_another_version_of_a_library_differ_in_their_record() -> None:
    before = {"packages": {"apex": "0.1", "torch": "2.9"}, "python": "3.11"}
    after = {"packages": {"apex": "0.2", "torch": "2.9"}, "python": "3.11"}
    assert differences(before, after) == [("packages.apex", "0.1", "0.2")]


def test_c8_a_spike_in_each_short_last_batch_is_one_cause_that_names_the_batch() -> None:
    loss = loss_curve(1200)
    loss[99::100] += 1.5
    watch, latest = Watch(), {}
    for row in rows({"train/loss": loss}):
        size = 3 if row.step % 100 == 99 else 32
        micro = MicroBatch(loader=0, epoch=row.step // 100, index=row.step % 100, tensors={"x": np.zeros((size, 4))})
        latest.update({a.id: a for a in watch.update(row, StepContext(-1, row.step, 0, {}, (micro,)))})
    first, *others = latest.values()
    assert first.onset == 99 and len(others) == 2
    assert first.notes == ("a batch of 3 samples, usually 32", "periodic: every 100 steps, 12 times")


def test_c9_accumulation_changes_neither_the_step_loss_nor_anything_else(tmp_path: Path) -> None:
    """The same data at 1, 4 and 8 micro-batches, with switches in the middle of the run."""
    data = loss_curve(400)
    run = trackbridge.init(dir=tmp_path, recorder={"enabled": False})
    for step, loss in enumerate(data):
        parts = (1, 4, 8)[step // 150]
        spread = 0.3 * np.linspace(-1, 1, parts) if parts > 1 else np.zeros(1)
        for part in spread:
            run.micro(loss=torch.tensor(float(loss + part), dtype=torch.float64), tokens=64)
        run.step()
    run.finish()
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[1] == pytest.approx(data) and record.anomalies == []


def test_c9_the_step_loss_is_the_mean_and_the_worst_micro_batch_is_named(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, recorder={"enabled": False})
    for loss in (1.0, 1.0, 1.0, 9.0):
        run.micro(loss=torch.tensor(loss), sample_loss=torch.tensor([loss]))
    run.step()
    run.finish()
    record = trackbridge.load(run.dir)
    series = ("train/loss", "train/sample_loss_max", "train/sample_loss_argmax")
    assert [record.series(name)[1].tolist() for name in series] == [[3.0], [9.0], [3.0]]
