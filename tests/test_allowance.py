"""Budgets of capsules: the most severe survive, and what gave way is said and counted, over crashes and resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import trackbridge
from tests.capsules import an_anomaly, make
from trackbridge.allowance import Allowance, Kept
from trackbridge.config import RecorderConfig
from trackbridge.journal import JournalReader
from trackbridge.records import Anomaly, Artifact
from trackbridge.rundir import RunDirectory
from trackbridge.sealer import Sealer

Given = list[tuple[str, str]]


def an_allowance(path: Path, given: Given, **settings: int) -> Allowance:
    def gave_up(capsule: str, anomaly: Anomaly, why: str) -> None:
        given.append((capsule, why))

    return Allowance(RunDirectory(path), RecorderConfig(**settings), gave_up)


def test_the_least_severe_gives_way(tmp_path: Path) -> None:
    given: Given = []
    removed: list[Kept] = []
    allowance = an_allowance(tmp_path, given, max_capsules=2)
    for step, severity in ((10, 0.5), (20, 0.2)):
        anomaly = an_anomaly(step=step, severity=severity, capsule=f"capsules/spike-{step}")
        assert allowance.make_room(anomaly, removed.append) is None
        allowance.add(anomaly)
    milder = allowance.make_room(an_anomaly(step=30, severity=0.2), removed.append)
    assert milder is not None and "recorder.max_capsules is 2" in milder and not given
    assert allowance.make_room(an_anomaly(step=40, severity=0.3), removed.append) is None
    assert [kept.path for kept in removed] == ["capsules/spike-20"] == [path for path, _ in given]
    assert "more severe" in given[0][1] and allowance.given_up == 2


def test_none_at_all() -> None:
    allowance = an_allowance(Path("nowhere"), [], max_capsules=0)
    assert allowance.make_room(an_anomaly(), lambda kept: None) is not None


def test_a_later_attempt_counts_what_is_there(tmp_path: Path) -> None:
    """Capsules of an earlier attempt are in the budget, and can give way: with all that is theirs."""
    make(tmp_path / "capsules" / "spike-13", local=True, anomaly=an_anomaly(severity=0.1))
    (tmp_path / "capsules" / "spike-14").mkdir()  # no capsule: left alone
    snapshot = tmp_path / "rank-0000" / "snapshots" / "step-10"
    snapshot.mkdir(parents=True)
    (snapshot / "state.safetensors").write_bytes(b"x")
    given: Given = []
    allowance = an_allowance(tmp_path, given, max_capsules=1)
    directory = RunDirectory(tmp_path)
    assert allowance.make_room(an_anomaly(severity=0.1), lambda kept: None) is not None
    refused = allowance.make_room(an_anomaly(severity=0.2), lambda kept: allowance.remove(kept, directory))
    allowance.sweep(directory)
    assert refused is None and [path for path, _ in given] == ["capsules/spike-13"]
    assert [path.name for path in (tmp_path / "capsules").iterdir()] == ["spike-14"]
    assert not snapshot.exists()


def test_a_snapshot_that_another_capsule_holds_stays(tmp_path: Path) -> None:
    kept = make(tmp_path / "capsules" / "spike-13")
    snapshot = tmp_path / "rank-0000" / "snapshots" / "step-10"
    snapshot.mkdir(parents=True)
    (snapshot / "state.safetensors").write_bytes(b"x")
    (tmp_path / "elsewhere").hardlink_to(snapshot / "state.safetensors")
    Allowance.remove(Kept("capsules/spike-13", an_anomaly(), 1.0), RunDirectory(tmp_path))
    Allowance.sweep(RunDirectory(tmp_path))
    assert snapshot.exists() and not kept.exists()


def test_the_budget_of_bytes(tmp_path: Path) -> None:
    given: Given = []
    directory = RunDirectory(tmp_path)
    allowance = an_allowance(tmp_path, given, capsule_bytes=10)
    found = []
    for step, severity in ((10, 0.5), (20, 0.1), (30, 0.9)):
        path = make(tmp_path / "capsules" / f"spike-{step}", anomaly=an_anomaly(step=step, severity=severity))
        kept = allowance.add(an_anomaly(step=step, severity=severity, capsule=f"capsules/{path.name}"))
        allowance.weigh(kept, directory)
        assert kept.bytes > 1000
        found.append(allowance.settle(kept.path, lambda gone: allowance.remove(gone, directory)))
    assert found == [True, False, True], "one is kept however large; a milder one is not"
    assert [path.name for path in (tmp_path / "capsules").iterdir()] == ["spike-30"] and allowance.given_up == 2


def test_given_up_while_it_was_sealed(tmp_path: Path) -> None:
    path = make(tmp_path / "capsules" / "spike-13")
    kept = Kept("capsules/spike-13", an_anomaly(), 1.0, given_up=True)
    an_allowance(tmp_path, []).weigh(kept, RunDirectory(tmp_path))
    assert not path.exists() and kept.bytes == 0


class NowPins:
    """Does its jobs at once, and writes what a pin would."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def pin(self, capsule: str, first: int, onset: int, last: int) -> None:
        snapshot(self.directory, first)

    def run(self, job: Callable[[], None]) -> None:
        job()

    def sync(self) -> None:
        pass

    def release(self, capsule: str) -> None:
        pass


