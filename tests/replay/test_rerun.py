"""Replays of a real recording: exact when nothing differs, clear when something is missing."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import replays
from tests.capsules import edit
from tests.replay.test_perturbed import perturbed
from tests.training import Model
from trackbridge import untrusted
from trackbridge.capsule import SpikeCapsule, load
from trackbridge.errors import CapsuleError, TrackbridgeError, UsageError
from trackbridge.fetch import pull
from trackbridge.replay import Rebuilt, ReplayReport, rerun, what_if


def in_a_fresh_process(reference: Path, build: str = "tests.replays:build") -> ReplayReport:
    module, _, function = build.partition(":")
    code = (
        f"import sys; from {module} import {function} as build\n"
        "from trackbridge import pull, replay\n"
        f"print(replay.rerun(pull({str(reference)!r}), build).model_dump_json())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return ReplayReport.model_validate_json(done.stdout)


# -- exact


def test_exact_in_a_fresh_process(run_dir: Path) -> None:
    report = in_a_fresh_process(run_dir)
    assert report.verdict == "exact" and report.first_divergence is None and report.missing == ()
    assert report.noise_ulp == 0.0
    assert (report.restart_step, report.anomaly_step, report.last_step) == (48, replays.BAD, replays.BAD + 4)
    assert [step.step for step in report.steps] == list(range(48, 57))
    for step in report.steps:
        assert step.compared > 35 and step.different == 0 and step.rng == "exact"
        assert step.losses[0] == step.losses[1]
    spike = report.steps[replays.BAD - 48]
    assert spike.loss_recorded is not None and spike.loss_recorded > 5
    assert "## Verdict: exact" in report.to_markdown()


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 2},
        {"accumulate": 1},
        {"activations": {"sites": "leaf"}},
        {"recorder": {"snapshot_every": 3, "before": 8, "after": 3}},
    ],
    ids=str,
)
def test_exact_however_it_was_recorded(tmp_path: Path, changes: dict[str, Any]) -> None:
    report = rerun(pull(replays.record(tmp_path, **changes)), replays.build)
    assert report.verdict == "exact", report.to_markdown()


def test_this_process_is_left_as_it_was(capsule: SpikeCapsule) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].copy()
    threads = torch.get_num_threads()
    assert rerun(capsule, replays.build, deterministic=True).deterministic
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert (before[2] == np.random.get_state(legacy=False)["state"]["key"]).all()
    assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()


def test_the_recorded_number_of_threads_is_used(capsule: SpikeCapsule) -> None:
    seen = []

    def build() -> Rebuilt:
        rebuilt = replays.build()
        torch.set_num_threads(2)
        inner = rebuilt.step

        def step(*arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return inner(*arguments)

        rebuilt.step = step
        return rebuilt

    rerun(capsule, build)
    assert set(seen) == {1}


def test_progress(capsule: SpikeCapsule) -> None:
    calls: list[tuple[int, int, int]] = []
    rerun(capsule, replays.build, runs=3, on_step=lambda *call: calls.append(call))
    assert calls == [(run, step, 56) for run in range(3) for step in range(48, 57)]


# -- incomplete


def copied(capsule: SpikeCapsule, path: Path, *, local: bool) -> Path:
    """A copy, with or without the batches beside it."""
    copy = Path(shutil.copytree(capsule.path, path / capsule.path.name))
    if local:
        shutil.copytree(f"{capsule.path}.local", f"{copy}.local")
    return copy


def test_without_batches(capsule: SpikeCapsule, tmp_path: Path) -> None:
    report = rerun(load(copied(capsule, tmp_path, local=False)), replays.build)
    assert report.verdict == "incomplete" and report.steps == () and report.noise_ulp is None
    assert "batch 0 of step 48 is not here" in report.reason and "fetch" in report.reason
    assert any("spike-52.local" in text for text in report.missing)


def test_without_a_snapshot(capsule: SpikeCapsule, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for name in [name for name in manifest["files"] if "/state/" in name]:
            del manifest["files"][name]
        manifest["missing"] = ["parameter snapshot: none was kept at or before step 52; ..."]

    copy = copied(capsule, tmp_path, local=False)
    shutil.rmtree(copy / "rank-0000" / "state")
    edit(copy, change)
    report = rerun(load(copy), replays.build)
    assert report.verdict == "incomplete" and report.reason.startswith("parameter snapshot: none was kept")


def test_without_the_scheduler(capsule: SpikeCapsule) -> None:
    def build() -> tuple[Any, ...]:
        rebuilt = replays.build()
        return rebuilt.model, rebuilt.optimizer, rebuilt.step

    report = rerun(capsule, build)
    assert report.verdict == "incomplete" and "state 'schedule' was recorded" in report.missing[0]


def test_state_of_another_kind(capsule: SpikeCapsule) -> None:
    def build() -> Rebuilt:
        rebuilt = replays.build()
        rebuilt.state = {"schedule": torch.nn.Linear(1, 1)}
        return rebuilt

    with pytest.raises(UsageError, match=r"state 'schedule' .Linear. that cannot take what was recorded"):
        rerun(capsule, build)


def test_a_generator_that_is_not_given_back(tmp_path: Path) -> None:
    """Recorded with a generator of its own; a replay that does not know of it cannot be exact, one that does is."""
    import trackbridge
    from tests.training import setup, train

    noise = torch.Generator().manual_seed(3)
    run = trackbridge.init(dir=tmp_path, strict=True, **replays.SETTINGS)
    made = setup()
    with_own_generator(made, noise)
    run.watch(made.model, made.optimizer, state={"schedule": made.schedule}, generators={"noise": noise})
    made.run = run
    train(made, run.batches(replays.data()), steps=replays.STEPS)
    run.finish()

    def build(known: bool) -> Rebuilt:
        rebuilt = replays.build()
        generator = torch.Generator().manual_seed(3)
        with_own_generator(rebuilt.step.made, generator)
        rebuilt.generators = {"noise": generator} if known else {}
        return rebuilt

    capsule = pull(run.dir)
    assert rerun(capsule, lambda: build(known=True)).verdict == "exact"
    report = rerun(capsule, lambda: build(known=False))
    assert report.verdict == "incomplete" and "generator/noise" in report.reason


def with_own_generator(made: Any, generator: torch.Generator) -> None:
    plain = made.loss
    made.loss = lambda batch: plain(batch) * (1 + 0.01 * torch.rand((), generator=generator))


def test_batches_made_again_from_their_ids(capsule: SpikeCapsule, tmp_path: Path) -> None:
    without = load(copied(capsule, tmp_path, local=False))
    dataset: Any = replays.data().dataset

    def build(shift: int) -> Rebuilt:
        rebuilt = replays.build()
        rebuilt.fetch = lambda micro: [dataset[[int(i) - shift for i in micro.sample_ids or ()]][0]]
        return rebuilt

    report = rerun(without, lambda: build(shift=0))
    assert report.verdict == "exact", report.to_markdown()
    report = rerun(without, lambda: build(shift=-10_000))
    assert report.verdict == "incomplete" and "could not be made again: fetch raised IndexError" in report.reason
    report = rerun(without, lambda: build(shift=1))
    assert report.verdict == "incomplete" and "as fetch made it, is not the recorded one" in report.reason


# -- what build() may get wrong


def test_another_model(capsule: SpikeCapsule) -> None:
    def build(model: torch.nn.Module) -> tuple[Any, ...]:
        return model, torch.optim.AdamW(model.parameters()), lambda *_: 0.0

    with pytest.raises(UsageError, match=r"not recorded: blocks\.2\.down\.bias"):
        rerun(capsule, lambda: build(Model(depth=3)))
    with pytest.raises(UsageError, match=r"recorded only: blocks\.1\.down\.bias"):
        rerun(capsule, lambda: build(Model(depth=1)))
    with pytest.raises(UsageError, match="size mismatch") as caught:
        rerun(capsule, lambda: build(Model(width=32)))
    assert "\n" not in str(caught.value)


def test_another_optimizer(capsule: SpikeCapsule) -> None:
    def build() -> tuple[Any, ...]:
        model = Model()
        return model, torch.optim.AdamW(list(model.parameters())[:3]), lambda *_: 0.0

    with pytest.raises(UsageError, match=r"groups of \[3\] parameters; recorded were \[13\]"):
        rerun(capsule, build)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, 1.0), "SGD.* is not the recorded one: no momentum was recorded"),
        (lambda p: torch.optim.RMSprop(p, 1.0), "RMSprop.* is not the recorded one: no alpha was recorded"),
        (lambda p: torch.optim.NAdam(p, 1.0), "NAdam.* cannot take the recorded state: KeyError"),
        (lambda p: torch.optim.AdamW(p[::-1], 1.0), r"parameters in another order: the recorded exp_avg"),
    ],
    ids=["SGD", "RMSprop", "NAdam", "another order"],
)
def test_an_optimizer_of_another_kind_is_told_before_the_first_step(capsule: SpikeCapsule, make: Any, words: str) -> None:
    def build() -> tuple[Any, ...]:
        model = Model()
        return model, make(list(model.parameters())), lambda *_: 0.0

    with pytest.raises(UsageError, match=words) as caught:
        rerun(capsule, build)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (None, "returned a NoneType; return"),
        ((1, 2), "returned a tuple; return"),
        ((Model(), torch.optim.SGD(Model().parameters(), 1.0), 3), "an int|a int"),
        ((3, torch.optim.SGD(Model().parameters(), 1.0), print), "model must be a Module"),
        ((Model(), 3, print), "optimizer must be a Optimizer"),
    ],
    ids=str,
)
def test_no_objects(capsule: SpikeCapsule, built: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rerun(capsule, lambda: built)


def test_a_step_that_returns_no_loss(capsule: SpikeCapsule) -> None:
    def build() -> Rebuilt:
        rebuilt = replays.build()
        rebuilt.step = lambda *_: None
        return rebuilt

    with pytest.raises(UsageError, match="returned a NoneType at step 48; return the step's loss"):
        rerun(capsule, build)


@pytest.mark.parametrize("loss", [torch.tensor(1 + 2j), torch.zeros(2), {}, {"a": "b"}], ids=str)
def test_what_is_no_loss_is_said(capsule: SpikeCapsule, loss: Any) -> None:
    def build() -> Rebuilt:
        rebuilt = replays.build()
        rebuilt.step = lambda *_: loss
        return rebuilt

    with pytest.raises(UsageError, match="at step 48; return the step's loss, a real scalar"):
        rerun(capsule, build)


def test_a_loss_as_a_numpy_scalar(capsule: SpikeCapsule) -> None:
    def build() -> Rebuilt:
        rebuilt = replays.build()
        inner = rebuilt.step
        rebuilt.step = lambda *arguments: np.float64(inner(*arguments))
        return rebuilt

    assert rerun(capsule, build).verdict == "exact"


def test_what_no_generator_gives_is_not_noise(capsule: SpikeCapsule) -> None:
    """As if drawn from the operating system: two replays differ from each other as much as from the record."""
    source = itertools.count(1)

    def build() -> Rebuilt:
        rebuilt = replays.build()
        plain = rebuilt.step.made.loss  # type: ignore[attr-defined]
        shift = next(source)
        rebuilt.step.made.loss = lambda batch: plain([batch[0].roll(shift, 1)])  # type: ignore[attr-defined]
        return rebuilt

    report = rerun(capsule, build)
    assert report.verdict == "not-reproduced" and "something random was not captured" in report.reason


def test_a_step_that_fails(capsule: SpikeCapsule) -> None:
    def build() -> Rebuilt:
        rebuilt = replays.build()

        def step(*_: Any) -> None:
            raise RuntimeError("no\nsuch kernel")

        rebuilt.step = step
        return rebuilt

    with pytest.raises(TrackbridgeError, match="raised at step 48 of the replay: RuntimeError: no such kernel") as caught:
        rerun(capsule, build)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_path_is_no_capsule(capsule: SpikeCapsule) -> None:
    with pytest.raises(UsageError, match=r"a replay takes a capsule, from trackbridge.pull.REF., not a PosixPath"):
        rerun(capsule.path, replays.build)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a replay takes a capsule"):
        what_if(capsule.path, replays.build)  # type: ignore[arg-type]


def test_two_runs_at_least(capsule: SpikeCapsule) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        rerun(capsule, replays.build, runs=1)
    with pytest.raises(UsageError, match="at least 2, not '3'"):
        rerun(capsule, replays.build, runs="3")  # type: ignore[arg-type]


# -- damage


def with_states(capsule: SpikeCapsule, path: Path, change: Callable[[dict[str, Any]], None]) -> SpikeCapsule:
    """A copy with other random states, and digests that fit, so that only the restoring can see it."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    copy = copied(capsule, path, local=True)
    file = copy / "rank-0000" / "rng.safetensors"
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    arrays = load_file(file)
    change(arrays)
    save_file(arrays, file, metadata=metadata)
    entry = {"sha256": untrusted.digest(file), "bytes": file.stat().st_size}
    edit(copy, lambda manifest: manifest["files"].update({"rank-0000/rng.safetensors": entry}))
    return load(copy)


