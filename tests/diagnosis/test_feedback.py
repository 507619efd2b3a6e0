"""A replay's findings change the ranking, in the hypotheses and in the capsule that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.capsules import an_anomaly, make
from trackbridge.capsule import load
from trackbridge.diagnosis.feedback import MARK, informed
from trackbridge.lab import CounterfactualReport, ReplayReport
from trackbridge.lab.counterfactuals import Trend, Try
from trackbridge.lab.replay import Divergence, EnvironmentDifference, StepReport
from trackbridge.records import Hypothesis
from trackbridge.replay.keep import keep

CORRUPT = Hypothesis("corrupt-batch", ("entropy",), (), "skip-batch")
EXPLOSION = Hypothesis("gradient-explosion", ("it grew",), (), "clip=1.0")
UNKNOWN = Hypothesis("unknown", (), (), "rerun")
FAULT = Hypothesis("hardware-fault", ("it jumped",), (), "rerun")
LOGITS = Hypothesis("attention-logit-growth", ("it grew",), (), "lower-lr=0.5")


def replayed(verdict: str, **facts: Any) -> ReplayReport:
    return ReplayReport.model_validate(
        {"verdict": verdict, "reason": "because", "run": "r", "anomaly_step": 13, "restart_step": 10, "last_step": 15, **facts}
    )


def tried(*tries: tuple[str, str], verdict: str = "exact") -> CounterfactualReport:
    trend = Trend(level=2.0, slope=0.0, sigma=0.1, first=1, last=9)
    found = [Try(name=name, what=f"{name} done", outcome=outcome, rank=k + 1) for k, (name, outcome) in enumerate(tries)]  # type: ignore[arg-type]
    return CounterfactualReport.model_validate(
        {
            "run": "r", "anomaly_id": "a", "anomaly_step": 13, "onset": 12, "series": "train/loss", "restart_step": 10,
            "last_step": 15, "guilty": (12,), "verdict": verdict, "trend": trend,
            "rerun": Try(name="rerun", what="nothing is changed", outcome="remains"), "tries": tuple(found),
        }
    )  # fmt: skip


def names(found: tuple[Hypothesis, ...]) -> list[str]:
    return [hypothesis.name for hypothesis in found]


def test_what_does_not_come_back_is_a_hardware_fault() -> None:
    found = informed((CORRUPT, UNKNOWN), replayed("not-reproduced"))
    assert names(found) == ["hardware-fault", "corrupt-batch", "unknown"]
    assert found[0].evidence_for[0].startswith(MARK) and found[0].intervention == "rerun"
    named = Divergence(step=12, series="act/b/rms", layer=None, statistic="rms", recorded=1.0, replayed=2.0, ulp=9.0)
    assert "act/b/rms" in informed((FAULT,), replayed("not-reproduced", first_divergence=named))[0].evidence_for[0]


def test_in_another_environment_that_says_less() -> None:
    other = EnvironmentDifference(name="torch.version", recorded="2.6", now="2.7")
    found = informed((CORRUPT, UNKNOWN), replayed("not-reproduced", environment=(other,)))
    assert names(found) == ["corrupt-batch", "unknown", "hardware-fault"] and "torch.version" in found[2].evidence_for[0]


def test_a_random_state_alone_is_no_fault() -> None:
    """Every number came back; the random state that a step left behind did not."""
    step = StepReport(step=10, loss_recorded=2.0, losses=(2.0, 2.0), compared=9, different=0, rng="differs after")
    assert informed((CORRUPT, UNKNOWN), replayed("not-reproduced", steps=(step,))) == (CORRUPT, UNKNOWN)
    found = informed((FAULT, CORRUPT), replayed("not-reproduced", steps=(step,)))
    assert names(found) == ["hardware-fault", "corrupt-batch"]
    assert "every number comes back" in found[0].evidence_against[0] and found[0].evidence_for == FAULT.evidence_for


@pytest.mark.parametrize("verdict", ["exact", "within-noise"])
def test_what_comes_back_is_none(verdict: str) -> None:
    found = informed((FAULT, CORRUPT, UNKNOWN), replayed(verdict))
    assert names(found) == ["corrupt-batch", "unknown", "hardware-fault"]
    assert verdict in found[2].evidence_against[0]


def test_an_incomplete_replay_says_nothing() -> None:
    assert informed((FAULT, CORRUPT, UNKNOWN), replayed("incomplete")) == (FAULT, CORRUPT, UNKNOWN)


def test_a_change_that_prevents_supports_and_one_that_does_not_refutes() -> None:
    table = tried(("clip=1.0", "prevented"), ("lower-lr=0.25", "prevented"), ("skip-batch", "remains"))
    found = informed((CORRUPT, LOGITS, EXPLOSION, UNKNOWN), counterfactuals=table)
    assert names(found) == ["gradient-explosion", "attention-logit-growth", "unknown", "corrupt-batch"]
    assert found[0].evidence_for[0] == f"{MARK}with clip=1.0 done the anomaly is gone"
    assert found[3].evidence_against == (f"{MARK}with skip-batch done the anomaly is still there",)


def test_changes_on_a_replay_that_is_not_the_record_say_nothing() -> None:
    table = tried(("clip=1.0", "prevented"), verdict="not-reproduced")
    found = informed((CORRUPT, EXPLOSION, UNKNOWN), counterfactuals=table)
    assert names(found) == ["hardware-fault", "corrupt-batch", "gradient-explosion", "unknown"]
    assert found[2] == EXPLOSION


def test_what_could_not_run_says_nothing_and_the_same_report_twice_is_once() -> None:
    table = tried(("skip-batch", "not-runnable"), ("clip=1.0", "remains"))
    once = informed((CORRUPT, EXPLOSION, UNKNOWN), counterfactuals=table)
    assert names(once) == ["corrupt-batch", "unknown", "gradient-explosion"]
    assert informed(once, counterfactuals=table) == once
    assert MARK not in str(informed(once))


def test_the_kept_capsule_says_so_everywhere(tmp_path: Path) -> None:
    capsule = load(make(tmp_path / "spike-13", anomaly=an_anomaly(hypotheses=(CORRUPT, UNKNOWN))))
    keep(capsule, replay=replayed("not-reproduced"))
    found = load(tmp_path / "spike-13")
    assert names(found.anomaly.hypotheses)[0] == "hardware-fault"
    assert "1. **hardware-fault**" in (found.path / "post-mortem.md").read_text()
    kept = keep(found, counterfactuals=tried(("skip-batch", "prevented")))
    assert names(kept.anomaly.hypotheses) == ["corrupt-batch", "unknown", "hardware-fault"]
