"""A checkpoint's detector state with a damaged value costs what was learned, and neither the detection nor the training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.detectors.kit import loss_curve, rows
from trackbridge.anomalies import Anomalies
from trackbridge.concluding import Concluder
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch
from trackbridge.journal import JournalWriter
from trackbridge.merging import Concluded
from trackbridge.records import Row
from trackbridge.rundir import RunDirectory

SETTINGS = DetectionConfig(rules=["grad/norm > 4"])
RESUMED, JUMP, STEPS = 300, 600, 640


def recorded() -> list[Row]:
    """The learning rate jumps shortly before the checkpoint, and the loss follows; long after it there is a spike."""
    loss, norm = loss_curve(STEPS), 1 + 0.1 * np.random.default_rng(1).standard_normal(STEPS)
    lr = np.full(STEPS, 1e-3)
    lr[RESUMED - 20 :] *= 30
    loss[RESUMED - 18 : RESUMED + 3] += 1.5
    norm[RESUMED - 3 : RESUMED + 3] += 5
    loss[JUMP] += 9
    memory = np.full(STEPS, 1e9)
    more = {"host/rss_bytes": memory, "perf/step_s": np.full(STEPS, 0.1), "optim/exp_avg_sq_norm": np.full(STEPS, 2.0)}
    return rows({"train/loss": loss, "train/lr": lr, "grad/norm": norm, **more})


ROWS = recorded()


def kept() -> str:
    watch = Watch(SETTINGS)
    for row in ROWS[:RESUMED]:
        watch.update(row)
    return json.dumps(watch.state_dict())


STATE = kept()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in a state: every key, and the first two of a list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*at, key)
        yield from places(item, (*at, key))


def damaged(at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = inside = json.loads(STATE)
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = value
    return dict(state)


def gone_on(folder: Path, state: dict[str, Any], rows: list[Row]) -> list[str]:
    """The events that a run tells that goes on from `state`."""
    directory = RunDirectory(folder)
    journal = JournalWriter(directory.rows(0), segment_bytes=1 << 20, fsync_seconds=1e9)
    unused: Any = None
    anomalies = Anomalies(rows=journal, directory=directory, instruments=unused, later=lambda what: None)
    concluder = Concluder(
        rows=journal, contexts=unused, recorder=None, watch=Watch(SETTINGS), merging=None, anomalies=anomalies, strict=True
    )
    concluder.resume(state, RESUMED)
    for row in rows:
        concluder._conclude(Concluded(row, None, row))
        if row.step == RESUMED:
            concluder.state()
    concluder.finish(0.0)
    journal.close()
    return [f"{found.kind} {found.onset}" for found in anomalies.latest.values()]


AT = [place for place in places(json.loads(STATE)) if place[0] != "detector" or len(place) < 4]


def test_a_whole_state_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert f"spike {JUMP}" in gone_on(tmp_path, json.loads(STATE), ROWS[RESUMED:]) and not caplog.messages
    assert {"excursion", "rule grad/norm > 4"} & set(json.loads(STATE)["open"]) and json.loads(STATE)["aftermath"]


@pytest.mark.parametrize("part", sorted({place[0] for place in AT}))
def test_a_damaged_value_does_not_end_the_detection(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it is; one that is noticed is told of once, and the bands are learned anew."""
    short = [*ROWS[RESUMED : RESUMED + 12]]
    for number, at in enumerate(place for place in AT if place[0] == part):
        for value in (None, []):
            caplog.clear()
            gone_on(tmp_path / f"{number}-{json.dumps(value)[:3].strip(chr(34))}", damaged(at, value), short)
            said = [message for message in caplog.messages if "detector state does not fit" in message]
            assert len(said) <= 1, (at, value)


@pytest.mark.parametrize(
    "at",
    [
        ("amp_skips",), ("detector", "level", 0), ("monitors", "stall", "ended"),
        ("monitors", "rule grad/norm > 4", "counts"), ("aftermath", "learning_rate", "until"),
    ],
)  # fmt: skip
def test_what_is_learned_anew_detects_again(at: tuple[Any, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert f"spike {JUMP}" in gone_on(tmp_path, damaged(at, None), ROWS[RESUMED:])
    assert caplog.text.count("detector state does not fit") == 1
