"""The local page: what it says, that it hides nothing when decimated, that it is safe, and that a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbridge.records import Anomaly, Hypothesis
from trackbridge.reports.page import PageData, Table, decimate, page

SPIKE = Anomaly(
    id="a", kind="spike", step=161, onset=160, severity=0.9, series="train/loss", value=6.69, expected=2.44, score=41.2,
    first_mover=("grad/norm", 159), cascade=(("grad/norm", 159), ("train/loss", 160)), recovered_after=3, time=1.7e9,
    hypotheses=(Hypothesis("corrupt-batch", ("entropy 7.9 bits",), ("gone in 3 steps",), "Leave the batch out."),),
)  # fmt: skip


def made(**changes: Any) -> PageData:
    steps = np.arange(220)
    loss = np.full(220, 2.4)
    loss[160:163] = 6.7
    norm = np.full(220, 1.0)
    norm[160] = np.nan
    given: dict[str, Any] = {
        "title": "Spike at step 160",
        "series": {"train/loss": (steps, loss), "grad/norm": (steps, norm)},
        "anomalies": (SPIKE,),
        "hypotheses": SPIKE.hypotheses,
        "actions": [("Run it again", "trackbridge replay . --build mine:build")],
        "tables": [Table("Batches", ("step", "ids"), [(160, "1, 2")])],
    }
    return PageData(**{**given, **changes})


def block(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def test_the_first_screen_answers_the_five_questions_without_scripts() -> None:
    html = page(made())
    first = re.sub(r"<[^>]+>", "", html[html.index("<main>") : html.index("Timeline")])
    for words in (
        "6.69",
        "2.44",
        "From step 160, seen at step 161",
        "after 3 steps",
        "41.2 robust sigmas",
        "grad/norm at step 159",
    ):
        assert words in first
    assert "trackbridge replay . --build mine:build" in first


def told(anomaly: Anomaly) -> str:
    html = page(made(anomalies=(anomaly,), hypotheses=anomaly.hypotheses))
    return re.sub(r"<[^>]+>", "", html[html.index("<main>") : html.index('<script type="application/json"')])


def test_when_nothing_was_before_the_loss_the_page_says_so() -> None:
    first = (("act/body/rms", 160), ("train/loss", 160))
    tied = SPIKE.updated(first_mover=first[0], cascade=first)
    assert "nothing before the loss itself (all at step 160)" in told(tied)
    own = SPIKE.updated(first_mover=first[1], cascade=(first[1], ("grad/norm", 161)))
    assert "nothing before the loss itself (at step 160)" in told(own)


def test_a_nan_is_not_finite_and_has_no_sigmas() -> None:
    bad = SPIKE.updated(kind="nonfinite", value=float("nan"), expected=2.44, score=float("inf"))
    said = told(bad)
    assert "not finite" in said and "Not a finite number" in said and "sigma" not in said


def test_numbers_and_plurals_are_for_readers() -> None:
    said = told(SPIKE.updated(score=40.3065, recovered_after=1, notes=("peak 7.69 (40 sigma) at step 161",)))
    assert "40.3 robust sigmas" in said and "after 1 step." in said and "Peak 7.69 (40 sigma) at step 161" in said
    assert "Not back to normal within this capsule" in told(SPIKE.updated(recovered_after=None))


def test_unknown_is_shown_only_where_it_leads() -> None:
    known, unknown = Hypothesis("rare-token", ("new",), (), "skip-batch"), Hypothesis("unknown", ("thin",), (), "rerun")
    assert "unknown" not in told(SPIKE.updated(hypotheses=(known, unknown)))
    said = told(SPIKE.updated(hypotheses=(unknown, known)))
    assert "1. unknown" in said and "rerun with the batch left out (run.batches(loader, skip=...))" in said


def test_hostile_text_stays_text() -> None:
    evil = "</script><script>alert(1)</script>"
    steps, values = np.arange(3), np.ones(3)
    html = page(
        made(
            title=evil,
            series={evil: (steps, values)},
            facts={evil: evil},
            actions=[(evil, evil)],
            tables=[Table(evil, (evil,), [(evil,)])],
        )
    )
    assert "alert(1)</script>" not in html
    assert html.count("<script") == 3


def test_a_non_finite_value_is_a_gap_with_a_mark() -> None:
    chart = block(page(made()))["charts"][1]
    assert chart["values"][160] is None
    assert chart["nonfinite"] == [160]


def test_a_page_without_anomalies_says_so() -> None:
    assert "No anomaly was detected." in page(made(anomalies=(), hypotheses=()))


@given(st.lists(st.floats(width=32), min_size=1, max_size=3000), st.integers(4, 200))
def test_decimation_keeps_every_extreme_and_says_non_finite(values: list[float], limit: int) -> None:
    steps, given = np.arange(len(values)), np.array(values)
    kept_steps, kept = decimate(steps, given, limit)
    assert np.array_equal(kept, given[kept_steps], equal_nan=True)
    assert (np.diff(kept_steps) > 0).all()
    finite = given[np.isfinite(given)]
    if len(finite):
        assert kept[np.isfinite(kept)].max() == finite.max()
        assert kept[np.isfinite(kept)].min() == finite.min()
    assert np.isfinite(given).all() == np.isfinite(kept).all()
    assert len(kept) <= max(limit, 3 * (limit // 2) + 2)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium on this machine (.ci/run installs it)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        quiet = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
        ]
        running = play.chromium.launch(executable_path=executable, args=quiet)
        yield running
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_without_a_word_or_a_request(browser: Any, tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(made()), encoding="utf-8")
    tab = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    tab.wait_for_selector("canvas")
    assert tab.locator("canvas").count() == 2
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page must not scroll sideways"
    assert said == []
    assert asked == [file.as_uri()]
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", background)[0]) > 128) == (scheme == "light")
    tab.close()
