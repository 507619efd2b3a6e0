"""What gets no capsule is diagnosed beside training: one process at a time, however many anomalies come at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.capsules import an_anomaly
from trackbridge.explainer import Explainer
from trackbridge.records import Hypothesis
from trackbridge.rundir import RunDirectory


def test_those_that_wait_are_explained_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Callable[[], None]] = []
    told: dict[str, tuple[Hypothesis, ...]] = {}
    asked: list[list[str]] = []
    explainer = Explainer(RunDirectory(tmp_path), 2, told.__setitem__, lambda: None, jobs.append)

    def child_says(command: list[str]) -> str:
        asked.append(command[4:])
        empty = {"name": "unknown", "evidence_for": [], "evidence_against": [], "intervention": ""}
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
