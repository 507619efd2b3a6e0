"""What follows a fault by name is its event until things have settled; what comes later, or is far worse, is another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import trackbridge
from tests.detectors.kit import loss_curve, rows, watch_all
from tests.detectors.test_level import heavy
from trackbridge import answers
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch, detect
from trackbridge.detectors.aftermath import CAUSE
from trackbridge.detectors.base import Verdict
from trackbridge.detectors.episodes import Episode
from trackbridge.records import Anomaly, Row

AT = 200


def jumped(steps: int = 500, back: int | None = None) -> np.ndarray:
    """A learning rate that is thirty times as large from step `AT` on, up to step `back`."""
    lr = np.full(steps, 1e-3)
    lr[AT:back] *= 30
    return lr


def raised(*spikes: tuple[int, int, float], steps: int = 500) -> np.ndarray:
    """A healthy loss with (first step, length, height) added."""
    loss = loss_curve(steps)
    for at, length, height in spikes:
        loss[at : at + length] += height
    return loss


def events(loss: np.ndarray, lr: np.ndarray | None = None, **series: np.ndarray) -> list[Anomaly]:
    return watch_all(Watch(), rows({"train/loss": loss, "train/lr": jumped() if lr is None else lr, **series}))


def test_excursions_that_follow_each_other_are_the_fault_s_one_event() -> None:
    """Without the fault they are four: it is the fault that joins them."""
    loss = raised((201, 5, 1.0), (225, 1, 1.2), (251, 2, 1.1), (290, 1, 0.9))
    (event,) = events(loss)
    assert (event.id, event.kind, event.series, event.onset) == (f"0-{AT}-shift", "spike", "train/loss", AT)
    assert event.first_mover == ("train/lr", AT) and event.recovered_after == 91
    (note,) = [note for note in event.notes if note.startswith("not settled: ")]
    assert note.startswith("not settled: 3 more excursions, the latest train/loss ") and note.endswith("at step 290")
    assert len(detect(range(500), loss)) == 4


def test_the_value_is_said_to_be_of_the_step_that_it_is_of() -> None:
    loss = raised((201, 5, 1.0))
    (event,) = events(loss)
    assert (event.step, event.onset, event.value_step) == (AT, AT, 201)
    assert event.value == loss[201] and f": {loss[201]:.6g} at step 201, expected " in str(event)


def test_a_spike_after_things_have_settled_is_an_event_of_its_own() -> None:
    last = 225
    told = events(raised((201, 5, 1.0), (last, 1, 1.2), (last + CAUSE + 5, 1, 1.0)))
    assert [event.onset for event in told] == [AT, last + CAUSE + 5]
    assert told[0].recovered_after == last + 1 - AT and told[1].first_mover == ("train/loss", last + CAUSE + 5)


def test_a_fault_that_nothing_followed_owns_nothing_later() -> None:
    told = events(raised((AT + CAUSE + 5, 1, 1.0)))
    assert [(event.series, event.onset) for event in told] == [("train/lr", AT), ("train/loss", AT + CAUSE + 5)]


def test_what_is_twice_as_bad_as_all_before_is_told_by_itself() -> None:
    told = events(raised((201, 5, 0.6), (230, 1, 3.0)))
    assert [event.onset for event in told] == [AT, 230] and told[1].severity > 0.8


def test_a_fault_that_is_over_owns_what_comes_at_once_and_no_more() -> None:
    short = jumped(back=AT + 1)
    (event,) = events(raised((AT + 1, 3, 1.0)), short)
    assert (event.series, event.first_mover, event.recovered_after) == ("train/loss", ("train/lr", AT), 4)
    told = events(raised((AT + 30, 1, 1.0)), short)
    assert [event.onset for event in told] == [AT, AT + 30] and told[0].recovered_after == 1


def test_a_new_level_renames_the_event_and_a_spike_above_it_does_not_end_it() -> None:
    (event,) = events(raised((AT + 1, 299, 1.5), (AT + 45, 1, 1.5)))
    assert (event.kind, event.onset, event.recovered_after) == ("shift", AT, None)


def test_a_level_that_only_medians_see_is_the_fault_s_too() -> None:
    """Six values in a row, each within its own heavy-tailed band."""
    loss = heavy(500, seed=2)
    loss[AT + 10 :] += 0.8
    alone = watch_all(Watch(), rows({"train/loss": loss}))[-1]
    assert alone.onset > AT and alone.notes[0].startswith("level: ")
    (event,) = [event for event in events(loss) if event.onset >= AT]
    assert (event.kind, event.series, event.onset, event.first_mover) == ("shift", "train/loss", AT, ("train/lr", AT))
    assert any(note.startswith("level: train/loss went from") for note in event.notes)


def test_a_drift_is_a_note_of_the_fault() -> None:
    loss = loss_curve(500)
    loss[AT + 5 :] += np.minimum(0.015 * np.arange(500 - AT - 5), 1.0)
    (alone,) = watch_all(Watch(), rows({"train/loss": loss}))
    assert alone.kind == "drift"
    (event,) = events(loss)
    assert event.series == "train/lr" and "train/loss" in dict(event.cascade)
    assert sum(note.startswith("effect in train/loss: drifts from step ") for note in event.notes) == 1


def test_things_have_not_settled_while_the_loss_still_drifts() -> None:
    """Beyond `CAUSE` steps of the fault another detector sees the same climb."""
    loss = 2 + 0.05 * np.random.default_rng(0).standard_normal(500)
    loss[AT + 5 :] += np.minimum(0.01 * np.arange(500 - AT - 5), 2.0)
    (event,) = events(loss)
    assert any(note.startswith("level: train/loss went from") for note in event.notes)


def test_layers_that_move_while_the_loss_does_not_are_a_note_of_the_fault() -> None:
    random = np.random.default_rng(0)
    layers = {f"layer/{x}/grad_norm": np.exp(0.05 * random.standard_normal(500)) for x in "abc"}
    layers["layer/b/grad_norm"][AT + 3 :] *= 8
    series = {"train/loss": 2 + 0.05 * random.standard_normal(500), **layers}
    assert [event.series for event in watch_all(Watch(), rows(series))] == ["layer/b/grad_norm"]
    (event,) = watch_all(Watch(), rows({**series, "train/lr": jumped()}))
    assert event.series == "train/lr" and any(note.startswith("effect in layer/b/grad_norm: is out") for note in event.notes)


def test_the_first_mover_of_a_fault_is_no_series_that_was_out_before_it() -> None:
    random = np.random.default_rng(0)
    layer = np.exp(0.05 * random.standard_normal(500))
    layer[AT - 3 : AT + 4] *= 8
    (event,) = events(raised((AT + 1, 5, 1.0)), **{"layer/a/grad_norm": layer})
    assert event.first_mover == ("train/lr", AT) and "layer/a/grad_norm" not in dict(event.cascade)


LONG, SHORT = ((240, 12, 1.0), (300, 1, 1.2)), ((201, 5, 1.0), (225, 1, 1.2), (251, 2, 1.1), (290, 1, 0.9))


def told_whole_and_resumed(data: list[Row], cut: int) -> tuple[list[Anomaly], list[Anomaly]]:
    """What a watch tells of all rows, and what two tell of which the second takes over at row `cut`."""
    watch, first, second = Watch(), Watch(), Watch()
    whole = [a for row in data for a in watch.update(row)]
    found = [a for row in data[:cut] for a in first.update(row)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return whole, found + [a for row in data[cut:] for a in second.update(row)]


@pytest.mark.parametrize("spikes", [LONG, SHORT])
@pytest.mark.parametrize("stop", [AT + 1, 203, 215, 226, 245, 252, 280, 291])
def test_a_restored_watch_goes_on_with_the_same_event(stop: int, spikes: tuple[tuple[int, int, float], ...]) -> None:
    data = rows({"train/loss": raised(*spikes), "train/lr": jumped()})
    whole, found = told_whole_and_resumed(data, stop)
    assert found == whole and len({a.id for a in found}) == 1


def test_a_training_whose_learning_rate_jumps_has_one_event_and_what_it_cannot_hide(tmp_path: Path) -> None:
    """Its loss settles some sixty times higher, and from there it spikes. It had eight events (2026-11-28)."""
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(7)
    true = torch.randn(16, 1, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = trackbridge.init(dir=tmp_path, id="jump", recorder={"max_capsules": 0, "snapshot_every": 0})
    run.watch(model, optimizer)
    for step in range(400):
        if step == 150:
            optimizer.param_groups[0]["lr"] *= 30
        x = torch.randn(32, 16, generator=generator)
        loss = (model(x) - torch.sin(x @ true / 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
    run.finish()
    first, *more = trackbridge.load(tmp_path / "jump").anomalies
    assert (first.onset, first.series, first.first_mover) == (150, "train/loss", ("train/lr", 150))
    assert first.hypotheses[0].name == "lr-discontinuity" and len(more) <= 1, more


@pytest.mark.parametrize("cut", range(AT + 5, AT + 45, 4))
def test_an_event_that_several_hold_is_one_after_a_restore(cut: int) -> None:
    """Its first excursion is over, two faults own it, and it is the latest: what one of them adds, the others have."""
    scale = 2.0 ** np.maximum(16 - np.maximum(np.arange(500) - AT - 5, 0) // 4, 0)
    lr = jumped()
    lr[AT + 10 :] *= 30
    loss = raised((AT + 1, 3, 1.0), (AT + 12, 2, 1.1), (AT + 30, 1, 1.2))
    data = rows({"train/loss": loss, "train/lr": lr, "train/loss_scale": scale})
    whole, found = told_whole_and_resumed(data, cut)
    assert found == whole


def test_an_event_that_lasts_as_long_as_the_run_has_no_more_notes_for_it() -> None:
    """Excursions and a further detector's verdicts for ever: each has its first note and its latest."""
    steps = 900
    loss = loss_curve(steps) + (np.arange(steps) > AT) * (np.arange(steps) % 37 == 0)
    watch = Watch(DetectionConfig(detectors=("z-100",)))
    data = rows({"train/loss": loss, "train/lr": jumped(steps)})
    told = [(row.step, a) for row in data for a in watch.update(row) if a.onset == AT]
    assert told[-1][0] > steps - 50
    first, latest = (note for note in told[-1][1].notes if note.startswith("z-100"))
    assert first.startswith("z-100: train/loss is ") and latest.startswith("z-100 again: train/loss is ")
    assert max(len(event.notes) for _, event in told) <= 6


