"""Noise in proportion to itself: its long upper side is no spike, several times the usual is one."""

from __future__ import annotations

import numpy as np
import pytest

import trackbridge


@pytest.mark.parametrize("seed", range(12))
def test_a_loss_several_times_the_usual_is_told_however_skewed_its_noise(seed: int) -> None:
    random = np.random.default_rng(seed)
    loss = np.abs(random.standard_normal(80)) * 0.5 + 0.5 * np.exp(0.5 * random.standard_normal(80))  # median 0.9, largest 2.5
    loss[52] = 10 * np.median(loss)
    assert 52 in [a.step for a in trackbridge.detect(np.arange(80), loss)]


@pytest.mark.parametrize("seed", range(4))
def test_the_long_side_is_no_spike(seed: int) -> None:
    random = np.random.default_rng(seed)
    loss = 0.5 * np.exp(0.3 * random.standard_normal(2000))
    assert len(trackbridge.detect(np.arange(2000), loss)) <= 1
