"""A small part of the fault zoo: real trainings, recorded, detected and diagnosed as in a live run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.faults.causes import FAULTS
from benchmarks.faults.held import HELD_FAULTS
from benchmarks.faults.judge import Outcome, Plan, effect, plans, run
from benchmarks.faults.pool import outcomes
from benchmarks.faults.scores import report
from trackbridge.diagnosis.registry import RULES, rule

TRIALS = (
    Plan("Noise", "perceptron", 1, 4.0),
    Plan("NanBatch", "perceptron", 1, 0.01),
    Plan("Shuffled", "deep", 1, 1.0),
    Plan("RateJump", "deep", 1, 50.0),
    Plan("WeightWord", "perceptron", 1, 1e4),
)


@pytest.mark.parametrize("plan", TRIALS, ids=lambda plan: plan.way)
def test_it_is_found_at_once_and_named_first(plan: Plan) -> None:
    outcome = run(plan)
    assert outcome.effect > 8 and outcome.detected and outcome.false_alarms == []
    assert outcome.delay is not None and outcome.delay <= 2
    assert outcome.first == outcome.cause and outcome.place == 0


def test_a_kept_record_is_judged_again_by_the_rules_of_today(tmp_path: Path) -> None:
    plan = Plan("NanBatch", "perceptron", 1, 0.01)
    assert run(plan, tmp_path).first == "corrupt-batch"
    try:
        rule("cosmic-ray", intervention="rerun")(lambda view, case: case.add(100, "a flash of light"))
        assert run(plan, tmp_path).first == "cosmic-ray"
    finally:
        RULES.pop("cosmic-ray", None)


def test_a_healthy_run_is_quiet() -> None:
    assert run(Plan("Restarts", "perceptron", 1)).false_alarms == []


def test_the_parts_share_no_model_no_seed_and_every_cause_is_in_both() -> None:
    development, held = plans("development", 1), plans("held-out", 1)
    for own in ("task", "seed"):
        assert not {getattr(plan, own) for plan in development} & {getattr(plan, own) for plan in held}
    ways = {way.__name__: way.cause for way in (*FAULTS, *HELD_FAULTS)}
    assert not {way.__name__ for way in FAULTS} & {way.__name__ for way in HELD_FAULTS}
    for part in (development, held):
        assert {ways[plan.way] for plan in part if plan.way in ways} == set(ways.values())
    assert len(set(ways.values())) >= 15


def test_the_effect_is_measured_against_the_twin() -> None:
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).tolist()
    assert effect(noise, noise, 80) == 0
    hit = [value + 20.0 * (step == 85) for step, value in enumerate(noise)]
    assert 10 < effect(hit, noise, 80) < 40
    assert effect([*noise[:90], math.nan, *noise[91:]], noise, 80) == math.inf


def test_the_report_counts_what_was_named() -> None:
    found = Outcome(Plan("Noise", "deep", 1), "corrupt-batch", 20.0, 150, detected=True, delay=0)
    found.hypotheses = ["corrupt-batch", "unknown"]
    wrong = Outcome(Plan("Shuffled", "deep", 1), "label-fault", 20.0, 150, detected=True, delay=2)
    wrong.hypotheses = ["unknown", "data-regime-change", "label-fault"]
    missed = Outcome(Plan("Repeated", "deep", 1), "repeated-batch", 20.0, 150)
    control = Outcome(Plan("Epochs", "deep", 1), "healthy", 0.0, 600, [(60, "spike", "train/loss")])
    broken = Outcome(Plan("Noise", "wide", 1), "corrupt-batch", error="MemoryError: none left")
    text = report([found, wrong, missed, control, broken])
    for line in (
        "| detection recall | 0.667 (2 of 3) [0.208, 0.939] |", "| cause named first | 0.500 (1 of 2) [0.095, 0.905] |",
        "| cause among the first three | 1.000 (2 of 2) [0.342, 1.000] |", "| misses answered with unknown | 1.000 (1 of 1)",
        "- Noise-wide-1-0-1: MemoryError: none left", "| Repeated | deep | 1 | 20 | not detected |",
        "| median delay, sudden causes (steps) | 1.0 |", "| false alarms | 1 in 1050 healthy steps, 19.05 per 20,000 |",
        "| label-fault |  | 1 |",
    ):  # fmt: skip
        assert line in text, line


def test_a_trial_that_fails_costs_no_other_and_outcomes_survive_json() -> None:
    todo = [Plan("NanBatch", "no such task", 1, 0.01), Plan("NanBatch", "perceptron", 1, 0.01)]
    bad, good = outcomes(todo, 1)
    assert bad.plan == todo[0] and "no such task" in bad.error and not bad.hypotheses
    assert not good.error and good.first == "corrupt-batch"
    assert Outcome.from_json(json.loads(json.dumps(good.to_json()))) == good
