"""The saved view of a W&B project: every section that is over steps, on our axis, with nothing smoothed or sampled away."""

from __future__ import annotations

import json
from typing import Any

from trackbridge import names, panels
from trackbridge.panels import TEMPLATES
from trackbridge.plugins import require
from trackbridge.reports.wandb_report import Subject, plots, shows, stable, view_name

_CLOSED = ("recorder", "nonfinite", "layers")


def build(subject: Subject) -> dict[str, Any]:
    """The spec of the workspace for all runs of a project. `subject.present`: the series that its runs have."""
    ws = require("wandb_workspaces.workspaces", "reports")
    sections = []
    for use in TEMPLATES["workspace"].uses:
        found = [panel for panel in panels.of(use) if panel.series and shows(panel, subject)]
        if found:
            sections.append(
                ws.Section(
                    name=use.title or panels.SECTIONS[use.section],
                    panels=list(plots(found, present=subject.present, across=True)),
                    is_open=use.section not in _CLOSED,
                    pinned=use.section == "outcome",
                    layout_settings=ws.SectionLayoutSettings(columns=3, rows=2),
                    panel_settings=ws.SectionPanelSettings(x_axis=names.STEP, smoothing_type="none"),
                )
            )
    space = ws.Workspace(
        entity=subject.entity,
        project=subject.project,
        name=TEMPLATES["workspace"].title,
        sections=sections,
        settings=ws.WorkspaceSettings(
            x_axis=names.STEP, smoothing_type="none", point_visualization_method="bucketing", ignore_outliers=False, max_runs=20
        ),
        runset_settings=ws.RunsetSettings(order=[ws.Ordering(ws.Metric("CreatedTimestamp"), ascending=False)]),
    )
    return to_spec(space)


def to_spec(space: Any) -> dict[str, Any]:
    """A wandb-workspaces workspace as strict JSON with stable ids."""
    return stable(json.loads(space._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)))


def from_spec(spec: dict[str, Any], subject: Subject) -> Any:
    """The wandb-workspaces workspace that `spec` describes; the inverse of `to_spec`."""
    ws = require("wandb_workspaces.workspaces", "reports")
    internal = require("wandb_workspaces.workspaces.internal", "reports")
    view = internal.View(
        entity=subject.entity,
        project=subject.project,
        display_name=TEMPLATES["workspace"].title,
        name=workspace_name(subject),
        id="",
        spec=internal.WorkspaceViewspec.model_validate(spec),
    )
    return ws.Workspace._from_model(view)


def workspace_name(subject: Subject) -> str:
    """The view's name on the server, as W&B's own look: ``nw-<11 letters>-v``. One per project: making it again updates it."""
    return f"nw-{view_name(TEMPLATES['workspace'], subject)[:11]}-v"
