"""Faults by name: each told where it is, none in what healthy runs do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.detectors import Watch
from trackbridge.records import Anomaly, MicroBatch, StepContext


def calm(steps: int, **series: Any) -> dict[str, Any]:
    return {"train/loss": loss_curve(steps), **{name.replace("__", "/"): values for name, values in series.items()}}


def events(series: Mapping[str, Any], **settings: Any) -> list[Anomaly]:
    return watch_all(Watch(), rows(series))


NAMES = ("lr-discontinuity", "repeated-batch", "optimizer-state-lost", "stale-second-moment", "fp16-overflow")


def fault(anomaly: Anomaly) -> str:
    return next(note for note in anomaly.notes if note.split(":")[0] in NAMES).split(":")[0]


def contexts(prints: Sequence[Any], epochs: Sequence[int | None] | None = None, samples: int = 8) -> list[StepContext]:
    """A context per step; `prints` holds a batch's number, or several for micro-batches."""
    found = []
    for step, given in enumerate(prints):
        epoch = epochs[step] if epochs is not None else None
        numbers = given if isinstance(given, tuple) else (given,)
        micro = tuple(
            MicroBatch(loader=0, epoch=epoch, fingerprint=f"{number:016x}", tensors={"x": np.zeros((samples, 3))})
            for number in numbers
        )
        found.append(StepContext(-1, step, 0, {}, micro))
    return found


def watched(found: Sequence[StepContext], loss: np.ndarray | None = None) -> list[Anomaly]:
    watch, latest = Watch(), {}
    for row, context in zip(rows({"train/loss": loss_curve(len(found)) if loss is None else loss}), found, strict=True):
        latest.update({anomaly.id: anomaly for anomaly in watch.update(row, context)})
    latest.update({anomaly.id: anomaly for anomaly in watch.finish()})
    return list(latest.values())


# -- learning rate


def warmup_cosine(steps: int, warm: int = 50, peak: float = 1e-3, low: float = 0.1) -> np.ndarray:
    t = np.arange(steps)
    cosine = low + (1 - low) * 0.5 * (1 + np.cos(np.pi * np.clip((t - warm) / (steps - warm), 0, 1)))
    return peak * np.where(t < warm, (t + 1) / max(warm, 1), cosine)


