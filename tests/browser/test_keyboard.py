"""The page without a mouse, and for people who do not see it as most do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.browser.conftest import LAPTOP, PHONE, Demo, Opener
from tests.browser.test_the_page import everything

pytestmark = pytest.mark.timeout(600)  # the demo is made when the first test asks for it
SERIOUS = {"serious", "critical"}


@pytest.mark.parametrize(("scheme", "size"), [("light", LAPTOP), ("dark", LAPTOP), ("light", PHONE), ("dark", PHONE)])
def test_axe_finds_nothing_serious(watch: Opener, run_file: str, scheme: str, size: tuple[int, int]) -> None:
    watched = watch(scheme, size)
    tab = watched.open(run_file)
    everything(watched)
    found = Axe().run(tab).response
    bad = [
        f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]
    assert bad == []
    assert len(found["passes"]) > 20, "the rules did run"


def test_axe_would_notice(watch: Opener, run_file: str) -> None:
    tab = watch().open(run_file)
    tab.evaluate("document.querySelectorAll('.answer').forEach((each) => { each.style.color = '#cccccc' })")
    assert "color-contrast" in {each["id"] for each in Axe().run(tab).response["violations"]}


def focused(tab: Any) -> dict[str, Any]:
    found: dict[str, Any] = tab.evaluate(
        """(() => { const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
        return { tag: at.tagName, id: at.id, text: at.textContent.slice(0, 60), outline: parseFloat(style.outlineWidth),
          style: style.outlineStyle, top: box.top + scrollY, seen: box.bottom > 0 && box.top < innerHeight }; })()"""
    )
    return found


def test_tab_goes_through_the_page_in_order_and_the_focus_is_seen(watch: Opener, run_file: str) -> None:
    tab = watch().open(run_file)
    visited = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        at = focused(tab)
        if at["tag"] == "BODY":
            break
        assert at["outline"] >= 1 and at["style"] != "none", f"no focus ring on {at}"
        assert at["seen"], f"the focus is off the screen: {at}"
        visited.append(at)
    assert visited[0]["text"] == "Timeline", "the sections come first"
    order = [at["id"] for at in visited if at["id"] in ("step", "heatmap-statistic", "layer-choice")]
    assert order[:2] == ["step", "heatmap-statistic"]
    rest = [at["top"] for at in visited if at["tag"] not in ("A",)]
    assert all(later >= earlier - 400 for earlier, later in pairwise(rest)), "from top to bottom"


def test_the_sections_are_reached_by_their_links(watch: Opener, run_file: str) -> None:
    tab = watch().open(run_file)
    tab.get_by_role("link", name="Layers").press("Enter")
    assert tab.evaluate("document.querySelector('#layers').getBoundingClientRect().top") < 120
    assert focused(tab)["text"] == "Layer by layer"


def test_arrow_keys_move_the_step_and_every_chart_reads_it(watch: Opener, demo: Demo, run_file: str) -> None:
    tab = watch().open(run_file)
    slider = tab.locator("#step")
    assert slider.input_value() == str(demo.onset)
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(demo.onset - 1)
    said = tab.locator("#step-reading").inner_text()
    steps, values = demo.record.series("train/loss")
    loss = float(values[steps == demo.onset - 1][0])
    assert said.startswith(f"step {demo.onset - 1}, train/loss {loss:.4g}")
    assert slider.get_attribute("aria-valuetext") == said
    readings = tab.locator("#charts .reading").all_inner_texts()
    assert readings[0] == f"{loss:.4g} at step {demo.onset - 1}"


def test_arrow_keys_move_the_histogram(watch: Opener, demo: Demo, run_file: str) -> None:
    steps = [record.step for record in demo.record.histograms()]
    tab = watch().open(run_file)
    tab.locator("#layers").scroll_into_view_if_needed()
    tab.wait_for_selector("#histogram-step")
    slider = tab.locator("#histogram-step")
    slider.focus()
    tab.keyboard.press("Home")
    assert tab.locator("#histogram-reading").inner_text() == f"step {steps[0]}"
    before = tab.locator(".shapes canvas").first.get_attribute("aria-label")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#histogram-reading").inner_text() == f"step {steps[1]}"
    assert tab.locator(".shapes canvas").first.get_attribute("aria-label") != before
    tab.keyboard.press("End")
    assert tab.locator("#histogram-reading").inner_text() == f"step {steps[-1]}"


def test_charts_say_what_they_show(watch: Opener, demo: Demo, run_file: str) -> None:
    tab = watch().open(run_file)
    said = tab.locator("#charts .plot").first.get_attribute("aria-label")
    steps, values = demo.record.series("train/loss")
    assert f"highest {values.max():.4g} at step {steps[values.argmax()]}" in said
