"""What gets no capsule is diagnosed beside training: one process at a time, however many anomalies come at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.capsules import an_anomaly
from tests.test_seal import a_context, writer
from trackbridge import explain
from trackbridge.explainer import Explainer
from trackbridge.records import Hypothesis, Row, Schema
from trackbridge.rundir import RunDirectory


def test_those_that_wait_are_explained_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Callable[[], None]] = []
    told: dict[str, tuple[Hypothesis, ...]] = {}
    asked: list[list[str]] = []
    explainer = Explainer(RunDirectory(tmp_path), 2, told.__setitem__, lambda: None, jobs.append)

    def child_says(command: list[str]) -> str:
        asked.append(command[4:])
        empty = {"name": "unknown", "evidence_for": [], "evidence_against": [], "intervention": "", "of_batch": []}
        return "\n".join(json.dumps({"id": each, "hypotheses": [empty]}) for each in command[4:])

    monkeypatch.setattr(explainer, "_child_says", child_says)
    for step in (10, 11, 12):
        explainer.consider(an_anomaly(id=f"a-{step}", step=step))
        explainer.advance(step)
    assert len(jobs) == 1 and not asked, "nothing runs but on the worker"
    explainer.advance(14)
    for job in jobs:
        job()
    assert asked == [["a-10", "a-11", "a-12"]] and list(told) == ["a-10", "a-11", "a-12"]
    assert explainer.finish(0.0)


def test_the_rules_see_the_way_that_led_to_the_anomaly(tmp_path: Path) -> None:
    """The training went back to step 10 before anybody explained the anomaly of step 20."""
    directory = RunDirectory(tmp_path)
    rows, ring = writer(directory.rows()), writer(directory.contexts())
    anomaly = an_anomaly(id="a", step=20, onset=20)

    def run(first: int, last: int, way: float) -> None:
        for step in range(first, last):
            rows.append(Row(-1, step, 0.0, 0, Schema(("train/loss",)), np.array([way])))
            ring.append(a_context(step))

    run(0, 21, 1.0)
    rows.append(anomaly)
    run(21, 23, 1.0)
    run(10, 30, 2.0)
    rows.close()
    ring.close()
    seen = explain._rows(directory, 0, anomaly, 25)
    assert [row.step for row in seen] == list(range(23)) and {float(row.values[0]) for row in seen} == {1.0}
    assert [context.step for context in explain._contexts(directory, 0, anomaly, 25)] == list(range(23))
