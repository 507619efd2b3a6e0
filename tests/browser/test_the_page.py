"""The local page in a real browser: it draws what was recorded, marks the right step, and asks nobody."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.conftest import LAPTOP, PHONE, Demo, Opener, Watched
from tests.test_page import hostile, made
from trackbridge.answers import QUESTIONS
from trackbridge.reports.page import page
from trackbridge.reports.spike import spike_page

pytestmark = pytest.mark.timeout(600)  # the demo is made when the first test asks for it


def everything(watched: Watched) -> Any:
    """Open every group and scroll to the end, so that everything is drawn."""
    tab = watched.tab
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    for top in range(0, tab.evaluate("document.documentElement.scrollHeight") + 1, 700):
        tab.evaluate(f"scrollTo(0, {top})")
        tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return tab


def inked(tab: Any, selector: str) -> int:
    """How many different colours a canvas has: one for an empty one."""
    return int(
        tab.evaluate(
            """(selector) => { const canvas = document.querySelector(selector);
            const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
            return new Set(data).size; }""",
            selector,
        )
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_have_the_recorded_data_and_nobody_is_asked(watch: Opener, demo: Demo, run_file: str, scheme: str) -> None:
    watched = watch(scheme)
    tab = watched.open(run_file)
    everything(watched)
    drawn = {line["label"]: line for chart in watched.charts() for line in chart}
    for name in ("train/loss", "grad/norm"):
        steps, values = demo.record.series(name)
        assert drawn[name]["steps"] == steps.tolist()
        assert np.allclose(np.array(drawn[name]["values"], float), values, rtol=1e-6, equal_nan=True)
    assert inked(tab, "#heatmap canvas") > 20 and inked(tab, "#charts canvas") > 5
    assert watched.said == []
    assert watched.asked == [run_file]
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", background)[0]) > 128) == (scheme == "light")


def test_the_spike_is_marked_at_its_step(watch: Opener, demo: Demo, run_file: str) -> None:
    watched = watch()
    tab = watched.open(run_file)
    tab.wait_for_selector("#charts canvas")
    marks = tab.evaluate("trackbridge.marks()")
    assert marks["from"] == demo.onset
    left, right = marks["pixels"]  # of the band, in the first chart's canvas
    column = tab.evaluate(
        """([x, y]) => { const canvas = document.querySelector("#charts canvas");
        return Array.from(canvas.getContext("2d").getImageData(x, y, 1, 1).data); }""",
        [round((left + right) / 2), marks["top"] + 30],
    )
    beside = tab.evaluate(
        """([x, y]) => { const canvas = document.querySelector("#charts canvas");
        return Array.from(canvas.getContext("2d").getImageData(x, y, 1, 1).data); }""",
        [round(left) - 9, marks["top"] + 60],
    )
    assert column[0] > column[2], "the band is red"
    assert column != beside
    assert marks["at"] == pytest.approx(demo.onset - 0.5)


def test_a_newcomers_five_questions_fit_the_first_screen_in_order(watch: Opener, run_file: str) -> None:
    tab = watch(size=LAPTOP).open(run_file)
    tops = []
    for question in QUESTIONS:
        heading = tab.get_by_role("heading", name=question, exact=True)
        box = heading.locator("xpath=..").bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= LAPTOP[1], f"{question!r} is below the first screen"
        assert box["x"] >= 0 and box["x"] + box["width"] <= LAPTOP[0]
        tops.append((box["y"], box["x"]))
    assert tops == sorted(tops)
    loss = tab.locator("#charts .plot").first.bounding_box()
    assert loss["y"] + 60 < LAPTOP[1], "and the loss can be seen to begin below them"


def test_a_capsules_page_opens_from_disk(watch: Opener, demo: Demo, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(spike_page(demo.capsule), encoding="utf-8")
    watched = watch()
    watched.open(file.as_uri())
    everything(watched)
    drawn = [line["label"] for chart in watched.charts() for line in chart]
    assert drawn[:2] == ["train/loss", "grad/norm"]
    assert watched.said == [] and watched.asked == [file.as_uri()]
    sealed = watch()
    sealed.open((demo.capsule.path / "report.html").as_uri())
    assert sealed.said == []


def test_a_phone_does_not_scroll_sideways(watch: Opener, run_file: str) -> None:
    watched = watch(size=PHONE, has_touch=True, is_mobile=True)
    tab = watched.open(run_file)
    everything(watched)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("innerWidth") == PHONE[0]
    assert tab.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 14


def test_zooming_one_chart_zooms_all_and_everything_comes_back(watch: Opener, demo: Demo, run_file: str) -> None:
    watched = watch()
    tab = watched.open(run_file)
    tab.get_by_role("button", name=f"spike at {demo.onset}").click()
    first, last = tab.evaluate("trackbridge.range()")
    assert first >= 0 and first < demo.onset < last
    assert all(abs(each[0] - first) < 1e-6 for each in tab.evaluate("trackbridge.ranges()"))
    box = tab.locator("#charts .u-over").first.bounding_box()
    tab.mouse.move(box["x"] + 100, box["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    tab.mouse.up()
    inner = tab.evaluate("trackbridge.range()")
    assert first < inner[0] < inner[1] < last
    tab.get_by_role("button", name="Everything").click()
    assert tab.evaluate("trackbridge.range()") is None


def test_a_layer_opens_from_the_table_and_shows_its_statistics(watch: Opener, demo: Demo, run_file: str) -> None:
    watched = watch()
    tab = watched.open(run_file)
    button = tab.locator("td[data-layer] button", has_text="blocks.").nth(1)  # inside a module whose output is watched
    layer = button.inner_text()
    button.click()
    assert tab.locator("#layer-choice").input_value() == f"layer/{layer}"
    titles = tab.locator("#layer .chart h3").all_inner_texts()
    assert {"Gradient norm", "Weight norm", "Activation kurtosis"} <= set(titles)
    lines = {line["label"]: line for chart in watched.charts() for line in chart}
    recorded = demo.record.series(f"layer/{layer}/grad_norm")
    assert np.allclose(lines[f"layer/{layer}/grad_norm"]["values"], recorded[1], rtol=1e-6)


def test_two_steps_are_ranked_by_the_divergence_of_their_weights(watch: Opener, demo: Demo, run_file: str) -> None:
    from trackbridge.histograms import divergence

    records = demo.record.histograms()
    assert len(records) > 1, "the demo records histograms"
    watched = watch()
    tab = watched.open(run_file)
    tab.locator("#compare").scroll_into_view_if_needed()
    tab.wait_for_selector("#comparison tbody tr")
    for slider, value in (("#compare-a", 0), ("#compare-b", len(records) - 1)):
        tab.locator(slider).fill(str(value))
    if tab.get_by_role("button", name=re.compile("All .* layers")).is_visible():
        tab.get_by_role("button", name=re.compile("All .* layers")).click()
        assert tab.evaluate("document.activeElement.getAttribute('role')") == "region", "the button is gone, the focus is not"
    rows = [row.split("\t") for row in tab.locator("#comparison tbody").inner_text().splitlines() if "\t" in row]
    expected = {}
    for name in records[0].names:
        if name.endswith("/weight"):
            before, now = records[0].get(name), records[-1].get(name)
            assert before is not None and now is not None
            expected[name.removeprefix("layer/").removesuffix("/weight")] = divergence(before, now)
    shown = {row[0]: float(row[1].replace("−", "-")) for row in rows}
    assert shown.keys() == expected.keys()
    for layer, value in expected.items():
        assert shown[layer] == pytest.approx(value, rel=2e-3, abs=1e-6)
    assert list(shown.values()) == sorted(shown.values(), reverse=True)


def test_a_run_without_layers_has_its_timeline(watch: Opener, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(page(made(series={"train/loss": (np.arange(220), np.linspace(3, 2, 220))})), encoding="utf-8")
    watched = watch()
    tab = watched.open(file.as_uri())
    tab.locator("#charts canvas").wait_for()
    assert not tab.locator("#heatmap").is_visible() and not tab.get_by_text("Layers that changed most").is_visible()
    assert not tab.get_by_role("link", name="Layers").is_visible() and watched.said == []


def test_words_and_tables_are_there_without_scripts(watch: Opener, run_file: str) -> None:
    watched = watch(java_script_enabled=False)
    watched.tab.goto(run_file)
    assert watched.tab.get_by_role("heading", name="What happened", exact=True).is_visible()
    assert watched.tab.get_by_text("Hypotheses, with what speaks for").is_visible()


def test_a_hostile_run_cannot_act(watch: Opener, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(page(hostile()), encoding="utf-8")
    watched = watch()
    shown: list[str] = []
    watched.tab.on("dialog", lambda dialog: (shown.append(dialog.message), dialog.dismiss()))
    tab = watched.open(file.as_uri())
    everything(watched)
    assert shown == [] and watched.said == [] and watched.asked == [file.as_uri()]
    assert tab.locator("img, iframe, form").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_policy_stops_a_script_that_got_in(watch: Opener, tmp_path: Path) -> None:
    """The second wall: even unescaped markup could not run or fetch."""
    file = tmp_path / "injected.html"
    html = page(made()).replace(
        "</main>", "<script>document.title = 'owned'</script><img src='http://127.0.0.1:9/x'></main>", 1
    )
    file.write_text(html, encoding="utf-8")
    watched = watch()
    tab = watched.open(file.as_uri())
    assert tab.title() != "owned"
    assert any("Content Security Policy" in text for text in watched.said)
