"""From the capsule of a spike to a training that goes on without its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

import trackbridge
from tests import capsules, replays
from tests.capsules import adopt, edit
from tests.training import setup, train
from trackbridge.capsule import load
from trackbridge.errors import UsageError
from trackbridge.fetch import pull
from trackbridge.replay import rerun, skip_plan

LAST = 53  # the last step of an epoch of six


def spiked(directory: Path, bad: int) -> Path:
    run = trackbridge.init(dir=directory, strict=True, **replays.SETTINGS)
    train(setup(run=run), run.batches(replays.data(bad_step=bad)), steps=replays.STEPS)
    run.finish()
    return run.dir


@pytest.mark.parametrize("bad", [replays.BAD, LAST], ids=["in the middle", "d10: the last batch of an epoch"])
def test_training_again_with_the_plan_leaves_out_exactly_the_spikes_batches(tmp_path: Path, bad: int) -> None:
    """Two micro-batches, in their own epoch, in a second run of the same program; what follows is what it would have been."""
    capsule = pull(spiked(tmp_path / "first", bad))
    assert capsule.anomaly.onset == bad and rerun(capsule, replays.build).verdict == "exact"
    plan = skip_plan(capsule)
    guilty = {micro.sample_ids for micro in capsule.batches[bad]}
    assert len(plan.skips) == 2 and {skip.sample_ids for skip in plan.skips} == guilty
    assert all(skip.epoch == bad // 6 and skip.loader == 0 for skip in plan.skips)
    plan.save(tmp_path / "plan.json")

    again = trackbridge.init(dir=tmp_path / "second", strict=True, **replays.SETTINGS)
    feed = again.batches(replays.data(bad_step=bad), skip=tmp_path / "plan.json")
    train(setup(run=again), feed, steps=replays.STEPS)
    again.finish()
    assert feed.skipped == 2
    assert not [anomaly for anomaly in trackbridge.load(again.dir).anomalies if anomaly.onset >= bad - 2]


def test_every_rank_of_the_capsule_gets_its_own_entries(tmp_path: Path) -> None:
    path = capsules.make(tmp_path / "spike-13")
    for name in ("batches.parquet", "rng.safetensors"):
        adopt(path, f"rank-0001/{name}", (path / "rank-0000" / name).read_bytes())
    edit(path, lambda manifest: manifest.update(ranks=[0, 1], world_size=2))
    plan = skip_plan(load(path))
    assert [skip.rank for skip in plan.skips] == [0, 0, 1, 1]
    assert {skip.sample_ids for skip in plan.skips} == {(12, 13)} and {skip.index for skip in plan.skips} == {None}


def test_what_the_record_does_not_identify_cannot_be_skipped(tmp_path: Path) -> None:
    capsule = load(capsules.make(tmp_path / "spike-13"))
    with pytest.raises(UsageError, match="no batch of step 99 was recorded"):
        skip_plan(capsule, (99,))
