"""What trackers say about anomalies and params."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from trackbridge import answers
from trackbridge.backends import words
from trackbridge.backends.wandb_rows import anomaly_facts
from trackbridge.detectors.monitors import learning_rate, loss_scale, optimizer_state, repeats, replicas
from trackbridge.diagnosis.registry import RULES
from trackbridge.records import FAULTS, Anomaly
from trackbridge.reports import contents, page_sections, post_mortem
from trackbridge.reports.subject import of_facts
from trackbridge.scan import plot
from trackbridge.testing import anomaly


def test_an_anomaly_in_a_line_and_on_a_page() -> None:
    spike = anomaly(0, 120, first_mover=("grad/norm", 119), cascade=(("grad/norm", 119), ("train/loss", 120)), onset=119)
    line = "spike in train/loss at step 120: 9.5, expected 2.25 (31 sigma); first to move: grad/norm at step 119"
    assert words.anomaly_line(spike) == line
    assert words.anomaly_markdown(spike).splitlines() == [
        "**What happened.** **train/loss** was **9.5** where **2.25** was expected (spike).  ",
        "**When.** From step **119**, seen at step 120 (2025-06-15 15:08:40 UTC). Not back to normal so far.  ",
        "**How bad.** **31 sigma** from what was expected.  ",
        "**What moved first.** grad/norm at step 119.  ",
        "**What to do now.** To test the first hypothesis, corrupt-batch: skip the batch.  ",
        "",
        "- ranks: 0",
        "- cascade: grad/norm (119), train/loss (120)",
        "",
        "1. **corrupt-batch**",
        "   - for: token entropy 7.9 bits",
        "   - to test it: skip the batch",
    ]
    over = words.anomaly_markdown(spike.updated(recovered_after=4, capsule="capsules/spike-120"), ["trackbridge pull x"])
    assert "Back to normal after 4 steps." in over and "- capsule: `capsules/spike-120`" in over
    assert "skip the batch. `trackbridge pull x`" in over
    many = tuple((f"layer/{k}/grad_norm", 120) for k in range(20))
    assert "layer/7/grad_norm (120) and 12 more\n" in words.anomaly_markdown(spike.updated(cascade=many))


def test_params_flatten_without_hiding_each_other() -> None:
    values = {
        "config": {"lr": 3e-4, "a": {"b": 1}, "a.b": 2, "on": True, "none": None, "list": [1, float("inf")], "empty": {}},
        "lr": "theirs",
        "git": {"commit": "abc"},
    }
    assert words.flatten(values) == {
        "lr": "0.0003", "a.b": "1", "a.b (2)": "2", "on": "True", "none": "None", "list": '[1, "Infinity"]', "empty": "{}",
        "lr (2)": "theirs", "git.commit": "abc",
    }  # fmt: skip
    assert words.flatten({"config": "a name"}) == {"config": "a name"}


def test_a_table_cannot_be_broken_by_its_cells() -> None:
    assert words.table({"a|b": "x\ny"}) == "| name | value |\n|---|---|\n| a\\|b | x<br>y |"


JUMP = anomaly(0, 150).updated(
    kind="shift", series="train/lr", value=0.03, expected=0.001, score=30.0, terms="30 times the 0.001 before", hypotheses=(),
    first_mover=("train/lr", 150), notes=("lr-discontinuity: train/lr rose 30 times, to 0.03",),
)  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        str,
        words.anomaly_line,
        words.anomaly_markdown,
        answers.happened,
        answers.how_bad,
        answers.how_far,
        lambda found: contents.anomalies([found]),
        lambda found: page_sections._all([found, found]),
        lambda found: " ".join(" ".join(cell) for cell in page_sections._told(found, 1)),
        post_mortem._value,
        lambda found: plot._table([found]),
    ],
)
def test_where_noise_is_no_measure_the_fault_s_own_terms_are_said_and_no_sigmas(said: Callable[[Anomaly], str]) -> None:
    assert "30 times the 0.001 before" in said(JUMP).replace("30 Times", "30 times") and "sigma" not in said(JUMP)
    told = JUMP.updated(terms="")
    assert "sigma" in said(told).replace("expected", "sigma"), "what the same words say of a series with noise"


def test_the_line_of_a_fault_reads_as_a_sentence() -> None:
    assert words.anomaly_line(JUMP) == "shift in train/lr at step 150: 0.03, 30 times the 0.001 before"
    later = JUMP.updated(series="train/loss", value=2.5, expected=0.4, score=7.13, terms="", value_step=151)
    line = "shift in train/loss at step 150: 2.5 at step 151, expected 0.4 (7.13 sigma); first to move: train/lr at step 150"
    assert words.anomaly_line(later) == line
    assert words.anomaly_row(JUMP)[words.ANOMALY_COLUMNS.index("sigma")] is None
    assert "(inf sigma)" not in words.anomaly_line(JUMP.updated(terms="", score=float("inf")))


def test_the_line_and_the_page_agree_on_what_moved_first() -> None:
    """What moves in the step of the loss itself was not first; but a NaN was, where it was computed first."""
    at_once = anomaly(0, 120).updated(
        first_mover=("act/5/kurtosis", 120), cascade=(("act/5/kurtosis", 120), ("train/loss", 120))
    )
    assert words.anomaly_line(at_once) == str(at_once)
    assert answers.first(at_once) == "Nothing before the loss itself (all at step 120)."
    broken = at_once.updated(kind="nonfinite")
    assert words.anomaly_line(broken) == f"{broken}; first to move: act/5/kurtosis, in the same step"
    assert answers.first(broken) == "act/5/kurtosis, in the same step."


def test_what_is_said_of_a_cause_before_it_is_known_is_true() -> None:
    assert "It is a fault by name, lr-discontinuity: train/lr rose 30 times, to 0.03." in words.anomaly_markdown(JUMP)
    assert "it was not known yet when this was written" in words.anomaly_markdown(JUMP.updated(notes=()))
    assert "No cause is looked for" in words.anomaly_markdown(JUMP.updated(kind="rule", notes=("rule: x > 5",)))


def test_the_names_of_faults_are_those_of_the_monitors() -> None:
    """And each is a hypothesis' name: what a monitor names is found again in the diagnosis."""
    named = {monitor.FAULT for monitor in (learning_rate, repeats, loss_scale, replicas)}
    assert set(FAULTS) == named | {optimizer_state.LOST, optimizer_state.STALE} and set(FAULTS) <= set(RULES)