def test_levels_that_follow_each_other_have_two_notes() -> None:
    episode = Episode(Anomaly("0-1-shift", "shift", 1, 1, 0.5, "train/lr", 1.0, 0.1, 10.0, notes=("lr-discontinuity: rose",)))
    for height in range(3, 9):
        episode.seen(f"level: train/loss went from 2 to {height}, 6 values in a row")
    assert episode.anomaly.notes == (
        "lr-discontinuity: rose",
        "level: train/loss went from 2 to 3, 6 values in a row",
        "level again: train/loss went from 2 to 8, 6 values in a row",
    )


def test_of_many_layers_some_have_a_note_and_all_are_members() -> None:
    episode = Episode(Anomaly("0-1-shift", "shift", 1, 1, 0.5, "train/lr", 1.0, 0.1, 10.0))
    told = [episode.leans(f"layer/{i}/grad_norm", Verdict(i, "spike", 9, 9, 2.0, 1.0, 9.0)) for i in range(2000)]
    assert 1 <= sum(told) == len(episode.anomaly.notes) < 50


def test_a_state_of_a_newer_version_is_taken_for_what_is_known_of_it() -> None:
    data = rows({"train/loss": raised((201, 5, 1.0), (225, 1, 1.2)), "train/lr": jumped()})
    watch, later = Watch(), Watch()
    for row in data[:203]:
        watch.update(row)
    state = json.loads(json.dumps(watch.state_dict()))
    for kept in (*state["open"].values(), state["aftermath"]["learning_rate"]["episode"]):
        kept["anomaly"]["since_then"] = kept["of_late"] = 7
    later.load_state_dict(state)
    assert [a for row in data[203:] for a in watch.update(row)] == [a for row in data[203:] for a in later.update(row)]


def test_a_user_s_rule_names_the_fault_that_is_under_way() -> None:
    rule = DetectionConfig(rules=["train/lr > 0.02 for 3 steps"])
    found = watch_all(Watch(rule), rows({"train/loss": loss_curve(300), "train/lr": jumped(300)}))
    (own,) = [event for event in found if event.kind == "rule"]
    assert answers.without_cause(own).startswith("A fault by name is under way, lr-discontinuity: train/lr rose 30 times")
    alone = watch_all(Watch(rule), rows({"train/loss": loss_curve(300), "train/lr": np.full(300, 0.03)}))
    assert answers.without_cause(alone[0]).startswith("No cause is looked for")
