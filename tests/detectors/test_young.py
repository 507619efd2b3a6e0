"""Bands that have seen little: of the steep beginning of a curve, or of a level that a series has just fallen to."""

from __future__ import annotations

import numpy as np
import pytest

from trackbridge.detectors.age import ages
from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.lean import Lean

SIGMA = 0.05


def found(curves: np.ndarray) -> np.ndarray:
    """Where a curve, a column each, is told to be out of its band; of the shape of `curves`."""
    detector, out = BandDetector(), np.zeros(curves.shape, bool)
    detector.bind([f"train/loss/{i}" for i in range(curves.shape[1])])
    for step, values in enumerate(curves):
        for verdict in detector.update(step, values, np.ones(len(values), bool)):
            out[step, verdict.index] = True
    return out


def test_spikes_of_six_sigmas_are_found_while_the_loss_still_falls_steeply() -> None:
    random = np.random.default_rng(5)
    curves = 2 + 8 / np.sqrt(np.arange(1, 301))[:, None] + SIGMA * random.standard_normal((300, 200))
    clean = found(curves)
    at = random.integers(120, 300, 200)
    curves[at, np.arange(200)] += 6 * SIGMA
    assert clean.sum() <= 1
    assert found(curves)[at, np.arange(200)].mean() > 0.82


def test_an_accepted_fall_doubles_the_scale() -> None:
    """How much a series varies at a level it has just fallen to is not known."""
    detector, here = BandDetector(), np.ones(1, bool)
    detector.bind(["train/loss"])
    for step, value in enumerate(2 + SIGMA * np.random.default_rng(7).standard_normal(300)):
        detector.update(step, np.array([value]), here)
    before = detector.scale[0], detector.steady[0]
    for step in range(300, 300 + detector.tuning.accept_below):
        assert detector.update(step, np.array([1.0]), here) == []
    assert (detector.scale[0], detector.steady[0]) == (2 * before[0], 2 * before[1])
    assert detector.level[0] == pytest.approx(1.0)


def test_a_loss_that_falls_off_a_plateau_and_is_noisier_there_is_no_spike() -> None:
    random = np.random.default_rng(7)
    level = np.concatenate([np.full(250, 2.0), np.linspace(2.0, 1.2, 15), np.full(335, 1.2)])
    sigma = np.concatenate([np.full(250, 0.02), np.linspace(0.02, 0.12, 15), np.full(335, 0.12)])
    assert not found(level[:, None] + sigma[:, None] * random.standard_normal((600, 100)))[250:].any()


@pytest.mark.parametrize(("gain", "base_gain"), [(0.15, 0.015), (0.02, 0.002)])
def test_white_noise_leans_as_much_as_its_floor_says(gain: float, base_gain: float) -> None:
    lean, base, random = np.zeros(4000), np.zeros(4000), np.random.default_rng(0)
    for _ in range(2000):
        x = random.standard_normal(4000)
        lean, base = lean + gain * (x - base - lean), base + base_gain * (x - base)
    assert Lean(gain, base_gain, 0.01, 100, 4.0).white == pytest.approx(lean.std(), rel=0.04)


def test_series_of_one_age_are_judged_as_those_of_different_ages_are() -> None:
    """One number for all, or one per series: the same to the bit."""
    curves = 2 + 8 / np.sqrt(np.arange(1, 401))[:, None] + SIGMA * np.random.default_rng(3).standard_normal((400, 3))
    even, odd = BandDetector(), BandDetector()
    even.bind(["train/loss/0", "train/loss/1"])
    odd.bind(["train/loss/0", "train/loss/1", "train/loss/2"])
    for step, values in enumerate(curves):
        even.update(step, values[:2], np.ones(2, bool))
        odd.update(step, values, np.array([True, True, step % 10 == 0]))
    assert isinstance(ages(even.seen), float) and not isinstance(ages(odd.seen), float)
    for name in even.FIRST:
        assert getattr(even, name).tolist() == getattr(odd, name)[:2].tolist(), name
    for name in even.drift.FIRST:
        assert getattr(even.drift, name).tolist() == getattr(odd.drift, name)[:2].tolist(), name
