"""One tracker being served: nothing lost, nothing twice, whatever it does and whenever the shipper dies. No time passes."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.disk import full_disk
from trackbridge.config import StreamConfig
from trackbridge.errors import RetryLater, TrackbridgeError
from trackbridge.journal import JournalWriter
from trackbridge.records import Artifact
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.backoff import ASKED_SECONDS, MOST_SECONDS, Backoff
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.cursor import Cursor, cursors, first_free_seq
from trackbridge.shipping.status import statuses
from trackbridge.shipping.worker import STUCK_SECONDS, Situation, Worker

sys.path.insert(0, str(Path(__file__).parent / "flaky"))
from a_run import ARun
from flaky_tracker import FlakyConfig, FlakyTracker, read


class Service:
    """A worker with a clock of its own."""

    def __init__(
        self, run: ARun, config: FlakyConfig, *, follow: bool = False, over: bool = False, seed: int = 0, anew: bool = False
    ) -> None:
        self.now = 0.0
        self.situation = Situation(follow=follow, over=over)
        policy = StreamConfig.model_validate(run.directory.read().settings["stream"])
        self.worker = Worker(
            config, run.directory, policy, self.situation, clock=lambda: self.now, rng=random.Random(seed), anew=anew
        )
        self.delays: list[float] = []

    def steps(self, most: int) -> Service:
        for _ in range(most):
            if self.worker.done:
                break
            self.delays.append(self.worker.step())
            self.now += self.delays[-1]
        return self

    def to_the_end(self) -> Service:
        self.steps(20_000)
        assert self.worker.done, "the worker does not come to an end"
        self.worker.finish(1.0)
        return self

    def die(self) -> None:
        """As SIGKILL: nothing is closed or saved. (Its claim goes stale with its process; here the process lives on.)"""
        self.worker.claim.path.unlink(missing_ok=True)

    @property
    def tracker(self) -> FlakyTracker:
        assert isinstance(self.worker.backend, FlakyTracker)
        return self.worker.backend


def rows(path: Path) -> list[tuple[int, int, float]]:
    """(attempt, step, loss) of each row in the tracker, in order of arrival."""
    return [(line["attempt"], line["step"], line["values"]["train/loss"]) for line in read(path) if line["type"] == "Row"]


def of_type(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read(path) if line["type"] == kind]


@pytest.fixture
def tracker(tmp_path: Path) -> Path:
    return tmp_path / "tracker.jsonl"


def finished_run(path: Path, **stream: Any) -> ARun:
    run = ARun(path, **stream)
    run.rows(range(21))
    run.anomaly(20)
    run.rows(range(21, 30))
    run.end()
    return run


@pytest.mark.parametrize("schedule", range(25))
def test_exactly_once_under_random_faults_and_deaths(tmp_path: Path, tracker: Path, schedule: int) -> None:
    """Training goes on, resumes from older steps, the tracker fails in every way, the shipper is killed at random points."""
    print(f"schedule {schedule}")
    rng = random.Random(schedule)
    run = ARun(tmp_path / "run")
    wanted: list[tuple[int, int, float]] = []
    step = 0

    def config() -> FlakyConfig:
        return FlakyConfig(
            path=tracker,
            seed=rng.randrange(10**6),
            faults=rng.choice([0.0, 0.1, 0.4]),
            knows=rng.random() < 0.7,
            only_at_close=rng.random() < 0.2,
        )

    service = Service(run, config(), follow=True, seed=schedule)
    for _ in range(rng.randrange(5, 25)):
        size = rng.randrange(0, 30)
        run.rows(range(step, step + size))
        wanted += [(run.attempt, s, 1000.0 * run.attempt + s) for s in range(step, step + size)]
        step += size
        if rng.random() < 0.2 and step:
            run.anomaly(step - 1)
        if rng.random() < 0.15:
            if rng.random() < 0.5:
                run.end("failed")
            step = max(step - rng.randrange(20), 0)
            run.resume(step)
        service.steps(rng.randrange(0, 12))
        if rng.random() < 0.3:
            service.die()
            service = Service(run, config(), follow=True, seed=schedule)
    run.end("finished")
    service.die()
    last = FlakyConfig(path=tracker, seed=schedule, faults=0.3)
    Service(run, last, follow=True, over=True).to_the_end()
    assert rows(tracker) == wanted
    seqs = [line["seq"] for line in read(tracker)]
    assert len(seqs) == len(set(seqs))
    assert of_type(tracker, "RunEnd")[-1]["status"] == "finished"
    (status,) = statuses(run.directory, {"flaky": last})
    assert (status.lag, status.last_error) == (0, None)


def test_each_attempt_is_opened_and_ended_on_its_own(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run")
    run.rows(range(5))
    run.end("failed")
    run.resume(3)
    run.rows(range(3, 8))  # dies without a word
    run.resume(6)
    run.rows(range(6, 9))
    run.end()
    service = Service(run, FlakyConfig(path=tracker)).steps(1)
    backend = None
    log: list[Any] = []
    while not service.worker.done:
        service.steps(1)
        backend = service.worker.backend or backend
    assert isinstance(backend, FlakyTracker)
    log = [entry for entry in backend.log if entry[0] != "write"]
    assert log == [("open", 0), ("close", "failed"), ("open", 1), ("close", None), ("open", 2), ("close", "finished")]


def test_a_delivered_run_is_not_contacted_again(tmp_path: Path, tracker: Path) -> None:
    run = finished_run(tmp_path / "run")
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    again = Service(run, FlakyConfig(path=tracker)).to_the_end()
    assert again.worker.backend is None


def test_what_comes_after_the_end_is_delivered_and_the_run_ended_again(tmp_path: Path, tracker: Path) -> None:
    """A capsule that was sealed late: its artifact follows the end."""
    run = finished_run(tmp_path / "run")
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    late = JournalWriter(run.directory.rows(), segment_bytes=1 << 14, fsync_seconds=1.0)
    late.append(Artifact(-1, 20, 1e12, "spike-run-20", "spike-capsule", "capsules/spike-20"))
    late.close()
    service = Service(run, FlakyConfig(path=tracker))
    service.steps(3)
    backend = service.tracker
    service.to_the_end()
    assert [line["name"] for line in of_type(tracker, "Artifact")] == ["spike-run-20"]
    assert [entry for entry in backend.log if entry[0] == "close"] == [("close", "finished")]


def test_the_end_is_told_even_if_the_tracker_has_what_came_after_it(tmp_path: Path, tracker: Path) -> None:
    """Killed between the delivery of a late artifact and the close: `open` knows a seq beyond that of the end."""
    run = finished_run(tmp_path / "run")
    late = JournalWriter(run.directory.rows(), segment_bytes=1 << 14, fsync_seconds=1.0)
    late.append(Artifact(-1, 20, 1e12, "spike-run-20", "spike-capsule", "capsules/spike-20"))
    late.close()
    first = Service(run, FlakyConfig(path=tracker), follow=True).steps(10)
    assert of_type(tracker, "Artifact") and not of_type(tracker, "RunEnd")
    first.die()
    Service(run, FlakyConfig(path=tracker), follow=True, over=True).to_the_end()
    assert [line["status"] for line in of_type(tracker, "RunEnd")] == ["finished"]


def test_anomalies_are_counted_over_restarts(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run")
    for step in (5, 9):
        run.rows(range(step - 2, step + 1))
        run.anomaly(step)
        run.rows(range(step + 1, step + 2))
        service = Service(run, FlakyConfig(path=tracker), follow=True).steps(10)
        service.die()
    counts = {line["step"]: line["values"].get("anomaly/count") for line in of_type(tracker, "Row")}
    assert (counts[5], counts[9]) == (1.0, 2.0)


def test_the_cursor_moves_only_to_what_is_safe(tmp_path: Path, tracker: Path) -> None:
    run = finished_run(tmp_path / "run")
    service = Service(run, FlakyConfig(path=tracker, only_at_close=True), follow=True).steps(20)
    assert len(rows(tracker)) == 30
    assert Cursor.load(run.directory, "flaky").seq == -1
    service.situation.over = True
    service.to_the_end()
    assert Cursor.load(run.directory, "flaky").seq == service.worker._reader.position == 32


def test_open_moves_the_cursor_forward(tmp_path: Path, tracker: Path) -> None:
    run = finished_run(tmp_path / "run")
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    (run.directory.shipper / "flaky.json").unlink()
    service = Service(run, FlakyConfig(path=tracker))
    service.steps(2)
    backend = service.tracker
    service.to_the_end()
    assert not [entry for entry in backend.log if entry[0] == "write"]
    assert len(rows(tracker)) == 30


def test_a_cursor_of_another_place_does_not_count(tmp_path: Path, tracker: Path) -> None:
    run = finished_run(tmp_path / "run")
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    Service(run, FlakyConfig(path=tmp_path / "elsewhere.jsonl")).to_the_end()
    assert rows(tmp_path / "elsewhere.jsonl") == rows(tracker)


def test_the_stream_policy_decides_what_is_left_out(tmp_path: Path, tracker: Path) -> None:
    run = finished_run(tmp_path / "run", every=10)
    Service(run, FlakyConfig(path=tracker), over=True).to_the_end()
    assert [step for _, step, _ in rows(tracker)] == [0, 10, *range(12, 29)]
    (line,) = [line for line in of_type(tracker, "Row") if line["step"] == 20]
    assert (line["values"]["anomaly/score"], line["values"]["anomaly/count"]) == (30.0, 1.0)
    assert statuses(run.directory, {"flaky": None})[0].lag == 0


# -- refusals


def test_refused_records_are_written_down_and_the_rest_goes_on(
    tmp_path: Path, tracker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = finished_run(tmp_path / "run")
    config = FlakyConfig(path=tracker, refuse=(3, 7))
    Service(run, config).to_the_end()
    assert [step for _, step, _ in rows(tracker)] == [s for s in range(30) if s not in (2, 6)]  # seq 0 is the parameters
    letters = (run.directory.shipper / "dead-letters.jsonl").read_text().splitlines()
    assert ['"seq": 3' in letters[0], '"seq": 7' in letters[1], len(letters)] == [True, True, 2]
    (status,) = statuses(run.directory, {"flaky": config})
    assert (status.dead_letters, status.lag) == (2, 0)
    assert "refuses 2 records for good" in caplog.text
    (run.directory.shipper / "flaky.json").unlink()
    tracker.unlink()
    Service(run, config).to_the_end()
    assert len((run.directory.shipper / "dead-letters.jsonl").read_text().splitlines()) == 2  # not said again


# -- patience


def test_retry_later_is_honoured(tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "run")
    service = Service(run, FlakyConfig(path=tracker))
    asked: list[float] = []

    def busy(self: FlakyTracker, batch: Any, /, *, timeout: float) -> int:
        asked.append(service.now)
        raise RetryLater(120.0, "maintenance")

    monkeypatch.setattr(FlakyTracker, "write", busy)
    service.steps(6)
    assert len(asked) > 3
    assert all(later - earlier >= 120.0 for earlier, later in itertools.pairwise(asked))
    assert Cursor.load(run.directory, "flaky").error == "maintenance"


@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_what_only_a_person_can_mend_ends_a_sync(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Nothing counts as delivered, and the claim is free for the next one."""
    run = finished_run(tmp_path / "run")

    def gone(self: FlakyTracker, *_: Any, **__: Any) -> int:
        raise TrackbridgeError("the run is deleted; restore it")

    with monkeypatch.context() as patch:
        patch.setattr(FlakyTracker, method, gone)
        service = Service(run, FlakyConfig(path=tracker)).steps(20)
        assert service.worker.done
        service.worker.finish(1.0)
        assert service.now < 2.0
    assert Cursor.load(run.directory, "flaky").error == "the run is deleted; restore it"
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    assert sorted(step for _, step, _ in rows(tracker)) == list(range(30))
    assert Cursor.load(run.directory, "flaky").error is None


