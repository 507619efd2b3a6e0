"""The verdict says no more than was seen."""

from __future__ import annotations

import pytest

from trackbridge.replay.compare import LOSS, Observation
from trackbridge.replay.judge import Ran, judge


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([True, True, True], "bit for bit, and so is the random state"),
        ([True, None, None], "and so is the random state before each step; after 2 of the 3 steps the record does not know it"),
    ],
)
def test_exact_says_where_the_random_state_is_not_known(after: list[bool | None], words: str) -> None:
    record = {step: {LOSS: 2.0 + step} for step in range(3)}
    history = {step: Ran(Observation(2.0 + step, 1e-7, {}, frozenset()), None, known) for step, known in enumerate(after)}
    found = judge(record, [history, history])
    assert found.verdict == "exact" and found.reason.endswith(words)
