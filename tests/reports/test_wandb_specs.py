"""W&B views are built offline, equal what is checked in, load again with the real library, and draw what a real run has."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.reports import specs
from tests.reports.specs import charts, spec
from trackbridge import names, panels
from trackbridge.panels import PANELS, TEMPLATES, Panel
from trackbridge.records import Anomaly
from trackbridge.reports import wandb_report, wandb_workspace
from trackbridge.reports.wandb_report import Subject, build, five_answers, title_of, view_name

# wandb-workspaces declares its models the old way.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

SPIKE, HEALTH = TEMPLATES["spike-forensics"], TEMPLATES["run-health"]
LINE, PICTURE = "Run History Line Plot", "Media Browser"


def titles(found: dict[str, Any]) -> list[str]:
    return [chart["config"].get("chartTitle", "") for chart in charts(found)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_checked_in_view_is_what_the_code_builds(name: str) -> None:
    assert json.loads(specs.golden(name).read_text(encoding="utf-8")) == spec(name), "run: make dashboards"


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_loads_again_and_equals_itself(name: str) -> None:
    found = spec(name)
    json.dumps(found, allow_nan=False)
    assert specs.again(name, found) == found


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_series_of_a_chart_is_in_the_catalogue(name: str) -> None:
    catalogue = {metric.name for metric in names.CATALOGUE}
    members = [re.sub("<.*>", "h.0.w", metric) for metric in catalogue]
    drawn = list(charts(spec(name)))
    assert drawn
    for chart in drawn:
        config = chart["config"]
        if chart["viewType"] == LINE:
            assert config["xAxis"] == names.STEP
            assert bool(config["metrics"]) != ("metricRegex" in config), "W&B draws one of the two"
            assert set(config["metrics"]) <= catalogue
            for expression in config.get("expressions", ()):
                assert set(re.findall(r"\$\{(.+?)\}", expression)) <= catalogue
            if "metricRegex" in config:
                assert any(re.fullmatch(config["metricRegex"], member) for member in members)
        elif chart["viewType"] == PICTURE:
            maps = [panel for panel in PANELS if panel.view == "heatmap"]
            assert config["mediaKeys"][0] in [panels.picture(panel, whole=whole) for panel in maps for whole in (False, True)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_one_step_is_never_averaged_away(name: str) -> None:
    for chart in charts(spec(name)):
        if chart["viewType"] == LINE:
            config = chart["config"]
            assert (config["pointVisualizationMethod"], config["smoothingType"]) == ("bucketing-gorilla", "none")
            assert config["ignoreOutliers"] is False


@pytest.mark.parametrize(("view", "series"), [("line", ("host/rss_bytes",)), ("heatmap", ("layer/<parameter>/grad_max",))])
def test_a_new_panel_is_one_entry(monkeypatch: pytest.MonkeyPatch, view: Any, series: tuple[str, ...]) -> None:
    """Wherever its section is: in every report that has it and in the workspace."""
    new = Panel("new", "layers", "A new panel", series, view)
    before = {name for name in TEMPLATES if any("A new panel" in title for title in titles(spec(name)))}
    monkeypatch.setattr(panels, "PANELS", (*PANELS, new))
    shown = {name for name in TEMPLATES if any("A new panel" in title for title in titles(spec(name)))}
    assert before == set()
    assert shown == {name for name, t in TEMPLATES.items() if any(use.section == "layers" for use in t.uses)}
    assert {"spike-forensics", "layer-atlas", "workspace"} <= shown


def test_a_renamed_series_breaks_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "CATALOGUE", tuple(metric for metric in names.CATALOGUE if metric.name != "grad/norm"))
    monkeypatch.setattr(names, "_index", names._index.__wrapped__)
    with pytest.raises(KeyError, match="grad/norm"):
        spec("run-health")


def test_the_window_is_around_the_onset_which_is_marked() -> None:
    early = build(SPIKE, replace(specs.RUN, anomaly=specs.SPIKE.updated(onset=18, step=20)))
    first = next(charts(early))["config"]
    assert (first["xAxisMin"], first["xAxisMax"]) == (0, 18 + wandb_report.WINDOW)
    assert first["chartTitle"] == "Loss (onset: step 18)"
    whole = [chart["config"] for chart in charts(early) if chart["config"].get("chartTitle") == "Loss"]
    assert len(whole) == 1 and "xAxisMin" not in whole[0]


def test_the_needle_is_at_the_onset_and_nowhere_else() -> None:
    def evaluate(expression: str, values: dict[str, float]) -> float:
        return float(eval(re.sub(r"\$\{(.+?)\}", lambda found: repr(values[found[1]]), expression)))

    loss, norm = (
        chart["config"]["expressions"][0] for chart in list(charts(build(SPIKE, specs.RUN)))[:2]
    )  # fmt: skip
    onset = specs.SPIKE.onset
    for step, height, factor in ((onset, 9.5, 2.0), (onset - 1, 0.0, 1.0), (onset + 1, 0.0, 1.0), (0, 0.0, 1.0)):
        values = {"train/loss": 9.5, "grad/norm": 3.0, "trackbridge/step": float(step)}
        assert evaluate(loss, values) == pytest.approx(height, abs=1e-4)
        assert evaluate(norm, values) == pytest.approx(3.0 * factor, rel=1e-4)


def test_panels_without_a_series_in_the_run_are_left_out() -> None:
    present = ["train/loss", "layer/h.0.w/grad_norm", "grad/norm_local"]
    found = build(SPIKE, replace(specs.RUN, present=present, pictures=[], texts={}, artifact=None))
    assert titles(found) == [
        "Loss (onset: step 118)", "Gradient norm (onset: step 118)", "Gradient norm by parameter (onset: step 118)",
        "Loss", "Gradient norm",
    ]  # fmt: skip
    assert [chart["config"]["metrics"] for chart in charts(found)][1] == ["grad/norm_local"], "a shard's own is not hidden"
    with_picture = build(TEMPLATES["layer-atlas"], replace(specs.RUN, present=present, pictures=["pictures/gradient-map-run"]))
    assert "Gradient norm, every parameter" in titles(with_picture)


def test_the_five_questions_come_first_and_in_order() -> None:
    for name in TEMPLATES.keys() - {"workspace"}:
        found = spec(name)
        text = found["blocks"][1]["content"]
        places = [text.index(f"**{question}.**") for question in wandb_report.QUESTIONS]
        assert places == sorted(places), name
    about = five_answers(SPIKE, specs.RUN)
    assert "9.5" in about and "2.25" in about and "step **118**" in about and "corrupt-batch" in about
    assert "trackbridge pull wandb:my-team/my-project/spike-run-0001-120:step-120" in about
    assert "No anomaly" in five_answers(HEALTH, replace(specs.RUN, anomaly=None, present=["train/loss"], artifact=None))
    blind = five_answers(SPIKE, Subject("e", "p", "r", step=7))
    assert "Made without looking" in blind and "step 7" in blind and "wandb:e/p/r@7" in blind


def test_the_story_is_on_it() -> None:
    text = "\n".join(str(block.get("content", "")) for block in spec("spike-forensics")["blocks"])
    for wanted in ("# Post-mortem", "| micro-batch |", "trackbridge replay wandb:my-team", "Tier **re-execute**"):
        assert wanted in text
    assert "spike-run-0001-120" in json.dumps(spec("spike-forensics")["blocks"][-2])


def test_a_runs_anomalies_are_a_table_in_its_health() -> None:
    assert "| 118 |" in "\n".join(str(block.get("content", "")) for block in spec("run-health")["blocks"])


def test_pictures_say_which_step_to_move_their_slider_to() -> None:
    step = specs.SPIKE.step
    near = [title for title in titles(spec("spike-forensics")) if title.endswith(f" (slider to step {step})")]
    assert len(near) == sum(panel.view == "heatmap" for panel in PANELS)
    assert not [title for title in titles(spec("layer-atlas")) if "slider" in title], "of a whole run there is one"


def test_a_report_is_known_by_what_it_is_about() -> None:
    one = view_name(SPIKE, specs.RUN)
    assert re.fullmatch("[a-z]{12}", one)
    assert one == view_name(SPIKE, Subject("other", "place", "run-0001", step=120)), "known or not, the same anomaly"
    others = {view_name(HEALTH, specs.RUN), view_name(SPIKE, replace(specs.RUN, run_id="r2")),
              view_name(SPIKE, replace(specs.RUN, anomaly=specs.SPIKE.updated(step=121)))}  # fmt: skip
    assert len({one, *others}) == 4
    assert view_name(HEALTH, specs.RUN) == view_name(HEALTH, replace(specs.RUN, anomaly=None)), "a run's view is one"
    assert re.fullmatch("nw-[a-z]{11}-v", wandb_workspace.workspace_name(specs.PROJECT))


def test_a_title_can_be_an_address() -> None:
    odd = replace(specs.RUN, name="a/b--c " * 30)
    assert "/" not in title_of(SPIKE, odd) and "--" not in title_of(SPIKE, odd) and len(title_of(SPIKE, odd)) <= 128


def test_nonfinite_values_do_not_spoil_the_json() -> None:
    bad: Anomaly = specs.SPIKE.updated(value=float("nan"), score=float("inf"), kind="nonfinite")
    found = build(SPIKE, replace(specs.RUN, anomaly=bad))
    json.dumps(found, allow_nan=False)
    assert "not finite" in five_answers(SPIKE, replace(specs.RUN, anomaly=bad))
