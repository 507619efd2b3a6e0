"""Replays on several ranks: real torchrun over gloo, DDP and FSDP2, one verdict for all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.capsules import adopt
from tests.fsdp2_here import SHARDS
from tests.replay import ranks_kit
from trackbridge.capsule import load
from trackbridge.replay import CounterfactualReport, ReplayReport, rerun, skip_plan

ROOT = Path(__file__).parents[2]


def torchrun(*words: object, ranks: int = 2) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, "-m", "tests.replay.ranks_kit", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@dataclass(frozen=True)
class Recorded:
    """A capsule of two ranks, and the reports of the two ranks that replayed it, by what was changed in it; and what each of
    them found that would have prevented the spike."""

    kind: str
    path: Path
    reports: dict[str, list[ReplayReport]]
    tries: list[CounterfactualReport]


KINDS = ("ddp", "fsdp2") if SHARDS else ("ddp",)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """Recorded by one torchrun; replayed by another, as it is and spoiled."""
    folder, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("reports")
    torchrun("record", folder, *KINDS)
    words: list[object] = []
    paths = {kind: folder / kind / "capsules" / f"spike-{ranks_kit.BAD}" for kind in KINDS}
    spoils: dict[str, Callable[[Path], None]] = {"plain": lambda _: None, "flipped": flip_a_bit, "hungry": take_a_batch}
    for kind, path in paths.items():
        for name, spoil in spoils.items():
            copy = Path(shutil.copytree(path, folder / f"{kind}-{name}" / path.name))
            spoil(copy)
            words += [kind, name, copy]
    torchrun("replay", out, *words)

    def read(report: type[Any], kind: str, name: str) -> list[Any]:
        return [report.model_validate_json((out / f"{kind}-{name}-{rank}.json").read_text()) for rank in (0, 1)]

    return {
        kind: Recorded(
            kind, path, {name: read(ReplayReport, kind, name) for name in spoils}, read(CounterfactualReport, kind, "tries")
        )
        for kind, path in paths.items()
    }


@pytest.fixture(params=KINDS)
def recorded(request: pytest.FixtureRequest, both: dict[str, Recorded]) -> Recorded:
    return both[request.param]


def flip_a_bit(capsule: Path) -> None:
    """One exponent bit of a weight of rank 1: it is sixteen times as large."""
    name = "rank-0001/state/state.safetensors"
    arrays = load_file(capsule / name)
    weight = next(key for key in sorted(arrays) if key.startswith("models/") and key.endswith("3.weight"))
    flat = arrays[weight].reshape(-1)
    place = int(np.flatnonzero((np.abs(flat) > 0.0625) & (np.abs(flat) < 0.125))[0])
    flat.view(np.uint32)[place] ^= 1 << 25
    save_file(arrays, capsule / "changed.safetensors")
    content = (capsule / "changed.safetensors").read_bytes()
    (capsule / "changed.safetensors").unlink()
    adopt(capsule, name, content)


def take_a_batch(capsule: Path) -> None:
    """Rank 1 has no batch of step 40."""
    name = "rank-0001/batches.safetensors"
    arrays = load_file(capsule / name)
    with safe_open(capsule / name, framework="np") as file:
        metadata = {key: value for key, value in file.metadata().items() if not key.startswith("40/")}
    left = {key: value for key, value in arrays.items() if not key.startswith("40/")}
    save_file(left, capsule / "less.safetensors", metadata)
    content = (capsule / "less.safetensors").read_bytes()
    (capsule / "less.safetensors").unlink()
    adopt(capsule, name, content)


def test_exact_on_both(recorded: Recorded) -> None:
    capsule = load(recorded.path)
    assert capsule.tier == "re-execute" and capsule.ranks == (0, 1) and capsule.missing == []
    assert capsule.restart_step == 36 and capsule.span[1] == ranks_kit.BAD + 4
    found = recorded.reports["plain"]
    assert found[0] == found[1], "one report for all"
    assert found[0].verdict == "exact" and found[0].verdicts == ("exact", "exact"), found[0].to_markdown()
    assert all(step.compared > 35 and step.rng == "exact" for step in found[0].steps)
    assert "By rank: exact, exact" in found[0].to_markdown()


def test_each_rank_keeps_its_own_batches_states_and_shards(recorded: Recorded) -> None:
    capsule = load(recorded.path)
    ids = [{i for micro in capsule.micro_batches(rank)[ranks_kit.BAD] for i in micro.sample_ids or ()} for rank in (0, 1)]
    assert ids[0] and ids[1] and not ids[0] & ids[1]
    assert not np.array_equal(capsule.rng(40, rank=0)["torch"], capsule.rng(40, rank=1)["torch"]), "each its own dropout"
    together, own = capsule.series(), [capsule.series(rank) for rank in (0, 1)]
    losses = [rows[40]["train/loss"] for rows in (together, *own)]
    assert losses[0] == (losses[1] + losses[2]) / 2 and losses[1] != losses[2]
    assert together[40]["ranks/merged"] == 2 and "ranks/merged" not in own[0][40]
    assert "layer/0.weight/grad_norm" in together[40]
    assert ("layer/0.weight/grad_norm_local" in own[0][40]) is (recorded.kind == "fsdp2")
    assert set(capsule.history_of(0)) == set(capsule.history_of(1)) == set(capsule.history)
    assert capsule.history_of(0)[20]["train/loss"] != capsule.history[20]["train/loss"]
    whole = {name: tuple(value.shape) for name, value in ranks_kit.network().state_dict().items()}
    states = [capsule.state(rank)["models"][""] for rank in (0, 1)]
    shapes = [{name.removeprefix("module."): tuple(value.shape) for name, value in state.items()} for state in states]
    if recorded.kind == "ddp":
        assert shapes == [whole, whole]
    else:
        assert all(shapes[0][name][0] + shapes[1][name][0] == shape[0] for name, shape in whole.items())
    counts = [record.get("layer/0.weight/weight") for record in capsule.histograms if record.step % 12 == 0]
    assert len(counts) == 5, "at step 0, and on the cadence up to the window's end"
    assert all(each is not None and each.sum() == 24 * 8 for each in counts), "of the whole tensor, not of a shard"


def test_another_number_of_ranks_is_incomplete(recorded: Recorded) -> None:
    report = rerun(load(recorded.path), lambda: pytest.fail("nothing is built"))
    assert report.verdict == "incomplete"
    assert "recorded on 2 ranks, this replay runs on 1" in report.reason and "torchrun --nproc-per-node 2" in report.reason


def test_a_flipped_bit_on_one_rank_is_seen_by_all(recorded: Recorded) -> None:
    found = recorded.reports["flipped"]
    assert found[0] == found[1] and found[0].verdict == "not-reproduced", found[0].to_markdown()
    divergence = found[0].first_divergence
    assert divergence is not None and divergence.step == 36
    assert "not-reproduced" in found[0].verdicts and divergence.layer == "3.weight", found[0].to_markdown()


def test_what_one_rank_lacks_stops_all(recorded: Recorded) -> None:
    """Not a hang in a collective: rank 1 cannot feed step 40, and both say so."""
    found = recorded.reports["hungry"]
    assert found[0].verdict == "incomplete" and found[0] == found[1]
    assert "rank 1: batch 0 of step 40 is not here" in found[0].reason
    assert found[0].verdicts == ("incomplete", "incomplete")


def test_more_than_two_ranks_of_ddp_add_in_the_recorded_order(tmp_path: Path) -> None:
    """DDP orders its buckets anew after a process' first step; with three ranks the order of addition shows."""
    torchrun("record", tmp_path, "ddp", ranks=3)
    path = tmp_path / "ddp" / "capsules" / f"spike-{ranks_kit.BAD}"
    torchrun("replay", tmp_path, "ddp", "only", path, ranks=3)
    report = ReplayReport.model_validate_json((tmp_path / "ddp-only-2.json").read_text())
    assert report.verdicts == ("exact",) * 3, report.to_markdown()


def test_what_would_have_prevented_it_on_two_ranks(recorded: Recorded) -> None:
    """Nonsense in the batch of both: leaving it out ranks first on each, and what cannot be tried on one cannot on any."""
    for found in recorded.tries:
        outcomes = {tried.name.partition("=")[0]: tried.outcome for tried in found.tries}
        assert found.verdict == "exact" and found.rerun.outcome == "remains"
        assert found.best is not None and found.best.name == "skip-batch", found.to_markdown()
        assert outcomes.pop("restore-optimizer") == "not-runnable" and outcomes.pop("skip-batch") == "prevented"
        assert set(outcomes.values()) == {"remains"}
    clipped = [next(tried for tried in found.tries if tried.name == "clip=0.1") for found in recorded.tries]
    assert clipped[0].given_up == clipped[1].given_up > 0, "the norm is that of all shards"
    plan = skip_plan(load(recorded.path))
    assert [skip.rank for skip in plan.skips] == [0, 0, 1, 1] and len({skip.sample_ids for skip in plan.skips}) == 4
