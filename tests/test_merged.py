"""What rank 0 writes is what one process would have: torchrun over gloo on two and three ranks. Cases: tests/merged_kit.py."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trackbridge
from tests import merged_kit
from tests.fsdp2_here import there
from trackbridge.history import RunRecord

ROOT = Path(__file__).parents[1]


def recorded(folder: Path, world: int) -> Path:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [*launch, "-m", "tests.merged_kit", str(folder), *merged_kit.CASES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def runs(world: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp(f"ranks{world}"), world)


@pytest.fixture(scope="module")
def single(world: int, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The pooled batch, in one process, in no wrapper."""
    run = trackbridge.init(dir=tmp_path_factory.mktemp("single"), **merged_kit.SETTINGS)
    merged_kit.train(run, merged_kit.net(), merged_kit.data(world))
    return trackbridge.load(run.dir)


def compared(record: RunRecord) -> dict[str, list[float]]:
    """Every series that does not belong to one process, by step. The kurtosis over channels is the ranks' mean by its rule, and
    rounding is in a checksum."""
    apart = ("perf/", "mem/", "host/", "trackbridge/", "ranks/", "param/replicas_differ")
    ends = ("/channel_kurtosis", "/checksum", "/checksum_local")
    names = [n for n in record.names if not n.startswith(apart) and not n.endswith(ends)]
    return {name: record.series(name)[1].tolist() for name in names}


def assert_same(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert found.keys() - wanted.keys() == wanted.keys() - found.keys() == set()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=3e-5, abs=1e-6), name


@pytest.mark.parametrize("case", ["ddp", "fsdp", "hybrid"])
def test_f1_merged_is_what_one_process_has(case: str, runs: Path, single: RunRecord, world: int) -> None:
    """FSDP2: uneven shards, tied weights and a frozen layer; DDP: the pooled batch, activations included."""
    record = trackbridge.load(runs / there(case))
    assert record.series("ranks/merged")[1].tolist() == [world] * merged_kit.STEPS
    assert_same(compared(record), compared(single))


def test_f1_the_norm_that_the_users_own_clipping_returned(runs: Path, single: RunRecord) -> None:
    """A DTensor, under FSDP2."""
    record = trackbridge.load(runs / there("fsdp_clipped_by_the_user"))
    for name in ("grad/norm", "grad/norm_clipped", "layer/first.weight/grad_norm"):
        assert record.series(name)[1] == pytest.approx(single.series(name)[1], rel=3e-5)


def test_f2_every_parameter_has_its_norm_in_every_step(runs: Path) -> None:
    record = trackbridge.load(runs / there("fsdp"))
    trained = ("first.weight", "first.bias", "one.weight", "last.weight", "last.bias")
    for name in trained:
        steps, values = record.series(f"layer/{name}/grad_norm")
        assert steps.tolist() == [0, 1, 2] and (values > 0).all()
    assert not [name for name in record.names if "two.weight" in name], "tied: counted once"
    assert "layer/frozen.weight/grad_norm" not in record.names


def test_shards_of_either_dimension_beside_replicas(runs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    run = trackbridge.init(dir=tmp_path, **{**merged_kit.SETTINGS, "activations": {"sites": "none"}})
    merged_kit.train(run, model, merged_kit.data(1), own_clip=True)
    assert_same(compared(trackbridge.load(runs / "tensor_parallel")), compared(trackbridge.load(run.dir)))


def test_f7_a_layout_that_nobody_knows_stays_local(runs: Path) -> None:
    """Not 7.236, the mean of what are no replicas; 10.954 would need to be told that they are experts."""
    names = trackbridge.load(runs / "experts").names
    assert {"layer/weight/grad_norm_local", "grad/norm_local"} <= set(names)
    assert not {"layer/weight/grad_norm", "grad/norm"} & set(names)


def test_f8_weighted_by_tokens_and_recorded_where_one_rank_has_it(runs: Path, world: int) -> None:
    weighted, micro, last = trackbridge.load(runs / "tokens").series("train/loss")[1].tolist()
    wanted = 1.08 if world == 2 else 1.04
    assert weighted == pytest.approx(wanted) and micro == pytest.approx(wanted) and last == 2.5


def test_one_ranks_nan_is_seen_and_named(runs: Path, world: int) -> None:
    record = trackbridge.load(runs / "broken")
    assert [math.isnan(value) for value in record.series("train/loss")[1]] == [False, True, False]
    assert record.series("ranks/nonfinite")[1].tolist() == [0.0, 1.0, 0.0]
    steps, who = record.series("ranks/nonfinite_rank")
    assert (steps.tolist(), who.tolist()) == ([1], [1.0])
    assert record.series("act/first/nonfinite")[1][1] > 0
    (anomaly,) = [anomaly for anomaly in record.anomalies if anomaly.kind == "nonfinite"]
    assert anomaly.ranks == (1,) and anomaly.series == "train/loss"


def test_a_flipped_bit_on_one_rank_is_an_anomaly_that_says_where(runs: Path, world: int) -> None:
    """Silent corruption: no loss tells it, the replicas' checksums do. Of two ranks nobody knows which one is right."""
    record = trackbridge.load(runs / "corrupted")
    assert record.series("param/replicas_differ")[1].tolist() == [0.0, 0.0, 1.0]
    (anomaly,) = record.anomalies
    assert (anomaly.kind, anomaly.step, anomaly.series) == ("divergence", 2, "param/replicas_differ")
    assert anomaly.notes[0].startswith("hardware-fault: 1 parameters differ") and "since step 1" in anomaly.notes[0]
    assert anomaly.notes[1] == ("in last.weight; rank 2 stands alone" if world == 3 else "in last.weight")
    assert anomaly.ranks == ((2,) if world == 3 else (0,))


def test_a_rank_that_died_leaves_rows_that_say_so(runs: Path, world: int) -> None:
    record = trackbridge.load(runs / "left")
    assert record.series("ranks/merged")[1].tolist() == [world, world, 1.0, 1.0]
    mean = sum(range(world)) / world
    assert record.series("train/loss")[1].tolist() == [mean, mean, 0.0, 0.0]
    assert record.series("trackbridge/rows_unmerged")[1].tolist() == [1.0, 2.0]
    assert record.status == "finished"


def test_the_ranks_that_do_not_ship_keep_their_own(runs: Path) -> None:
    record = trackbridge.load(runs / there("fsdp"))
    rows: list[Any] = [dict(row.items()) for row in record.rows(1)]
    assert len(rows) == merged_kit.STEPS and not [name for name in rows[0] if name.startswith("ranks/")]
    assert rows[0]["layer/first.weight/grad_norm_local"] < record.series("layer/first.weight/grad_norm")[1][0]
