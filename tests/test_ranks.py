"""Ranks agree on one run, and a rank that does not take part is an error in seconds, not a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fsdp2_here import needs_shards
from trackbridge.errors import UsageError
from trackbridge.ranks import Ranks

TWO_RANKS = """
import sys, torch, torch.distributed as dist
import trackbridge
dist.init_process_group("gloo")
run = trackbridge.init(dir=sys.argv[1], project="two")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.watch(model, optimizer)
for step in range(3):
    loss = model(torch.full((2, 4), float(dist.get_rank() + 1))).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    run.step(loss=loss)
run.finish()
sys.stdout.write(f"RUN {run.id}\\n")
dist.barrier()
"""

SHARDED = """
import sys, torch, torch.distributed as dist
import trackbridge
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
run = trackbridge.init(dir=sys.argv[1], ranks={"merge_up_to": int(sys.argv[2])})
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.watch(model, optimizer)
for step in range(2):
    loss = model(torch.full((2, 4), 1.0 + step)).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    run.step(loss=loss)
run.finish()
dist.barrier()
"""

LONELY = """
import torch.distributed as dist, trackbridge, sys
from trackbridge.ranks import Ranks
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        Ranks.current().agree("x", timeout=1.0)
    except trackbridge.TrackbridgeError as error:
        sys.stdout.write(f"SAID {error}\\n")
dist.barrier()
"""


def torchrun(tmp_path: Path, code: str, *words: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_ranks_make_one_run(tmp_path: Path) -> None:
    """F8: by global rank; the others start no tracker."""
    import trackbridge

    output = torchrun(tmp_path, TWO_RANKS, str(tmp_path / "runs"))
    ids = {line.split()[1] for line in output.splitlines() if line.startswith("RUN")}
    assert len(ids) == 1
    record = trackbridge.load(tmp_path / "runs" / ids.pop())
    assert record.series("train/loss")[0].tolist() == [0, 1, 2]
    assert sorted(p.name for p in record.path.glob("rank-*")) == ["rank-0000", "rank-0001"]


@needs_shards
def test_a_shard_is_never_shown_as_the_whole(tmp_path: Path) -> None:
    """F1, F7: what one rank cannot know is labelled local."""
    import trackbridge

    torchrun(tmp_path, SHARDED, str(tmp_path / "runs"), "0")
    names = trackbridge.load(tmp_path / "runs").names
    assert "train/loss" in names and "layer/0.weight/grad_norm_local" in names
    whole = [name for name in names if name.startswith(("layer/", "grad/", "param/")) and not name.endswith("_local")]
    assert whole == []


@needs_shards
def test_merged_the_suffix_is_gone_and_the_other_rank_keeps_its_own(tmp_path: Path) -> None:
    import trackbridge

    torchrun(tmp_path, SHARDED, str(tmp_path / "runs"), "2")
    record = trackbridge.load(tmp_path / "runs")
    names = record.names
    assert {"grad/norm", "param/norm", "layer/0.weight/grad_norm"} <= set(names)
    assert not [name for name in names if name.endswith("_local") and not name.endswith("/checksum_local")]  # of a shard's bits
    assert record.series("ranks/merged")[1].tolist() == [2.0, 2.0]
    own = [name for row in record.rows(1) for name in row.schema.names if name.startswith(("layer/", "grad/", "param/"))]
    assert own and all(name.endswith("_local") for name in own)


def test_a_rank_that_does_not_take_part(tmp_path: Path) -> None:
    """F4: a clear error at the start, no hang in a hook's collective."""
    assert "not every rank called trackbridge.init" in torchrun(tmp_path, LONELY)


def test_a_world_without_a_process_group_is_told_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    ranks = Ranks.current()
    assert (ranks.rank, ranks.world_size, ranks.leader) == (1, 2, False)
    with pytest.raises(UsageError, match="init_process_group"):
        ranks.agree(None)
