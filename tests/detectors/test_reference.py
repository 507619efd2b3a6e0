"""The published scores, against their formula written out."""

from __future__ import annotations

import numpy as np
import pytest

from trackbridge.detectors.reference import REFERENCES, RollingScore


@pytest.mark.parametrize("ddof", [0, 1])
def test_the_score_is_the_formula(ddof: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal(300)
    x[random.choice(300, 10, replace=False)] += 8
    detector = RollingScore(50, 3.0, 20, ddof)
    detector.bind(("train/loss", "other"))
    found = {}
    for step in range(300):
        for v in detector.update(step, np.array([x[step], -x[step]]), np.array([True, step % 2 == 0])):
            if v.index == 0:
                found[step] = v.score
    expected = {}
    for i in range(20, 300):
        past = x[max(0, i - 50) : i]
        z = (x[i] - past.mean()) / past.std(ddof=ddof)
        if z > 3:
            expected[i] = z
    assert found == pytest.approx(expected)


def test_the_named_ones_are_there() -> None:
    assert [name.split(",")[0] for name in REFERENCES] == [
        "OLMo spike score", "z > 3.5 of the last 500", "z > 2 of the last 100", "trainscope z-score",
    ]  # fmt: skip
