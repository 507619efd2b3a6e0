"""Records that no healthy run writes: thousands of layers, series that are not finite, two layers only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.detectors.kit import rows
from tests.diagnosis.kit import AT, STEPS, Story
from trackbridge.diagnosis import View, diagnose, view
from trackbridge.diagnosis.registry import RULES, Case
from trackbridge.records import Anomaly, Schema


def spike(**more: Any) -> Anomaly:
    known = {"kind": "spike", "step": AT, "onset": AT, "first_mover": ("train/loss", AT)} | more
    return Anomaly(id="a", severity=0.5, series="train/loss", value=3.0, expected=2.0, score=9.0, **known)


def weigh(name: str, story: Story, anomaly: Anomaly) -> Case:
    case = Case()
    RULES[name].weigh(View(anomaly, rows(story.series), story.contexts()), case)
    return case


def test_of_thousands_of_series_none_is_searched_for() -> None:
    """A search for each of them is quadratic: a diagnosis of 300 layers took 5 s."""

    class Names(tuple[str, ...]):
        def index(self, *_: Any) -> int:  # type: ignore[override]
            raise AssertionError("searched")

    data = rows(Story().spike().series)
    schema = Schema(Names(data[0].schema.names))
    data = [replace(row, schema=schema) for row in data]
    looked = View(spike(), data)
    assert looked.at("train/loss") == data[AT].values[list(schema.names).index("train/loss")]
    assert all(len(looked.series(name)[0]) == STEPS for name in looked.names)


def test_the_output_layer_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(view, "is_head", lambda name: bool(asked.append(name)))
    names = [f"layer/stack.{k}.weight/weight_norm" for k in range(50)] + ["layer/last.weight/weight_norm"]
    looked = View(spike(), rows({name: np.ones(STEPS) for name in names}))
    assert [looked.is_output(name) for name in names] == [False] * 50 + [True]
    assert len(asked) <= 2 * len(names)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rate_that_is_not_finite_did_not_rise(bad: float) -> None:
    story = Story().spike()
    story.series["train/lr"][AT] = bad
    assert View(spike(), rows(story.series)).lr_jump == pytest.approx((1.0, AT), abs=50)
    assert "lr-discontinuity" not in [found.name for found in diagnose(spike(), rows(story.series))]


def test_a_rate_that_rose_after_the_onset_is_said_to_have() -> None:
    story = Story().spike(20)
    story.series["train/lr"][AT + 2 :] *= 10
    texts = [text for _, text in weigh("lr-discontinuity", story, spike(step=AT + 4)).supports]
    assert any("9.99 times" in text and "2 steps after the onset" in text for text in texts)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_moments_that_were_not_finite_for_a_step_are_not_lost(bad: float) -> None:
    story = Story().spike()
    for name in story.series:
        if name.endswith("exp_avg_sq_norm"):
            story.series[name][AT] = bad
    found = weigh("optimizer-state-lost", story, spike())
    assert not found.supports and any("continuous" in text for _, text in found.opposes)


def test_a_moment_that_has_been_zero_is_not_stale() -> None:
    """Its gradient came and went: nothing over nothing is no fall."""
    story = Story().spike()
    name = "layer/blocks.0.mlp.weight/exp_avg_sq_norm"
    story.series[name][AT - 60 :] = 0.0
    assert not weigh("stale-second-moment", story, spike()).supports


def test_of_two_layers_one_stale_moment_is_not_most_of_them() -> None:
    story = Story().spike().gradients(3)
    story.series = {
        name: values for name, values in story.series.items() if not name.startswith("layer/") or "blocks.0" in name
    }
    story.series["layer/blocks.0.mlp.weight/exp_avg_sq_norm"][AT:] *= 0.02
    assert weigh("stale-second-moment", story, spike()).weight >= 4
    assert not weigh("optimizer-state-lost", story, spike()).supports


@pytest.mark.filterwarnings("error")
def test_a_record_of_anything_is_weighed_without_a_warning() -> None:
    for value in (0.0, np.inf, -np.inf, np.nan, 1e308, -1.0):
        story = Story().spike()
        for name in story.series:
            story.series[name][AT:] = value
        for kind in ("spike", "nonfinite", "drift"):
            assert diagnose(spike(kind=kind), rows(story.series), story.contexts())
