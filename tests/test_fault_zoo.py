"""A small part of the fault zoo: real trainings, recorded, detected and diagnosed as in a live run."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.faults.causes import FAULTS
from benchmarks.faults.judge import Outcome, Plan, effect, plans, run
from benchmarks.faults.scores import report

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


def test_a_healthy_run_is_quiet() -> None:
    assert run(Plan("Restarts", "perceptron", 1)).false_alarms == []


def test_the_parts_share_no_model_no_seed_and_every_cause_is_in_both() -> None:
    development, held = plans("development", (1,)), plans("held-out", (101,))
    assert not {plan.task for plan in development} & {plan.task for plan in held}
    ways = {way.__name__: way.cause for way in FAULTS}
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
    text = report([found, wrong, missed, control])
    for line in (
        "| detection recall | 0.667 (2 of 3) |", "| cause named first | 0.500 (1 of 2) |",
        "| cause among the first three | 1.000 (2 of 2) |", "| misses answered with unknown | 1.000 (1 of 1) |",
        "| median delay, sudden causes (steps) | 1.0 |", "| false alarms | 1 in 1050 healthy steps, 19.05 per 20,000 |",
        "| label-fault |  | 1 |",
    ):  # fmt: skip
        assert line in text, line
