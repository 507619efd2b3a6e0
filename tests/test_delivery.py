"""The shipper's life as the trainer sees it: started again when it dies, not for ever, never waited for without a limit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trackbridge
from trackbridge import plugins, shipper
from trackbridge.delivery import RESTARTS, Child

sys.path.insert(0, str(Path(__file__).parent / "flaky"))
from flaky_tracker import read

FLAKY = Path(__file__).parent / "flaky"


def ending(*codes: int) -> tuple[Callable[[], subprocess.Popen[bytes]], list[int]]:
    """Starts processes that end with these exit statuses, the last one again and again. Negative: by that signal."""
    started: list[int] = []

    def start() -> subprocess.Popen[bytes]:
        code = codes[min(len(started), len(codes) - 1)]
        started.append(code)
        words = f"import os, sys; os.kill(os.getpid(), {-code})" if code < 0 else f"import sys; sys.exit({code})"
        return subprocess.Popen([sys.executable, "-S", "-c", words])

    return start, started


def test_a_shipper_that_dies_is_started_again_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start, started = ending(-signal.SIGKILL, 3, 0)
    child = Child(start, tmp_path, pause=0.0)
    assert child.wait(60)
    assert started == [-9, 3, 0] and child.restarts == 2
    assert "ended by signal 9; starting it again" in caplog.text and "ended with status 3" in caplog.text


def test_but_not_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start, started = ending(-signal.SIGSEGV)
    child = Child(start, tmp_path, pause=0.0)
    assert child.wait(60)
    assert len(started) == RESTARTS + 1
    assert f"deliver it later with: trackbridge sync {tmp_path}" in caplog.text


@pytest.mark.parametrize("code", [0, 1, 2])
def test_an_end_of_its_own_decision_is_accepted(tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """Everything delivered, not everything (SIGTERM, the run goes on elsewhere), wrong usage: trying again would not help."""
    start, started = ending(code)
    child = Child(start, tmp_path, pause=0.0)
    assert child.wait(60)
    assert started == [code]
    assert ("sync" in caplog.text) == (code == 2)


def test_waiting_is_bounded(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    child = Child(lambda: process, tmp_path)
    assert not child.wait(0.05)
    process.kill()


def test_a_run_whose_shipper_is_killed_still_delivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FLAKY))
    plugins.available.cache_clear()
    tracker = tmp_path / "tracker.jsonl"
    caplog.set_level(logging.WARNING)
    pids: list[int] = []
    start = shipper.start

    def noted(*arguments: object) -> subprocess.Popen[bytes]:
        process = start(*arguments)  # type: ignore[arg-type]
        pids.append(process.pid)
        return process

    monkeypatch.setattr(shipper, "start", noted)
    run = trackbridge.init(backend={"kind": "flaky", "path": str(tracker)}, dir=tmp_path, id="r")
    run.step(loss=1.0)
    os.kill(pids[0], signal.SIGKILL)
    for _ in range(20):
        run.step(loss=1.0)
    report = run.finish(60)
    assert report, str(report)
    assert len(pids) == 2
    assert [line["step"] for line in read(tracker) if line["type"] == "Row"] == list(range(21))
    plugins.available.cache_clear()
