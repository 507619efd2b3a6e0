"""A cause with too little evidence to be named is listed; what the record rules out is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.detectors.kit import rows
from tests.diagnosis.kit import AT, LAYERS, STEPS, Story
from tests.diagnosis.test_necessary import named, spike, weighed
from trackbridge.diagnosis import diagnose
from trackbridge.diagnosis.view import moved_by
from trackbridge.records import Anomaly, Hypothesis

STEP = np.arange(STEPS)


def every_tenth(story: Story, first: int = 5) -> Story:
    """Weights and second moments as a run measures them."""
    for name, values in story.series.items():
        if name.endswith(("/weight_norm", "/weight_max", "/exp_avg_sq_norm")):
            measured = [float(v) if step % 10 == first else None for step, v in enumerate(values)]
            story.series[name] = measured  # type: ignore[assignment]
    return story


def told(story: Story, anomaly: Anomaly) -> tuple[Hypothesis, ...]:
    return diagnose(anomaly, rows(story.series)[: anomaly.step + 9], story.contexts()[: anomaly.step + 9])


def names(found: Sequence[Hypothesis]) -> list[str]:
    return [hypothesis.name for hypothesis in found]


def too_far(since: int = AT, rate: float = 1.0) -> list[str]:
    """What is listed where two weights of six grow from `since` on, four times up to the onset, and all gradients are large, so
    that the second moments, when they are measured again, are as well."""
    story = Story().spike(10, 10.0).gradients(30, 3)
    story.series["layer/blocks.2.mlp.weight/weight_norm"] = story.series["layer/embed.weight/weight_norm"].copy()
    story.series["act/blocks.0/rms"][AT : AT + 3] *= 3
    for layer in ("blocks.0.mlp.weight", "blocks.1.mlp.weight"):
        story.series[f"layer/{layer}/weight_norm"] *= np.clip(4.0 ** ((STEP - since + 1) / (AT - since + 1)), 1, 16)
    for layer in LAYERS:
        story.series[f"layer/{layer}/exp_avg_sq_norm"][AT:] *= 20
    story.series["train/lr"][AT - 1 :] *= rate
    return names(told(every_tenth(story), spike()))


def test_weights_that_an_update_took_too_far_are_listed_as_a_stale_second_moment() -> None:
    found = too_far()
    assert "stale-second-moment" in found[found.index("unknown") :]
    assert "stale-second-moment" not in too_far(since=AT - 40)
    assert "stale-second-moment" not in too_far(rate=20.0)


@pytest.mark.parametrize(("share", "listed"), [(0.2, True), (0.99, False)])
def test_of_one_weight_many_elements_are_an_update_and_one_is_a_number(share: float, listed: bool) -> None:
    story = Story().spike(10, 10.0).gradients(30, 3)
    weight = "layer/blocks.0.mlp.weight"
    story.series[f"{weight}/weight_norm"][AT:] *= 3
    story.series[f"{weight}/weight_max"] = story.series[f"{weight}/weight_norm"] * np.where(STEP < AT, 0.2, share)
    story.series["act/blocks.0/rms"][AT : AT + 3] *= 3
    assert ("stale-second-moment" in names(told(every_tenth(story), spike()))) is listed


def deepening(factor: float = 1.02, *, few: bool = False) -> tuple[Story, Anomaly]:
    """All weights grow by `factor` a step from the onset on, and with them what the last block puts out and all gradients: one
    measurement of the weights has seen it."""
    story = Story()
    grown = np.maximum(1.0, factor ** (STEP - AT + 1))
    for layer in LAYERS:
        story.series[f"layer/{layer}/weight_norm"] *= grown
    for name in [n for n in story.series if n.endswith("grad_norm")] + ["grad/norm", "act/blocks.1/max", "act/blocks.1/rms"]:
        story.series[name] *= np.minimum(grown**8, 4)
    if few:
        story.series["act/blocks.1/kurtosis"] = (story.series["act/blocks.1/kurtosis"] + 3) * np.minimum(grown**8, 4) - 3
    story.series["train/loss"][AT:] += np.linspace(0.1, 4, STEPS - AT)
    return every_tenth(story), replace(spike(kind="shift", step=AT + 6, first_mover=("grad/norm", AT)), series="grad/norm")


def test_weights_that_grow_a_little_together_with_the_gradients_are_an_explosion() -> None:
    assert named(told(*deepening()))[0] == "gradient-explosion"
    assert not weighed(deepening(1.003)[0], "gradient-explosion", deepening(1.003)[1]).supports


def test_where_all_of_an_output_grew_alike_there_are_no_outliers() -> None:
    assert "activation-outliers" not in names(told(*deepening()))
    assert "activation-outliers" in names(told(*deepening(few=True)))


@pytest.mark.parametrize("jumps", [False, True])
def test_a_weight_measured_just_before_the_onset_may_have_changed_by_then(jumps: bool) -> None:
    """The loss leaves its line in the step of the measurement, its band one step later."""
    story = Story().spike(3)
    bias = "layer/blocks.0.mlp.bias"
    story.series[f"{bias}/weight_norm"] = 0.2 * np.exp(1e-3 * np.random.default_rng(1).standard_normal(STEPS))
    story.series[f"{bias}/weight_norm"][AT:] *= 9
    story.series[f"{bias}/weight_max"] = story.series[f"{bias}/weight_norm"] * np.where(STEP < AT, 0.3, 0.99)
    if jumps:
        story.series["act/blocks.0/max"][AT + 1] *= 10
    anomaly = spike(step=AT + 1, onset=AT + 1, first_mover=("train/loss", AT + 1))
    found = told(every_tenth(story, first=AT % 10), anomaly)
    assert "hardware-fault" in named(found)
    assert ("activation-outliers" in names(found)) is not jumps  # an activation that jumped shows that it was one step
    labels = weighed(story, "label-fault", anomaly)
    assert jumps or any(f"one weight alone changed: {bias}" in text for _, text in labels.opposes)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_gradient_that_became_infinite_has_not_jumped(layers: int) -> None:
    """Clipping leaves NaN where the infinity was and zero elsewhere. A format that does not hold it fits as well as a number
    that changed by itself, where it is one layer's."""
    story = Story()
    for k, layer in enumerate(LAYERS):
        story.series[f"layer/{layer}/grad_norm"][AT] = np.nan if k < layers else 0.0
        story.series[f"layer/{layer}/grad_norm"][AT + 1 :] = np.nan
    story.series["grad/norm"][AT] = np.inf
    story.series["grad/norm"][AT + 1 :] = np.nan
    story.series["train/loss"][AT + 1 :] = np.nan
    broke = Anomaly("a", "nonfinite", AT, AT, 0.9, "grad/norm", np.inf, 1.0, np.inf, ("grad/norm", AT))
    found = told(story, broke)
    assert named(found) == []
    assert set(names(found)) == {"unknown", "fp16-overflow", *(["hardware-fault"] if layers == 1 else [])}
    texts = [text for hypothesis in found for text in hypothesis.evidence_for]
    assert not any("inf sigmas" in text for text in texts)
    assert any(f"layer/{LAYERS[0]}/grad_norm became infinite" in text for text in texts)
    story.series["train/loss"][AT] = np.nan  # then it began before the backward pass
    assert not weighed(story, "fp16-overflow", broke).supports


def test_a_value_that_is_not_finite_is_told_so_and_not_in_sigmas() -> None:
    assert moved_by("act/inp/nonfinite", np.inf) == "act/inp/nonfinite is above 0 from one step to the next"
    assert moved_by("act/inp/rms", np.inf) == "act/inp/rms is finite no more"
    assert moved_by("act/inp/rms", 12.34) == "act/inp/rms moved 12.3 sigmas"
