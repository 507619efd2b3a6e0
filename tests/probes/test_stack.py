"""The stack people really run, as one, on two ranks of a CPU: `benchmarks/stack.py`, small, and what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fsdp2_here import there
from tests.probes.kit import Lab, sgd
from tests.probes.test_activations import Stack, batch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "stack.py"
QUICK = ["--seconds", "0", "--steps", "1", "--limit", "90"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def measured(folder: Path, *launcher: str) -> dict[str, Any]:
    """What the script says. It ends by itself within 90 seconds, hung or not."""
    target = folder / "stack.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, *launcher, str(SCRIPT), *QUICK, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(target.read_text())
    return result


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    there("stack")
    return measured(tmp_path_factory.mktemp("stack"), *TORCHRUN)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("which", ["sharded", "whole"])
def test_the_statistics_are_those_worked_out_by_hand(which: str, request: pytest.FixtureRequest) -> None:
    values = request.getfixturevalue(which)["values"]
    assert values["wrong"] == []
    assert values["own part"] + values["whole"] == values["compared"] == 3 * (28 + 2 * 2)  # steps, parameters, blocks


@pytest.mark.parametrize("which", ["sharded", "whole"])
def test_training_ends_in_the_same_bits(which: str, request: pytest.FixtureRequest) -> None:
    same = request.getfixturevalue(which)["same_bits"]
    assert same["unwatched again"] and same["watched"]


@pytest.mark.parametrize("which", ["sharded", "whole"])
def test_no_graph_is_broken_and_none_is_made_twice(which: str, request: pytest.FixtureRequest) -> None:
    cases = request.getfixturevalue(which)["cases"]
    for name, case in cases.items():
        assert case["graphs"] == cases["unwatched"]["graphs"] > 0, name
        assert case["graph_breaks"] == 0 and case["recompiles_after_warmup"] == 0, name


def test_both_ranks_agree(sharded: dict[str, Any]) -> None:
    (other,) = sharded["ranks"]
    assert other["values"]["compared"] == sharded["values"]["compared"] and other["rounds"] == sharded["rounds"]


def inputs_written() -> list[object]:
    """What the compiler knows of each input that a graph with our hooks in it writes to."""
    written: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.trackbridge.observe.default):
            written.append(node.args[1].meta["tensor_dict"].get("_dynamo_static_input_type"))
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.trackbridge.observe):
            written.append(node.args[1].meta["tensor_dict"].get("_dynamo_static_input_type"))
        return graph

    model = Stack()
    run: Any = torch.compile(model, backend=backend, fullgraph=True)
    lab = Lab(run, sgd(model))
    run(batch()).sum().backward()
    lab.close()
    return written


def test_what_a_graph_writes_to_is_known_to_stay() -> None:
    """Else the compiler gives up on CUDA graphs (`mode="reduce-overhead"`): a graph that writes to an input is replayed only
    where the input is known to be at the same address always. `test_cuda.py` has the graphs themselves. In a process of its
    own: what the compiler traces depends on what it met before."""
    command = [sys.executable, "-c", "from tests.probes.test_stack import inputs_written as all_; print(*map(bool, all_()))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True"] * 4, done.stderr
