"""A trainer in torchtitan's style, on two ranks over gloo: FSDP2, model parts, a container of optimizers, compiled blocks,
selective checkpointing; recorded, and its bad step run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import trackbridge
from trackbridge.errors import UsageError
from trackbridge.watched import named

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_style"
BAD, STEPS = 30, 36


def torchrun(*words: object) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=EXAMPLE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    said = torchrun("train.py", "--dir", folder, "--id", "titan", "--steps", STEPS, "--bad-at", BAD)
    assert f"after {STEPS} steps" in said
    return folder / "titan"


def test_every_part_and_every_optimizer_is_recorded_under_the_models_own_names(directory: Path) -> None:
    record = trackbridge.load(directory)
    assert record.status == "finished" and len(record.series("train/loss")[0]) == STEPS
    assert {"train/lr", "train/lr/1.0"} <= set(record.names), "a rate for each optimizer of the container"
    weights = {name.split("/")[1] for name in record.names if name.endswith("/exp_avg_sq_norm")}
    assert {"0.embedding.weight", "0.layers.1.qkv.weight", "1.layers.2.ffn.0.weight", "1.output.weight"} <= weights
    sites = {name.split("/")[1] for name in record.names if name.startswith("act/")}
    assert sites == {
        "0.embedding",
        *(f"0.layers.{n}" for n in (0, 1)),
        *(f"1.layers.{n}" for n in (2, 3)),
        "1.norm",
        "1.output",
    }
    _, applied = record.series("optim/applied")
    assert applied[-1] == 2 * STEPS, "an update of each optimizer"


def test_the_spike_is_sealed_and_runs_again_bit_for_bit_on_both_ranks(directory: Path, tmp_path: Path) -> None:
    (anomaly,) = [one for one in trackbridge.load(directory).anomalies if one.capsule]
    assert anomaly.onset == BAD
    said = torchrun(
        "-m", "trackbridge.cli", "replay", f"{directory}@{BAD}", "--build", "train:build", "--dest", tmp_path, "--json"
    )
    report = json.loads(said)
    assert report["verdict"] == "exact", report
    assert report["verdicts"] == {"0": "exact", "1": "exact"} or report["verdicts"] == ["exact", "exact"]


class Container:
    """Optimizers together, as a class of its own."""

    def __init__(self, members: list[Optimizer]) -> None:
        self.members = members

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.members)


class Formal(SGD):
    """The same, and an `Optimizer`: its own state stays empty."""

    def __init__(self, members: list[Optimizer]) -> None:
        super().__init__([p for member in members for group in member.param_groups for p in group["params"]], lr=0.1)
        self.members = members

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.members)


def members(count: int = 2) -> list[Optimizer]:
    return [SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(count)]


@pytest.mark.parametrize("kind", [Container, Formal, list, tuple])
def test_a_container_is_its_members(kind: Any) -> None:
    two = members()
    assert named("optimizer", kind(two), Optimizer) == {"0": two[0], "1": two[1]}
    assert named("optimizer", kind(two[:1]), Optimizer) == {"": two[0]}


def test_what_is_one_model_stays_one() -> None:
    for model in (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.ModuleList([nn.Tanh()]), nn.ModuleDict({"a": nn.Tanh()})):
        assert named("model", model, nn.Module) == {"": model}


@pytest.mark.parametrize("given", [iter([]), set(), 3, "adam", torch.ones(2), Container(["adam"]), [None]])  # type: ignore[list-item]
def test_what_holds_no_optimizers_is_said_in_one_line(given: Any) -> None:
    with pytest.raises(UsageError, match="must be a"):
        named("optimizer", given, Optimizer)