def test_a_run_that_goes_on_asks_a_stuck_tracker_now_and_then_and_lets_a_sync_do_it(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ARun(tmp_path / "run")
    run.rows(range(10))
    asked: list[float] = []
    service = Service(run, FlakyConfig(path=tracker), follow=True)

    def gone(self: FlakyTracker, info: Any, /) -> int:
        asked.append(service.now)
        raise TrackbridgeError("the run is deleted; restore it")

    with monkeypatch.context() as patch:
        patch.setattr(FlakyTracker, "open", gone)
        service.steps(1000)
        assert not service.worker.done
        assert len(asked) >= 3
        assert all(later - earlier >= STUCK_SECONDS for earlier, later in itertools.pairwise(asked))
        assert max(service.delays) <= 2.0, "the end of the run is seen soon"
        run.rows(range(10, 20))
        run.end()
        service.situation.over = True
        before = len(asked)
        service.steps(5)
        assert service.worker.done and len(asked) == before + 1
    service.worker.finish(1.0)

    other = ARun(tmp_path / "other")
    other.rows(range(10))
    with monkeypatch.context() as patch:
        patch.setattr(FlakyTracker, "open", gone)
        service = Service(other, FlakyConfig(path=tmp_path / "o.jsonl"), follow=True).steps(9)
    Service(other, FlakyConfig(path=tmp_path / "o.jsonl")).to_the_end()
    other.rows(range(10, 20))
    other.end()
    service.situation.over = True
    service.to_the_end()
    assert sorted(step for _, step, _ in rows(tmp_path / "o.jsonl")) == list(range(20))


def test_a_tracker_that_keeps_and_has_nothing_any_more_is_not_given_the_rest(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one that does not know (-1 as well) nothing follows."""
    run = ARun(tmp_path / "run")
    run.rows(range(10))
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    run.rows(range(10, 20))
    tracker.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(FlakyConfig, "keeps", property(lambda self: True))
        service = Service(run, FlakyConfig(path=tracker)).steps(20)
        assert service.worker.done and not tracker.exists()
        service.worker.finish(1.0)
        assert "had 10 rows of this run and has none any more" in (Cursor.load(run.directory, "flaky").error or "")
        Service(run, FlakyConfig(path=tracker), anew=True).to_the_end()
    assert sorted(step for _, step, _ in rows(tracker)) == list(range(20))


def test_back_off_grows_with_jitter_and_resets() -> None:
    backoff = Backoff(random.Random(3))
    delays = [backoff.fail() for _ in range(200)]
    assert max(delays[:2]) <= 2.0
    assert max(delays) <= MOST_SECONDS
    assert len(set(delays)) == 200
    assert sum(delays[20:]) / 180 > MOST_SECONDS / 4
    backoff.ok()
    assert backoff.fail() <= 1.0


class Unprintable(Exception):  # noqa: N818 - no error of ours
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("method", ["open", "write", "close"])
@pytest.mark.parametrize(
    "answer",
    [None, math.nan, "7", 0.5, SystemExit(3), Unprintable(), RetryLater(-1e9), RetryLater(math.inf), RetryLater(math.nan)],
    ids=repr,
)
def test_what_a_third_party_should_not_answer(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch, method: str, answer: object
) -> None:
    """It is waited out as any other trouble: nothing is taken for delivered, nobody is asked without a pause or never again."""
    run = finished_run(tmp_path / "run")
    proper = getattr(FlakyTracker, method)

    def odd(*arguments: object, **options: object) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(FlakyTracker, method, odd)
    service = Service(run, FlakyConfig(path=tracker, only_at_close=method == "close")).steps(20)
    assert not service.worker.done
    if method != "close":  # `open` may well know, later, what a close did not tell
        assert service.worker._cursor.seq == -1
    assert all(0 <= delay <= ASKED_SECONDS + MOST_SECONDS for delay in service.delays)
    assert sum(service.delays) > 30.0
    monkeypatch.setattr(FlakyTracker, method, proper)
    service.to_the_end()
    assert sorted(step for _, step, _ in rows(tracker)) == list(range(30))


def test_an_outage_is_one_warning_a_minute_and_a_new_connection_now_and_then(
    tmp_path: Path, tracker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = finished_run(tmp_path / "run")
    service = Service(run, FlakyConfig(path=tracker, faults=1.0))
    backends = set()
    while service.now < 1800:
        service.steps(1)
        backends.add(id(service.worker.backend))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert 15 <= len(warnings) <= 31
    assert "records behind" in warnings[0].message
    assert len(backends) > 3
    assert not rows(tracker)


def test_memory_is_bounded_in_an_outage_and_the_journal_is_delivered_after_it(tmp_path: Path, tracker: Path) -> None:
    run = ARun(tmp_path / "run")
    run.rows(range(12_000))
    service = Service(run, FlakyConfig(path=tracker, only_at_close=True), follow=True).steps(60)
    assert len(service.worker._pending) <= 5_000
    run.end()
    service.situation.over = True
    service.to_the_end()
    assert [step for _, step, _ in rows(tracker)] == list(range(12_000))


def test_errors_in_files_and_logs_have_no_secrets(
    tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = finished_run(tmp_path / "run")

    def leak(self: FlakyTracker, run: Any, /) -> int:
        raise ConnectionError("401 for https://user:hunter2secret@tracker.example/api?api_key=abcdef123456\nmore")

    monkeypatch.setattr(FlakyTracker, "open", leak)
    Service(run, FlakyConfig(path=tracker)).steps(3)
    told = (run.directory.shipper / "flaky.json").read_text() + "".join(r.message for r in caplog.records if r.levelno > 20)
    assert "401" in told
    assert "hunter2secret" not in told and "abcdef123456" not in told


def test_a_full_disk_on_our_side_stops_nothing(tmp_path: Path, tracker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "run")

    def full(self: Cursor, directory: RunDirectory) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Cursor, "save", full)
    Service(run, FlakyConfig(path=tracker)).to_the_end()
    assert len(rows(tracker)) == 30


def test_a_disk_that_is_full_when_the_shipper_begins_is_waited_for(
    tmp_path: Path, tracker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a claim can be written then. Half of one, a claim of nobody, would keep everybody waiting."""
    run = finished_run(tmp_path / "run")
    service = Service(run, FlakyConfig(path=tracker))
    with full_disk(0):
        service.steps(3)
        assert not service.worker.claim.held and list(run.directory.shipper.iterdir()) == []
    assert "next try in" in caplog.text and "Traceback" not in caplog.text
    service.to_the_end()
    assert len(rows(tracker)) == 30


# -- cursors and claims


DAMAGED = ('{"kind": "fla', '{"seq": 1e999}', '{"seq": 5, "rows": "many"}', '{"seq": 5, "attempt": null}', "[]", "3", "")


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_cursor_is_as_none(tmp_path: Path, tracker: Path, damaged: str) -> None:
    run = ARun(tmp_path / "run")
    Cursor("flaky", seq=17).save(run.directory)
    assert cursors(run.directory)["flaky"].seq == 17
    assert first_free_seq(run.directory) == 18
    (run.directory.shipper / "flaky.json").write_text(damaged)
    assert Cursor.load(run.directory, "flaky").seq == -1
    run.rows(range(3))
    run.end()
    Service(run, FlakyConfig(path=tracker), over=True).to_the_end()
    assert [step for _, step, _ in rows(tracker)] == [0, 1, 2]


def test_one_process_at_a_time(tmp_path: Path, tracker: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = finished_run(tmp_path / "run")
    first = Service(run, FlakyConfig(path=tracker), follow=True).steps(3)
    second = Service(run, FlakyConfig(path=tracker)).steps(3)
    assert second.worker.waiting_for == f"process {os.getpid()} on {run.host}"
    assert second.worker.backend is None
    assert caplog.text.count(f"flaky is being served by process {os.getpid()}") == 1  # it waits, and says so once
    first.worker.finish(1.0)
    second.to_the_end()
    assert second.worker.waiting_for is None
    assert len(rows(tracker)) == 30


def test_claims_of_the_dead_are_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "x.claim"
    dead = Claim(path)
    assert dead.take() is None
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**22 - 1}'))
    heir = Claim(path)
    assert heir.take() is None
    assert not dead.touch()  # and the dead one notices, should it wake up
    dead.release()
    assert heir.touch()
    os.utime(path, (1.0, 1.0))  # silent for decades, though its process lives
    third = Claim(path)
    assert third.take() is None
    assert not heir.touch()
    third.release()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_lost_its_claim_lets_go(tmp_path: Path, tracker: Path) -> None:
    run = finished_run(tmp_path / "run")
    first = Service(run, FlakyConfig(path=tracker), follow=True).steps(3)
    backend = first.tracker
    os.utime(first.worker.claim.path, (1.0, 1.0))
    heir = Service(run, FlakyConfig(path=tracker), follow=True).steps(1)
    first.worker.claim.touch()
    first.steps(1)
    assert first.worker.waiting_for is not None
    assert ("close", None) in backend.log
    heir.worker.finish(1.0)
