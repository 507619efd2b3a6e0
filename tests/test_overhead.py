"""What measuring costs is measured; and where it is too much, something is given up, in a documented order, and comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trackbridge
from tests.test_ranks import torchrun
from trackbridge.errors import Part
from trackbridge.overhead import CALM, RAREST, WINDOW, Concert, Economy, Expense, Throttle


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_outermost_part_counts() -> None:
    clock = Clock()
    expense = Expense(clock)
    outer, inner = Part("outer", timer=expense), Part("inner", timer=expense)
    clock.now += 5  # the user's
    with outer:
        clock.now += 1
        with inner:
            clock.now += 2
        clock.now += 4
    clock.now += 3
    assert expense.close(0, 15.0) == pytest.approx(7 / 15)
    assert expense.close(1, 10.0) == 0


def test_a_part_that_fails_is_charged_too() -> None:
    clock = Clock()
    expense = Expense(clock)
    with pytest.raises(ValueError, match="ours"), Part("it", strict=True, timer=expense):
        clock.now += 2
        raise ValueError("ours")
    clock.now += 8
    assert expense.close(0, 10.0) == pytest.approx(0.2)


def test_what_comes_after_the_step_was_closed_is_the_next_ones() -> None:
    clock = Clock()
    expense = Expense(clock)
    with Part("the run", timer=expense):
        clock.now += 1
        assert expense.close(0, 4.0) == 0.25
        clock.now += 3
    assert expense.close(1, 4.0) == 0.75


def test_threads_nest_for_themselves() -> None:
    """A thread of the user's that logs while the training thread is in a hook of ours leaves nothing open."""
    expense = Expense()
    inside, done = threading.Event(), threading.Event()

    def log() -> None:
        with Part("the run", timer=expense):
            inside.set()
            done.wait(20)

    other = threading.Thread(target=log)
    with Part("a hook", timer=expense):
        other.start()
        inside.wait(20)
    done.set()
    other.join()
    assert expense.close(0, 1000.0) > 0
    assert expense.close(1, 1000.0) == 0


def shares(throttle: Throttle, fixed: float, thinned: float, windows: int) -> list[int]:
    """The factor after each window of a run whose measuring costs `fixed`, and `thinned` over the factor."""
    factors = []
    for _ in range(windows):
        for _ in range(WINDOW):
            throttle.add(fixed + thinned / throttle.factor, 1.0)
        factors.append(throttle.factor)
    return factors


Share = st.floats(0, 0.5)


@given(limit=st.floats(0.001, 0.3), fixed=Share, thinned=Share)
@settings(max_examples=100, deadline=None)
def test_it_settles_below_the_limit_if_it_can_and_never_swings(limit: float, fixed: float, thinned: float) -> None:
    throttle = Throttle(limit)
    factors = shares(throttle, fixed, thinned, 40)
    assert factors == sorted(factors) and len(set(factors[-30:])) == 1
    cost = (fixed + thinned / factors[-1]) * (WINDOW - 1) / WINDOW  # the dearest step is left out
    assert factors[-1] == RAREST or cost <= limit * (1 + 1e-9)
    before = (fixed + thinned / (factors[-1] / 2)) * (WINDOW - 1) / WINDOW
    assert factors[-1] == 1 or before > limit * (1 - 1e-9)  # nothing is given up that could have stayed


@given(limit=st.floats(0.005, 0.1), thinned=st.floats(0.15, 0.5), least=st.floats(0, 0.3))
@settings(max_examples=50, deadline=None)
def test_it_recovers_when_the_steps_become_longer(limit: float, thinned: float, least: float) -> None:
    throttle = Throttle(limit)
    shares(throttle, 0.0, thinned, 10)
    assert throttle.factor > 1
    factors = shares(throttle, 0.0, least * limit, 7 * CALM)
    assert factors == sorted(factors, reverse=True) and factors[-1] == 1


def test_one_hiccup_is_no_habit() -> None:
    throttle = Throttle(0.01)
    for step in range(10 * WINDOW):
        throttle.add(0.9 if step % WINDOW == 7 else 0.002, 1.0)
    assert throttle.factor == 1


def test_it_is_said_once_that_it_begins_and_once_that_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    throttle = Throttle(0.01)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        shares(throttle, 0.05, 0.05, 40)
    first, second = (record.getMessage() for record in caplog.records)
    assert "max_overhead" in first and "loss and gradients stay" in first
    assert "64 times" in second


def test_ranks_change_at_the_same_step() -> None:
    store = torch.distributed.HashStore()
    concerts = [Concert(store, "run/0", leader=rank == 0, heard_s=0.001) for rank in range(3)]
    ranks = [Economy(Throttle(0.01), concert, leader=rank == 0) for rank, concert in enumerate(concerts)]
    factors: list[list[int]] = [[], [], []]
    for call in range(40 * WINDOW):
        for rank, economy in enumerate(ranks):  # the others are within their limits, and follow all the same
            factors[rank].append(economy.close(call, 0.03 / economy.factor if rank == 0 else 0.001, 1.0))
        if concerts[0].pending:
            wait(lambda: all(concert.pending for concert in concerts))
    assert factors[0] == factors[1] == factors[2] and set(factors[0]) == {1, 2, 4}
    for economy in ranks:
        economy.stop()


