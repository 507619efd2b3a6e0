"""The guard acts on the step under way: the same on every rank, counted, recorded, and replayed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import trackbridge
from tests.guard_kit import BAD, STEPS
from tests.wrapped_optimizers import WRAPPERS
from trackbridge.config import DetectionConfig, GuardConfig, TrackbridgeConfig
from trackbridge.detectors.band import BandDetector
from trackbridge.errors import ConfigError, GuardError, UsageError
from trackbridge.guard import LAG, Guard
from trackbridge.replay import Rebuilt, rerun
from trackbridge.replay import guard as recorded_guard

ROOT = Path(__file__).parents[1]


def a_guard(**changes: Any) -> Guard:
    return Guard(GuardConfig(**changes), DetectionConfig())


def calm(guard: Guard, count: int = 60, seed: int = 0) -> None:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()
    assert all(guard.ok(2.0 + 0.05 * value) for value in noise)


# -- deciding


@pytest.mark.parametrize("bad", [9.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("action", "answer", "stopped"), [("warn", True, False), ("skip", False, False), ("stop", False, True)]
)
def test_what_each_action_does(bad: float, action: str, answer: bool, stopped: bool) -> None:
    guard = a_guard(action=action)
    calm(guard)
    assert guard.ok(bad) is answer
    assert (guard.flagged, guard.held, guard.stopped) == (1, int(not answer), stopped)
    assert guard.ok(2.0) and guard.consecutive == 0
    assert guard.stopped is stopped, "stop stays"


def test_raise_raises() -> None:
    guard = a_guard(action="raise")
    calm(guard)
    with pytest.raises(GuardError, match="loss is 9, out of its band"):
        guard.ok(torch.tensor(9.0))


def test_a_gradient_norm_counts_too() -> None:
    guard = a_guard(action="skip")
    for _ in range(40):
        assert guard.ok(2.0, grad_norm=torch.tensor(0.5))
    assert not guard.ok(2.0, grad_norm=400.0)
    assert not guard.ok(2.0, grad_norm=float("nan"))
    assert guard.ok(2.0, grad_norm=0.5)


def test_flagged_values_do_not_teach_the_band() -> None:
    guard = a_guard(action="skip")
    calm(guard)
    assert [guard.ok(50.0) for _ in range(8)] == [False] * 8
    assert guard.held == 8


@pytest.mark.parametrize("loss", [torch.zeros(2), "high", None], ids=str)
def test_what_is_no_scalar_is_refused(loss: Any) -> None:
    with pytest.raises(UsageError, match="scalar"):
        a_guard().ok(loss)


def test_the_settings_name_their_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"guard\.action"):
        TrackbridgeConfig.load(guard={"action": "ignore"})
    with pytest.raises(ConfigError, match="did you mean 'patience'"):
        TrackbridgeConfig.load(guard={"pacience": 3})


# -- rollback


def test_it_asks_for_a_rollback_and_gives_up_after_too_many(caplog: pytest.LogCaptureFixture) -> None:
    guard = a_guard(action="skip", max_consecutive=2, patience=5, max_rollbacks=1)
    calm(guard)
    for _ in range(2):
        guard.ok(50.0)
    assert not guard.wants_rollback
    guard.ok(50.0)
    assert guard.wants_rollback and "trackbridge rollback" in caplog.text
    guard.rolled_back()
    assert not guard.wants_rollback and guard.consecutive == 0
    for _ in range(3):
        guard.ok(50.0)
    with pytest.raises(GuardError, match="2 times without 5 good steps"):
        guard.rolled_back()


def test_after_a_recovery_rollbacks_count_anew() -> None:
    guard = a_guard(action="skip", max_consecutive=1, patience=5, max_rollbacks=1)
    calm(guard)
    for _ in range(3):
        guard.rolled_back()
        calm(guard, 5)
    assert guard.rollbacks == 0


def test_its_state_goes_on_and_what_was_counted_stays() -> None:
    guard = a_guard(action="skip", max_consecutive=1)
    calm(guard)
    early = json.loads(json.dumps(guard.state_dict()))
    guard.ok(50.0)
    guard.ok(50.0)
    guard.rolled_back()
    guard.load_state_dict(early)  # the same process, with the checkpoint's state
    assert (guard.flagged, guard.rollbacks) == (2, 1)
    fresh = a_guard(action="skip")
    fresh.load_state_dict(early)
    assert not fresh.ok(9.0) and fresh.ok(2.0), "no new warm-up"


# -- the bar


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 50.0), min_size=30, max_size=80),
    st.floats(0.0, 3.0),
    st.integers(0, 2**31),
)
def test_the_upper_end_of_the_band_is_where_it_alarms(values: list[float], spread: float, seed: int) -> None:
    """What `protect` compares with on the device is what `ok` decides by."""
    import numpy as np

    def made() -> BandDetector:
        detector = BandDetector(DetectionConfig(threshold=6.0))
        detector.bind(("train/loss", "grad/norm"))
        noise = np.random.default_rng(seed).normal(size=len(values)) * spread
        for step, value in enumerate(values):
            both = np.array([value + abs(noise[step]), value])
            detector.update(step, both, np.array([True, True]))
        return detector

    upper = made().upper()
    for index in range(2):
        for factor, out in ((1 - 1e-6, False), (1 + 1e-6, True)):
            detector = made()
            row = np.array([1e-9, 1e-9])
            row[index] = upper[index] * factor + (1e-9 if out else -1e-9)
            verdicts = detector.update(99, row, np.arange(2) == index)
            assert any(v.index == index and v.kind != "drift" for v in verdicts) is out


# -- on the device


def fused() -> tuple[nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(model: nn.Linear, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    loss = model(torch.ones(2, 3)).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def state(model: nn.Linear, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return [parameter.detach().clone() for parameter in model.parameters()] + moments


@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_optimizer_drops_a_flagged_update(scaled: bool) -> None:
    model, optimizer = fused()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    guard = a_guard(action="skip")
    told: list[tuple[str, float]] = []
    guard._tell = lambda name, value: told.append((name, float(value)))
    for _ in range(40):
        guard.protect(optimizer, torch.tensor(2.0))
        step(model, optimizer, scaler)
    before = state(model, optimizer)
    for bad in (torch.tensor(50.0), torch.tensor(float("nan")), torch.tensor(float("inf"))):
        guard.protect(optimizer, bad)
        step(model, optimizer, scaler)
    assert all(map(torch.equal, before, state(model, optimizer)))
    assert [value for name, value in told if name == "guard/dropped"][-3:] == [1.0, 1.0, 1.0]
    guard.protect(optimizer, torch.tensor(2.0))
    step(model, optimizer, scaler)
    assert not torch.equal(before[0], state(model, optimizer)[0])
    assert not hasattr(optimizer, "found_inf"), "nothing of ours stays on the optimizer"
    for _ in range(LAG):
        guard.protect(optimizer, torch.tensor(2.0))
        step(model, optimizer, scaler)
    assert guard.held == guard.flagged == 3
    guard.detach()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_protect_never_waits_for_the_device() -> None:
    model = nn.Linear(3, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = a_guard(action="skip")
    losses = [torch.full((), 2.0, device="cuda") for _ in range(40)] + [torch.full((), 50.0, device="cuda")]
    for number, loss in enumerate(losses):
        model(torch.ones(2, 3, device="cuda")).square().mean().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if number >= LAG:
            torch.cuda.synchronize()  # what was sent `LAG` calls ago has arrived
        torch.cuda.set_sync_debug_mode("error")
        try:
            guard.protect(optimizer, loss)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, before, model.parameters()))


def test_two_optimizers_each_have_their_own_flag() -> None:
    (bad_model, bad), (good_model, good) = fused(), fused()
    guard = a_guard(action="skip")
    for model, optimizer in ((bad_model, bad), (good_model, good)):
        step(model, optimizer)
        model(torch.ones(2, 3)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in bad_model.parameters()]
    guard.protect(bad, torch.tensor(float("nan")))
    guard.protect(good, torch.tensor(2.0))
    bad.step()
    good.step()
    assert all(map(torch.equal, before, bad_model.parameters()))
    assert not torch.equal(before[0], next(good_model.parameters()))
    assert not hasattr(bad, "found_inf") and not hasattr(good, "found_inf")


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_optimizer_in_a_wrapper(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    model, inside = fused()
    guard, optimizer = a_guard(action="skip"), wrap(inside)
    step(model, optimizer)
    before = state(model, inside)
    guard.protect(optimizer, torch.tensor(math.inf))
    step(model, optimizer)
    assert all(map(torch.equal, before, state(model, inside)))
    guard.protect(optimizer, torch.tensor(2.0))
    step(model, optimizer)
    assert not all(map(torch.equal, before, state(model, inside)))


def test_what_is_not_finite_is_dropped_from_the_first_step_on() -> None:
    model, optimizer = fused()
    guard = a_guard(action="skip")
    step(model, optimizer)
    before = state(model, optimizer)
    guard.protect(optimizer, torch.tensor(float("inf")))
    step(model, optimizer)
    assert all(map(torch.equal, before, state(model, optimizer)))


def test_protect_says_what_it_needs() -> None:
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(UsageError, match=r"AdamW\(..., fused=True\)"):
        a_guard().protect(plain, torch.tensor(1.0))
    with pytest.raises(UsageError, match="use ok"):
        a_guard().protect(fused()[1], 1.0)  # type: ignore[arg-type]


# -- recorded, and replayed


def training(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, Callable[[Any, list[Tensor], Any], Tensor]]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "protect")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.01 * step))

    def one(guard: Any, batch: list[Tensor], optimizer: Any) -> Tensor:
        x, y = batch
        loss = (model(x) - y).square().mean()
        loss.backward()
        if kind == "protect":
            guard.protect(optimizer, loss)
            optimizer.step()
            schedule.step()
        elif kind == "branch":
            if guard.ok(loss):
                optimizer.step()
                schedule.step()  # rests with the optimizer
        else:
            if guard.ok(loss):
                optimizer.step()
            schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, schedule, one


@pytest.mark.parametrize("kind", ["plain", "branch", "protect"])
def test_a_held_update_is_in_the_record_and_the_replay_is_exact(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    model, optimizer, schedule, one = training(kind)
    run = trackbridge.init(
        dir=tmp_path, strict=True, guard={"action": "skip"}, recorder={"snapshot_every": 8, "before": 6, "after": 6}
    )
    run.watch(model, optimizer, state={"schedule": schedule})
    data = [torch.randn(16, 4, generator=torch.Generator().manual_seed(step)) for step in range(70)]
    bad = 56
    for number, x in enumerate(run.batches(data)):
        y = x.sum(1, keepdim=True) * (40.0 if number == bad else 1.0)
        run.step(one(run.guard, [x, y], optimizer), batch=[x, y])
    run.finish()

    record = trackbridge.load(run.dir)
    name = "guard/dropped" if kind == "protect" else "guard/held"
    steps, held = record.series(name)
    assert steps[held > 0].tolist() == [bad]
    assert record.series("optim/skipped")[1][-1] == 1
    assert [a.onset for a in record.anomalies if a.series == "train/loss"] == [bad], "a spike that was held is still told"

    def build() -> Rebuilt:
        model, optimizer, schedule, one = training(kind)

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Tensor:
            x = batches[0]
            guard: Any = NoGuard() if kind == "plain" else recorded_guard
            return one(guard, [x, x.sum(1, keepdim=True) * (40.0 if index == bad else 1.0)], optimizer)

        return Rebuilt(model, optimizer, step, state={"schedule": schedule})

    report = rerun(trackbridge.pull(run.dir), build)
    assert report.verdict == "exact", report.to_markdown()


class NoGuard:
    """A step function that knows of no guard."""

    def ok(self, loss: Tensor) -> bool:
        return True


# -- ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks did, by case. The case in which one of them leaves early is the last."""
    folder, cases = tmp_path_factory.mktemp("ranks"), ("ok", "protect", "uneven")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.guard_kit"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launch, str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in (0, 1)] for case in cases}


@pytest.mark.parametrize("case", ["ok", "protect"])
def test_f6_only_one_rank_is_out_of_band_and_all_leave_out_the_same_steps(two_ranks: dict[str, Any], case: str) -> None:
    told = two_ranks[case]
    assert told[0]["held"] == told[1]["held"] == len(BAD)
    assert told[0]["weights"] == told[1]["weights"]
    if case == "ok":
        assert told[0]["answers"] == told[1]["answers"] == [step not in BAD for step in range(STEPS)]


def test_f6_a_rank_with_a_batch_fewer_makes_the_others_fail_in_words(two_ranks: dict[str, Any]) -> None:
    waiting, gone = two_ranks["uneven"]
    assert "not every rank called run.guard within 5 s" in waiting["error"] and gone["error"] is None