def test_a_damaged_random_state_is_named(capsule: SpikeCapsule, tmp_path: Path) -> None:
    def shorten(arrays: dict[str, Any]) -> None:
        arrays["step/51/numpy"] = arrays["step/51/numpy"][:-1]

    damaged = with_states(capsule, tmp_path, shorten)
    report = rerun(damaged, replays.build)
    assert report.verdict == "incomplete" and "before step 51" in report.reason and "numpy" in report.reason
    with pytest.raises(CapsuleError, match="numpy"):
        damaged.restore_rng(step=51, strict=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the recorded devices")
def test_states_of_devices_that_are_not_here(capsule: SpikeCapsule, tmp_path: Path) -> None:
    def add(arrays: dict[str, Any]) -> None:
        arrays |= {f"step/{step}/cuda:{i}": np.zeros(16, np.uint8) for step in range(48, 57) for i in range(8)}

    report = rerun(with_states(capsule, tmp_path, add), replays.build)
    assert report.verdict == "incomplete" and "8 device states unused" in report.reason
    assert all(step.different == 0 for step in report.steps), "what could be compared was"


def test_a_deterministic_replay_on_cuda_needs_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: said before the first step, not by a failing backward."""
    from trackbridge.replay.settings import check_cublas

    recorded = {"torch": {"deterministic_algorithms": True}, "environment": {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}}
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(UsageError, match="export CUBLAS_WORKSPACE_CONFIG=:16:8"):
        check_cublas(recorded, None)
    check_cublas(recorded, False)
    with pytest.raises(UsageError, match="export CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        check_cublas({}, True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    check_cublas(recorded, None)


def test_restore_rng(capsule: SpikeCapsule) -> None:
    torch.manual_seed(0)
    report = capsule.restore_rng()
    assert report.exact
    assert np.array_equal(torch.get_rng_state().numpy(), capsule.rng(replays.BAD)["torch"])
    with pytest.raises(CapsuleError, match="no RNG state of rank 0 before step 3; recorded: 48 to 56"):
        capsule.restore_rng(step=3)


def test_the_report_is_json(capsule: SpikeCapsule) -> None:
    def perturb(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
        made.models[""].head.weight.data[0, 0] = math.nan  # type: ignore[union-attr, operator, index]

    report = rerun(capsule, perturbed(perturb, 52, 0))
    assert report.verdict == "not-reproduced" and report.first_divergence is not None

    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads(report.model_dump_json(), parse_constant=refuse)
    assert data["verdict"] == "not-reproduced" and data["steps"][4]["losses"] == ["NaN", "NaN"]
    assert ReplayReport.model_validate_json(report.model_dump_json()).verdict == "not-reproduced"
    assert "nan" in report.to_markdown()


def test_what_no_build_should_return_is_named_with_what_makes_one() -> None:
    with pytest.raises(UsageError, match=r"returned a Linear; return \(model, optimizer, step\).*hf\.rebuild\(trainer\)"):
        Rebuilt.of(torch.nn.Linear(2, 2))
