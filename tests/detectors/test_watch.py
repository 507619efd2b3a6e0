"""One event per episode: members, first mover, recovery, and state."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch, detect
from trackbridge.errors import ConfigError, UsageError
from trackbridge.records import Row, Schema


def network(steps: int = 300) -> dict[str, np.ndarray]:
    """A run of three layers, with a spike that begins in b's activations at 198 and reaches the loss at 200."""
    random = np.random.default_rng(7)
    series = {"train/loss": loss_curve(steps), "grad/norm": np.exp(0.1 * random.standard_normal(steps))}
    for layer in "abc":
        series[f"act/{layer}/kurtosis"] = 3 + 0.2 * random.standard_normal(steps)
        series[f"layer/{layer}.weight/grad_norm"] = np.exp(0.1 * random.standard_normal(steps))
    series["act/b/kurtosis"][198:206] = 400
    for layer in "abc":
        series[f"layer/{layer}.weight/grad_norm"][200:204] *= 50
    series["grad/norm"][200:204] *= 50
    series["train/loss"][200:204] += 3
    return series


def test_a_spike_is_one_event_with_first_mover_cascade_and_recovery() -> None:
    watch = Watch()
    versions = [(row.step, a) for row in rows(network()) for a in watch.update(row)]
    assert {a.id for _, a in versions} == {"0-200-spike"}
    step, first = versions[0]
    assert (step, first.series, first.kind, first.onset) == (200, "train/loss", "spike", 200)
    assert first.first_mover == ("act/b/kurtosis", 198)
    last = versions[-1][1]
    assert last.recovered_after == 4
    assert [name for name, _ in last.cascade] == [
        "act/b/kurtosis", "train/loss", "layer/c.weight/grad_norm", "layer/b.weight/grad_norm", "layer/a.weight/grad_norm",
        "grad/norm",
    ]  # fmt: skip
    assert last.time == 1200.0 and first.score > 20 and 0.5 < first.severity <= 1


def test_a_gradient_excursion_joined_by_the_loss_becomes_the_losss_event() -> None:
    series = {"train/loss": loss_curve(300), "grad/norm": np.exp(0.1 * np.random.default_rng(0).standard_normal(300))}
    series["grad/norm"][200:205] *= 100
    series["train/loss"][202:205] += 3
    (event,) = watch_all(Watch(), rows(series))
    assert (event.series, event.step, event.onset) == ("train/loss", 200, 200)
    assert event.first_mover == ("grad/norm", 200)
    assert dict(event.cascade)["train/loss"] == 202


def test_an_episode_that_never_ends_did_not_recover() -> None:
    loss = loss_curve(210)
    loss[200:] += np.linspace(3, 9, 10)
    (event,) = detect(range(210), loss)
    assert event.recovered_after is None and event.kind == "spike"


def test_a_loss_that_keeps_rising_is_a_divergence() -> None:
    loss = loss_curve(700)
    loss[200:] += np.linspace(1, 200, 500)
    event = detect(range(700), loss)[0]
    assert event.kind == "divergence" and event.severity >= 0.9 and event.recovered_after is None


@pytest.mark.parametrize("rate", [0.01, 0.03])
def test_a_drift_is_found_within_fifteen_steps_and_is_one_event(rate: float) -> None:
    delays = []
    for seed in range(6):
        loss = loss_curve(2400, seed=seed)
        loss[2000:2200] += rate * np.arange(1, 201)
        loss[2200:] += rate * 200
        events = detect(range(2400), loss)
        assert len(events) <= 2 and events[0].step >= 2000
        delays.append(events[0].step - 2000 + 1)
    assert np.median(delays) <= 15


def test_non_finite_elements_inside_a_layer_are_an_event() -> None:
    count = np.zeros(50)
    count[30:33] = 4
    (event,) = watch_all(Watch(), rows({"train/loss": loss_curve(50), "layer/a.weight/grad_nonfinite": count}))
    assert (event.kind, event.series, event.step, event.recovered_after) == (
        "nonfinite",
        "layer/a.weight/grad_nonfinite",
        30,
        3,
    )


