"""What `trackbridge replay` prints of a report: the steps that matter, and each reason once."""

from __future__ import annotations

import pytest

from trackbridge.cli.replay import _print
from trackbridge.lab.replay import EnvironmentDifference, ReplayReport, StepReport


def step(number: int, different: int = 0) -> StepReport:
    worst = {"worst": "grad/norm_clipped", "ulp": 3.0} if different else {}
    return StepReport(step=number, loss_recorded=2.0, losses=(2.0, 2.0), compared=10, different=different, **worst)  # type: ignore[arg-type]


def printed(capsys: pytest.CaptureFixture[str], **of_report: object) -> list[str]:
    known: dict[str, object] = {"verdict": "exact", "reason": "all of it", "run": "r", "anomaly_step": 100, "restart_step": 1}
    _print(ReplayReport(**{"last_step": 108, **known, **of_report}))  # type: ignore[arg-type]
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_long_way_to_the_anomaly_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, steps=tuple(map(step, range(1, 109))))
    assert "2-91 900 of 900 exact" in lines and "100 2 2 10 of 10 exact <- anomaly" in lines
    assert len(lines) == 1 + 2 + 17 + 1  # names, the first step and the fold, eight to each side of the anomaly, verdict


def test_a_step_that_differs_is_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, steps=tuple(step(n, different=int(n == 50)) for n in range(1, 109)))
    assert [line for line in lines if line.startswith(("2-49", "50 ", "51-91"))] == [
        "2-49 480 of 480 exact",
        "50 2 2 9 of 10 grad/norm_clipped: 3 ULP exact",
        "51-91 410 of 410 exact",
    ]


def test_few_steps_are_all_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed(capsys, steps=tuple(map(step, range(80, 109))))) == 1 + 29 + 1


def test_what_is_missing_is_said_once_and_without_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, verdict="incomplete", reason="no batches", missing=("no batches", "no generator"))
    assert lines == ["missing no generator", "verdict: incomplete (no batches)"]


def test_packages_that_came_since_are_one_line_and_changed_ones_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    new = [EnvironmentDifference(name=f"packages.new-{i}", recorded=None, now="1.0") for i in range(40)]
    torch = EnvironmentDifference(name="packages.torch", recorded="2.6", now="2.13")
    threads = EnvironmentDifference(name="environment.OMP_NUM_THREADS", recorded=None, now="1")
    lines = printed(capsys, environment=(*new[:20], torch, threads, *new[20:]))
    assert lines[:-1] == [
        "not as recorded packages.torch: 2.6 then, 2.13 now",
        "not as recorded environment.OMP_NUM_THREADS: None then, 1 now",
        "not as recorded packages that were not there then: 40 (new-0, new-1, new-2, new-3, ...)",
    ]
