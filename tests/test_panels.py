"""Panels are data: each names series that the catalogue and a real run have, or says why a run may lack them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from trackbridge import names, panels
from trackbridge.panels import CONDITIONAL, CONTENTS, PANELS, SECTIONS, TEMPLATES, Panel, Use


def test_ids_are_unique_and_sections_exist() -> None:
    assert len({panel.id for panel in PANELS}) == len(PANELS)
    assert {panel.section for panel in PANELS} == set(SECTIONS)
    for template in TEMPLATES.values():
        for use in template.uses:
            assert use.section in SECTIONS
            there = {panel.id for panel in PANELS if panel.section == use.section}
            assert set(use.only) <= there and there


def test_every_panel_is_in_a_report() -> None:
    uses = [use for template in TEMPLATES.values() for use in template.uses]
    shown = {panel.id for use in uses for panel in panels.of(use)}
    assert {panel.id for panel in PANELS} == shown


def test_every_series_is_in_the_catalogue() -> None:
    catalogue = {metric.name for metric in names.CATALOGUE}
    drawn = {series for panel in PANELS for series in panel.series}
    assert drawn <= catalogue
    assert set(CONDITIONAL) <= drawn, "a reason for a series that no panel draws"
    assert all((panel.content in CONTENTS) == (not panel.series) for panel in PANELS)


def test_a_renamed_series_breaks_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for gone, section in (("train/loss", "outcome"), ("act/<module>/kurtosis", "layers")):
        with monkeypatch.context() as patch:
            patch.setattr(names, "CATALOGUE", tuple(metric for metric in names.CATALOGUE if metric.name != gone))
            patch.setattr(names, "_index", names._index.__wrapped__)
            with pytest.raises(KeyError, match=re.escape(gone)):
                panels.of(Use(section))


def test_a_panel_draws_its_series_and_families() -> None:
    lr = Panel("lr", "settings", "x", ("train/lr", "train/lr/<group>"))
    assert [name for name in ("train/lr", "train/lr/1", "train/lr_local", "eval/train/lr", "train/loss") if lr.draws(name)] == [
        "train/lr", "train/lr/1", "train/lr_local",
    ]  # fmt: skip
    assert lr.members(["train/lr/1", "train/loss", "train/lr"]) == ["train/lr", "train/lr/1"]
    assert lr.families == ("train/lr/<group>",)
    assert lr.members(["train/lr_local", "train/lr"]) == ["train/lr_local", "train/lr"]
    assert Panel("x", "speed", "x", ("perf/step_s", "perf/fetch_s")).unit == "s"
    assert Panel("x", "speed", "x", ("perf/step_s", "train/loss")).unit == ""


def test_empty_panels_are_left_out() -> None:
    assert [panel.id for panel in panels.of(Use("memory"), ["host/rss_bytes"])] == ["host-memory"]
    assert [panel.id for panel in panels.of(Use("story"), [])] == [panel.id for panel in PANELS if panel.section == "story"]
    assert [panel.id for panel in panels.of(Use("outcome", only=("loss",)))] == ["loss"]


def test_a_panel_is_hashable_data() -> None:
    assert replace(PANELS[0]) == PANELS[0] and len({*PANELS}) == len(PANELS)
