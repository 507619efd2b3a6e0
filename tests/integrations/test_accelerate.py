"""Accelerate: the plain loop's series, anomalies and capsule; nothing changed; an exact replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trackbridge
from tests.integrations.accelerate_kit import ACCUMULATE, BAD, STEPS, Training, loss_of
from tests.replays import SETTINGS, data
from tests.training import setup
from trackbridge import replay
from trackbridge.replay import Rebuilt


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = Training()
    run = trackbridge.init(dir=tmp_path_factory.mktemp("accelerate"), strict=True, **SETTINGS)
    loader = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
    training.train(loader)
    run.finish()
    return run.dir


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training as a plain loop."""
    run = trackbridge.init(dir=tmp_path_factory.mktemp("plain"), strict=True, **SETTINGS)
    made = setup()
    run.watch(made.model, made.optimizer, state={"lr_scheduler": made.schedule})
    made.model.train()
    loader, step = run.batches(data()), 0
    while step < STEPS:
        for number, batch in enumerate(loader):
            loss = loss_of(made.model, batch)
            (loss / ACCUMULATE).backward()
            run.micro(loss)
            if number % ACCUMULATE == ACCUMULATE - 1:
                run.clip_grad_norm_(1.0)
                made.optimizer.step()
                run.step()
                made.schedule.step()
                made.optimizer.zero_grad()
                step += 1
                if step == STEPS:
                    break
    run.finish()
    return run.dir


def test_the_series_are_the_plain_loops(recorded: Path, plain: Path) -> None:
    ours, theirs = trackbridge.load(recorded), trackbridge.load(plain)
    assert set(ours.names) == set(theirs.names)
    for name in ours.names:
        if name.startswith(("perf/", "host/", "trackbridge/")):
            continue
        (steps, values), (their_steps, their_values) = ours.series(name), theirs.series(name)
        assert steps.tolist() == their_steps.tolist(), name
        assert values.tobytes() == their_values.tobytes(), name


def test_the_anomalies_and_the_capsule_are_the_plain_loops(recorded: Path, plain: Path) -> None:
    ours, theirs = trackbridge.load(recorded).anomalies, trackbridge.load(plain).anomalies
    facts = [(a.kind, a.step, a.onset, a.series, a.value, a.severity, a.first_mover) for a in ours]
    assert facts == [(a.kind, a.step, a.onset, a.series, a.value, a.severity, a.first_mover) for a in theirs]
    assert facts[0][:2] == ("spike", BAD)
    capsule, other = trackbridge.pull(recorded), trackbridge.pull(plain)
    assert capsule.verify() and (capsule.span, capsule.restart_step) == (other.span, other.restart_step)
    for step in capsule.steps:
        mine, their = capsule.micro_batches(0)[step], other.micro_batches(0)[step]
        assert [(m.epoch, m.index, m.sample_ids, m.fingerprint) for m in mine] == [
            (m.epoch, m.index, m.sample_ids, m.fingerprint) for m in their
        ]
        before, others = capsule.rng_states(0).before(step), other.rng_states(0).before(step)
        assert before.keys() == others.keys()
        assert all(np.array_equal(before[name], others[name]) for name in before), step


def test_watched_and_unwatched_end_in_the_same_bits(tmp_path: Path) -> None:
    training = Training()
    run = trackbridge.init(dir=tmp_path, strict=True, **SETTINGS)
    loader = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
    watched = training.train(loader, steps=8).state()
    run.finish()
    assert watched == Training().train(steps=8).state()


def build() -> Rebuilt:
    training = Training(seed=99)
    return trackbridge.accelerate.rebuild(training.accelerator, training.model, training.optimizer, training.body)


def test_the_replay_is_exact(recorded: Path) -> None:
    report = replay.rerun(trackbridge.pull(recorded), build)
    assert report.verdict == "exact", report