def test_the_first_mover_of_a_nan_is_where_the_data_flows_first() -> None:
    steps = 40
    flag = np.where(np.arange(steps) == 30, 1.0, 0.0)
    loss = loss_curve(steps)
    loss[30] = math.nan
    series = {"layer/a/grad_nonfinite": flag, "train/loss": loss, "act/deep/nonfinite": flag, "act/late/nonfinite": flag}
    (event,) = watch_all(Watch(), rows(series))
    assert event.series == "train/loss" and event.first_mover == ("act/deep/nonfinite", 30)
    assert [name for name, _ in event.cascade] == list(dict.fromkeys(
        ["act/deep/nonfinite", "act/late/nonfinite", "train/loss", "layer/a/grad_nonfinite"]
    ))  # fmt: skip


def test_one_nan_never_silences_the_detector() -> None:
    loss = loss_curve(400)
    loss[200] = math.nan
    loss[210] += 1
    assert [(e.kind, e.step) for e in detect(range(400), loss)] == [("nonfinite", 200), ("spike", 210)]


@pytest.mark.parametrize("standing", ["act/block.0/kurtosis", "train/loss/aux", "layer/a/weight_nonfinite"])
@pytest.mark.parametrize("also", [205, 500])
def test_what_is_broken_for_good_hides_no_loss_that_breaks_later(standing: str, also: int) -> None:
    loss, broken = loss_curve(600), np.zeros(600)
    loss[[also, 300, 301, 400]] = math.nan
    loss[350] += 2
    broken[200:] = 3.0 if standing.endswith("_nonfinite") else math.nan
    skipped = np.cumsum(np.isin(np.arange(600), [310, 450]))  # by a scaler
    data = rows({"train/loss": loss, standing: broken, "optim/skipped": skipped})
    events = watch_all(Watch(), data)
    told = [(e.kind, e.onset, e.series, e.recovered_after) for e in events]
    expected = [
        ("nonfinite", 200, standing, None), ("nonfinite", 300, "train/loss", 2), ("spike", 350, "train/loss", 1),
        ("nonfinite", 400, "train/loss", 1),
    ]  # fmt: skip
    assert told == expected + [("nonfinite", 500, "train/loss", 1)] * (also == 500)
    assert [e.cascade for e in events if e.onset == 300] == [(("train/loss", 300),)]
    for cut in (250, 301, 399):
        first, second = Watch(), Watch()
        found = [repr(a) for row in data[:cut] for a in first.update(row)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        found += [repr(a) for row in data[cut:] for a in second.update(row)]
        whole = Watch()
        assert found == [repr(a) for row in data for a in whole.update(row)]


def test_a_norm_that_stays_broken_is_told_once_whatever_steps_are_skipped() -> None:
    grad = np.ones(300)
    grad[100:] = math.inf
    skipped = np.cumsum(np.isin(np.arange(300), [150, 151, 200]))
    events = watch_all(Watch(), rows({"train/loss": loss_curve(300), "grad/norm": grad, "optim/skipped": skipped}))
    assert [(e.kind, e.step, e.recovered_after) for e in events] == [("nonfinite", 100, None)]


def test_a_run_of_nan_is_one_event() -> None:
    loss = loss_curve(100)
    loss[50:] = math.nan
    (event,) = detect(range(100), loss)
    assert (event.step, event.recovered_after) == (50, None)


def test_series_may_come_and_go() -> None:
    """Weights every tenth step, a series that starts late: known ones keep their state, and ids of schemas may be reused."""
    loss = loss_curve(400)
    loss[333] += 2
    late = [None if i < 100 or i % 10 else 1.0 for i in range(400)]
    (event,) = watch_all(Watch(), rows({"layer/w/update_ratio": late, "train/loss": list(loss)}))
    assert event.step == 333


def test_clipping_does_not_hide_the_layer_whose_gradient_exploded() -> None:
    series = network()
    for layer, factor in (("a", 1.0), ("b", 50.0), ("c", 1.0)):
        series[f"layer/{layer}.weight/grad_norm"][200:204] *= factor / 50
    series["act/b/kurtosis"][198:206] = 3.0
    series["grad/norm_clipped"] = np.minimum(series["grad/norm"], 1.5)
    share = series["grad/norm_clipped"] / series["grad/norm"]
    for layer in "abc":
        series[f"layer/{layer}.weight/grad_norm"] *= share
    (event,) = watch_all(Watch(), rows(series))
    assert "layer/b.weight/grad_norm" in dict(event.cascade)
    assert "layer/a.weight/grad_norm" not in dict(event.cascade)


def test_rows_of_logged_values_are_not_judged() -> None:
    watch = Watch()
    watch_all(watch, rows({"train/loss": loss_curve(100)}), finish=False)
    row = Row(100, 100, 0.0, 0, Schema(("train/loss",)), np.array([1e9]), kind="log")
    assert watch.update(row) == []


@pytest.mark.parametrize("cut", [150, 199, 200, 201, 203, 206, 250])
def test_resume_equals_no_resume(cut: int) -> None:
    data = rows(network())
    whole = Watch()
    expected = [a for row in data for a in whole.update(row)] + whole.finish()
    first = Watch()
    found = [a for row in data[:cut] for a in first.update(row)]
    second = Watch()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [a for row in data[cut:] for a in second.update(row)] + second.finish()
    assert found == expected


def test_resume_in_the_middle_of_a_nan_and_of_a_rhythm() -> None:
    loss = loss_curve(1000)
    loss[99::100] += 1.5
    loss[640:660] = math.nan
    data = rows({"train/loss": loss})
    whole = Watch()
    expected = [repr(a) for row in data for a in whole.update(row)]
    first, second = Watch(), Watch()
    found = [repr(a) for row in data[:650] for a in first.update(row)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert found + [repr(a) for row in data[650:] for a in second.update(row)] == expected


def test_a_told_change_of_regime_is_no_alarm() -> None:
    loss = loss_curve(600)
    loss[300:] += 0.8
    told, untold = Watch(), Watch()
    data = rows({"train/loss": loss})
    told_events = []
    for row in data:
        if row.step == 300:
            told.note("batch_size", 300)
        told_events += told.update(row)
    assert told_events == [] and [e.kind for e in watch_all(untold, data)] == ["shift"]


def test_a_told_amp_skip_is_left_out() -> None:
    grad = np.full(100, 1.0)
    grad[60] = math.inf
    watch = Watch()
    watch.note("amp_skip", 60)
    assert watch_all(watch, rows({"train/loss": loss_curve(100), "grad/norm": grad})) == []
    assert watch.amp_skips == 1


def test_detect_takes_settings_and_names_the_nearest_valid_one() -> None:
    loss = loss_curve(300)
    loss[250] += 0.5
    assert detect(range(300), loss, settings={"threshold": 20.0}) == []
    assert len(detect(range(300), loss, settings=DetectionConfig(threshold=5.0))) == 1
    with pytest.raises(ConfigError, match="did you mean 'threshold'"):
        detect(range(300), loss, settings={"treshold": 3.0})
    with pytest.raises(UsageError, match="differ in length"):
        detect(range(299), loss)


def test_detect_equals_a_live_watch() -> None:
    series = network()
    live = watch_all(Watch(), rows({name: series[name] for name in ("train/loss", "grad/norm")}))
    arrays = detect(range(300), series["train/loss"], series["grad/norm"])
    assert [a.updated(time=0.0) for a in live] == arrays


def test_a_value_several_times_anything_before_is_told_in_the_noisiest_loss() -> None:
    """Skewed noise is no spike, but a spike in it is one."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        loss = 0.5 * np.abs(random.standard_normal(70)) + 0.5 * np.exp(0.5 * random.standard_normal(70))
        assert [a.step for a in detect(range(70), loss) if a.kind == "spike" and a.score > 8] == []
        loss[52] = 8.6
        assert 52 in [a.step for a in detect(range(70), loss)], seed


def test_the_long_side_of_a_small_loss_is_no_spike() -> None:
    """A classifier's: 0.5 on average, each batch 20 or 30 percent off."""
    found = [len(detect(range(1500), 0.5 * np.exp(0.28 * np.random.default_rng(s).standard_normal(1500)))) for s in range(4)]
    assert sum(found) <= 1
