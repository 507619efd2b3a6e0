"""What trackers say about anomalies and params."""

from __future__ import annotations

from trackbridge.backends import words
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
