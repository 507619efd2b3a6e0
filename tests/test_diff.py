"""`diff` and `show --findings` on real recorded runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import trackbridge
from tests.capsules import an_anomaly, edit, make
from tests.training import Model, loader, seed_everything
from trackbridge.advice import what_to_do
from trackbridge.cli import app
from trackbridge.cli.diff import _numbers
from trackbridge.config import RAREST
from trackbridge.diff import Split, diff, facts
from trackbridge.findings import anomalies, findings, memory, overhead
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Hypothesis, Params, Row, Schema
from trackbridge.rundir import RunDirectory

STEPS = 24
FAULT = 14


def record(folder: Path, name: str, *, seed: int = 0, lr: float = 1e-2, swap: bool = False, nudge: bool = False) -> Path:
    """A short run. `swap`: the batches of step FAULT and the next change places; `nudge`: one weight of the second block is
    moved before step FAULT."""
    seed_everything(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = [batch for _ in range(2) for batch in loader()]
    if swap:
        batches[FAULT], batches[FAULT + 1] = batches[FAULT + 1], batches[FAULT]
    run = trackbridge.init(dir=folder, id=name, config={"lr": lr, "model": {"depth": 2}}, parameters={"weights_every": 5})
    run.watch(model, optimizer)
    for step, (tokens,) in enumerate(run.batches(batches[:STEPS])):
        if nudge and step == FAULT:
            with torch.no_grad():
                model.blocks[1].up.weight[0, 0] += 1e-3
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, tokens=tokens.numel())
    run.finish()
    return run.dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff") / "runs"
    record(folder, "plain")
    record(folder, "again")
    record(folder, "swapped", swap=True)
    record(folder, "nudged", nudge=True)
    record(folder, "other", seed=1, lr=2e-2)
    return folder


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_run_and_its_repetition_are_the_same(folder: Path) -> None:
    found = diff(folder / "plain", folder / "again")
    assert found.same and found.split is None and found.data.first is None and found.config == []
    assert found.steps == STEPS and found.data.compared == STEPS and found.series > 50
    said = call("diff", folder / "plain", folder / "again")
    assert said.exit_code == 0 and "equal to the bit" in said.output and "the same batches in all 24 steps" in said.output


def test_swapped_batches_are_named_as_such(folder: Path) -> None:
    found = diff(folder / "plain", folder / "swapped")
    assert not found.same and found.data.first == FAULT and found.data.same_elsewhere == 2
    assert found.split is not None and found.split.step == FAULT and found.split.stage == "forward"
    said = call("diff", folder / "plain", folder / "swapped").output
    assert "2 of them are batches the other run had at another step" in said


def test_a_weight_that_moved_is_found_in_its_layer(folder: Path) -> None:
    found = diff(folder / "plain", folder / "nudged")
    assert found.data.first is None and found.config == []
    assert found.split is not None and (found.split.step, found.split.layer) == (FAULT, "blocks.1")
    said = call("diff", folder / "plain", folder / "nudged")
    assert said.exit_code == 1 and f"they part at step {FAULT}, first in layer blocks.1 (forward)" in said.output


def test_other_settings_other_seed(folder: Path) -> None:
    found = diff(folder / "plain", folder / "other")
    assert found.config == [("lr", 1e-2, 2e-2)] and found.data.rng == 0
    assert found.split is not None and found.split.step == 0
    assert found.apart is not None and found.apart.series == "train/loss"
    said = json.loads(call("diff", "plain", "other", "--dir", folder, "--json").stdout)
    assert said["config"] == [["lr", 1e-2, 2e-2]] and said["same"] is False and said["split"]["step"] == 0


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(250, "train/lr", 0.001, 0.1, "4.bias", "loss", 7),
         "they part at step 250: train/lr is 0.001 and 0.1; 7 more series differ in that step, first of a layer 4.bias"),
        (Split(3, "train/loss", 2.0123456789, 2.1, None, "loss", 0),
         "they part at step 3 (loss): train/loss is 2.01235 and 2.1"),
        (Split(3, "layer/4.bias/grad_norm", 2.01234561, 2.01234562, "4.bias", "backward", 0),
         "they part at step 3, first in layer 4.bias (backward): layer/4.bias/grad_norm is 2.01234561 and 2.01234562"),
    ],
)  # fmt: skip
def test_a_series_of_no_layer_is_put_in_none_and_numbers_are_short(split: Split, words: str) -> None:
    assert _numbers(SimpleNamespace(split=split)) == words  # type: ignore[arg-type]


def test_runs_without_contexts_or_loss_are_compared_as_far_as_they_go(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder / "plain", bare)
    shutil.rmtree(bare / "rank-0000" / "contexts")
    (bare / "provenance.json").unlink()
    found = diff(folder / "plain", bare)
    assert found.data.compared == 0 and found.split is None and found.provenance
    assert "not comparable" in call("diff", folder / "plain", bare).output


def test_no_run_is_one_line(tmp_path: Path) -> None:
    said = call("diff", tmp_path, tmp_path)
    assert said.exit_code == 2 and len(said.output.strip().splitlines()) == 1


def test_facts_of_trees() -> None:
    assert list(facts({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": {}})) == [
        ("a.c", 2, 5), ("d", 3, None), ("e", None, {})
    ]  # fmt: skip


# -- findings


def test_findings_are_ranked_and_shown(folder: Path, tmp_path: Path) -> None:
    record = trackbridge.load(folder / "plain")
    found = findings(record)
    assert [f.severity for f in found] == sorted((f.severity for f in found), reverse=True)
    said = call("show", folder / "plain", "--findings")
    assert said.exit_code == 0 and f"{len(found)} finding" in said.output
    listed = json.loads(call("show", folder / "plain", "--findings", "--json").stdout)
    assert [f["what"] for f in listed["findings"]] == [f.what for f in found]


GUESS = Hypothesis("corrupt-batch", intervention="skip-batch")


def _advice(run: Path, **changes: Any) -> str:
    record = SimpleNamespace(anomalies=[an_anomaly(step=9, hypotheses=(GUESS,), **changes)], path=run)
    (finding,) = anomalies(record)  # type: ignore[arg-type]
    return finding.advice


def test_an_anomaly_comes_with_the_command_that_tests_its_hypothesis(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    place = make(run / "capsules" / "spike-7", anomaly=an_anomaly(hypotheses=(GUESS,)))
    told = f"perhaps corrupt-batch; to test it: trackbridge replay '{place}' --build my_module:build --try skip-batch"
    assert _advice(run, capsule="capsules/spike-7") == told
    late = an_anomaly(
        capsule="capsules/spike-7", hypotheses=()
    )  # the run ended before it was sealed: the causes are in the capsule only
    assert what_to_do(run, late) == told
    theirs = an_anomaly(capsule="capsules/spike-7", hypotheses=(Hypothesis("own", intervention="look at the cable."),))
    assert what_to_do(run, theirs) == "perhaps own; to test it: look at the cable"


def test_no_replay_is_advised_that_cannot_run(tmp_path: Path) -> None:
    """Every command in an advice works: without batches, or a capsule, it is the one that shows the evidence."""
    report = f"the evidence: trackbridge report {tmp_path}@9 --post-mortem"
    assert _advice(tmp_path, capsule=None) == f"perhaps corrupt-batch; it cannot be replayed, it has no capsule; {report}"
    assert "its capsule is not on this disk; " in _advice(tmp_path, capsule="capsules/spike-7")
    place = make(tmp_path / "capsules" / "spike-7")
    edit(place, lambda manifest: manifest.update(tier="explain"))
    told = _advice(tmp_path, capsule="capsules/spike-7")
    assert (
        told
        == f"perhaps corrupt-batch; it cannot be replayed, not all its batches were kept (run.batches keeps them); {report}"
    )


def test_every_rule_speaks_when_it_should(tmp_path: Path) -> None:
    """A run with much amiss: killed, slow data, lost rows, skipped updates, a module that falls silent, a NaN."""
    run = trackbridge.init(dir=tmp_path, id="bad", backend=None)
    directory = RunDirectory(run.dir)
    run.finish()
    shutil.rmtree(directory.rows())
    file = directory.read()
    gone = file.attempts[0].model_copy(update={"number": 1, "pid": 2**22 - 1})
    directory.write(file.model_copy(update={"attempts": [*file.attempts, gone]}))
    _rows(directory)
    directory.provenance.write_text(
        json.dumps({
            "hardware": {"gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 1000}]},
            "torch": {"cudnn_benchmark": True, "deterministic_algorithms": False, "matmul_allow_tf32": True},
        })
    )  # fmt: skip
    record = trackbridge.load(run.dir)
    said = " | ".join(finding.what for finding in findings(record))
    for words in (
        "the run was killed", "5 rows were dropped", "40 of 300 updates were skipped", "30% of the time went into waiting",
        "modules not seen any more after step 99: block", "gradients were clipped in 100% of the steps, to 0.5",
        "device memory was 97% full", "TF32", "cudnn.benchmark", "deterministic algorithms are off", "no git repository",
        "nonfinite in train/loss", "between two attempts changed: torch.version: 2.9 -> 2.10", "trackbridge itself took 5.0%",
    ):  # fmt: skip
        assert words in said, words
    assert findings(record)[0].what.startswith("nonfinite")


def of_series(settings: dict[str, object] | None = None, gpus: bool = False, **series: object) -> Any:
    """A record of 200 steps, as far as the rules of speed read it; a series may be a number or {step: number}."""
    whole = {name: one if isinstance(one, dict) else dict.fromkeys(range(200), one) for name, one in series.items()}
    known = {name.replace("__", "/"): one for name, one in whole.items()}
    hardware = {"gpus": [{"memory_bytes": 1000}]} if gpus else {}
    return SimpleNamespace(
        names=list(known), settings=settings or {}, provenance={"hardware": hardware},
        series=lambda name: (np.array(list(known[name])), np.array(list(known[name].values()), float)),
    )  # fmt: skip


def test_what_measuring_took_comes_with_advice_that_acts_on_it() -> None:
    """A median over the steps would not see what one step in ten takes, and no cadence helps against what every step does."""

    def told(settings: dict[str, object] | None = None, **series: object) -> tuple[float, str, str]:
        (found,) = overhead(of_series(settings, **series))
        return found.severity, found.what, found.advice

    every = dict.fromkeys(range(9, 200, 10), 1.0)
    dear = {step: 0.5 if step in every else 0.01 for step in range(200)}
    _, what, advice = told(trackbridge__overhead_share=dear, param__norm=every)
    assert "5.9% of a step" in what and "parameters.weights_every" in advice
    _, _, advice = told(trackbridge__overhead_share=0.2, param__norm=every)
    assert "max_overhead" in advice and "weights_every" not in advice
    share, factor = ({step: a if step < 150 else b for step in range(200)} for a, b in ((0.5, 0.2), (8.0, RAREST)))
    severity, what, advice = told({"max_overhead": 0.03}, trackbridge__overhead_share=share, trackbridge__thinning=factor)
    assert "20.0% of a step" in what and "64 times more rarely" in what and not advice and severity < 0.3
    for limit, now, thinned in ((0.3, 0.2, RAREST), (0.03, 0.2, 8.0), (None, 0.02, 1.0)):
        found = overhead(of_series({"max_overhead": limit}, trackbridge__overhead_share=now, trackbridge__thinning=thinned))
        assert not list(found), "allowed, still being thinned, or little"


def test_memory_that_activations_leave_is_no_fragmentation_unless_the_allocator_lacked_some() -> None:
    kept = {"mem__fragmentation": 0.6, "mem__reserved_bytes": 500.0}
    assert not list(memory(of_series(gpus=True, **kept, mem__alloc_retries=0)))
    (found,) = memory(of_series(gpus=True, **kept, mem__alloc_retries=3))
    assert "60%" in found.what and "3 times" in found.what and "expandable_segments" in found.advice


def test_a_module_that_gives_nan_is_not_missing(tmp_path: Path) -> None:
    """From step 100 on "block" gives NaN, of which only the count is recorded; "head" does not run any more."""
    run = trackbridge.init(dir=tmp_path, id="nan", backend=None)
    directory = RunDirectory(run.dir)
    run.finish()
    shutil.rmtree(directory.rows())
    writer = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=5.0)
    for step in range(300):
        values = {
            "train/loss": 2.0,
            "act/block/rms": 1.0,
            "act/block/nonfinite": 0.0,
            "act/head/rms": 1.0,
            "act/head/nonfinite": 0.0,
        }
        if step >= 100:
            values = {"train/loss": float("nan"), "act/block/nonfinite": 8.0}
        writer.append(Row(-1, step, 1000.0 + step, 0, Schema(tuple(values)), np.array(list(values.values()))))
    writer.close()
    said = [finding.what for finding in findings(trackbridge.load(run.dir))]
    assert [what for what in said if "not seen" in what] == ["modules not seen any more after step 99: head"]


def _rows(directory: RunDirectory) -> None:
    values = {
        "train/loss": 2.0, "grad/norm": 2.0, "grad/norm_clipped": 1.0, "optim/applied": 260.0, "optim/skipped": 40.0,
        "perf/step_s": 1.0, "perf/fetch_s": 0.3, "mem/reserved_bytes": 970.0, "trackbridge/rows_dropped": 5.0,
        "trackbridge/overhead_share": 0.05, "act/block/rms": 1.0,
    }  # fmt: skip
    writer = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=5.0)
    for step in range(300):
        names = tuple(name for name in values if step < 100 or name != "act/block/rms")
        writer.append(Row(-1, step, 1000.0 + step, 0, Schema(names), np.array([values[name] for name in names])))
    writer.append(Anomaly("0-7-nonfinite", "nonfinite", 7, 7, 1.0, "train/loss", float("nan"), 2.0, float("inf")))
    for version in ("2.9", "2.10"):
        writer.append(Params(-1, 1000.0, {"provenance": {"torch": {"version": version}}}))
    writer.close()
