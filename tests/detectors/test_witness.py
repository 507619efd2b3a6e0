"""What says too little alone waits for a second witness, and what has a good reason is no alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch
from trackbridge.detectors.band import BandDetector


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
    loss[201] = 2.14  # beyond `release`
    (event,) = watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))
    (alone,) = watch_all(Watch(), rows({"train/loss": loss}))
    assert (event.onset, event.step) == (200, 201)
    assert event.severity == alone.severity and any(note.startswith("peak 2.25 ") for note in event.notes)
    assert watch_all(Watch(DetectionConfig(threshold=3.0)), rows({"train/loss": loss[:201], "grad/norm": norm[:201]}))


def test_one_norm_that_clipping_held_is_no_news_and_two_are() -> None:
    loss, norm = _quiet()
    norm[200] = 8.0
    assert watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))
    clipped = {"train/loss": loss, "grad/norm": norm, "grad/norm_clipped": np.minimum(norm, 1.0)}
    assert not watch_all(Watch(), rows(clipped))
    norm[200], norm[201] = 80.0, 8.0
    clipped["grad/norm_clipped"] = np.minimum(norm, 1.0)
    (event,) = watch_all(Watch(), rows(clipped))
    assert (event.series, event.step) == ("grad/norm", 201)
    assert any(note.startswith("peak 80 ") for note in event.notes)


def test_what_waits_survives_a_resumption() -> None:
    loss, norm = _quiet()
    loss[200], loss[201] = 2.25, 2.14
    all_rows = rows({"train/loss": loss, "grad/norm": norm})
    first, second = Watch(), Watch()
    watch_all(first, all_rows[:201], finish=False)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert watch_all(second, all_rows[201:]) == watch_all(Watch(), all_rows)


def test_a_state_of_an_older_version_loads_and_a_damaged_one_does_not() -> None:
    curve = rows({"train/loss": loss_curve(400), "grad/norm": np.ones(400)})
    first, second = Watch(), Watch()
    watch_all(first, curve[:200], finish=False)
    state = first.state_dict()
    del state["waiting"], state["detector"]["bias"]
    for lean in ("drift", "slow_drift"):
        del state["detector"][lean]["then"]
    second.load_state_dict(json.loads(json.dumps(state)))
    assert not watch_all(second, curve[200:])
    del state["detector"]["scale"]
    with pytest.raises(KeyError):
        Watch().load_state_dict(state)


def test_few_losses_are_judged_as_many_are() -> None:
    """They take another way through `_unbiased`."""
    curves = np.stack([loss_curve(300, seed) for seed in range(12)], 1)
    names = [f"train/loss/{i}" for i in range(12)]
    together, alone = BandDetector(), [BandDetector() for _ in names]
    together.bind(names)
    for name, one in zip(names, alone, strict=True):
        one.bind([name])
    for step, values in enumerate(curves):
        together.update(step, values, np.ones(12, bool))
        for i, one in enumerate(alone):
            one.update(step, values[i : i + 1], np.ones(1, bool))
    for name in ("bias", "scale", "steady", "level"):
        assert getattr(together, name).tolist() == [float(getattr(one, name)[0]) for one in alone]


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


def test_a_norm_that_never_moves_is_no_witness() -> None:
    """What is recorded after a clip that always bites is 1 at every step."""
    loss, _ = _quiet()
    loss[200] = 2.25
    for norm in (np.ones(300), np.zeros(300), np.full(300, 0.9999999)):
        assert watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))


def test_a_small_noisy_loss_three_times_up_needs_no_witness() -> None:
    random = np.random.default_rng(0)
    loss = np.abs(0.2 + 0.05 * random.standard_normal(300))
    loss[200] = 0.65  # nine sigmas, which its own skew takes for five
    norm = np.exp(0.1 * random.standard_normal(300))
    norm[200] = 1.0
    assert [a.onset for a in watch_all(Watch(), rows({"train/loss": loss, "grad/norm": norm}))] == [200]