def test_w_and_b_s_summary_tells_the_terms_and_the_step_too() -> None:
    later = JUMP.updated(value_step=151)
    back = of_facts(later.id, anomaly_facts(later))
    assert (back.terms, back.value_step) == (later.terms, 151)
    old = of_facts("x", {"step": 3})
    assert (old.terms, old.value_step) == ("", None), "as an older version told it"


AGAIN = "the batch of step 301 is that of step 300 again"
REPEAT = anomaly(0, 301).updated(
    kind="rule", series="data/repeated", value=1.0, expected=0.0, score=1.0, terms=AGAIN, hypotheses=(),
    first_mover=("data/repeated", 301), cascade=(), notes=("after_resume", f"repeated-batch: {AGAIN}"),
)  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        str,
        words.anomaly_line,
        lambda found: words.anomaly_markdown(found).partition("- cascade")[0],
        lambda found: contents.anomalies([found]),
        lambda found: page_sections._all([found, found]),
        lambda found: page_sections._name(found),
        lambda found: " ".join(" ".join(cell) for cell in page_sections._told(found, 1)[:1]),
    ],
)
def test_a_fault_that_no_series_shows_reads_by_its_name(said: Callable[[Anomaly], str]) -> None:
    text = said(REPEAT)
    assert "repeated-batch" in text and "rule" not in text and " 1, " not in text
    own = REPEAT.updated(terms="the rule is x > 5", notes=("rule: x > 5 (x is 6)",))
    assert own.fault == "" and "rule" in said(own), "a user's rule is one"


def test_its_line_is_a_sentence() -> None:
    assert words.anomaly_line(REPEAT) == f"repeated-batch at step 301: {AGAIN}"


def test_a_command_that_is_advised_can_be_typed_as_it_is() -> None:
    words = shlex.split(answers.evidence_command("/my runs/it's", 7))
    assert words == ["trackbridge", "report", "/my runs/it's@7", "--post-mortem"]
