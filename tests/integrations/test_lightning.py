"""Lightning: the plain loop's series, anomalies and capsule; nothing changed; an exact replay."""

from __future__ import annotations

from pathlib import Path

import pytest

import trackbridge
from tests.integrations.lightning_kit import ACCUMULATE, STEPS, Lit, callback, fit, loss_of, state
from tests.integrations.plain_loop import assert_the_same_series, assert_the_same_spike
from tests.replays import SETTINGS, data
from tests.training import seed_everything
from trackbridge import replay
from trackbridge.replay import Rebuilt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    watching = callback(tmp_path_factory.mktemp("lightning"))
    fit(watching)
    assert watching.run is not None
    return watching.run.dir


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training as a plain loop."""
    run = trackbridge.init(dir=tmp_path_factory.mktemp("plain"), strict=True, **SETTINGS)
    seed_everything()
    module = Lit()
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    run.watch(module, optimizer, state={"lr_scheduler": schedule})
    module.train()
    loader, step = data(), 0
    while step < STEPS:
        for number, batch in enumerate(run.batches(loader)):
            if number % ACCUMULATE == 0:
                optimizer.zero_grad()
            loss = loss_of(module.model, batch)
            (loss / ACCUMULATE).backward()
            run.micro(loss)
            if number % ACCUMULATE == ACCUMULATE - 1:
                run.clip_grad_norm_(1.0)
                optimizer.step()
                run.step()
                schedule.step()
                step += 1
                if step == STEPS:
                    break
    run.finish()
    return run.dir


def test_the_series_are_the_plain_loops(recorded: Path, plain: Path) -> None:
    passes = {"perf/forward_s", "perf/backward_s", "perf/flops_per_s"}  # the plain loop calls only a part of what it watches
    assert_the_same_series(recorded, plain, passes)


def test_the_anomalies_and_the_capsule_are_the_plain_loops(recorded: Path, plain: Path) -> None:
    assert_the_same_spike(recorded, plain)


def test_watched_and_unwatched_end_in_the_same_bits(tmp_path: Path) -> None:
    assert state(fit(callback(tmp_path), steps=8)) == state(fit(steps=8))


def build() -> Rebuilt:
    seed_everything(99)
    return trackbridge.lightning.rebuild(Lit(), accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0, accelerator="cpu")


def test_the_replay_is_exact(recorded: Path) -> None:
    report = replay.rerun(trackbridge.pull(recorded), build)
    assert report.verdict == "exact", report
