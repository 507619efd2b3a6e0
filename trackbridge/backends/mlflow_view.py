"""The charts of an MLflow experiment, laid out from the panels: a saved view, which the runs page lists and a link opens.

MLflow keeps such a view in a tag of the experiment, ``mlflow.sharedViewState.<id>``: JSON with a name, two times in
milliseconds, and the state of the page, deflated. This is not documented; tested with MLflow 3.17 and 3.18. MLflow's charts
take no expressions, so the series are listed; a view that is there keeps its series, for other runs have others.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trackbridge.panels import PANELS, SECTIONS, Panel

VIEW = "trackbridge"
TAG = f"mlflow.sharedViewState.{VIEW}"
MOST = 20_000
"""Characters that an experiment's tag may have."""
LINES = 32
"""Series of a family in one chart."""
_DEFLATED = "deflate;"


def link(experiment: str) -> str:
    """The address of the view, below that of the server."""
    return f"#/experiments/{experiment}/runs?viewStateShareKey={VIEW}&compareRunsMode=CHART&workflowType=machine_learning"


def build(present: Collection[str], old: str | None, now: int, key: Callable[[str], str]) -> str | None:
    """The value of `TAG` for runs with the series `present`, in addition to those of the view `old`. `now`: milliseconds;
    `key` gives MLflow's name of a series. None if nothing is new in it."""
    before = state(old)
    held = {chart.get("uuid"): chart.get("selectedMetricKeys", []) for chart in before.get("compareRunCharts", ())}
    drawn = {}
    for panel in PANELS:
        if panel.view in ("line", "scalar"):
            own = [key(name) for name in panel.members(sorted(present))]
            keys = [*panel.series, *sorted({*own, *held.get(panel.id, ())})]
            drawn[panel.id] = [name for name in dict.fromkeys(keys) if name in own or name in held.get(panel.id, ())]
    lines = LINES
    found = _state(drawn, lines)
    if found == before:
        return None
    created = json.loads(old).get("createdAt", now) if before and old else now
    while len(value := _tag(found, created, now)) > MOST and lines > 1:
        lines //= 2
        found = _state(drawn, lines)
    return value


def state(value: str | None) -> dict[str, Any]:
    """The state of the page that the tag's `value` holds; {} if it holds none that we can read."""
    try:
        packed = json.loads(value or "")["state"]
        if packed.startswith(_DEFLATED):
            packed = zlib.decompress(base64.b64decode(packed.removeprefix(_DEFLATED))).decode()
        found: dict[str, Any] = json.loads(packed)
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return {}
    return found


def _tag(found: dict[str, Any], created: int, now: int) -> str:
    packed = base64.b64encode(zlib.compress(json.dumps(found, separators=(",", ":")).encode(), 9)).decode()
    return json.dumps({"name": VIEW, "createdAt": created, "updatedAt": now, "state": _DEFLATED + packed})


def _state(drawn: Mapping[str, list[str]], lines: int) -> dict[str, Any]:
    """The page: a section per section, a chart per panel that has keys in `drawn`, at most `lines` of them."""
    charts = [_chart(panel, keys[:lines]) for panel in PANELS if (keys := drawn.get(panel.id))]
    used = {chart["metricSectionId"] for chart in charts}
    return {
        "compareRunCharts": charts,
        "compareRunSections": [
            {"uuid": section, "name": heading, "display": True, "isReordered": False}
            for section, heading in SECTIONS.items()
            if section in used
        ],
        "isAccordionReordered": True,
    }


def _chart(panel: Panel, keys: list[str]) -> dict[str, Any]:
    common = {
        "uuid": panel.id,
        "metricSectionId": panel.section,
        "displayName": f"{panel.title} ({panel.unit})" if panel.unit else panel.title,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 10,
        "metricKey": keys[0],
        "selectedMetricKeys": keys,
    }
    if panel.view == "scalar":
        return {**common, "type": "BAR"}
    return {
        **common,
        "type": "LINE",
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "scaleType": panel.scale,
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": False,
        "useGlobalXaxisKey": False,
        "ignoreOutliers": False,
        "range": {},
    }
