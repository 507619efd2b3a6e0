"""The trend, the distance and the order of the table: the numbers behind a rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.capsules import an_anomaly
from trackbridge.lab import Try
from trackbridge.replay.counterfactual import TOLD_APART, ranked
from trackbridge.replay.score import FITTED, WORST, fit

NOWHERE = an_anomaly(expected=3.0)
numbers = st.floats(-50.0, 50.0)


@given(level=numbers, slope=st.floats(-1.0, 1.0), outliers=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_the_trend_is_the_line_whatever_a_few_outliers_do(level: float, slope: float, outliers: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    losses = {step: {"train/loss": level + slope * (step - 100)} for step in range(60, 120)}
    for step in generator.choice(range(68, 100), outliers, replace=False):
        losses[int(step)]["train/loss"] += generator.choice([-1, 1]) * 1e3
    losses[90]["train/loss"] = math.nan
    trend = fit(losses, 100, 0.009, NOWHERE)
    assert trend.last == 99 and trend.first == 99 - FITTED  # the step that was not finite is left out
    assert trend.at(110, 100) == pytest.approx(level + 10 * slope, abs=1e-6)
    assert trend.sigma == pytest.approx(max(0.009 * abs(trend.level), math.ulp(1.0)), abs=1e-6)


@given(level=st.floats(0.5, 10.0), sigma=st.floats(0.02, 0.3), seed=st.integers(0, 2**31))
def test_sigma_is_that_of_the_noise(level: float, sigma: float, seed: int) -> None:
    """On the average of 20 fits: one in a thousand fits finds less than 0.4 of it."""
    found = []
    for noise in np.random.default_rng(seed).normal(0.0, sigma, (20, FITTED)):
        losses = {step: {"train/loss": level + float(value)} for step, value in enumerate(noise)}
        found.append(fit(losses, FITTED, 0.0, NOWHERE).sigma)
    assert 0.65 * sigma < np.mean(found) < 1.25 * sigma


def test_with_hardly_any_past_the_level_is_what_is_known() -> None:
    assert fit({}, 5, 0.01, NOWHERE).level == 3.0
    short = fit({3: {"train/loss": 2.0}, 4: {"train/loss": 2.5}}, 5, 0.01, NOWHERE)
    assert (short.level, short.slope, short.sigma) == (2.5, 0.0, pytest.approx(0.025))


def a_try(name: str, score: float | None, *, given_up: float = 0.0, outcome: str = "prevented") -> Try:
    return Try(name=name, what="", outcome=outcome, score=score, given_up=given_up)  # type: ignore[arg-type]


def test_the_order_of_the_table() -> None:
    tries = [
        a_try("not runnable", None, outcome="not-runnable"),
        a_try("remains, near", 0.1, outcome="remains"),
        a_try("prevented, far", 9.0),
        a_try("prevented, dear", 1.0, given_up=0.6),
        a_try("prevented, cheap", 1.0 + TOLD_APART / 3, given_up=0.0),
        a_try("remains, not finite", WORST, outcome="remains"),
    ]
    names = ["prevented, cheap", "prevented, dear", "prevented, far", "remains, near", "remains, not finite", "not runnable"]
    found = ranked(tries)
    assert [t.name for t in found] == names
    assert [t.rank for t in found] == [1, 2, 3, 4, 5, None]


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=8), st.randoms())
def test_the_order_does_not_depend_on_the_order_of_the_tries(values: list[tuple[float, float, bool]], random: object) -> None:
    tries = [
        a_try(str(i), score, given_up=given_up, outcome="prevented" if gone else "remains")
        for i, (score, given_up, gone) in enumerate(values)
    ]
    shuffled = list(tries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def key(found: tuple[Try, ...]) -> list[tuple[object, ...]]:
        return [(t.outcome, t.score, t.given_up) for t in found]

    assert key(ranked(tries)) == key(ranked(shuffled))
