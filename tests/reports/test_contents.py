"""Texts and tables of a capsule as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import capsules as made
from trackbridge import capsule as capsules
from trackbridge.capsule import SpikeCapsule
from trackbridge.lab.counterfactuals import CounterfactualReport, Trend, Try
from trackbridge.reports import contents
from trackbridge.testing import anomaly


@pytest.fixture
def capsule(tmp_path: Path) -> SpikeCapsule:
    return capsules.load(made.make(tmp_path / "spike-13"))


def test_the_post_mortem_is_the_one_that_somebody_may_have_filled_in(capsule: SpikeCapsule) -> None:
    assert contents.of_capsule(capsule)["post-mortem"] == "# nothing yet\n"
    bare = capsule.model_copy(update={"files": {}}).at(capsule.path)
    assert contents.post_mortem_of(bare).startswith("# Post-mortem: spike at step 13")


def test_the_batch_at_the_onset_is_identified(capsule: SpikeCapsule) -> None:
    lines = contents.of_capsule(capsule)["batch"].splitlines()
    assert lines[0].startswith("| micro-batch |") and len(lines) == 4
    assert lines[2] == "| 0 | 0 | 0 | 12 | 12, 13 | 000c |"
    assert "secret" not in "".join(contents.of_capsule(capsule).values()), "no raw batch"


def test_the_capsule_says_what_it_is_good_for(capsule: SpikeCapsule) -> None:
    said = contents.files(capsule)
    assert said.startswith("Tier **re-feed**, restart at step 10.") and "| window.parquet |" in said


def test_counterfactuals_are_ranked_with_their_caution(capsule: SpikeCapsule) -> None:
    assert "counterfactuals" not in contents.of_capsule(capsule)

    def a_try(name: str, rank: int | None, outcome: Any) -> Try:
        return Try(name=name, what=f"{name} from step 12 on", outcome=outcome, rank=rank, peak=9.25, reason="because")

    report = CounterfactualReport(
        run="r", anomaly_id="a", anomaly_step=13, onset=12, series="train/loss", restart_step=10, last_step=15, guilty=(12,),
        verdict="exact", caution="be careful", trend=Trend(level=2, slope=0, sigma=0.1, first=10, last=11),
        rerun=a_try("rerun", None, "remains"), tries=(a_try("skip-batch", 1, "prevented"), a_try("clip=1.0", None, "failed")),
    )  # fmt: skip
    capsule.__dict__["counterfactuals"] = report  # where the property keeps it
    lines = contents.of_capsule(capsule)["counterfactuals"].splitlines()
    assert lines[0] == "The plain replay of steps 10 to 15: **exact**. be careful"
    assert lines[4] == "| 1 | skip-batch from step 12 on | prevented | 9.25 |  | because |"
    assert lines[5].startswith("|  | clip=1.0")


def test_anomalies_are_a_row_each_and_cells_cannot_break_it() -> None:
    text = contents.anomalies([anomaly(0, 7, series="a|b\nc"), anomaly(1, 9, notes=("peak 12 (40 sigma) at step 10",))])
    lines = text.splitlines()
    assert len(lines) == 4 and "spike in a\\|b<br>c" in lines[2]
    assert "peak 12" in lines[3] and contents.anomalies([]) == ""
