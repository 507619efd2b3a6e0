"""Reading runs back: series over attempts, frames, layers, states, damage."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trackbridge
from trackbridge.errors import ReferenceNotFoundError, UsageError
from trackbridge.history import load, runs
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile

ALWAYS = Schema(("train/loss", "layer/a.weight/grad_norm", "act/h.0/rms"))
SOMETIMES = Schema(("train/loss", "layer/a.weight/grad_norm", "act/h.0/rms", "layer/a.weight/weight_norm"))


def attempt(number: int = 0, *, pid: int | None = None, host: str | None = None, when: float | None = None) -> Attempt:
    return Attempt(
        number=number,
        start_step=0,
        time=time.time() if when is None else when,
        pid=os.getpid() if pid is None else pid,
        host=host or socket.gethostname(),
    )


def make(path: Path, records: list[Record], *attempts: Attempt, name: str = "a run", created: float = 1.0) -> RunDirectory:
    directory = RunDirectory(path)
    file = RunFile(project="p", run_id=path.name, name=name, created=created, attempts=list(attempts) or [attempt()])
    directory.write(file.model_copy(update={"config": {"lr": 3e-4}}))
    journal = JournalWriter(directory.rows(), segment_bytes=1 << 16, fsync_seconds=1e9)
    for record in records:
        journal.append(record)
    journal.close()
    return directory


def row(step: int, loss: float, *, attempt: int = 0, kind: Any = "step", when: float = 0.0) -> Row:
    schema = SOMETIMES if step % 10 == 0 else ALWAYS
    values = np.array([loss, step * 2.0, step * 3.0, step * 4.0][: len(schema.names)])
    return Row(-1, step, when, attempt, schema, values, kind)


def anomaly(step: int, **changes: Any) -> Anomaly:
    return Anomaly(f"spike-{step}", "spike", step, step, 1.0, "train/loss", 9.0, 2.0, 30.0).updated(**changes)


def test_what_a_run_holds(tmp_path: Path) -> None:
    records: list[Record] = [
        Params(-1, 1.0, {"config": {"lr": 3e-4}}),
        *(row(step, step / 7) for step in range(25)),
        anomaly(20),
        anomaly(12),
        Row(-1, 24, 1.0, 0, Schema(("eval/loss",)), np.array([1.5]), "log"),
        anomaly(20, recovered_after=2),
        Artifact(-1, 20, 1.0, "spike-x-20", "spike-capsule", "capsules/spike-20"),
        RunEnd(-1, 2.0, "failed", 0, "RuntimeError: boom"),
    ]
    make(tmp_path / "r1", records)
    (tmp_path / "r1" / "provenance.json").write_text(json.dumps({"python": "3.x"}))
    run = trackbridge.load(tmp_path)  # the directory of runs holds just this one
    assert run.names == ["train/loss", "layer/a.weight/grad_norm", "act/h.0/rms", "layer/a.weight/weight_norm", "eval/loss"]
    steps, values = run.series("train/loss")
    assert steps.dtype == np.int64 and values.dtype == np.float64
    assert steps.tolist() == list(range(25))
    assert values.tolist() == [step / 7 for step in range(25)]
    assert [a.tolist() for a in run.series("layer/a.weight/weight_norm")] == [[0, 10, 20], [0.0, 40.0, 80.0]]
    assert [(a.step, a.recovered_after) for a in run.anomalies] == [(12, None), (20, 2)]
    assert run.artifacts[0].path == "capsules/spike-20"
    assert (run.status, run.error) == ("failed", "RuntimeError: boom")
    assert run.config == {"lr": 3e-4}
    assert run.provenance == {"python": "3.x"}
    assert run.info.run_id == "r1"
    assert not run.damage
    assert [r.step for r in run.rows(0)][-2:] == [24, 24]
    with pytest.raises(UsageError, match=r"no series 'train/los' .*did you mean 'train/loss'"):
        run.series("train/los")
    with pytest.raises(UsageError, match="rank 3"):
        next(run.rows(3))


def test_frame_and_layers(tmp_path: Path) -> None:
    make(tmp_path / "r", [row(step, float(step)) for step in range(12)])
    run = load(tmp_path / "r")
    frame = run.frame()
    assert frame.index.name == "step"
    assert list(frame.columns) == run.names
    assert frame["layer/a.weight/weight_norm"].notna().tolist() == [step % 10 == 0 for step in range(12)]
    assert run.frame("train/loss")["train/loss"].tolist() == list(range(12))
    layers = run.layers
    assert list(layers.columns) == ["step", "family", "layer", "grad_norm", "weight_norm", "rms"]
    at = layers[(layers.step == 10) & (layers.family == "layer")].iloc[0]
    assert (at.layer, at.grad_norm, at.weight_norm) == ("a.weight", 20.0, 40.0)
    assert math.isnan(at.rms)
    assert len(layers) == 24


def test_a_run_without_rows_has_empty_frames(tmp_path: Path) -> None:
    make(tmp_path / "r", [])
    run = load(tmp_path / "r")
    assert run.names == []
    assert run.frame().empty
    assert run.layers.empty


def test_the_newest_attempt_wins_where_attempts_overlap(tmp_path: Path) -> None:
    old = [row(step, 1.0) for step in range(10)]
    new = [row(step, 2.0, attempt=1) for step in range(6, 9)]
    logged = [row(7, 3.0, attempt=1, kind="log")]
    make(tmp_path / "r", [*old, *new, *logged], attempt(0), attempt(1))
    steps, values = load(tmp_path / "r").series("train/loss")
    assert steps.tolist() == list(range(10))
    assert values.tolist() == [1.0] * 6 + [2.0, 3.0, 2.0, 1.0]


def test_status_without_an_end(tmp_path: Path) -> None:
    now, gone, elsewhere = time.time(), 2**22 - 1, "another-host"
    cases = {
        "mine": (attempt(), 0.0, "running"),
        "gone": (attempt(pid=gone), now, "killed"),
        "reused-pid": (attempt(when=now - 1e7), now, "killed"),  # this process is younger than that
        "elsewhere-fresh": (attempt(host=elsewhere, when=now - 1e6), now - 3600, "running"),
        "elsewhere-stale": (attempt(host=elsewhere, when=now - 1e6), now - 7 * 3600, "killed"),
    }
    for name, (life, when, status) in cases.items():
        make(tmp_path / name, [row(0, 1.0, when=when)], life)
        assert load(tmp_path / name).status == status, name


def test_the_end_of_an_older_attempt_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    make(tmp_path / "r", [row(0, 1.0), RunEnd(-1, 0.0, "failed", 0), row(1, 1.0, attempt=1)], attempt(0), attempt(1))
    assert load(tmp_path / "r").status == "running"


def test_damage_is_said_once_and_the_rest_is_there(tmp_path: Path) -> None:
    directory = make(tmp_path / "r", [row(step, 1.0) for step in range(30)], attempt(pid=2**22 - 1))
    (segment,) = directory.rows().iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 255
    segment.write_bytes(data[:-5])
    with pytest.warns(RuntimeWarning, match=r"damaged: \d+ records? lost.*what is whole was read") as caught:
        run = load(tmp_path / "r")
    assert len(caught) == 1
    assert len(run.series("train/loss")[0]) == 28
    assert run.damage.records_lost == 1
    assert "the end of the newest segment" in run.damage.where
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.frame()


def test_references_that_name_no_run(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(ReferenceNotFoundError, match=r"no run\.json"):
        load(tmp_path)
    for name in ("one", "two"):
        make(tmp_path / name, [])
    with pytest.raises(ReferenceNotFoundError, match="holds 2 runs, name one of: one, two"):
        load(tmp_path)


def test_summaries(tmp_path: Path) -> None:
    make(
        tmp_path / "b",
        [*(row(step, step / 2) for step in range(300)), anomaly(5), anomaly(5, recovered_after=1), RunEnd(-1, 1.0, "finished")],
        created=1.0,
    )
    logs: list[Record] = [Row(-1, 9, 1.0, 0, Schema(("eval/loss",)), np.array([1.0]), "log")] * 200
    make(tmp_path / "a", [row(9, 4.5, when=time.time()), *logs], created=2.0)
    make(tmp_path / "c", [], created=3.0)
    found = runs(tmp_path)
    assert [(s.run_id, s.status, s.step, s.loss, s.anomalies) for s in found] == [
        ("b", "finished", 299, 149.5, 1),
        ("a", "running", 9, 4.5, 0),
        ("c", "running", -1, None, 0),
    ]
    assert runs(tmp_path / "a")[0] == found[1]


def test_reading_while_the_run_goes_on_needs_no_end(tmp_path: Path) -> None:
    directory = make(tmp_path / "r", [row(0, 1.0)])
    journal = JournalWriter(directory.rows(), segment_bytes=1 << 16, fsync_seconds=1e9)
    journal.append(row(1, 2.0))
    assert load(tmp_path / "r").series("train/loss")[1].tolist() == [1.0, 2.0]
