"""Ranks and anomalies: who reports, who decides, who keeps what; over a real store, without a second process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.capsules import an_anomaly
from tests.test_seal import a_run
from trackbridge import attendance
from trackbridge.capsule import load
from trackbridge.config import RecorderConfig
from trackbridge.notices import Notices
from trackbridge.records import Anomaly, Row, Schema
from trackbridge.rundir import RunDirectory, dumps
from trackbridge.seal import seal
from trackbridge.sealer import Follower, Sealer


class FakePins:
    """Notes what is asked of it; the real one needs a recorder."""

    def __init__(self) -> None:
        self.pinned: list[tuple[Any, ...]] = []
        self.released: list[str] = []

    def pin(self, *what: Any) -> None:
        self.pinned.append(what)

    def release(self, capsule: str) -> None:
        self.released.append(capsule)

    def held(self) -> tuple[str, ...]:
        return tuple(what[0] for what in self.pinned if what[0] not in self.released)

    def sync(self) -> None:
        pass

    def run(self, job: Callable[[], None]) -> None:
        pass

    def wait(self, timeout: float) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ranks(tmp_path: Path, count: int = 3) -> tuple[Sealer, list[Follower], list[FakePins], list[int]]:
    store, pins, asked = HashStore(), [FakePins() for _ in range(count)], []
    notices = [Notices(store, "r/0", rank, count) for rank in range(count)]
    directory = RunDirectory(tmp_path)
    config = RecorderConfig(before=3, after=4)
    leader = Sealer(directory, config, pins[0], lambda *_: None, lambda *_: None, notices[0])  # type: ignore[arg-type]
    others = [Follower(directory, pins[rank], notices[rank], asked.append) for rank in range(1, count)]  # type: ignore[arg-type]
    return leader, others, pins, asked


def test_what_the_leader_finds_all_ranks_keep(tmp_path: Path) -> None:
    leader, others, pins, asked = ranks(tmp_path)
    anomaly = leader.consider(an_anomaly(step=40, onset=39))
    assert anomaly.capsule == "capsules/spike-40"
    for other in others:
        other._listen(now=True)
    assert [each.pinned for each in pins] == [[("spike-40", 36, 39, 44)]] * 3
    assert asked == [40, 40]


def test_what_another_rank_finds_the_leader_decides(tmp_path: Path) -> None:
    """A spike that only rank 2 sees becomes the leader's; one that the leader has a capsule for is no second one."""
    leader, others, pins, _ = ranks(tmp_path)
    own = an_anomaly(id="x", step=40, onset=39, value=float("nan"))
    assert others[1].consider(own) == own and others[1].consider(an_anomaly(kind="drift")).capsule is None
    (found,) = leader._reports(leader._notices, now=True)  # type: ignore[arg-type]
    assert found.id == "x-rank-2" and found.ranks == (2,) and "detected on rank 2" in found.notes
    assert found.value != found.value and found.cascade == own.cascade
    assert leader.seen_here(found) is None
    assert leader.consider(found).capsule == "capsules/spike-40"
    others[0]._listen(now=True)
    assert pins[1].pinned == pins[0].pinned
    assert leader.seen_here(an_anomaly(id="y", step=42)) == "x-rank-2"


def test_a_receipt_is_released_when_the_capsule_is_on_this_disk(tmp_path: Path) -> None:
    leader, others, pins, _ = ranks(tmp_path)
    leader.consider(an_anomaly(step=40, onset=39))
    others[0]._listen(now=True)
    others[0].heard()
    assert pins[1].released == []
    (tmp_path / "capsules" / "spike-40").mkdir(parents=True)
    others[0].heard()
    assert pins[1].released == ["spike-40"]


def test_a_capsule_is_sealed_when_the_training_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _, pins, _ = ranks(tmp_path)
    leader.consider(an_anomaly(step=40, onset=39))
    jobs: list[Callable[[], None]] = []
    monkeypatch.setattr(pins[0], "run", jobs.append)
    for step in (40, 41, 41):
        leader.advance(step)
    assert not jobs
    leader.advance(20)
    assert len(jobs) == 1, "steps 42 to 44 of this way will never come"


def test_what_the_leader_gives_up_no_rank_holds_on_to(tmp_path: Path) -> None:
    """Where disks are not shared, nothing else would tell them: their rings would grow with each capsule that gave way."""
    leader, others, pins, _ = ranks(tmp_path)
    leader._allowance._most = 1
    leader.consider(an_anomaly(id="mild", step=40, onset=40, severity=0.1))
    leader.consider(an_anomaly(id="severe", step=90, onset=90, severity=0.9))
    others[0]._listen(now=True)
    assert pins[0].released == ["spike-40"] and pins[1].held() == ("spike-90",)


