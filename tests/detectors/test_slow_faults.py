"""Throughput, memory, stalls, plateaus, single layers, changes of regime, the user's rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.config import DetectionConfig, TrackbridgeConfig
from trackbridge.detectors import Watch, detect
from trackbridge.detectors.prime import primed
from trackbridge.errors import ConfigError
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, MicroBatch, StepContext
from trackbridge.rules import Rule

MiB = 2.0**20


def events(series: dict[str, Any], **settings: Any) -> list[Anomaly]:
    return watch_all(Watch(DetectionConfig(**settings)), rows(series))


# -- throughput


def pace(steps: int = 600, seconds: float = 2.0) -> np.ndarray:
    random = np.random.default_rng(3)
    took = seconds * np.exp(0.05 * random.standard_normal(steps))
    took[:5] *= 20  # compilation
    took[::50] += 30  # a checkpoint
    return took


def speed(took: np.ndarray, tokens: float | np.ndarray = 1000.0) -> dict[str, Any]:
    return {"train/loss": loss_curve(len(took)), "perf/step_s": took, "perf/tokens_per_s": tokens / took}


def test_a_lasting_slowdown_is_told_once_and_is_over_when_it_is() -> None:
    took = pace()
    assert events(speed(took)) == []
    took[300:400] *= 2
    (event,) = events(speed(took))
    assert (event.kind, event.series) == ("throughput", "perf/tokens_per_s")
    assert 300 <= event.onset < 310 and event.onset + 29 == event.step
    assert event.value == pytest.approx(250, rel=0.1) and event.expected == pytest.approx(500, rel=0.1)
    assert event.recovered_after == pytest.approx(100, abs=10)


def test_larger_batches_are_no_slowdown_and_fewer_seconds_than_asked_neither() -> None:
    took = pace()
    took[300:] *= 4
    assert events(speed(took, np.where(np.arange(600) < 300, 1000.0, 4000.0))) == []
    quick = pace(seconds=0.01)
    quick[300:] *= 3
    assert events(speed(quick)) == []
    assert [event.kind for event in events(speed(quick), throughput={"seconds": 0.5})] == ["throughput"]


# -- memory


def held(kind: str, steps: int = 4000, noise: float = 300.0) -> np.ndarray:
    t = np.arange(steps)
    base = 4096 * MiB + noise * MiB * np.random.default_rng(0).random(steps)  # what comes and goes within a step
    base[:100] -= 3000 * MiB * (1 - t[:100] / 100)  # optimizer state and caches are made
    grown = {
        "steady": 0.0 * t,
        "slope": 0.4 * MiB * np.maximum(t - 1000, 0),
        "staircase": 200 * MiB * (np.maximum(t - 500, 0) // 250),
        "one jump": 900 * MiB * (t > 2000),
        "fills up": 900 * MiB * (1 - np.exp(-np.maximum(t - 300, 0) / 150)),
        "up and down": 500 * MiB * np.abs(((t / 600) % 2) - 1),
    }[kind]
    return np.asarray(base + grown)


@pytest.mark.parametrize("kind", ["steady", "one jump", "fills up", "up and down"])
def test_memory_that_comes_to_rest_is_no_creep(kind: str) -> None:
    values = held(kind)
    assert events({"mem/allocated_bytes": values, "mem/reserved_bytes": 1.2 * values}) == []


@pytest.mark.parametrize("kind", ["slope", "staircase"])
def test_creep_is_told_by_its_shape(kind: str) -> None:
    values = held(kind)
    (event,) = events({"mem/allocated_bytes": values, "mem/reserved_bytes": 1.1 * values})
    assert (event.kind, event.series) == ("memory", "mem/allocated_bytes")
    assert event.notes[-1].startswith(f"{kind}: ") and event.step < 2200


def test_reserved_memory_that_grows_alone_is_fragmentation() -> None:
    (event,) = events({"mem/allocated_bytes": held("steady"), "mem/reserved_bytes": 1.1 * held("slope")})
    assert event.series == "mem/reserved_bytes" and event.notes[-1].startswith("fragmentation: ")


def test_host_memory_is_sampled_now_and_then() -> None:
    values = [v if i % 10 == 0 else None for i, v in enumerate(held("slope", noise=20.0))]
    (event,) = events({"train/loss": list(loss_curve(4000)), "host/rss_bytes": values})
    assert event.series == "host/rss_bytes" and event.notes[-1].startswith("slope: ")


# -- stalls


def stalled(waits: Sequence[float], **settings: Any) -> tuple[Watch, list[Anomaly]]:
    """A run of two-second steps after which nothing comes for each of `waits`."""
    watch = Watch(DetectionConfig(stall=settings))
    watch_all(watch, rows({"train/loss": loss_curve(50), "perf/step_s": np.full(50, 2.0)}), finish=False)
    return watch, [anomaly for waited in waits for anomaly in watch.wait(waited)]


def test_a_stall_is_told_while_it_lasts_and_is_over_with_the_next_step() -> None:
    watch, (event,) = stalled([1, 10, 299, 301, 600, 5000])
    assert (event.kind, event.step, event.onset, event.value) == ("stall", 50, 50, 301.0)
    assert event.time == 1000.0 + 49 + 301 and event.expected == 2.0
    (last,) = watch_all(watch, rows({"train/loss": [2.0], "perf/step_s": [6000.0]}, start=50), finish=False)
    assert (last.id, last.recovered_after) == (event.id, 0)
    assert watch.wait(11_000) == []  # a gap of 6,000 seconds ended by itself
    assert [a.id for a in watch.wait(12_001)] == ["0-51-stall"]


def test_slow_steps_need_a_longer_wait_and_the_first_ones_prove_nothing() -> None:
    assert stalled([39], seconds=1.0)[1] == [] and len(stalled([41], seconds=1.0)[1]) == 1
    watch = Watch()
    assert watch.wait(1e9) == []
    watch_all(watch, rows({"train/loss": [2.0] * 5, "perf/step_s": [1.0] * 5}), finish=False)
    assert watch.wait(1e9) == []


# -- plateau


def test_a_plateau_is_told_only_where_asked_for() -> None:
    asked = {"plateau": {"enabled": True, "steps": 600, "least": 0.01}}
    loss = np.concatenate([loss_curve(800), np.full(1200, 2.28) + 0.05 * np.random.default_rng(9).standard_normal(1200)])
    assert detect(range(2000), loss) == []
    (event,) = detect(range(2000), loss, settings=asked)
    assert (event.kind, event.series) == ("plateau", "train/loss") and 1200 < event.step < 1801
    falling = np.full(2000, 5.0) * 0.9997 ** np.arange(2000)
    assert detect(range(2000), falling, settings=asked) == []


def test_a_flat_loss_after_the_learning_rate_decayed_is_no_plateau() -> None:
    series = {"train/loss": np.full(2000, 2.0), "train/lr": 1e-3 * 0.2 ** np.searchsorted([300, 400], np.arange(2000))}
    assert events(series, plateau={"enabled": True, "steps": 600}) == []
    series["train/lr"] = np.full(2000, 1e-3)
    assert [a.kind for a in events(series, plateau={"enabled": True, "steps": 600})] == ["plateau"]


# -- single layers


def network(steps: int = 600) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    series = {"train/loss": loss_curve(steps, start=0.5)}
    for i in range(6):
        series[f"act/{i}/kurtosis"] = 3 + 0.1 * random.standard_normal(steps)
        series[f"layer/{i}/grad_norm"] = np.exp(0.1 * random.standard_normal(steps))
    return series


def test_layers_that_stay_out_of_their_band_are_one_event_of_low_severity() -> None:
    series = network()
    assert events(series) == []
    series["act/2/kurtosis"][400:412] = 100
    series["layer/3/grad_norm"][402:412] *= 50
    (event,) = events(series)
    assert (event.kind, event.series, event.step, event.onset) == ("spike", "act/2/kurtosis", 407, 400)
    assert event.severity <= 0.3 and event.recovered_after == 12
    assert event.cascade[:2] == (("act/2/kurtosis", 400), ("layer/3/grad_norm", 402))


def test_a_loss_that_follows_takes_the_layers_event_over() -> None:
    series = network()
    series["act/2/kurtosis"][400:420] = 100 * np.exp(np.arange(20) / 10)
    series["train/loss"][415:418] += 3
    (event,) = events(series)
    assert (event.kind, event.series, event.first_mover) == ("spike", "train/loss", ("act/2/kurtosis", 400))
    assert event.severity > 0.5


# -- changes of regime


def fed(loss: np.ndarray, shapes: Sequence[tuple[int, int]], epochs: Sequence[int] | None = None) -> list[Anomaly]:
    watch, latest = Watch(), {}
    for i, (row, shape) in enumerate(zip(rows({"train/loss": loss}), shapes, strict=True)):
        micro = MicroBatch(loader=0, epoch=epochs[i] if epochs is not None else None, tensors={"x": np.zeros(shape)})
        for anomaly in watch.update(row, StepContext(-1, i, 0, {}, (micro,))):
            latest[anomaly.id] = anomaly
    return list(latest.values())


def test_a_switch_of_the_sequence_length_is_no_spike() -> None:
    loss = loss_curve(600)
    loss[300:] += 0.8
    assert fed(loss, [(8, 64)] * 300 + [(8, 128)] * 300) == []
    assert [a.kind for a in fed(loss, [(8, 64)] * 600)] == ["shift"]


def test_a_switch_is_seen_in_the_tokens_that_the_loop_counts_too() -> None:
    loss = loss_curve(600)
    loss[300:] += 0.8
    tokens = np.cumsum(np.where(np.arange(600) < 300, 512, 2048))
    assert events({"train/loss": loss, "train/tokens": tokens}) == []


def test_lengths_that_always_vary_blind_nobody() -> None:
    loss = loss_curve(600)
    loss[300] += 1
    lengths = np.random.default_rng(0).integers(10, 100, 600)
    assert [a.step for a in fed(loss, [(8, int(n)) for n in lengths])] == [300]


def test_a_short_last_batch_is_noisier_and_says_so_when_it_stands_out_all_the_same() -> None:
    loss = loss_curve(600)
    shapes = [(32, 8) if i % 100 != 99 else (3, 8) for i in range(600)]
    loss[299] += 0.35  # seven sigmas of a full batch, two of a batch of three
    assert fed(loss, shapes) == [] and [a.step for a in fed(loss, [(32, 8)] * 600)] == [299]
    loss[399] += 3
    (event,) = fed(loss, shapes)
    assert event.step == 399 and event.notes == ("a batch of 3 samples, usually 32",)


def test_an_event_at_the_start_of_an_epoch_says_so() -> None:
    loss = loss_curve(600)
    loss[300] += 1
    (event,) = fed(loss, [(8, 8)] * 600, np.arange(600) // 100)
    assert event.notes == ("the first step of epoch 3",)


def test_a_resumed_run_is_not_blind_and_marks_what_follows(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, segment_bytes=1 << 20, fsync_seconds=5.0)
    for row in rows({"train/loss": loss_curve(400)}):
        writer.append(row)
    writer.close()
    watch = primed(DetectionConfig(), tmp_path, 1, 300)
    later = loss_curve(400)[300:]
    later[3] += 1
    (event,) = watch_all(watch, rows({"train/loss": later}, start=300, attempt=1))
    assert (event.step, event.attempt, event.notes) == (303, 1, ("after_resume",))
    assert watch_all(primed(DetectionConfig(), tmp_path, 0, 0), rows({"train/loss": later[:20]})) == []


# -- the user's rules


@pytest.mark.parametrize(
    ("text", "series", "limit", "steps"),
    [
        ("perf/mfu < 0.3 for 50 steps", "perf/mfu", 0.3, 50),
        ("perf/mfu<30%", "perf/mfu", 0.3, 1),
        ("mem/reserved_bytes >= 95%", "mem/reserved_bytes", 950.0, 1),
        ("host/rss_bytes > 1.5 GiB for 1 step", "host/rss_bytes", 1.5 * 2**30, 1),
        ("host/rss_bytes > 10GB", "host/rss_bytes", 1e10, 1),
        ("perf/step_s > 250 ms", "perf/step_s", 0.25, 1),
        ("layer/*/update_ratio > 1e-2", "layer/a.weight/update_ratio", 0.01, 1),
        ("train/lr == -.5", "train/lr", -0.5, 1),
    ],
)
def test_rules_are_read(text: str, series: str, limit: float, steps: int) -> None:
    rule = Rule.model_validate(text)
    assert rule.concerns(series) and not rule.concerns(f"{series}x") and not rule.concerns("other")
    assert rule.limit(series, lambda name: 1000.0) == pytest.approx(limit) and rule.steps == steps
    assert Rule.model_validate(rule.model_dump()) == rule


@pytest.mark.parametrize("text", ["", "perf/mfu", "perf/mfu < many", "perf/mfu < 0.3 for ever", "< 3", "a < 3 < 4", "a << 3"])
def test_a_rule_that_cannot_be_read_is_an_error_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="is no rule: write SERIES < NUMBER") as raised:
        TrackbridgeConfig.load(detection={"rules": [text]})
    assert "\n" not in str(raised.value)


def test_rules_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKBRIDGE_DETECTION__RULES", '["perf/mfu < 0.3", {"rule": "train/lr > 1", "severity": 0.9}]')
    loaded = TrackbridgeConfig.load().detection.rules
    assert [(rule.rule, rule.severity) for rule in loaded] == [("perf/mfu < 0.3", 0.5), ("train/lr > 1", 0.9)]


def test_a_share_of_what_nobody_knows_is_never_broken() -> None:
    assert Rule.model_validate("mem/reserved_bytes > 1%").limit("mem/reserved_bytes", lambda name: None) is None
    assert events({"mem/reserved_bytes": np.full(10, 1e12)}, rules=["mem/reserved_bytes > 1%"]) == []


def test_a_rule_is_one_event_while_it_holds() -> None:
    mfu = np.full(300, 0.4)
    mfu[100:120] = mfu[150:151] = mfu[200:] = 0.2
    mfu[110] = np.nan  # absent from the count, and an event of its own
    found = [a for a in events({"perf/mfu": mfu}, rules=["perf/mfu < 30% for 5 steps"]) if a.kind == "rule"]
    assert [(a.step, a.onset, a.recovered_after) for a in found] == [(104, 100, 20), (204, 200, None)]
    assert found[0].severity == 0.5 and found[0].expected == pytest.approx(0.3)
    assert found[0].notes == ("rule: perf/mfu < 30% for 5 steps (perf/mfu is 0.2)",)


def test_a_pattern_is_one_event_for_all_its_series() -> None:
    series = {f"layer/{i}/update_ratio": np.where(np.arange(50) >= 20 + i, 0.5, 0.001) for i in range(4)}
    (event,) = events(series, rules=[{"rule": "layer/*/update_ratio > 0.1", "severity": 0.9}], layers={"enabled": False})
    assert (event.series, event.step, event.severity) == ("layer/0/update_ratio", 20, 0.9)


@pytest.mark.parametrize(
    ("rule", "there", "guess"),
    [
        ("loss > 1 for 3 steps", ("eval/loss", "train/loss", "grad/norm"), " (did you mean 'train/loss'?)"),
        ("train/los > 1", ("train/loss", "grad/norm"), " (did you mean 'train/loss'?)"),
        ("expert/*/load > 1", ("train/loss",), ""),
    ],
)
def test_a_rule_on_a_series_that_does_not_exist_says_so_once(
    rule: str, there: tuple[str, ...], guess: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch, data = Watch(DetectionConfig(rules=[rule])), rows({name: np.full(100, 2.0) for name in there})
    watch_all(watch, data[:19], finish=False)
    assert not caplog.records
    watch_all(watch, data[19:])
    (said,) = caplog.records
    name = rule.split()[0]
    assert (said.name, said.levelname) == ("trackbridge", "WARNING") and said.getMessage() == (
        f"trackbridge: the rule {rule!r} has nothing to judge: none of the first 20 steps recorded a series {name!r}{guess}"
    )


def test_a_rule_whose_series_is_seen_now_and_then_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ratio = [0.1 if step in (9, 90) else None for step in range(100)]
    events({"train/loss": np.full(100, 2.0), "layer/a/update_ratio": ratio}, rules=["layer/*/update_ratio > 1"])
    assert not caplog.records


# -- the laws


def everything(steps: int = 2000) -> dict[str, Any]:
    series: dict[str, Any] = {**network(steps), **speed(pace(steps)), "mem/allocated_bytes": held("slope", steps)}
    series["perf/step_s"][1500:1600] *= 3
    series["perf/tokens_per_s"] = 1000 / series["perf/step_s"]
    series["act/2/kurtosis"][900:950] = 100
    return series


SETTINGS: dict[str, Any] = {
    "plateau": {"enabled": True, "steps": 300, "least": 0.01},
    "rules": ["perf/step_s > 5 s for 20 steps"],
}


@pytest.mark.parametrize("cut", [5, 905, 1540, 1950])
def test_resume_equals_no_resume(cut: int) -> None:
    data = rows(everything())
    whole = Watch(DetectionConfig(**SETTINGS))
    expected = [a for row in data for a in whole.update(row)]
    assert {a.kind for a in expected} >= {"spike", "throughput", "memory", "rule", "plateau"}
    first, second = Watch(DetectionConfig(**SETTINGS)), Watch(DetectionConfig(**SETTINGS))
    found = [a for row in data[:cut] for a in first.update(row)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert found + [a for row in data[cut:] for a in second.update(row)] == expected


def test_a_nan_in_every_series_changes_nothing_that_follows() -> None:
    series = everything()
    told = [(a.kind, a.step) for a in events(series, **SETTINGS)]
    absent = {name: [v if i != 800 else None for i, v in enumerate(values)] for name, values in series.items()}
    broken = {name: [v if i != 800 else float("nan") for i, v in enumerate(values)] for name, values in series.items()}
    absent["train/extra"] = broken["train/extra"] = [1.0] * 2000  # so that no row is empty
    found = [(a.kind, a.step) for a in events(broken, **SETTINGS) if a.kind != "nonfinite"]
    assert found == [(a.kind, a.step) for a in events(absent, **SETTINGS)]
    assert {kind for kind, _ in found} == {kind for kind, _ in told}


def test_state_does_not_grow() -> None:
    watch, sizes = Watch(DetectionConfig(**SETTINGS)), []
    for part in range(3):
        watch_all(watch, rows(everything(1200), start=1200 * part), finish=False)
        sizes.append(len(json.dumps(watch.state_dict())))
    assert max(sizes) < min(sizes) + 3000
