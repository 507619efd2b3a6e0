"""Each cause, told from the traces it leaves; and "unknown" where they are thin."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.detectors.kit import rows, watch_all
from tests.diagnosis.kit import AT, LAYERS, STEPS, Story, outliers
from trackbridge import tree
from trackbridge.detectors import Watch
from trackbridge.diagnosis import diagnose
from trackbridge.diagnosis.batch import Batches
from trackbridge.diagnosis.registry import RULES, Case, rule
from trackbridge.records import Anomaly, MicroBatch, StepContext
from trackbridge.tokens import tokens_of

CONTRACT = {
    "corrupt-batch", "rare-token", "label-fault", "repeated-batch", "lr-discontinuity", "optimizer-state-lost",
    "stale-second-moment", "gradient-explosion", "fp16-overflow", "attention-logit-growth", "embedding-instability",
    "activation-outliers", "data-regime-change", "hardware-fault", "config-change",
}  # fmt: skip


def corrupt() -> Story:
    story = Story().spike().gradients()
    story.series["act/blocks.0/rms"][AT : AT + 2] *= 1.5
    for step in (AT, AT + 1):
        story.tokens[step] |= {"unique": 250, "entropy": 7.9, "max": 255, "rarest": [[255, 1], [250, 1]]}
    return story


def holes() -> Story:
    story = corrupt()
    story.tokens = [{"length": 512, "nonfinite": 0} for _ in range(STEPS)]
    story.tokens[AT]["nonfinite"] = 3
    return story


def rare() -> Story:
    story = Story().spike(1).gradients(3, 1)
    story.series["layer/embed.weight/grad_norm"][AT] *= 10
    story.tokens[AT] |= {"max": 240, "rarest": [[240, 1], [231, 1]]}
    return story


def labels() -> Story:
    return Story().spike().gradients(3)


def repeated() -> Story:
    story = Story().spike(6)
    story.prints[AT - 8 : AT] = ["again"] * 8
    return story


def lr_jump() -> Story:
    story = Story().spike(20).gradients(5, 20)
    story.series["train/lr"][AT - 3 :] *= 10
    story.series["optim/update_ratio"][AT - 3 :] *= 10
    return story


def state_lost() -> Story:
    story = Story().spike(20).gradients(3, 20)
    for name in ("optim/exp_avg_norm", "optim/exp_avg_sq_norm", *(f"layer/{layer}/exp_avg_sq_norm" for layer in LAYERS)):
        story.series[name][AT:] *= 0.05
    story.notes = ("after_resume",)
    return story


def stale() -> Story:
    story = Story().spike(6, 1.0)
    layer = "layer/blocks.1.mlp.weight"
    story.series[f"{layer}/exp_avg_sq_norm"][AT - 1 :] *= 1e-3
    story.series[f"{layer}/update_ratio"][AT:] *= 30
    return story


def explosion() -> Story:
    story = Story()
    growth = 1.6 ** np.arange(STEPS - AT + 8)
    for name in ("grad/norm", *(f"layer/{layer}/grad_norm" for layer in LAYERS)):
        story.series[name][AT - 8 :] *= np.minimum(growth, 1e6)
    story.series["train/loss"][AT:] += np.linspace(1, 9, STEPS - AT)
    return story


def overflow() -> Story:
    story = Story()
    story.series["train/loss"][AT] = math.inf
    story.series["train/loss_scale"] = np.where(np.arange(STEPS) < AT, 65536.0, 32768.0)
    story.series["act/blocks.1/max"][AT - 6 :] = 60000
    story.series["optim/skipped"] = np.where(np.arange(STEPS) < AT, 0.0, 1.0)
    return story


def logits() -> Story:
    story = Story().spike(20).gradients(10, 20)
    grown = np.maximum(1, 1.04 ** (np.arange(STEPS) - (AT - 40)))
    story.series["layer/blocks.1.attn.qkv.weight/weight_norm"] *= grown
    story.series["layer/blocks.1.attn.qkv.weight/grad_norm"] *= grown**2
    return story


def embedding() -> Story:
    story = Story().spike(20).gradients(10, 20)
    grown = np.maximum(1, 1.05 ** (np.arange(STEPS) - (AT - 30)))
    story.series["layer/embed.weight/weight_norm"] *= grown
    story.series["act/embed/rms"] *= grown
    return story


def regime() -> Story:
    story = Story()
    story.series["train/loss"][AT:] += 0.8
    for step in range(AT, STEPS):
        story.tokens[step] |= {"entropy": 5.0, "unique": 90}
    return story


def damaged() -> Story:
    story = Story().spike(30, 2.0).gradients(10, 30)
    for name in ("rms", "max", "kurtosis"):
        story.series[f"act/blocks.0/{name}"][AT:] *= 30
    story.series["layer/blocks.0.mlp.weight/weight_norm"][AT:] *= 3
    return story


def changed() -> Story:
    story = Story().spike(30, 1.0)
    story.series["act/blocks.0/rms"][AT:] *= 1.3
    story.notes = ("after_resume", "changed: torch 2.6.0 -> 2.7.1")
    return story


STORIES = {
    "corrupt-batch": corrupt, "rare-token": rare, "label-fault": labels, "repeated-batch": repeated,
    "lr-discontinuity": lr_jump, "optimizer-state-lost": state_lost, "stale-second-moment": stale,
    "gradient-explosion": explosion, "fp16-overflow": overflow, "attention-logit-growth": logits,
    "embedding-instability": embedding, "activation-outliers": outliers, "data-regime-change": regime,
    "hardware-fault": damaged, "config-change": changed,
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_the_cause_is_named_first_with_evidence_and_a_test(name: str) -> None:
    first = STORIES[name]().first()
    assert first.name == name
    assert first.evidence_for and first.intervention


OF_BATCH = {"corrupt-batch": 2, "rare-token": 1, "repeated-batch": 1, "label-fault": 0, "lr-discontinuity": 0}


@pytest.mark.parametrize(("name", "count"), OF_BATCH.items())
def test_what_is_a_fact_about_a_batch_is_marked_as_one(name: str, count: int) -> None:
    first = STORIES[name]().first()
    assert len(first.of_batch) == count and set(first.of_batch) <= set(first.evidence_for)
    assert not any("back in its band" in text or "jumped" in text for text in first.of_batch)


def test_non_finite_data_is_a_corrupt_batch() -> None:
    first = holes().first()
    assert first.name == "corrupt-batch" and "3 non-finite" in first.evidence_for[0]


def test_every_hypothesis_of_the_contract_has_a_rule() -> None:
    assert set(RULES) == CONTRACT == set(STORIES)


def test_a_bare_loss_is_unknown() -> None:
    """With nothing but a loss there is no telling, and nothing is made up."""
    story = Story().spike()
    story.series = {"train/loss": story.series["train/loss"]}
    story.tokens = [{} for _ in range(STEPS)]
    story.prints = [f"{i}" for i in range(STEPS)]
    hypotheses = story.told()[1]
    assert hypotheses[0].name == "unknown" and hypotheses[0].evidence_for


def test_no_rows_and_no_contexts_is_unknown() -> None:
    anomaly = Anomaly("x", "spike", 5, 5, 0.5, "train/loss", 4.0, 2.0, 10.0)
    (only,) = diagnose(anomaly, [])
    assert only.name == "unknown" and only.intervention == "rerun"


def test_a_nan_without_traces_is_unknown() -> None:
    story = Story()
    story.series["train/loss"][AT] = math.nan
    assert story.first().name == "unknown"


def test_evidence_against_is_told_too() -> None:
    _, hypotheses = lr_jump().told()
    assert hypotheses[0].name == "lr-discontinuity"
    against = {h.name: h.evidence_against for h in hypotheses}
    assert "the record supports lr-discontinuity" in against["unknown"]
    rejected = corrupt().told()[1]
    assert all("train/lr" not in text for h in rejected for text in h.evidence_for)


def test_of_data_in_floats_nothing_is_said_about_tokens() -> None:
    story = labels()
    labelled = {"x": {"length": 512, "nonfinite": 0}, "y": {"length": 8, "unique": 5, "entropy": 2.1}}
    story.tokens = [labelled] * STEPS
    said = [text for h in story.told()[1] for text in (*h.evidence_for, *h.evidence_against)]
    assert said and not any("token" in text for text in said)


def test_a_jump_of_an_activation_alone_is_no_hardware_fault() -> None:
    story = Story().spike(30, 2.0).gradients(10, 30)
    for name in ("rms", "max", "kurtosis"):
        story.series[f"act/blocks.0/{name}"][AT:] *= 30
    names = [h.name for h in story.told()[1]]
    assert "hardware-fault" in names[names.index("unknown") :]


def test_clipping_is_told_only_where_it_is_recorded() -> None:
    def said(story: Story) -> str:
        (found,) = (h for h in story.told()[1] if h.name == "gradient-explosion")
        return " ".join((*found.evidence_for, *found.evidence_against))

    story = explosion()
    assert "clipping is not recorded" in said(story)
    story.series["grad/norm_clipped"] = story.series["grad/norm"].copy()
    assert "clipping is not recorded" in said(story), "the optimizer's own norm under both names"
    story.series["grad/norm_clipped"] = np.minimum(story.series["grad/norm"], 1.0)
    assert "clipping held the applied norm at 1" in said(story)


def test_the_same_record_gives_the_same_answer() -> None:
    assert corrupt().told() == corrupt().told()


def test_a_healthy_epoch_is_no_repeat() -> None:
    """The same batch an epoch later is how training works."""
    story = Story().spike(6)
    story.prints = [f"print-{i % 100}" for i in range(STEPS)]
    assert all(h.name != "repeated-batch" for h in story.told()[1])


def test_a_third_party_rule_takes_part_and_a_name_is_taken_once() -> None:
    @rule("cosmic-ray", intervention="rerun")
    def ray(_: object, case: Case) -> None:
        case.add(100, "a flash of light")

    try:
        assert Story().spike().first().name == "cosmic-ray"
        with pytest.raises(ValueError, match="exists already"):
            rule("cosmic-ray", intervention="rerun")(ray)
    finally:
        del RULES["cosmic-ray"]


def test_a_warm_up_is_no_jump_of_the_learning_rate() -> None:
    """Its first steps double the rate; its steps are equal."""
    story = labels()
    story.series["train/lr"] = 1e-3 * np.minimum(1.0, (np.arange(STEPS) + 1) / 220)
    story.series["train/lr"][: AT - 20] = 1e-6
    story.series["train/lr"][AT - 20 :] = 1e-3 * np.minimum(1.0, (np.arange(STEPS - AT + 20) + 1) / 40)
    jumps = [text for h in story.told()[1] for text in h.evidence_for if "train/lr rose" in text]
    assert not [text for text in jumps if f"at step {AT - 19}" in text]
    assert labels().first().name == "label-fault"


def text_batches(kind: str) -> list[StepContext]:
    """Batches of letters that were kept whole; the one at `AT` holds `kind`."""
    random = np.random.default_rng(4)
    contexts = []
    for step in range(STEPS):
        ids = random.integers(97, 117, (8, 64))
        if step == AT and kind == "binary":
            ids = random.integers(0, 256, (8, 64))
        if step == AT and kind == "rare":
            ids = np.where(random.random((8, 64)) < 0.4, random.integers(200, 204, (8, 64)), ids)
        skeleton, leaves = tree.pack({"ids": ids.astype(np.int64)})
        micro = MicroBatch(0, 0, step, None, f"print-{step}", skeleton=skeleton, tensors=tree.to_numpy(leaves))
        contexts.append(StepContext(step, step, 0, {}, (micro,)))
    return contexts


def test_of_a_kept_batch_the_same_is_known_as_of_one_with_its_statistics_written_down() -> None:
    kept = text_batches("rare")
    written = [replace(c, micro=tuple(replace(micro, tokens=tokens_of(micro)) for micro in c.micro)) for c in kept]
    found = Batches(kept, AT).table
    assert {("ids", "entropy"), ("ids", "share"), ("ids", "max")} <= found.keys() and found == Batches(written, AT).table


@pytest.mark.parametrize(("kind", "cause"), [("binary", "corrupt-batch"), ("rare", "rare-token")])
def test_a_foreign_file_and_rare_tokens_are_told_apart_by_what_is_new(kind: str, cause: str) -> None:
    story = Story().spike().gradients(3)
    data = rows(story.series)
    anomaly = watch_all(Watch(), data)[0]
    first = diagnose(anomaly, data, text_batches(kind))[0]
    assert first.name == cause and first.of_batch, "the foreign file, too, is a fact about its batch"


def test_a_weight_that_grows_in_a_young_run_is_nothing_without_a_past() -> None:
    story = Story().spike()
    grown = 1.3 ** (np.arange(STEPS) / 48)
    story.series["layer/embed.weight/weight_norm"] *= grown
    assert all(h.name != "embedding-instability" for h in story.told()[1])