def test_a_rank_that_hears_late_follows_at_once() -> None:
    store = torch.distributed.HashStore()
    leader, other = (Concert(store, "run/0", leader=first, heard_s=0.001) for first in (True, False))
    leader.announce(4, 100)
    wait(lambda: other.pending)
    assert leader.due(99) is None and leader.due(100) == 4 and leader.due(101) is None
    assert other.due(250) == 4 and not other.pending
    leader.close(), other.close()


TWO_RANKS = """
import sys, torch, torch.distributed as dist
import trackbridge
from trackbridge import overhead
overhead.WINDOW, overhead.HEARD_S, overhead.AHEAD_S = 10, 0.01, 0.5
torch.set_num_threads(1)
dist.init_process_group("gloo")
run = trackbridge.init(dir=sys.argv[1], max_overhead=0.9 if dist.get_rank() else 0.0001, recorder={"enabled": False})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.watch(model, optimizer)
for _ in range(400):
    model(torch.ones(2, 4)).mean().backward(); optimizer.step(); optimizer.zero_grad(); run.step()
run.finish()
dist.barrier()
"""


def test_two_ranks_thin_together(tmp_path: Path) -> None:
    """So the activations in a row of all ranks are those of all ranks, or of none."""
    torchrun(tmp_path, TWO_RANKS, str(tmp_path / "runs"))
    record = trackbridge.load(tmp_path / "runs")
    rows = [
        {row.step: dict(zip(row.schema.names, row.values.tolist(), strict=True)) for row in record.rows(rank)}
        for rank in range(2)
    ]
    thinning = [[rows[rank][step].get("trackbridge/thinning", 1.0) for step in sorted(rows[0])] for rank in range(2)]
    assert rows[0].keys() == rows[1].keys() and thinning[0] == thinning[1] and thinning[0][-1] >= 2
    measured = [{step for step, values in rows[rank].items() if "act/0/mean" in values} for rank in range(2)]
    assert measured[0] == measured[1] and len(measured[0]) < len(rows[0])


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def trained(folder: Path, *, steps: int, costs: dict[range, float], **options: object) -> trackbridge.RunRecord:
    """A run on a clock of its own: each step takes a second, and of that ours what `costs` says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    quiet = {"recorder": {"enabled": False}, "perf": {"flops_per_token": 1.0}}  # counting FLOPs may run the hook on a copy
    run = trackbridge.init(dir=folder, **quiet, **options)  # type: ignore[arg-type]
    clock = Clock()
    run._expense = run._steps._expense = Expense(clock)
    run._pace._clock._now = clock
    run.watch(model, optimizer)
    cost = 0.0
    model.register_forward_hook(lambda *_: spend(run._expense, clock, cost))
    for step in range(steps):
        begun = clock.now
        cost = next((c for when, c in costs.items() if step in when), 0.0)
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.now = begun + 1.0
        run.step(loss=loss.detach())
    run.finish()
    return trackbridge.load(folder)


def spend(expense: Expense, clock: Clock, seconds: float) -> None:
    expense.enter()
    clock.now += seconds
    expense.leave()


def test_a_run_thins_itself_and_recovers(tmp_path: Path) -> None:
    busy = range(WINDOW + 1)  # the first step has no share
    record = trained(tmp_path, steps=6 * WINDOW, costs={busy: 0.1}, max_overhead=0.05)
    steps, share = record.series("trackbridge/overhead_share")
    assert share[steps == 10] == pytest.approx(0.1) and share[-1] == 0
    steps, thinning = record.series("trackbridge/thinning")
    assert thinning[: WINDOW - 1].tolist() == [1.0] * (WINDOW - 1) and set(thinning.tolist()) == {1.0, 2.0}
    assert thinning[-1] == 1.0
    rare = set(steps[thinning == 2.0].tolist())
    measured = set(record.series("act/0/mean")[0].tolist())
    assert measured & rare and {s for s in rare if s % 2 == 0} - measured <= {min(rare)}
    assert len(measured & rare) < 0.6 * len(rare)
    for name in ("train/loss", "grad/norm", "layer/0.weight/grad_norm"):  # what detection lives on
        assert len(record.series(name)[0]) == 6 * WINDOW


def test_without_max_overhead_the_share_is_told_and_nothing_else_happens(tmp_path: Path) -> None:
    record = trained(tmp_path, steps=2 * WINDOW, costs={range(1000): 0.5})
    assert record.series("trackbridge/overhead_share")[1].tolist() == pytest.approx([0.5] * (2 * WINDOW - 1))
    assert "trackbridge/thinning" not in record.names and len(record.series("act/0/mean")[0]) == 2 * WINDOW


def test_the_share_of_a_real_run_is_there(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    run = trackbridge.init(dir=tmp_path)
    run.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        optimizer.step()
        run.step(loss=loss.detach())
    run.finish()
    _, share = trackbridge.load(tmp_path).series("trackbridge/overhead_share")
    assert len(share) == 4 and ((share > 0) & (share <= 1)).all()


@pytest.mark.parametrize("limit", [0, 1.0, -0.1, "much"])
def test_a_limit_that_is_none(tmp_path: Path, limit: object) -> None:
    with pytest.raises(trackbridge.TrackbridgeError, match="max_overhead"):
        trackbridge.init(dir=tmp_path, max_overhead=limit)
