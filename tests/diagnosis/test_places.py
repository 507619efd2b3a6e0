"""What the rules read off places: where a step went wrong first, whether one number or many changed, what the inputs were."""

from __future__ import annotations

import numpy as np
import pytest

from tests.detectors.kit import rows, watch_all
from tests.diagnosis.kit import AT, LAYERS, STEPS, Story
from trackbridge.detectors import Watch
from trackbridge.diagnosis import diagnose, trends
from trackbridge.diagnosis.batch import Past
from trackbridge.records import Hypothesis


def place(found: tuple[Hypothesis, ...], name: str) -> int:
    return [hypothesis.name for hypothesis in found].index(name)


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_a_rate_that_climbs_in_a_few_steps_is_a_discontinuity(steps: int) -> None:
    story = Story().spike(20).gradients(5, 20)
    climb = 30.0 ** (np.clip(np.arange(STEPS) - AT + 2, 0, steps) / steps)
    story.series["train/lr"] *= climb
    assert story.first().name == "lr-discontinuity"


def test_a_warm_up_and_a_restart_are_no_climb() -> None:
    steps = np.arange(300)
    warming = np.minimum(1.0, (steps + 1) / 250)
    restarting = np.where(steps < 150, 1 - steps / 150, np.minimum(1.0, (steps - 149) / 6))
    for at in (40, 100, 200):
        assert trends.climb(steps, warming, at, at + 8) is None
    assert trends.climb(steps, restarting, 155, 163) is None
    assert trends.climb(steps, np.where(steps < 150, 1.0, 3.0), 152, 160) == (3.0, 150)


def whole_head(one_number: bool) -> Story:
    """The last layer's weight is 50 times as large from the onset on; the output's module is not measured."""
    story = Story().spike(30, 30.0).gradients(10, 30)
    name = "layer/lm_head.weight"
    for statistic, value in (("grad_norm", 0.4), ("grad_max", 0.05), ("weight_norm", 10.0)):
        story.series[f"{name}/{statistic}"] = value * np.exp(1e-3 * np.random.default_rng(1).standard_normal(STEPS))
    story.series[f"{name}/weight_norm"][AT:] *= 50
    story.series["layer/ln_f.bias/grad_norm"] = 0.1 * np.exp(0.1 * np.random.default_rng(2).standard_normal(STEPS))
    share = np.where(np.arange(STEPS) < AT, 0.4, 1.0 if one_number else 0.5)
    story.series["layer/ln_f.bias/grad_max"] = story.series["layer/ln_f.bias/grad_norm"] * share
    order = {key: value for key, value in story.series.items() if not key.startswith(name)}
    story.series = order | {key: value for key, value in story.series.items() if key.startswith(name)}
    return story


@pytest.mark.parametrize(("one_number", "cause"), [(True, "hardware-fault"), (False, "embedding-instability")])
def test_one_number_of_the_head_is_told_from_many_by_what_comes_back_through_it(one_number: bool, cause: str) -> None:
    assert whole_head(one_number).first().name == cause


@pytest.mark.parametrize(("share", "cause"), [(0.999, "hardware-fault"), (0.1, "embedding-instability")])
def test_the_largest_element_of_a_weight_says_so_directly(share: float, cause: str) -> None:
    story = whole_head(one_number=share < 0.5)  # the other trace says the opposite, and counts less
    story.series["layer/lm_head.weight/weight_max"] = story.series["layer/lm_head.weight/weight_norm"] * share
    assert story.first().name == cause


def hot(kind: str) -> tuple[Hypothesis, ...]:
    """A spike of a step in a run that shows no batches; `kind` of tokens have the largest gradients at it."""
    story = Story().spike(1).gradients(3, 1)
    usual = np.random.default_rng(3).integers(0, 9, (STEPS, 3)).astype(float)
    usual[AT] = {"new": [140, 190, 186], "known": [1, 2, 3], "one": [208, 1, 2]}[kind]
    for k in range(3):
        story.series[f"embedding/hottest_row/embed{f'/{k + 1}' if k else ''}"] = usual[:, k]
    data = rows(story.series)
    return diagnose(watch_all(Watch(), data)[0], data)


def test_the_hottest_rows_say_what_the_inputs_were() -> None:
    assert hot("new")[0].name == "corrupt-batch"
    assert hot("known")[0].name == "label-fault"
    assert place(hot("one"), "rare-token") < place(hot("one"), "corrupt-batch")


def test_without_a_batch_and_without_a_trace_it_is_unknown_and_the_candidates_are_named() -> None:
    story = Story().spike(1).gradients(3, 1)
    data = rows({name: values for name, values in story.series.items() if not name.startswith("act/embed/")})
    found = diagnose(watch_all(Watch(), data)[0], data)
    assert found[0].name == "unknown"
    assert {hypothesis.name for hypothesis in found[1:4]} >= {"corrupt-batch", "label-fault"}