HEALTHY = {
    "constant": np.full(400, 1e-3),
    "warm-up and cosine": warmup_cosine(400),
    "warm-up from zero": warmup_cosine(400) * (np.arange(400) > 0),
    "exponential warm-up": 1e-3 * np.minimum(1.05 ** (np.arange(400) - 200), 1),
    "stairs down": 1e-3 * 0.1 ** (np.arange(400) // 100),
    "stairs up, then down": 1e-3 * np.array([0.2, 0.4, 0.6, 0.8, 1.0, 0.1, 0.01, 0.001])[np.arange(400) // 50],
    "warm restarts": np.tile(warmup_cosine(100, 0, 1e-3, 0.0), 4),
    "restarts with warm-up": np.tile(warmup_cosine(100, 10, 1e-3, 0.1), 4),
    "shrinking restarts": np.concatenate([warmup_cosine(100, 0, 1e-3 * 0.8**i, 0.01) for i in range(4)]),
    "triangle": 1e-3 * np.abs((np.arange(400) % 100) / 50 - 1) + 1e-5,
    "one cycle": np.concatenate([np.linspace(4e-5, 1e-3, 120), np.linspace(1e-3, 4e-9, 280)]),
    "linear to zero": np.linspace(1e-3, 0, 400),
    "warm-up, stable, decay": np.concatenate([np.linspace(1e-5, 1e-3, 50), np.full(300, 1e-3), np.linspace(1e-3, 0, 50)]),
    "inverse square root": 1e-3 * np.minimum(np.arange(1, 401) ** -0.5, np.arange(1, 401) * 40**-1.5),
    "plateau scheduler": 1e-3 * 0.5 ** np.searchsorted([90, 170, 171, 300], np.arange(400)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_schedule_is_a_discontinuity(name: str) -> None:
    first_stair = name == "stairs up, then down"  # the first stair up looks like a fault, unless an epoch begins there
    found = events(calm(400, train__lr=HEALTHY[name], train__lr__other=0.1 * HEALTHY[name]))
    assert [event.onset for event in found] == ([50] if first_stair else [])


def test_stairs_up_at_epochs_are_a_schedule() -> None:
    lr = HEALTHY["stairs up, then down"]
    watch = Watch()
    found: list[Anomaly] = []
    for row, context in zip(rows(calm(400, train__lr=lr)), contexts(range(400), np.arange(400) // 50), strict=True):
        found += watch.update(row, context)
    assert found == []


@pytest.mark.parametrize("factor", [2.0, 10.0, 1000.0])
@pytest.mark.parametrize("name", ["constant", "warm-up and cosine", "linear to zero", "one cycle"])
def test_a_rise_beyond_the_schedule_is_told_at_once(name: str, factor: float) -> None:
    lr = HEALTHY[name].copy()
    lr[200:] *= factor * lr.max() / lr[200]
    (event,) = events(calm(400, train__lr=lr))
    assert (event.kind, event.series, event.step, event.onset) == ("shift", "train/lr", 200, 200)
    assert fault(event) == "lr-discontinuity" and event.recovered_after is None
    assert event.expected == pytest.approx(lr[199]) and event.value == pytest.approx(lr[200])
    assert event.terms == f"{lr[200] / lr[199]:.3g} times the {lr[199]:.3g} before"


def test_a_rise_that_ends_has_recovered_and_one_that_looked_like_a_restart_is_told_at_its_end() -> None:
    lr = np.full(400, 1e-3)
    lr[200:203] = 1e-2
    (event,) = events(calm(400, train__lr=lr))
    assert (event.step, event.recovered_after) == (200, 3)
    lr = warmup_cosine(400)
    lr[330:335] *= 5  # no higher than the peak was: until step 335 this could be a restart
    (event,) = events(calm(400, train__lr=lr))
    assert (event.step, event.onset) == (335, 330)


def test_a_fall_to_nothing_is_told() -> None:
    lr = np.full(400, 1e-3)
    lr[200:] = 0.0
    (event,) = events(calm(400, train__lr=lr))
    assert (event.step, event.value, fault(event)) == (200, 0.0, "lr-discontinuity")
    assert str(event) == "shift in train/lr at step 200: 0, from the 0.001 before"


def test_the_rate_may_not_rise_after_a_resume() -> None:
    lr = warmup_cosine(400)
    watch = Watch()
    watch_all(watch, rows(calm(300, train__lr=lr[:300])), finish=False)
    watch.note("resume", 300)
    after = {"train/loss": loss_curve(400)[300:], "train/lr": np.full(100, 1e-3)}
    (event,) = watch_all(watch, rows(after, start=300, attempt=1))
    assert (event.step, event.notes[0]) == (300, "after_resume") and fault(event) == "lr-discontinuity"


def test_a_restart_may_raise_the_loss() -> None:
    loss = loss_curve(400)
    loss[300:312] += 0.6
    lr = np.concatenate([warmup_cosine(300, 0, 1e-3, 0.0), warmup_cosine(100, 0)])
    assert events({"train/loss": loss, "train/lr": lr}) == []
    assert [event.onset for event in events({"train/loss": loss})] == [300]


def test_a_loss_that_follows_is_the_same_event_with_the_rate_as_first_mover() -> None:
    loss = loss_curve(400)
    loss[204:215] += 3
    lr = np.where(np.arange(400) < 200, 1e-3, 2e-2)
    watch = Watch()
    found = [a for row in rows({"train/loss": loss, "train/lr": lr}) for a in watch.update(row)]
    assert len({a.id for a in found}) == 1
    assert (found[0].kind, found[0].step) == ("shift", 200)
    last = found[-1]
    assert (last.kind, last.series, last.onset, last.step) == ("spike", "train/loss", 200, 200)
    assert last.first_mover == ("train/lr", 200) and dict(last.cascade)["train/loss"] == 204
    assert last.recovered_after == 15 and fault(last) == "lr-discontinuity"


# -- batches


@pytest.mark.parametrize("length", [1, 5, 40])
def test_a_stuck_loader_is_one_event(length: int) -> None:
    order = [*range(100), *[99] * length, *range(100, 200)]
    (event,) = watched(contexts(order, [0] * len(order)))
    assert (event.kind, event.step, event.onset, event.recovered_after) == ("rule", 100, 100, length)
    assert fault(event) == "repeated-batch" and "step 99" in event.notes[-1]


def test_a_chunk_that_comes_again_is_one_event_where_epochs_are_unknown_too() -> None:
    order = [*range(60), *range(30, 60), *range(60, 120)]
    for epochs in (None, [0] * len(order)):
        (event,) = watched(contexts(order, epochs))
        assert (event.step, event.value, event.recovered_after) == (60, 30.0, 30)


def test_epochs_are_no_repeats() -> None:
    order = np.tile(np.arange(40), 5)
    assert watched(contexts(order, np.arange(200) // 40)) == []
    assert watched(contexts(order)) == []
    assert watched(contexts([7] * 60)) == []  # the whole data set is one batch
    assert watched(contexts(order, [0] * 200)) == []  # itertools.cycle: nobody counts the epochs
    assert watched(contexts([(7, 7)] * 60, [0] * 60)) == []  # overfitting one batch, on purpose


def test_samples_drawn_with_replacement_are_no_repeats() -> None:
    order = np.random.default_rng(0).integers(0, 100, 4000)
    assert watched(contexts(order, samples=1), loss_curve(4000)) == []


def test_micro_batches_that_are_all_the_same_are_told() -> None:
    order = [(3 * i, 3 * i + 1) for i in range(100)]
    order[50:60] = [(3 * i, 3 * i) for i in range(50, 60)]
    (event,) = watched(contexts(order, [0] * 100))
    assert (event.step, event.recovered_after) == (50, 10) and "micro-batches" in event.notes[-1]


def test_a_step_that_a_loop_runs_again_is_no_repeat() -> None:
    watch, found = Watch(), []
    data = rows({"train/loss": loss_curve(60)})
    steps = contexts(range(60), [0] * 60)
    for step in [*range(60), *range(40, 60)]:
        found += watch.update(data[step], steps[step])
    assert found == []


# -- optimizer state


def moments(steps: int = 400) -> dict[str, Any]:
    """Second moments of four layers, measured every tenth step."""
    random = np.random.default_rng(1)
    series: dict[str, Any] = {}
    for name in ("optim", *(f"layer/{x}.weight" for x in "abc")):
        values = np.exp(0.05 * random.standard_normal(steps)) * np.linspace(2, 1, steps)
        series[f"{name}/exp_avg_sq_norm"] = [v if i % 10 == 0 else None for i, v in enumerate(values)]
    return series


def test_a_lost_state_is_told_and_a_falling_one_is_not() -> None:
    series = {"train/loss": list(loss_curve(400)), **moments()}
    assert events(series) == []
    for name, values in series.items():
        if name != "train/loss":
            series[name] = [v if v is None or i < 200 else v * min(0.002 * (i - 194), 1.0) for i, v in enumerate(values)]
    (event,) = events(series)
    assert (event.kind, event.step, fault(event)) == ("shift", 200, "optimizer-state-lost")


def test_a_stale_layer_is_named() -> None:
    series = {"train/loss": list(loss_curve(400)), **moments()}
    name = "layer/b.weight/exp_avg_sq_norm"
    series[name] = [v if v is None or i < 200 else v * 1e-3 for i, v in enumerate(series[name])]
    (event,) = events(series)
    assert (event.step, event.series, fault(event)) == (200, name, "stale-second-moment")
    assert "b.weight" in event.notes[-1]


def test_a_cause_that_is_measured_late_is_noted_on_the_spike() -> None:
    series = {"train/loss": list(loss_curve(400)), **moments()}
    name = "layer/b.weight/exp_avg_sq_norm"
    series[name] = [v if v is None or i < 195 else v * 1e-3 for i, v in enumerate(series[name])]
    for i in range(195, 198):
        series["train/loss"][i] += 2
    (event,) = events(series)
    assert (event.kind, event.step, event.series) == ("spike", 195, "train/loss")
    assert fault(event) == "stale-second-moment" and (name, 200) in event.cascade


# -- loss scale


def test_the_search_of_a_scaler_is_no_collapse_and_an_occasional_halving_neither() -> None:
    scale = 65536 / 2.0 ** np.minimum(np.arange(600), 12)
    scale[100:] /= 2.0 ** ((np.arange(500) // 90) % 2)
    assert events(calm(600, train__loss_scale=scale)) == []


def test_a_collapse_of_the_scale_is_told() -> None:
    scale = np.full(400, 65536.0)
    scale[200:] /= 2.0 ** np.minimum(np.arange(200) // 3, 8)
    (event,) = events(calm(400, train__loss_scale=scale))
    assert (event.kind, event.series, event.step, event.onset) == ("shift", "train/loss_scale", 212, 203)
    assert fault(event) == "fp16-overflow" and event.recovered_after == 224 + 100 - 203


# -- the laws


def everything(steps: int = 400) -> tuple[dict[str, Any], list[StepContext]]:
    series = {"train/loss": list(loss_curve(steps)), **moments(steps)}
    for i in range(204, 215):
        series["train/loss"][i] += 3
    series["train/lr"] = np.where((np.arange(steps) < 200) | (np.arange(steps) > 260), 1e-3, 2e-2)
    series["train/loss_scale"] = 65536 / 2.0 ** np.clip(np.arange(steps) - 300, 0, 6)
    name = "layer/b.weight/exp_avg_sq_norm"
    series[name] = [v if v is None or i < 350 else v * 1e-3 for i, v in enumerate(series[name])]
    return series, contexts([i if i < 100 or i > 110 else 99 for i in range(steps)], [0] * steps)


def versions(watch: Watch, data: Sequence[Any], found: Sequence[StepContext]) -> list[str]:
    return [repr(a) for row, context in zip(data, found, strict=True) for a in watch.update(row, context)]


@pytest.mark.parametrize("cut", [1, 99, 100, 105, 199, 200, 203, 206, 230, 299, 303, 304, 350, 399])
def test_resume_equals_no_resume(cut: int) -> None:
    series, steps = everything()
    data = rows(series)
    expected = versions(Watch(), data, steps)
    assert len({text.split("'")[1] for text in expected}) == 4
    first, second = Watch(), Watch()
    found = versions(first, data[:cut], steps[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert found + versions(second, data[cut:], steps[cut:]) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_silences_no_monitor_and_changes_nothing_that_follows(bad: float) -> None:
    series, _ = everything()
    told = [a.id for a in watch_all(Watch(), rows(series)) if a.kind != "nonfinite"]
    broken = {name: [v if i != 150 or v is None or name == "train/loss" else bad for i, v in enumerate(values)]
              for name, values in series.items()}  # fmt: skip
    found = watch_all(Watch(), rows(broken))
    assert [a.id for a in found if a.kind != "nonfinite"] == told
    assert [a.step for a in found if a.kind == "nonfinite"] == [150]


def test_the_order_of_series_changes_nothing() -> None:
    series, steps = everything()
    turned = dict(reversed(series.items()))
    assert versions(Watch(), rows(series), steps) == versions(Watch(), rows(turned), steps)


def test_state_does_not_grow() -> None:
    watch = Watch()
    sizes = []
    for part in range(4):
        data = rows({"train/loss": np.full(1000, 2.0), "train/lr": np.full(1000, 1e-3)}, start=1000 * part)
        batches = contexts(range(1000 * part, 1000 * part + 1000))
        for row, context in zip(data, batches, strict=True):
            watch.update(row, context)
        sizes.append(len(json.dumps(watch.state_dict())))
    assert sizes[-1] < sizes[0] + 400


@pytest.mark.filterwarnings("error")
def test_numbers_at_the_end_of_the_range_are_no_warning() -> None:
    """Of a norm that clipping cut by more than a float can say, and of a second moment that was next to nothing."""
    huge = np.where(np.arange(60) % 7 == 6, 1e300, 1.0)
    second = np.where(np.arange(60) % 7 == 6, 1e300, 5e-324)
    watch_all(Watch(), rows({
        "train/loss": np.full(60, 2.0), "grad/norm": huge, "grad/norm_clipped": np.full(60, 1e-8), "layer/a/grad_norm": huge,
        "optim/exp_avg_sq_norm": second, "layer/a/exp_avg_sq_norm": second,
    }))  # fmt: skip