def snapshot(directory: RunDirectory, step: int) -> Path:
    path = directory.snapshots(0) / f"step-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "state.safetensors").write_bytes(b"x")
    return path


def test_snapshots_of_what_gave_way_before_it_was_sealed_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    begins = snapshot(directory, 10)  # where `make` begins its capsules
    config = RecorderConfig(max_capsules=1, before=4, after=4)
    sealer = Sealer(directory, config, NowPins(directory), lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    mild = sealer.consider(an_anomaly(id="mild", step=40, onset=40, severity=0.1))
    severe = sealer.consider(an_anomaly(id="severe", step=100, onset=100, severity=0.9))
    orphan = directory.snapshots(0) / "step-36"
    assert mild.capsule is not None and severe.capsule is not None and sealer.given_up == 1
    assert orphan.exists(), "not while another is under way, which may need the same"

    def child_says(command: list[str]) -> tuple[str, str]:
        make(tmp_path / str(severe.capsule), anomaly=severe)
        return "severe\tpath\n", ""

    monkeypatch.setattr(sealer, "_child_says", child_says)
    sealer.advance(200)
    assert not orphan.exists() and begins.exists()


def test_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two spikes and room for one capsule: the later, larger one has it, and the record says what became of the other."""
    with caplog.at_level(logging.WARNING, "trackbridge"):
        run = trackbridge.init(
            dir=tmp_path, strict=True, recorder={"max_capsules": 1, "before": 2, "after": 2}, detection={"warmup": 8}
        )
        for step in range(140):
            loss = 2.0 + 0.01 * (step * 7919 % 13) + {60: 3.0, 100: 90.0}.get(step, 0.0)
            run.step(loss=loss)
            run._scribe.ask(lambda: None)  # in pace with the scribe
            if step == 80:  # the first capsule is sealed and announced
                deadline = 200
                while not (run.dir / "capsules" / "spike-60").exists() and deadline:
                    deadline -= 1
                    run._scribe.ask(lambda: __import__("time").sleep(0.05))
        run.finish()
    record = trackbridge.load(run.dir)
    first, second = (anomaly for anomaly in record.anomalies if anomaly.kind == "spike")
    assert (first.step, second.step) == (60, 100)
    assert first.capsule is None and any("its capsule was given up: recorder.max_capsules is 1" in n for n in first.notes)
    assert second.capsule == "capsules/spike-100" and trackbridge.pull(run.dir).step == 100
    assert "the capsule of step 60 was given up" in caplog.text
    assert record.series("trackbridge/capsules_given_up")[1].max() == 1.0
    journal = JournalReader(RunDirectory(run.dir).rows(), kinds={Artifact, Anomaly}).read()
    artifacts = [each.metadata["step"] for each in journal if isinstance(each, Artifact)]
    assert artifacts[-1] == 100, "what the tracker was told of the first stays true: it may have it"
    assert json.loads((run.dir / "capsules" / "spike-100" / "manifest.json").read_text())["step"] == 100