def test_growth_behind_the_place_where_it_began_did_not_cause_it() -> None:
    story = Story().spike(3).gradients(10, 3)
    for statistic in ("rms", "max", "kurtosis"):
        story.series[f"act/blocks.0/{statistic}"][AT : AT + 2] *= 60
    grown = np.maximum(1, 1.02 ** (np.arange(STEPS) - (AT - 40)))
    story.series["layer/blocks.1.mlp.weight/weight_norm"] *= grown
    found = story.told()[1]
    assert found[0].name == "hardware-fault"
    assert not any("had grown" in text for text in found[0].evidence_against)
    assert LAYERS.index("blocks.1.mlp.weight") > LAYERS.index("blocks.0.mlp.weight")


def test_garbage_among_known_tokens_is_told_from_new_tokens_in_a_usual_text() -> None:
    random = np.random.default_rng(0)
    share = 1 / np.arange(1, 201)
    text = lambda: random.choice(200, (8, 64), p=share / share.sum())  # noqa: E731
    past = Past()
    usual = [dict(past.compare(text(), learn=True)) for _ in range(60)][30:]
    rare, garbage = text(), random.integers(0, 256, (8, 64))
    rare[random.random(rare.shape) < 0.3] = 230
    seen = {kind: dict(past.compare(batch, learn=False)) for kind, batch in (("rare", rare), ("garbage", garbage))}
    most = max(one["mixture"] for one in usual)
    assert seen["rare"]["new"] > 0.2 and seen["garbage"]["new"] > 0.1
    assert seen["garbage"]["mixture"] > 3 * most and seen["rare"]["mixture"] < 1.5 * most
    assert seen["garbage"]["variety"] > max(one["variety"] for one in usual) > seen["rare"]["variety"]


def test_the_head_is_known_by_its_place_where_its_name_says_nothing() -> None:
    story = whole_head(one_number=False)
    story.series = {name.replace("lm_head", "decoder"): values for name, values in story.series.items()}
    story.series["layer/decoder.weight/weight_max"] = story.series["layer/decoder.weight/weight_norm"] * 0.1
    found = story.told()[1]
    assert found[0].name == "embedding-instability"
    assert "hardware-fault" not in [hypothesis.name for hypothesis in found[: place(found, "unknown")]]


def test_an_embedding_that_puts_out_more_is_no_single_number_even_before_its_weight_is_measured() -> None:
    story = Story().spike(30).gradients(3, 30)
    for statistic in ("rms", "max"):
        story.series[f"act/embed/{statistic}"][AT:] *= 40
    story.series = {name: values for name, values in story.series.items() if "weight_norm" not in name}
    found = story.told()[1]
    assert found[0].name == "embedding-instability"
    story.series["act/embed/rms"][AT:] /= 20  # a few elements of it alone
    assert "embedding-instability" not in [hypothesis.name for hypothesis in story.told()[1][:1]]


def test_a_batch_of_one_token_is_no_rare_token_and_garbage_with_new_tokens_is_told_from_neither() -> None:
    def told(now: list[float]) -> tuple[Hypothesis, ...]:
        story = Story().spike(1).gradients(3, 1)
        usual = np.random.default_rng(3).integers(0, 9, (STEPS, 4)).astype(float)
        usual[AT] = now
        story.series["act/embed/kurtosis"][AT] = 12.0
        for k in range(4):
            story.series[f"embedding/hottest_row/embed{f'/{k + 1}' if k else ''}"] = usual[:, k]
        data = rows(story.series)
        return diagnose(watch_all(Watch(), data)[0], data)

    one = told([77.0, np.nan, np.nan, np.nan])
    assert one[0].name == "corrupt-batch" and "rare-token" not in [hypothesis.name for hypothesis in one[:2]]
    some = told([208.0, 231.0, 1.0, 2.0])
    assert some[0].name == "unknown"
    assert {hypothesis.name for hypothesis in some[1:4]} >= {"corrupt-batch", "rare-token"}


def test_a_weight_that_grows_as_a_whole_makes_no_outliers_and_may_leave_fp16() -> None:
    story = Story()
    grown = np.maximum(1.12 ** (np.arange(STEPS) - AT + 20), 1)
    story.series["train/loss"][AT:] += np.linspace(1, 6, STEPS - AT)
    story.series["train/loss_scale"] = np.full(STEPS, 1024.0)
    weight = "layer/blocks.0.mlp.weight"
    story.series[f"{weight}/weight_max"] = 0.5 * story.series[f"{weight}/weight_norm"]
    for name in (f"{weight}/weight_norm", f"{weight}/weight_max", "act/blocks.0/max", "act/blocks.0/rms"):
        story.series[name] = story.series[name] * grown
    found = story.told()[1]
    assert found[0].name != "activation-outliers"
    assert any("fp16 does not hold it" in text for text in found[place(found, "fp16-overflow")].evidence_for)
    story.series[f"{weight}/weight_max"] *= grown  # a few of its elements
    few = story.told()[1]
    named = ["activation-outliers" in [hypothesis.name for hypothesis in each] for each in (found, few)]
    assert named == [False, True]


@pytest.mark.parametrize("feeds", [False, True])
def test_a_loss_that_feeds_itself_is_no_label_fault(feeds: bool) -> None:
    story = Story().spike(20)
    if feeds:
        story.series["train/loss"][AT : AT + 6] *= 3.0 ** np.arange(6)
    named = [hypothesis.name for hypothesis in story.told()[1]]
    assert ("label-fault" in named[: named.index("unknown")]) is not feeds
