"""What says too little alone waits for a second witness, and what has a good reason is no alarm."""

from __future__ import annotations

import numpy as np

from tests.detectors.kit import rows, watch_all
from trackbridge.detectors import Watch


def _quiet(steps: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A flat loss of sigma 0.05 and a gradient norm of 1, varying by 10%."""
    random = np.random.default_rng(seed)
    return 2 + 0.05 * random.standard_normal(steps), np.exp(0.1 * random.standard_normal(steps))


def test_a_borderline_loss_needs_the_gradient_or_a_second_value() -> None:
    loss, norm = _quiet()
    loss[200] = 2.25  # some five sigmas
    norm[200] = 1.0
    assert watch_all(Watch(), rows({"train/loss": loss}))  # no witness could be asked
    assert not watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))
    seen = norm.copy()
    seen[200] = 2.5
    assert watch_all(Watch(), rows({"train/loss": loss, "grad/norm": seen}))
    loss[201] = 2.25
    (event,) = watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))
    assert (event.onset, event.step) == (200, 201)


def test_one_norm_that_clipping_held_is_no_news_and_two_are() -> None:
    loss, norm = _quiet()
    norm[200] = 8.0
    assert watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))
    clipped = {"train/loss": loss, "grad/norm": norm, "grad/norm_clipped": np.minimum(norm, 1.0)}
    assert not watch_all(Watch(), rows(clipped))
    norm[201] = 8.0
    clipped["grad/norm_clipped"] = np.minimum(norm, 1.0)
    (event,) = watch_all(Watch(), rows(clipped))
    assert (event.series, event.step) == ("grad/norm", 201)


def test_what_a_scaler_searched_is_no_part_of_a_later_fall() -> None:
    search = [2.0**k for k in range(31, 17, -1)]
    scale = [*search, *[2.0**18] * 24, *[2.0**17] * 60]
    assert not watch_all(Watch(), rows({"train/loss": 2 + np.zeros(len(scale)), "train/loss_scale": scale}))
    fall = [*scale, 2.0**16, 2.0**15, 2.0**14, 2.0**13]
    assert watch_all(Watch(), rows({"train/loss": 2 + np.zeros(len(fall)), "train/loss_scale": fall}))


def test_a_noisy_loss_that_doubles_over_forty_steps_is_told() -> None:
    random = np.random.default_rng(3)
    level = np.concatenate([np.full(160, 1.0), np.linspace(1.0, 2.05, 30), np.full(60, 2.05)])
    found = watch_all(Watch(), rows({"train/loss": level + 0.22 * random.standard_normal(250)}))
    assert found and found[0].onset >= 150
