"""The shipper as a process: started by a trainer that dies, killed itself, run by hand, from a copied folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trackbridge import plugins, shipper
from trackbridge.errors import ReferenceNotFoundError, UsageError
from trackbridge.history import load
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.records import Anomaly, Artifact, RunEnd
from trackbridge.rundir import RunDirectory
from trackbridge.shipping import settle as settling
from trackbridge.shipping.claim import Claim

sys.path.insert(0, str(Path(__file__).parent / "flaky"))
from a_run import ARun
from flaky_tracker import FlakyConfig, OtherConfig, read

FLAKY = Path(__file__).parent / "flaky"
GONE = 2**22 - 1  # a process id that nobody has


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flaky tracker's entry points are found here and in child processes."""
    monkeypatch.setenv("PYTHONPATH", str(FLAKY))
    plugins.available.cache_clear()
    yield
    plugins.available.cache_clear()


@pytest.fixture
def tracker(tmp_path: Path) -> Path:
    return tmp_path / "tracker.jsonl"


def given(tracker: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"kind": "flaky", "path": str(tracker), **more}]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read(path) if line["type"] == "Row"]


def status(path: Path) -> str | None:
    return next((line["status"] for line in reversed(read(path)) if line["type"] == "RunEnd"), None)


def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        threading.Event().wait(0.05)


