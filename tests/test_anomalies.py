"""Anomalies as they are told: what a new version keeps of the one before, who is told once, what the journal holds of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.capsules import an_anomaly
from trackbridge import sealer as sealers
from trackbridge.anomalies import HISTOGRAMS_AFTER, Anomalies
from trackbridge.config import RecorderConfig
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.records import Anomaly, Hypothesis
from trackbridge.rundir import RunDirectory

CAPSULE = "capsules/spike-13"
GUESS = (Hypothesis("unknown", (), ()),)


class Sealer:
    """Promises every anomaly the same capsule; `reports` is what other ranks detect."""

    given_up = 0

    def __init__(self) -> None:
        self.reports: list[Anomaly] = []
        self.same: str | None = None
        self.updates: list[Anomaly] = []

    def consider(self, anomaly: Anomaly) -> Anomaly:
        return anomaly.updated(capsule=CAPSULE, notes=(*anomaly.notes, "considered"))

    def update(self, anomaly: Anomaly) -> None:
        self.updates.append(anomaly)

    def advance(self, step: int) -> None: ...

    def heard(self) -> list[Anomaly]:
        heard, self.reports = self.reports, []
        return heard

    part: Any = lambda self, seconds: self.heard()

    def seen_here(self, anomaly: Anomaly) -> str | None:
        return self.same

    def settle(self, anomaly: Anomaly) -> bool:
        return True

    def finish(self, timeout: float) -> bool:
        return True


class Told:
    def __init__(self, folder: Path, world_size: int = 1) -> None:
        self.sealer = Sealer()
        self.later: list[Callable[[], Any]] = []
        self.asked: list[int | None] = []
        self.directory = RunDirectory(folder)
        self.rows = JournalWriter(self.directory.rows(0), segment_bytes=1 << 20, fsync_seconds=1e9)
        self.ask_histograms = self.asked.append
        instruments: Any = self
        self.anomalies = Anomalies(
            rows=self.rows, directory=self.directory, instruments=instruments, later=self.later.append,
            seal=lambda to: self.sealer, world_size=world_size, strict=True,
        )  # fmt: skip

    def journal(self) -> list[Anomaly]:
        self.rows.sync()
        return [record for record in JournalReader(self.directory.rows(0)).read() if isinstance(record, Anomaly)]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_newer_version_keeps_what_was_added_to_the_older(told: Told) -> None:
    found = an_anomaly(id="a", notes=("found",), hypotheses=(), capsule=None, ranks=(0,))
    told.anomalies.tell(found, lambda new: new.updated(ranks=(3,), notes=(*new.notes, "blamed")))
    told.anomalies.explained("a", GUESS)
    told.later.pop()()
    told.anomalies.tell(found.updated(recovered_after=4, notes=("found", "over")), lambda new: new.updated(ranks=(5,)))
    last = told.anomalies.latest["a"]
    assert last.notes == ("found", "over", "blamed", "considered") and last.recovered_after == 4
    assert (last.capsule, last.ranks, last.hypotheses) == (CAPSULE, (3,), GUESS)
    assert told.sealer.updates == [last], "the sealer hears of a newer version, and does not consider it again"
    assert [a.recovered_after for a in told.journal()] == [found.recovered_after, found.recovered_after, 4]
    assert [a.id for a in told.anomalies.news()] == ["a"] and told.anomalies.news() == []


def test_histograms_are_asked_for_once_of_a_step_that_all_ranks_still_have_before_them(told: Told, tmp_path: Path) -> None:
    several = Told(tmp_path / "several", world_size=2)
    for each in (told, several):
        each.anomalies.tell(an_anomaly(id="a", step=13, capsule=None))
        each.anomalies.tell(an_anomaly(id="a", step=13, capsule=None))
    assert told.asked == [None] and several.asked == [13 + HISTOGRAMS_AFTER]


def test_what_another_rank_saw_too_is_no_news(told: Told) -> None:
    told.anomalies.tell(an_anomaly(id="a", ranks=(0,), capsule=None))
    told.anomalies.news()
    told.sealer.same = "a"
    told.sealer.reports = [an_anomaly(id="b", ranks=(1,)), an_anomaly(id="c", ranks=(1,))]
    told.anomalies.listen()
    assert list(told.anomalies.latest) == ["a"] and told.anomalies.news() == []
    assert [a.ranks for a in told.journal()] == [(0,), (0, 1)], "journalled once for a rank that is new"


def test_a_report_waits_until_this_rank_has_looked_at_the_step(told: Told) -> None:
    told.sealer.reports = [an_anomaly(id="early", step=10, capsule=None), an_anomaly(id="late", step=20, capsule=None)]
    told.anomalies.listen(judged=15)
    assert list(told.anomalies.latest) == ["early"]
    told.anomalies.listen(judged=20)
    told.sealer.reports = [an_anomaly(id="last", step=30, capsule=None)]
    told.anomalies.listen(judged=20)
    told.anomalies.part(1.0)
    assert [a.id for a in told.anomalies.news()] == ["early", "late", "last"], "at the end nothing is waited for"


def test_a_capsule_that_gave_way_is_taken_back_from_all_its_anomalies(told: Told) -> None:
    for name in ("a", "b"):
        told.anomalies.tell(an_anomaly(id=name, capsule=None, notes=()))
    told.anomalies.gave_up(CAPSULE, told.anomalies.latest["a"], "no room")
    assert [(a.capsule, a.notes[-1]) for a in told.anomalies.latest.values()] == [(None, "no room")] * 2
    told.anomalies.tell(an_anomaly(id="a", capsule=None, notes=("over",)))
    assert told.anomalies.latest["a"].capsule is None and told.anomalies.latest["a"].notes == ("over", "considered", "no room")


def test_a_capsule_that_could_not_be_sealed_is_said(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.anomalies.sealed(an_anomaly(step=13), "a full disk")
    assert "the capsule of step 13 could not be sealed: a full disk" in caplog.text and not told.later


def test_a_capsule_that_the_run_s_end_interrupted_is_not_said_to_have_failed(tmp_path: Path) -> None:
    def nothing(*_: object) -> None: ...

    sealer = sealers.Sealer(RunDirectory(tmp_path), RecorderConfig(), None, nothing, nothing)  # type: ignore[arg-type]
    assert sealer._why("spike-13", "") == "the sealing process was ended"
    assert sealer._why("spike-13", "warning\nspike-13: a full disk\nlast words") == "spike-13: a full disk"
    sealer.finish(0.0)
    assert sealer._why("spike-13", "").endswith("the shipper does it, else `trackbridge sync`")
