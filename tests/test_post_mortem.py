"""The post-mortem: what a replay has shown is filled in, and a record without a capsule has one too."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.capsules import an_anomaly, edit, make
from tests.diagnosis.test_feedback import CORRUPT, UNKNOWN, replayed, tried
from tests.test_seal import a_run, writer
from trackbridge.capsule import load
from trackbridge.cli import app
from trackbridge.config import DetectionConfig
from trackbridge.diagnosis.data import words
from trackbridge.diagnosis.feedback import MARK
from trackbridge.errors import UsageError
from trackbridge.history import load as load_run
from trackbridge.records import Hypothesis, MicroBatch
from trackbridge.replay.keep import keep
from trackbridge.reports import post_mortem as module
from trackbridge.reports.band import band
from trackbridge.reports.known import Known
from trackbridge.reports.post_mortem import _PANELS, _TITLES, BLANK, NO_BATCHES, SECTIONS, TWO_SIGMAS, post_mortem
from trackbridge.seal import seal


def section(text: str, number: int) -> str:
    return text.split(f"## {number}. ")[1].split("\n## ")[0]


def test_what_a_replay_has_shown_is_filled_in(tmp_path: Path) -> None:
    capsule = load(make(tmp_path / "spike-13", anomaly=an_anomaly(hypotheses=(CORRUPT, UNKNOWN))))
    before = post_mortem(capsule)
    assert section(before, 4).strip().endswith(f"Not known yet. {BLANK}")
    after = post_mortem(keep(capsule, replay=replayed("exact"), counterfactuals=tried(("skip-batch", "prevented"))))
    assert "verdict: **exact**: because" in section(after, 3) and "Replay with skip-batch done: prevented" in section(after, 3)
    assert "Result: with skip-batch done the anomaly is gone." in section(after, 3)
    assert "Corrupt-batch (entropy): with skip-batch done the anomaly is gone." in section(after, 4)
    assert "gone with skip-batch done" in section(after, 5)
    assert BLANK in section(after, 4) and BLANK in section(after, 7), "a person confirms, and draws the lesson"


def test_names_from_anywhere_change_nothing_of_its_sections(tmp_path: Path) -> None:
    name = "a\n\n## 7. Fake\n\n<img src=x>|`**b**\ud800"
    hypothesis = Hypothesis(name, (f"{MARK}{name}", name), (name,), name)
    other = Hypothesis("other", (name,), (name,), name)
    found = an_anomaly(
        hypotheses=(hypothesis, other), series=name, kind=name, first_mover=(name, 12), cascade=((name, 12),), terms=name
    )
    text = post_mortem(load(make(tmp_path / "spike-13")), found)
    text.encode()
    assert re.findall(r"^#.*", text, re.MULTILINE)[1:] == [f"## {k}. {title}" for k, title in enumerate(SECTIONS, 1)]
    assert "<img" not in text and "a\\n\\n## 7. Fake" in text


def test_two_distances_of_one_value_are_told_apart(tmp_path: Path) -> None:
    far = Hypothesis("label-fault", ("at the onset the loss is 66.9 sigmas up",))
    capsule = load(make(tmp_path / "spike-13"))
    assert TWO_SIGMAS in section(post_mortem(capsule, an_anomaly(hypotheses=(far,))), 2)
    assert TWO_SIGMAS not in post_mortem(capsule, an_anomaly(hypotheses=(CORRUPT,)))


def test_without_batches_nobody_is_asked_for_the_result_of_a_replay(tmp_path: Path) -> None:
    place = make(tmp_path / "spike-13")
    assert section(post_mortem(load(place)), 3).count(BLANK) == 2 and "To try first" in post_mortem(load(place))
    edit(place, lambda manifest: manifest.update(tier="explain"))
    text = post_mortem(load(place))
    assert section(text, 3).count(NO_BATCHES) == 2 and BLANK not in section(text, 3) and "To try first" not in text
    edit(place, lambda manifest: manifest.update(local={"tier": "re-feed", "files": {}}))  # they stayed on the other machine
    assert section(post_mortem(load(place)), 3).count(BLANK) == 2


def test_a_run_without_a_capsule_has_one_too(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1")
    record = load_run(directory.path)
    text = post_mortem(record, record.anomalies[0])
    assert text == post_mortem(record), "the most severe one"
    assert [line[6:] for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)
    assert "| Peak | 9 at step 20 |" in text and "(from 20 recorded steps)" in text and "samples 20, 21" in text
    assert "a capsule: this is from the run's journal" in text


def test_a_record_without_an_anomaly_says_so(tmp_path: Path) -> None:
    record = load_run(a_run(tmp_path / "run-1").path)
    record.anomalies.clear()
    with pytest.raises(UsageError, match="no anomaly"):
        post_mortem(record)


def test_unusual_tokens_are_numbers_in_the_symptoms(tmp_path: Path) -> None:
    capsule = load(make(tmp_path / "spike-13"))
    usual = {"length": 512, "entropy": 6.4, "unique": 140}
    batches = {step: (MicroBatch(tokens={"ids": {**usual, "unique": 140 + step % 3}}),) for step in range(12)}
    batches[12] = (MicroBatch(tokens={"ids": {**usual, "entropy": 7.9, "unique": 250}}),)
    known = Known.of_capsule(capsule)
    known = Known(known.anomaly, "r", "r", known.window, known.values, batches, {}, {})
    said = module._unusual(known)
    assert "entropy of ids: +75 sigmas (step 12)" in said and "unique of ids: +" in said
    many = {step: batches[step % 12] for step in range(12)} | {12: batches[0]}
    usual_one = Known(known.anomaly, "r", "r", known.window, known.values, many, {}, {})
    assert module._unusual(usual_one).startswith("nothing in these statistics"), "a hypothesis may know more of the contents"


def test_the_average_is_the_one_of_pandas(tmp_path: Path) -> None:
    import pandas as pd

    known = Known.of_capsule(load(make(tmp_path / "spike-13")))
    values = known.before("train/loss")
    ema, count = known.ema("train/loss", 50)
    assert count == len(values) == 2
    assert ema == pytest.approx(float(pd.Series(values).ewm(span=50, adjust=True).mean().iloc[-1]), rel=1e-12)
    assert np.isnan(known.ema("no/series", 50)[0])


def test_every_panel_exists() -> None:
    assert all(panel in _TITLES for panels in _PANELS.values() for panel in panels)


def test_the_band_is_as_wide_as_the_noise_before_whatever_the_spike(tmp_path: Path) -> None:
    """A score is compressed for large values: a sigma worked out of it would grow with the spike."""
    limits = []
    for value, score in ((9.0, 31.0), (9000.0, 31.0), (float("nan"), float("inf"))):
        told = an_anomaly(id="a-20", step=21, onset=20, value=value, expected=2.0, score=score)
        record = load_run(a_run(tmp_path / f"run-{len(limits)}", anomaly=told).path)
        found = re.search(r"train/loss stays below ([\d.]+) \(expected 2 plus", section(post_mortem(record, told), 6))
        assert found is not None
        limits.append(float(found[1]))
    assert limits[0] == limits[1] == limits[2] and 2.0 < limits[0] < 2.2


def test_a_band_is_of_the_spread_about_the_trend() -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.1, 32)
    told, settings = an_anomaly(value=500.0, expected=1.0), DetectionConfig()
    level, falling = (band(told, line + noise, settings) for line in (np.full(32, 1.0), np.linspace(9.0, 1.0, 32)))
    assert level is not None and falling is not None
    assert 0.05 < level.sigma < 0.2 and falling.sigma == pytest.approx(level.sigma, rel=0.2)
    assert level.limit == pytest.approx(1.0 + settings.threshold * level.sigma) and not level.by_factor
    flat = band(told, np.full(32, 1.0), settings)
    assert flat is not None and flat.sigma == pytest.approx(settings.floor, rel=1e-6), "no narrower than the detector's"


def test_a_norm_has_its_band_by_factors() -> None:
    norm = np.exp(np.random.default_rng(0).normal(0.0, 0.3, 32))
    told, settings = an_anomaly(series="grad/norm", value=500.0, expected=1.0), DetectionConfig()
    found = band(told, norm, settings)
    assert found is not None and found.by_factor and 0.15 < found.sigma < 0.6
    assert found.limit == pytest.approx(np.exp(found.bar * found.sigma)) and found.bar >= settings.grad_threshold


def test_no_band_without_a_past_or_a_rise() -> None:
    settings = DetectionConfig()
    assert band(an_anomaly(), np.ones(7), settings) is None
    assert band(an_anomaly(value=1.0), np.ones(32), settings) is None
    assert band(an_anomaly(expected=float("nan")), np.ones(32), settings) is None


def test_of_two_anomalies_in_one_capsule_the_one_asked_for_is_written(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(15,))
    folder = seal(directory.path, "a-20")
    shared = {"capsule": "capsules/spike-21", "value": 9.0, "expected": 2.0}
    rows = writer(directory.rows(0))
    rows.append(an_anomaly(id="a-20", step=21, onset=20, **shared))
    rows.append(an_anomaly(id="a-24", step=24, onset=22, kind="shift", **shared))
    rows.close()

    def asked(reference: object) -> tuple[str, str]:
        result = CliRunner().invoke(app, ["report", str(reference), "--post-mortem"])
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    own, nothing = asked(f"{directory.path}@21")
    assert own == (folder / "post-mortem.md").read_text() and not nothing
    other, told = asked(f"{directory.path}@24")
    assert other.startswith("# Post-mortem: shift at step 24 of") and "| Onset | step 22 |" in other
    assert "shares with the spike at step 21" in told and str(folder / "post-mortem.md") in told and told.count("\n") == 1
    newest, told = asked(directory.path)
    assert newest == other and told.startswith("This is of the shift at step 24, the newest of 2; for another:")
    direct, told = asked(f"{folder}@24")
    assert direct == own and told == "This is of the spike at step 21, not of step 24\n"


def test_what_replays_of_the_capsules_own_anomaly_have_shown_is_not_said_of_another(tmp_path: Path) -> None:
    capsule = keep(load(make(tmp_path / "spike-13")), counterfactuals=tried(("skip-batch", "prevented")))
    assert "prevented" in post_mortem(capsule) and "gone with skip-batch" in section(post_mortem(capsule), 5)
    other = post_mortem(capsule, an_anomaly(id="spike-14", step=14))
    assert other.startswith("# Post-mortem: spike at step 14") and "prevented" not in other and "gone with" not in other


def test_the_symptoms_do_not_deny_what_the_diagnosis_saw_of_the_batch(tmp_path: Path) -> None:
    """It sees the raw batches and more of the past than the record may still hold when the post-mortem is written."""
    known = Known.of_capsule(load(make(tmp_path / "spike-13")))
    known = replace(known, batches={step: (MicroBatch(),) for step in (10, 11, 12)})
    assert module._unusual(known) == "not known: too little is recorded here of the batches before it (2 steps with batches)"
    seen, other = words(12, "0", "mean", 2590.0, 12), "as the batch of step 12 is, so was the batch of step 11"
    twice = tuple(Hypothesis(name, (seen, other), (), None, of_batch=(seen,)) for name in ("a", "b"))
    known = replace(known, anomaly=an_anomaly(hypotheses=twice))
    assert "2.59e+03 sigmas above usual" in seen and module._unusual(known) == seen, "by what it is about, not by its words"


def test_a_rule_s_event_has_one_and_nobody_is_told_to_sync(tmp_path: Path) -> None:
    rule = an_anomaly(
        id="a-rule", kind="rule", step=21, onset=20, capsule=None, hypotheses=(), value=9.0, expected=5.0, score=1.0,
        terms="the rule is train/loss > 5 for 2 steps",
    )  # fmt: skip
    directory = a_run(tmp_path / "run-1", anomaly=rule)
    for reference in (f"{directory.path}@21", f"{directory.path}"):
        said = CliRunner().invoke(app, ["report", reference, "--post-mortem"])
        assert said.exit_code == 0 and "sync" not in said.output, said.output
        assert "| Value | 9, the rule is train/loss > 5 for 2 steps |" in said.stdout and "sigma" not in section(said.stdout, 1)
        assert "train/loss not told again (it was 9, the rule is train/loss > 5 for 2 steps)" in section(said.stdout, 6)
        assert "nothing to replay" in section(said.stdout, 3) and "No cause is looked for" in section(said.stdout, 2)
        assert "Made from the run's record: the rule at step 21 has no capsule" in said.stderr


def test_a_capsule_that_was_promised_is_waited_for(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", anomaly=an_anomaly(id="a-20", step=21, onset=20, capsule="capsules/spike-21"))
    said = CliRunner().invoke(app, ["report", f"{directory.path}@21", "--post-mortem"])
    assert said.exit_code != 0 and "trackbridge sync" in said.output