def shipper_pid(directory: Path) -> int | None:
    try:
        return int(json.loads((directory / "shipper" / "flaky.claim").read_text())["pid"])
    except (OSError, ValueError):
        return None


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def trainer(tmp_path: Path, tracker: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has recorded a spike, with a capsule on its way, and goes on."""
    command = [sys.executable, str(FLAKY / "a_run.py"), str(tmp_path / "run"), str(tracker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "spiked\n"
        yield process
        process.kill()


def test_a_killed_trainers_last_rows_and_capsule_are_delivered_and_the_run_is_marked(
    tmp_path: Path, tracker: Path, trainer: subprocess.Popen[str]
) -> None:
    directory = tmp_path / "run"
    until(lambda: shipper_pid(directory))
    pid = shipper_pid(directory)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    until(lambda: status(tracker) == "killed" and pid is not None and not running(pid))
    assert steps(tracker) == list(range(45))
    (artifact,) = [line for line in read(tracker) if line["type"] == "Artifact"]
    assert artifact["name"] == "spike-run-30"
    manifest = json.loads((directory / artifact["path"] / "manifest.json").read_text())
    assert manifest["step"] == 30
    run = load(directory)
    assert run.status == "killed"
    assert run.artifacts[0].metadata["anomaly_id"] == "spike-30"
    (backend,) = shipper.status(directory)
    assert (backend.kind, backend.lag, backend.where) == ("flaky", 0, f"less {tracker}")
    log = (directory / "shipper" / "shipper.log").read_text()
    assert "ended: flaky at 48 of 48" in log
    assert "could not" not in log and "cannot" not in log


def test_with_the_shipper_killed_too_sync_does_it(tmp_path: Path, tracker: Path, trainer: subprocess.Popen[str]) -> None:
    directory = tmp_path / "run"
    until(lambda: shipper_pid(directory))
    pid = shipper_pid(directory)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert status(tracker) is None
    report = shipper.sync(directory, timeout=60)
    assert report.complete and report.killed and report.sealed == ("capsules/spike-30",)
    assert steps(tracker) == list(range(45))
    assert status(tracker) == "killed"
    again = shipper.sync(directory, timeout=60)
    assert again.complete and not again.killed and not again.sealed
    assert len({line["seq"] for line in read(tracker)}) == len(read(tracker))


def test_a_killed_shipper_is_replaced_without_loss_or_repetition(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run", given(tracker, faults=0.2))
    children = []
    for start in range(0, 120, 30):
        child = shipper.start(run.directory.path, os.getpid())
        children.append(child)
        run.rows(range(start, start + 30))
        until(lambda start=start: len(steps(tracker)) > start)
        child.kill()
        child.wait()
    last = shipper.start(run.directory.path, os.getpid())
    run.end()
    assert last.wait(60) == 0
    assert steps(tracker) == list(range(120))
    assert status(tracker) == "finished"


def test_the_child_has_its_own_session_and_a_log_and_ends_with_the_run(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run", given(tracker))
    child = shipper.start(run.directory.path, os.getpid())
    until(lambda: shipper_pid(run.directory.path))
    assert os.getsid(child.pid) == child.pid
    assert Path(f"/proc/{child.pid}/fd/1").readlink().name == "shipper.log"
    assert Path(f"/proc/{child.pid}/fd/0").readlink() == Path("/dev/null")
    child.terminate()  # a scheduler's warning: what is there is delivered, within bounds
    run.rows(range(5))
    run.end("failed")
    assert child.wait(60) == 0
    assert status(tracker) == "failed"


def test_a_new_attempt_takes_over_from_the_old_shipper(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run", given(tracker))
    old = shipper.start(run.directory.path, os.getpid())
    run.rows(range(3))
    until(lambda: len(steps(tracker)) == 3)
    run.resume(3)
    new = shipper.start(run.directory.path, os.getpid())
    run.rows(range(3, 6))
    assert old.wait(60) == 1  # it leaves the rest to its successor
    run.end()
    assert new.wait(60) == 0
    assert steps(tracker) == list(range(6))


# -- in this process


def killed_run(path: Path, tracker: Path, **more: Any) -> ARun:
    """A run whose trainer is not there any more, without a word."""
    run = ARun(path, given(tracker), **more)
    run.rows(range(40))
    run.anomaly(30, capsule="capsules/spike-30")
    run.journal.close()
    file = run.directory.read()
    file.attempts[-1].pid = GONE
    run.directory.write(file)
    return run


def test_sync_from_a_copied_directory_to_a_tracker_that_was_not_configured(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run", given(tracker))
    run.rows(range(20))
    run.end()
    assert shipper.sync(run.directory.path).complete
    copy = tmp_path / "laptop" / "run"
    shutil.copytree(run.directory.path, copy)
    shutil.rmtree(run.directory.path)
    elsewhere = tmp_path / "other.jsonl"
    seen: list[str] = []
    report = shipper.sync(copy, [OtherConfig(kind="other", path=elsewhere)], on_progress=lambda s: seen.append(s[0].kind))
    assert report.complete
    assert set(seen) == {"other"}
    assert steps(elsewhere) == steps(tracker) == list(range(20))
    assert {(b.kind, b.lag) for b in shipper.status(copy)} == {("flaky", 0), ("other", 0)}


def test_a_run_that_died_on_another_host_is_marked_only_when_it_has_been_silent_for_long(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed_run(tmp_path / "run", tracker, host="another-host")
    report = shipper.sync(run.directory.path)
    assert report.complete and not report.killed
    assert status(tracker) is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7 * 3600)
    report = shipper.sync(run.directory.path)
    assert report.complete and report.killed
    assert status(tracker) == "killed"


def test_a_live_run_is_synced_as_far_as_it_is(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run", given(tracker))
    run.rows(range(10))
    report = shipper.sync(run.directory.path)
    assert report.complete and not report.killed
    assert steps(tracker) == list(range(10))
    assert status(tracker) is None
    run.rows(range(10, 12))
    run.end()
    assert shipper.sync(run.directory.path).complete
    assert steps(tracker) == list(range(12))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_is_read_only_is_refused_in_one_line(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """(Root may write everywhere, so the file system's answer is given here.)"""
    run = ARun(tmp_path / "run", given(tracker))
    run.end()

    def read_only(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UsageError, match="sync a copy of the run directory"):
        shipper.sync(run.directory.path)


def test_a_slow_tracker_delays_nobody_and_a_timeout_is_kept(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ARun(tmp_path / "run")
    run.rows(range(20))
    run.end()
    stuck = FlakyConfig(path=tracker, hang=3600.0)
    quick = OtherConfig(kind="other", path=tmp_path / "other.jsonl")
    monkeypatch.setattr(shipper, "STOP_SECONDS", 1.0)
    begun = time.monotonic()
    report = shipper.sync(run.directory.path, [stuck, quick], timeout=1.0)
    assert time.monotonic() - begun < 10.0
    assert {b.kind: b.lag for b in report.backends} == {"flaky": 22, "other": 0}
    assert not report.complete
    assert steps(tmp_path / "other.jsonl") == list(range(20))


def test_a_run_without_trackers(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run")
    run.rows(range(3))
    with pytest.raises(UsageError, match="--to tensorboard"):
        shipper.sync(run.directory.path)
    with pytest.raises(ReferenceNotFoundError):
        shipper.sync(tmp_path / "nowhere")
    dead = killed_run(tmp_path / "dead", tracker)
    file = dead.directory.read()
    dead.directory.write(file.model_copy(update={"backends": []}))
    report = shipper.sync(dead.directory.path)
    assert report.killed and report.sealed


def test_a_capsule_that_cannot_be_sealed_does_not_keep_the_run_from_its_end(tmp_path: Path, tracker: Path) -> None:
    run = killed_run(tmp_path / "run", tracker)
    writer = JournalWriter(run.directory.rows(), segment_bytes=1 << 14, fsync_seconds=1.0)
    writer.append(Anomaly("far", "spike", 900, 900, 1.0, "train/loss", 1.0, 1.0, 9.0, capsule="capsules/spike-900"))
    writer.append(Anomaly("evil", "spike", 30, 30, 1.0, "train/loss", 1.0, 1.0, 9.0, capsule="../../outside"))
    writer.close()
    report = shipper.sync(run.directory.path)
    assert report.complete and report.killed
    assert report.sealed == ("capsules/spike-30",)
    assert not (tmp_path / "outside").exists()


def test_what_others_did_while_we_sealed_is_not_done_again(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed_run(tmp_path / "run", tracker)
    ours = settling._seal

    def slowly(directory: RunDirectory, anomaly: Anomaly) -> Artifact | None:
        artifact = ours(directory, anomaly)
        assert artifact is not None
        other = JournalWriter(directory.rows(), segment_bytes=1 << 14, fsync_seconds=1.0)
        other.append(artifact)
        other.append(RunEnd(-1, time.time(), "killed"))
        other.close()
        return artifact

    monkeypatch.setattr(settling, "_seal", slowly)
    report = shipper.sync(run.directory.path)
    assert report.complete and not report.killed and not report.sealed
    kinds = [type(record).__name__ for record in JournalReader(run.directory.rows()).read()]
    assert (kinds.count("RunEnd"), kinds.count("Artifact")) == (1, 1)
    run.resume(40)
    assert settling.settle(run.directory, 0, Claim(tmp_path / "x"), dead=True) == settling.Settled()


def test_two_at_once_mark_a_dead_run_once(tmp_path: Path, tracker: Path) -> None:
    run = killed_run(tmp_path / "run", tracker)
    reports: list[shipper.SyncReport] = []
    threads = [threading.Thread(target=lambda: reports.append(shipper.sync(run.directory.path, timeout=60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = [type(record).__name__ for record in JournalReader(run.directory.rows()).read()]
    assert kinds.count("RunEnd") == 1
    assert kinds.count("Artifact") == 1
    assert steps(tracker) == list(range(40))
    assert len({line["seq"] for line in read(tracker)}) == len(read(tracker))


def test_in_a_thread_of_the_trainer(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run")
    near = shipper.Shipper(run.directory.path, [FlakyConfig(path=tracker)], follow=True)
    thread = threading.Thread(target=near.run, daemon=True)
    thread.start()
    run.rows(range(5))
    until(lambda: len(steps(tracker)) == 5)
    run.anomaly(4, capsule="capsules/spike-4")
    run.end()
    thread.join(60)
    assert not thread.is_alive()
    assert status(tracker) == "finished"
    assert not RunDirectory(run.directory.path).capsules.exists()  # the trainer seals its own


def test_no_torch_and_no_tracker_on_this_path(tmp_path: Path) -> None:
    run = ARun(tmp_path / "run", [{"kind": "tensorboard"}])
    run.rows(range(40))
    run.anomaly(30, capsule="capsules/spike-30")
    run.journal.close()
    file = run.directory.read()
    file.attempts[-1].pid = GONE
    run.directory.write(file)
    words = (
        "import sys; from trackbridge import shipper;"
        "heavy = {'torch', 'wandb', 'mlflow', 'pandas', 'pyarrow', 'tensorboard'} & set(sys.modules);"
        "assert not heavy, heavy;"
        f"report = shipper.sync({str(run.directory.path)!r});"
        "assert report.complete and report.killed and report.sealed, report;"
        "heavy = {'torch', 'wandb', 'mlflow'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
