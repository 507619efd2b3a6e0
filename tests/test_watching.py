"""What a live run adds to detection: stalls told by an idle scribe, a loop that asks whether to stop, faults of a training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trackbridge
from tests.test_ranks import torchrun
from trackbridge import scribe
from trackbridge.records import Anomaly


def started(folder: Path, **settings: Any) -> trackbridge.Run:
    return trackbridge.init(dir=folder, recorder={"enabled": False}, **settings)


def until(run: trackbridge.Run, wanted: Callable[[list[Anomaly]], bool]) -> list[Anomaly]:
    """The run's anomalies once they are as `wanted`."""
    deadline = time.monotonic() + 30
    while not wanted(run.anomalies):
        assert time.monotonic() < deadline, run.anomalies
        threading.Event().wait(0.01)
    return run.anomalies


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the scribe's clock, in seconds; it looks at it often."""
    monkeypatch.setattr(scribe, "IDLE_SECONDS", 0.01)
    return [1000.0]


def steady(run: trackbridge.Run, now: list[float], steps: int = 30) -> None:
    run._scribe._clock = lambda: now[0]
    for _ in range(steps):
        run.step(loss=2.0)
    run._scribe.ask(lambda: None)


def test_a_run_that_hangs_is_told_while_it_hangs(tmp_path: Path, now: list[float]) -> None:
    run = started(tmp_path)
    steady(run, now)
    now[0] += 299
    run._scribe.ask(lambda: None)
    assert run.anomalies == []
    now[0] += 2
    (event,) = until(run, bool)
    assert (event.kind, event.step, event.series) == ("stall", 30, "perf/step_s") and event.value == 301.0
    run._scribe.ask(lambda: None)  # what is told is journalled first, handed to the loop last
    assert [a.kind for a in run.step(loss=2.0)] == ["stall"]  # and the loop hears of it when it goes on
    until(run, lambda found: found[0].recovered_after == 0)
    run.finish()
    assert [a.kind for a in trackbridge.load(run.dir).anomalies] == ["stall"]


def test_an_announced_pause_is_no_stall(tmp_path: Path, now: list[float]) -> None:
    run = started(tmp_path)
    steady(run, now)
    with run.pause("eval"), run.pause("save"):
        now[0] += 5000
        threading.Event().wait(0.1)
        assert run.anomalies == []
    now[0] += 200
    threading.Event().wait(0.1)
    assert run.anomalies == []
    now[0] += 200
    assert until(run, bool)[0].value == 400.0
    run.finish()


def test_a_run_that_ends_is_not_stalled(tmp_path: Path, now: list[float]) -> None:
    run = started(tmp_path)
    steady(run, now)
    run._scribe._closing = True
    now[0] += 5000
    threading.Event().wait(0.1)
    run.finish()
    assert run.anomalies == []


def test_the_loop_asks_whether_to_stop(tmp_path: Path) -> None:
    run = started(tmp_path, stop_on_anomaly=0.8)
    for step in range(60):
        run.step(loss=2.0 + 0.01 * (step % 5) + 0.5 * (step == 40))
    run._scribe.ask(lambda: None)
    assert [a.severity < 0.8 for a in run.anomalies] == [True] and run.should_stop is None and not run.agree_to_stop()
    run.step(loss=float("nan"))
    run._scribe.ask(lambda: None)
    assert run.should_stop is not None and run.should_stop.kind == "nonfinite" and run.agree_to_stop()
    run.finish()
    other = started(tmp_path)
    other.step(loss=float("nan"))
    other._scribe.ask(lambda: None)
    assert len(other.anomalies) == 1 and other.should_stop is None
    other.finish()


def test_faults_of_a_real_training_are_told_by_name(tmp_path: Path) -> None:
    """A learning rate of fifty times, then a loader that hands out one batch again and again, then Adam's state is lost."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.randn(4096, 8)
    target = data.sum(1, keepdim=True) + 0.1 * torch.randn(4096, 1)
    order = [list(range(8 * i, 8 * i + 8)) for i in range(300)]
    order[150:160] = [order[149]] * 10
    run = trackbridge.init(dir=tmp_path, parameters={"moments_every": 5})
    run.watch(model, optimizer)
    for step, rows in enumerate(run.batches([(data[i], target[i]) for i in order])):
        optimizer.param_groups[0]["lr"] = 5e-2 if 100 <= step < 103 else 1e-3
        if step == 250:
            optimizer.state.clear()
        loss = torch.nn.functional.mse_loss(model(rows[0]), rows[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
    run.finish()
    named = {note.partition(":")[0]: a for a in trackbridge.load(run.dir).anomalies for note in a.notes}
    assert named["lr-discontinuity"].onset == 100 and named["lr-discontinuity"].capsule is not None
    assert (named["repeated-batch"].onset, named["repeated-batch"].recovered_after) == (150, 10)
    assert 250 <= named["optimizer-state-lost"].step <= 255


STOPPING = """
import sys, torch, torch.distributed as dist
import trackbridge
from tests.test_ranks import torchrun
dist.init_process_group("gloo")
run = trackbridge.init(dir=sys.argv[1], stop_on_anomaly=0.9, recorder={"enabled": False})
run.watch(torch.nn.Linear(2, 1))
for step in range(100):
    run.step(loss=float("nan") if dist.get_rank() == 1 and step == 10 else 2.0)
    run._scribe.ask(lambda: None)
    if run.agree_to_stop():
        break
sys.stdout.write(f"STOPPED {dist.get_rank()} {step}\\n")
run.finish()
"""


def test_ranks_that_must_leave_together_agree(tmp_path: Path) -> None:
    """F6: only one rank is over the limit; both leave at the same step, and none hangs."""
    said = torchrun(tmp_path, STOPPING, str(tmp_path / "runs"))
    stopped = {line.split()[1]: int(line.split()[2]) for line in said.splitlines() if line.startswith("STOPPED")}
    assert set(stopped) == {"0", "1"} and stopped["0"] == stopped["1"] < 99