def test_parting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader hears reports until all have said that they are done, and they keep listening until it says so."""
    leader, others, pins, _ = ranks(tmp_path, 3)
    others[1]._notices.tell({"rank": 2, "drained": True})
    assert leader._reports(leader._notices, now=True) == [], "one may be done while the leader still trains"  # type: ignore[arg-type]
    others[0].consider(an_anomaly(id="late", step=50, onset=50))
    others[0]._notices.tell({"rank": 1, "drained": True})
    (late,) = leader.part(5.0)
    leader.consider(late)
    assert leader.finish(0.0) is False  # no child runs here: the jobs are not done
    others[0].part(5.0)
    assert pins[1].pinned == [("spike-50", 47, 50, 54)]


def test_a_rank_that_never_comes_is_not_waited_for(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackbridge.sealer.time", type("T", (), {"monotonic": clock, "sleep": clock.sleep}))
    leader, others, _, _ = ranks(tmp_path, 2)
    assert leader.part(60.0) == [] and 19 < clock.now < 21
    clock.now = 0.0
    others[0].part(3.0)
    assert 2.9 < clock.now < 3.5


def test_a_store_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nand a trace")

        set = add = check  # type: ignore[assignment]

    notices = Notices(Broken(), "n", 1, 2)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert notices.heard(now=True) == []
        notices.tell({"x": 1})
        assert notices.heard(now=True) == []
    assert len(caplog.records) == 1 and "Connection reset by peer" in caplog.text and "trace" not in caplog.text


def test_a_leader_that_has_ended_with_the_store_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a launcher rank 0 holds the store: once it has ended there is nobody to hear, and nothing to complain about."""
    _, others, _, _ = ranks(tmp_path, 2)

    def gone(keys: list[str]) -> bool:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("trackbridge.sealer.time.sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setattr(others[0]._notices, "_store", SimpleNamespace(check=gone, set=HashStore().set, add=HashStore().add))
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert others[0].part(20.0) == []
    assert not caplog.records


def test_questions_are_rationed(clock: Clock) -> None:
    asked = []

    class Store(HashStore):
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            return super().check(keys)

    notices = Notices(Store(), "n", 5, 1000, clock)
    for _ in range(100):
        clock.now += 0.1
        notices.heard()
    assert len(asked) == 10, "a thousand ranks ask once a second each"


# -- attendance


def test_sealing_waits_for_the_ranks_that_share_the_disk(tmp_path: Path, clock: Clock) -> None:
    directory = a_run(tmp_path / "r", ranks=(0, 1), world_size=2, steps=range(30))
    waited = attendance.wait_for(directory, "spike-21", 0, 26, 60.0, clock=clock, sleep=clock.sleep)
    assert waited == (0, 1) and clock.now < 7, "no receipts, and nothing moves: not for long"
    for rank in (0, 1):
        receipt = directory.pin("spike-21", rank)
        receipt.parent.mkdir(exist_ok=True)
        receipt.write_text(json.dumps({"why_not": None}))
    assert attendance.wait_for(directory, "spike-21", 0, 26, 60.0, clock=clock, sleep=clock.sleep) == ()
    assert attendance.wait_for(directory, "spike-21", 0, 31, 60.0, clock=clock, sleep=clock.sleep) == (0, 1)


def test_one_that_moves_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    from tests.test_seal import NAMES, writer

    directory = a_run(tmp_path / "r", ranks=(0, 1), world_size=2, steps=range(26))
    directory.pin("s", 0).parent.mkdir()
    directory.pin("s", 0).write_text("{}")
    directory.pin("s", 1).parent.mkdir()
    rows = [writer(directory.rows(rank)) for rank in (0, 1)]

    def sleep(seconds: float) -> None:
        """Rank 1 writes a step every three seconds, and its receipt at last."""
        clock.now += 3.0
        step = 25 + int(clock.now / 3)
        for journal in rows:
            journal.append(Row(-1, step, 0.0, 0, Schema(NAMES), a_row(step)))
        if step == 35:
            directory.pin("s", 1).write_text("{}")

    assert attendance.wait_for(directory, "s", 0, 30, 600.0, clock=clock, sleep=sleep) == ()
    assert clock.now == 30.0


def a_row(step: int) -> Any:
    import numpy as np

    return np.full(6, float(step))


def test_a_capsule_is_made_again_when_the_other_ranks_are_here(tmp_path: Path) -> None:
    """No shared disk: the leader seals what it has, and again once ``rank-0001`` was copied beside ``rank-0000``."""
    directory = a_run(tmp_path / "here", ranks=(0,), world_size=2, snapshots=(15,), upload_batches=True)
    first = load(seal(directory.path, "a-20", wait=1.0))
    assert first.ranks == (0,) and first.tier == "re-feed"
    assert any("ranks 1: nothing of them is on this disk" in text and "trackbridge.seal" in text for text in first.missing)
    elsewhere = a_run(tmp_path / "there", ranks=(1,), world_size=2, snapshots=(15,), upload_batches=True)
    elsewhere.rank(1).rename(directory.rank(1))
    again = load(seal(directory.path, "a-20"))
    assert again.ranks == (0, 1) and again.tier == "re-execute" and again.missing == []
    assert [path.name for path in directory.capsules.iterdir()] == ["spike-21"], "nothing is left over"


def test_why_a_rank_kept_no_snapshot_is_said(tmp_path: Path) -> None:
    anomaly = an_anomaly(id="a-20", step=21, onset=20, first_mover=("grad/norm", 20), capsule="capsules/spike-21")
    directory = a_run(tmp_path / "r", ranks=(0, 1), world_size=2, anomaly=anomaly)
    receipt = directory.pin("spike-21", 1)
    receipt.parent.mkdir()
    receipt.write_text(json.dumps({"why_not": "the scribe was late"}))
    assert any("the scribe was late (rank 1)" in text for text in load(seal(directory.path, "a-20")).missing)


def test_an_anomaly_travels_whole() -> None:
    from trackbridge.sealer import _foreign

    anomaly = an_anomaly(value=float("inf"), expected=float("nan"), recovered_after=3)
    back = _foreign(dumps(asdict(anomaly)), 7)
    assert isinstance(back, Anomaly) and back.hypotheses == anomaly.hypotheses and back.value == float("inf")
    assert back.first_mover == anomaly.first_mover
