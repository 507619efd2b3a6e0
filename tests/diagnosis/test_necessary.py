"""What must be in the record before a cause is named, and what rules it out; where two are as likely, none is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trackbridge
from tests.detectors.kit import rows
from tests.diagnosis.kit import AT, LAYERS, STEPS, Story, outliers
from tests.diagnosis.test_causes import STORIES
from trackbridge import explain
from trackbridge.diagnosis import View, diagnose, rule, trends
from trackbridge.diagnosis.batch import Batches, Past
from trackbridge.diagnosis.registry import RULES, Case
from trackbridge.records import Anomaly, Hypothesis, MicroBatch, StepContext
from trackbridge.rundir import RunDirectory


def named(found: tuple[Hypothesis, ...]) -> list[str]:
    """What stands above "unknown"."""
    names = [hypothesis.name for hypothesis in found]
    return names[: names.index("unknown")]


def weighed(story: Story, name: str, anomaly: Anomaly | None = None) -> Case:
    """The evidence for and against one cause of the anomaly that is told of `story`, or of one of our own."""
    case = Case()
    RULES[name].weigh(View(anomaly or story.told()[0], rows(story.series), story.contexts()), case)
    return case


def spike(**more: object) -> Anomaly:
    known = {"kind": "spike", "step": AT, "onset": AT, "first_mover": ("train/loss", AT)} | more
    return Anomaly(id="a", severity=0.5, series="train/loss", value=3.0, expected=2.0, score=9.0, **known)  # type: ignore[arg-type]


def test_what_has_been_growing_has_not_jumped() -> None:
    story = Story().spike()
    grown = np.maximum(1.0, 1.05 ** (np.arange(STEPS) - AT + 40))
    for statistic in ("rms", "max"):
        story.series[f"act/blocks.0/{statistic}"] *= grown
        story.series[f"act/blocks.1/{statistic}"][AT:] *= 4
    view = View(story.told()[0], rows(story.series), story.contexts())
    far = trends.jump(view.before("act/blocks.0/rms", 100), view.near("act/blocks.0/rms", 0))
    assert far is not None and far > 10, "it is far from where it was"
    assert (view.jump("act/blocks.0/rms") or 0.0) < 2 and (view.jump("act/blocks.1/rms") or 0.0) > 10
    assert view.first_jump is not None and view.sites[view.first_jump[0]] == "blocks.1"


def test_a_loss_that_falls_fast_hides_no_jump() -> None:
    story = Story()
    noise = 0.02 * np.random.default_rng(1).standard_normal(STEPS)
    story.series["train/loss"] = 5 - 0.015 * np.arange(STEPS) + noise
    story.series["train/loss"][AT] += 0.3
    view = View(spike(), rows(story.series), story.contexts())
    assert (view.loss_jump or 0.0) > 8, "15 sigmas above the line of the last values, 0.3 below their median"
    assert "label-fault" in named(diagnose(spike(), rows(story.series), story.contexts()))


def test_where_all_the_others_shrink_there_are_no_outliers() -> None:
    story = outliers()
    assert "activation-outliers" in named(story.told()[1])
    shrunk = np.minimum(1, 0.93 ** (np.arange(STEPS) - (AT - 40)))
    story.series["act/blocks.0/max"] = Story().series["act/blocks.0/max"] * shrunk
    found = story.told()[1]
    assert "activation-outliers" not in named(found)
    assert any("none stands out for its size" in text for _, text in weighed(story, "activation-outliers").opposes)


def test_outliers_are_there_when_the_loss_jumps() -> None:
    story = outliers()
    before = weighed(story, "activation-outliers", spike())
    story.series["act/blocks.0/max"][AT] = 0.5 * story.series["act/blocks.0/max"][AT - 1]
    after = weighed(story, "activation-outliers", spike())
    assert before.weight - after.weight == 4
    assert any("when the loss rose act/blocks.0/max was" in text for _, text in after.opposes)


def test_a_weight_that_was_growing_did_not_change_by_itself() -> None:
    def found(grows: bool) -> Case:
        story = Story().spike(30, 2.0)
        weight = "layer/blocks.0.mlp.weight/weight_norm"
        measured = np.arange(STEPS) % 10 == 9
        story.series[weight][AT:] *= 20
        if grows:
            story.series[weight][AT - 10 : AT] *= 3
        story.series = {
            name: [v if keep else None for v, keep in zip(values, measured, strict=True)] if "weight_norm" in name else values
            for name, values in story.series.items()
        }  # type: ignore[assignment]
        return weighed(story, "hardware-fault", spike())

    assert any("changed 2" in text and "in between" in text for _, text in found(False).supports)
    assert not any("in between" in text for _, text in found(True).supports)


def test_few_known_tokens_are_no_garbage_for_being_few() -> None:
    """Seven of ten tokens are new ones: what is left is a rough histogram, of the usual tokens all the same."""
    random = np.random.default_rng(0)
    share = 1 / np.arange(1, 201) ** 1.1
    text = lambda: random.choice(200, (12, 32), p=share / share.sum())  # noqa: E731
    past = Past()
    usual = np.median([dict(past.compare(text(), learn=True)).get("mixture", 0.0) for _ in range(60)][30:])
    rare = [np.where(random.random((12, 32)) < 0.7, 230, text()) for _ in range(8)]
    far = [dict(past.compare(batch, learn=False))["mixture"] - usual for batch in rare]
    assert abs(np.mean(far)) < 6 * 0.01, "less than six of its least sigmas"
    garbage = dict(past.compare(random.integers(0, 256, (12, 32)), learn=False))
    assert garbage["mixture"] - usual > 10 * 0.01


def contexts(tensor: str, key: str, values: np.ndarray) -> list[StepContext]:
    return [
        StepContext(i, i, 0, {}, (MicroBatch(0, 0, i, None, f"{i}", {tensor: {key: float(value)}}),))
        for i, value in enumerate(values)
    ]


def test_other_data_is_still_there_at_the_end_by_its_size() -> None:
    """A shift of 2.5 sigmas a batch: nine batches are sure of it, the last six alone are not."""
    values = 6.4 + 0.05 * np.random.default_rng(3).standard_normal(STEPS)
    stays, passes = values.copy(), values.copy()
    stays[AT:] += 0.125
    passes[AT : AT + 3] += 0.6
    last = AT + 8
    for one, expected in ((stays, True), (passes, False)):
        batches = Batches(contexts("input", "entropy", one), AT)
        assert batches.still_there("input", "entropy", AT, AT + 3, last) is expected
        story = Story().spike(40, 0.8)
        for step in range(STEPS):
            story.tokens[step] = {"length": 512, "entropy": float(one[step])}
        data = [row for row in rows(story.series) if row.step <= last]
        case = Case()
        RULES["data-regime-change"].weigh(View(spike(step=AT), data, story.contexts()[: last + 1]), case)
        assert any("has stayed" in text for _, text in case.supports) is expected


def test_a_largest_value_a_little_out_says_nothing_where_the_batch_is_known() -> None:
    story = Story().spike(2, 3.0).gradients(3)
    story.series["act/blocks.1/max"][AT] = np.median(story.series["act/blocks.1/max"]) * np.exp(8.5 * 0.05)
    assert "label-fault" in named(diagnose(spike(), rows(story.series), story.contexts()))
    story.series["act/blocks.1/rms"][AT] *= 1.3  # all of it
    assert "label-fault" not in named(diagnose(spike(), rows(story.series), story.contexts()))


def test_a_state_that_most_layers_lost_is_no_stale_layer() -> None:
    def found(layers: tuple[str, ...]) -> tuple[Hypothesis, ...]:
        story = Story().spike(20).gradients(3, 20)
        young = np.minimum(1.0, 1.02 ** (np.arange(STEPS) - AT))  # moments that have been growing
        for layer in LAYERS:
            story.series[f"layer/{layer}/exp_avg_sq_norm"] *= young
        for layer in layers:
            story.series[f"layer/{layer}/exp_avg_sq_norm"][AT:] *= 0.5
        story.series["optim/exp_avg_norm"][AT:] *= 0.5 if layers else 1.0
        story.series[f"layer/{LAYERS[-1]}/exp_avg_sq_norm"][AT:] *= 0.05
        return story.told()[1]

    assert named(found(()))[0] == "stale-second-moment"
    assert named(found(LAYERS))[0] == "optimizer-state-lost"
    assert "stale-second-moment" not in named(found(LAYERS))


def test_where_as_much_speaks_for_two_neither_is_named() -> None:
    story = Story().spike().gradients(3)
    anomaly, alone = story.told()
    assert alone[0].name == "label-fault"
    best = weighed(story, "label-fault").weight
    try:
        rule("as-good", intervention="rerun")(lambda view, case: case.add(best, "the same"))
        tied = diagnose(anomaly, rows(story.series), story.contexts())
    finally:
        RULES.pop("as-good")
    assert tied[0].name == "unknown" and {h.name for h in tied[1:3]} == {"as-good", "label-fault"}
    assert tied[0].evidence_for == ("as much speaks for as-good as for label-fault",)


@pytest.mark.parametrize(("early", "told"), [(0, True), (2, True), (3, False)])
def test_a_level_may_be_dated_shortly_before_the_attempt_that_changed_it(tmp_path: Path, early: int, told: bool) -> None:
    for attempt in range(2):
        with trackbridge.init(dir=tmp_path, id="r", resume="auto", config={"smoothing": 0.4 * attempt}) as run:
            for step in range(20):
                run.step(loss=2.0 + attempt + 0.01 * (step % 3))
    start = 20
    anomaly = spike(kind="shift", step=start + 5, onset=start - early, first_mover=("train/loss", start - early), attempt=1)
    found = explain.explain(RunDirectory(run.dir), anomaly)
    assert ("config-change" in [hypothesis.name for hypothesis in found]) is told
    view = View(anomaly, rows({"train/loss": np.ones(20)}, start=start, attempt=1))
    assert view.since_resume == (0 if told else None)
    assert "-" not in "".join(text.split("began")[1][:4] for h in found for text in h.evidence_for if "began" in text)


def slowly(share: float = 0.8) -> Story:
    """One weight is twice its norm at the next measurement after the onset; the loss climbs with no jump anywhere."""
    story = Story()
    story.series["train/loss"][AT:] += np.linspace(0.1, 3, STEPS - AT)
    measured = np.arange(STEPS) % 10 == 5
    weight = "layer/blocks.0.mlp.weight"
    story.series[f"{weight}/weight_norm"][AT:] *= 2
    story.series[f"{weight}/weight_max"] = story.series[f"{weight}/weight_norm"] * np.where(np.arange(STEPS) < AT, 0.1, share)
    for name in story.series:
        if name.endswith(("weight_norm", "weight_max")):
            values = [v if keep else None for v, keep in zip(story.series[name], measured, strict=True)]
            story.series[name] = values  # type: ignore[assignment]
    return story


def test_a_weight_that_changed_between_two_measurements_did_so_in_one_step_only_where_something_shows_it() -> None:
    anomaly = spike(kind="shift", step=AT + 8)
    story = slowly()
    assert [w for w, text in weighed(story, "hardware-fault", anomaly).supports if "in between" in text] == [1]
    assert "hardware-fault" not in named(diagnose(anomaly, rows(story.series)))
    story.series["act/blocks.0/max"][AT:] *= 10
    story.series["train/loss"][AT:] += 3
    assert [w for w, text in weighed(story, "hardware-fault", anomaly).supports if "in between" in text] == [4]
    assert named(diagnose(anomaly, rows(story.series)))[0] == "hardware-fault"


def test_few_elements_of_a_weight_that_grew_speak_of_outliers_and_not_of_an_explosion() -> None:
    anomaly = spike(kind="shift", step=AT + 8)
    assert any(
        "few elements of layer/blocks.0.mlp.weight" in text
        for _, text in weighed(slowly(), "activation-outliers", anomaly).supports
    )
    assert not weighed(slowly(share=0.1), "activation-outliers", anomaly).supports
    story = slowly()
    story.series["grad/norm"][AT:] *= np.minimum(1.6 ** np.arange(STEPS - AT), 1e3)
    case = weighed(story, "gradient-explosion", anomaly)
    assert any("one weight alone changed: layer/blocks.0.mlp.weight" in text for _, text in case.opposes)


def test_gradients_of_attention_that_another_weight_explains_are_not_its_own() -> None:
    def found(grows: bool) -> tuple[Hypothesis, ...]:
        story = Story()
        climb = np.maximum(1.0, 1.06 ** (np.arange(STEPS) - AT + 20))
        story.series["grad/norm"] *= climb
        for layer in LAYERS:
            if "qkv" in layer:
                story.series[f"layer/{layer}/grad_norm"] *= climb
        if grows:
            story.series["layer/embed.weight/weight_norm"] *= climb
        return diagnose(spike(kind="drift", step=AT + 8), rows(story.series)[: AT + 17], story.contexts()[: AT + 17])

    assert named(found(False)) == ["attention-logit-growth"]
    assert found(True)[0].name == "embedding-instability" and "attention-logit-growth" not in named(found(True))


def healthy(*parts: str) -> Callable[[Story], None]:
    """Makes the series that have one of `parts` in their names what they are in a healthy run; those that it lacks go."""

    def undo(story: Story) -> None:
        usual = Story().series
        names = [name for name in story.series if any(part in name for part in parts)]
        assert names
        for name in names:
            story.series[name] = usual[name] if name in usual else np.zeros(STEPS)

    return undo


def usual_tokens(story: Story) -> None:
    story.tokens = Story().tokens


def usual_prints(story: Story) -> None:
    story.prints = Story().prints


def no_change(story: Story) -> None:
    story.notes = ("after_resume",)


TAKEN_AWAY: dict[str, Callable[[Story], None]] = {
    "corrupt-batch": usual_tokens,
    "rare-token": usual_tokens,
    "repeated-batch": usual_prints,
    "data-regime-change": usual_tokens,
    "lr-discontinuity": healthy("train/lr"),
    "gradient-explosion": healthy("grad"),
    "optimizer-state-lost": healthy("exp_avg"),
    "stale-second-moment": healthy("exp_avg_sq_norm"),
    "fp16-overflow": healthy("train/loss_scale", "optim/skipped", "act/"),
    "activation-outliers": healthy("act/"),
    "attention-logit-growth": healthy("qkv"),
    "embedding-instability": healthy("embed"),
    "hardware-fault": healthy("weight_norm"),
    "config-change": no_change,
}
"""What makes the trace that the rule goes by one of a healthy run; the rest of the story stays as it was."""


@pytest.mark.parametrize("name", TAKEN_AWAY)
def test_without_its_evidence_a_cause_is_not_named(name: str) -> None:
    story = STORIES[name]()
    assert story.first().name == name
    TAKEN_AWAY[name](story)
    assert name not in named(story.told()[1])


def test_no_rule_is_left_out() -> None:
    """That of label-fault is taken away in `test_a_largest_value_a_little_out_says_nothing_where_the_batch_is_known`."""
    assert set(TAKEN_AWAY) | {"label-fault"} == set(RULES)
