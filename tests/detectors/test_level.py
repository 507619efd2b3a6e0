"""A level that stays up and a slow climb are told once, whatever the tails; what is ordinary is not."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.detectors.kit import rows, watch_all
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch
from trackbridge.detectors.monitors import Level, Look
from trackbridge.records import Anomaly


def heavy(steps: int = 400, seed: int = 0, level: float = 2.0) -> np.ndarray:
    """Noise that gives the band a wide bar: every tenth value or so is an outlier."""
    random = np.random.default_rng(seed)
    outliers = np.where(random.random(steps) < 0.12, np.abs(random.standard_normal(steps)) * 0.6, 0.0)
    return level + 0.08 * random.standard_normal(steps) + outliers


def events(loss: np.ndarray, norm: np.ndarray | None = None, **settings: Any) -> list[Anomaly]:
    series: dict[str, Any] = {"train/loss": loss} | ({} if norm is None else {"grad/norm": norm})
    return watch_all(Watch(DetectionConfig(**settings)), rows(series))


def signs(loss: np.ndarray, norm: np.ndarray | None = None) -> list[tuple[int, str, str]]:
    monitor = Level(DetectionConfig().level)
    series: dict[str, Any] = {"train/loss": loss} | ({} if norm is None else {"grad/norm": norm})
    found = []
    for row in rows(series):
        sign = monitor.update(Look(row, {name: i for i, name in enumerate(row.schema.names)}, None, False))
        if sign is not None:
            found.append((sign.onset, sign.kind, sign.series))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_stays_is_told_whatever_the_tails(seed: int) -> None:
    loss = heavy(seed=seed)
    assert signs(loss) == []
    loss[300:] += 0.8
    ((onset, kind, series),) = signs(loss)
    assert (kind, series) == ("shift", "train/loss") and 298 <= onset <= 303


def test_it_is_one_event_with_the_excursion_it_is() -> None:
    random = np.random.default_rng(1)
    loss = 2.0 + 0.02 * random.standard_normal(400)
    loss[300:] += 1.0
    told = {anomaly.id: anomaly for anomaly in events(loss)}
    (only,) = told.values()
    assert only.kind == "shift" and any(note.startswith("level: ") for note in only.notes)


def test_a_climb_is_told_though_the_loss_fell_before() -> None:
    random = np.random.default_rng(2)
    loss = 2.5 + 3.0 * np.exp(-np.arange(400) / 60) + 0.1 * random.standard_normal(400)
    assert signs(loss) == []
    loss[300:] += 0.02 * np.arange(100)
    (first, *_) = signs(loss)
    assert first[1:] == ("drift", "train/loss") and 280 <= first[0] <= 340


def test_gradients_may_grow_while_the_loss_falls_and_not_otherwise() -> None:
    random = np.random.default_rng(3)
    norm = np.exp(0.15 * random.standard_normal(400)) * np.maximum(1.0, 1.04 ** (np.arange(400) - 300.0))
    flat = 2.0 + 0.02 * random.standard_normal(400)
    falling = flat + 3.0 - 0.0075 * np.arange(400)
    assert signs(falling, norm) == []
    assert [kind for _, kind, series in signs(flat, norm) if series == "grad/norm"] == ["drift"]


def test_a_spike_of_five_values_is_no_level_and_a_told_change_neither() -> None:
    loss = heavy(seed=5)
    loss[300:305] += 3.0
    assert signs(loss) == []
    jumped = heavy(seed=6)
    jumped[300:] += 1.0
    watch = Watch()
    for row in rows({"train/loss": jumped}):
        if row.step == 300:
            watch.note("sequence_length", 300)
        assert not [a for a in watch.update(row) if a.kind in ("shift", "drift")]


def test_the_end_is_told_and_the_state_goes_through_json() -> None:
    loss = heavy(seed=7)
    loss[200:240] += 0.8
    loss[250] = math.nan
    whole, first, second = (Level(DetectionConfig().level) for _ in range(3))
    ended, same = [], []
    for row in rows({"train/loss": loss}):
        look = Look(row, {"train/loss": 0}, None, False)
        sign = whole.update(look)
        if row.step == 220:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        half = first if row.step < 220 else second
        same.append(half.update(look) == sign)
        ended.append(whole.over())
    assert all(same)
    assert ended[-1] is not None and 240 <= ended[-1] <= 250
    assert all(len(values) <= 56 for values in whole.values.values()), "memory does not grow"
