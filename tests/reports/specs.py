"""The checked-in W&B views, and how they are made: ``make dashboards``, which is ``python -m tests.reports.specs``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import dashboards
from trackbridge.panels import CONDITIONAL, PANELS, TEMPLATES, Panel
from trackbridge.reports import wandb_report, wandb_workspace
from trackbridge.reports.wandb_report import Subject
from trackbridge.testing import anomaly

SPIKE = anomaly(7, 120, onset=118, recovered_after=9)
TEXTS = {
    "post-mortem": "# Post-mortem",
    "anomalies": "| step |\n|---|\n| 118 |",
    "capsule": "Tier **re-execute**, restart at step 100.",
    "batch": "| micro-batch |\n|---|\n| 0 |",
    "counterfactuals": "| what |\n|---|\n| 1 |",
}
RUN = Subject("my-team", "my-project", "run-0001", "a run", SPIKE, artifact="spike-run-0001-120", texts=TEXTS)
PROJECT = Subject("my-team", "my-project")


def subject(name: str) -> Subject:
    return PROJECT if TEMPLATES[name].about == "project" else RUN


def spec(name: str) -> dict[str, Any]:
    """The spec of the template `name` about the example run or project."""
    build = wandb_workspace.build if name == "workspace" else lambda about: wandb_report.build(TEMPLATES[name], about)
    return build(subject(name))


def again(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """`found` loaded with the real library and written again."""
    if name == "workspace":
        return wandb_workspace.to_spec(wandb_workspace.from_spec(found, subject(name)))
    title = wandb_report.title_of(TEMPLATES[name], subject(name))
    return wandb_report.to_spec(wandb_report.from_spec(found, "my-team", "my-project", title))


def golden(name: str) -> Path:
    return Path(dashboards.__file__).parent / "wandb" / f"{name}.json"


def charts(found: Any) -> Iterator[dict[str, Any]]:
    """Every panel of a spec, of a report or of a workspace."""
    if isinstance(found, dict):
        if "viewType" in found:
            yield found
        else:
            for value in found.values():
                yield from charts(value)
    elif isinstance(found, list):
        for value in found:
            yield from charts(value)


def without_series(present: Collection[str]) -> list[str]:
    """The series of panels that a run with the series `present` lacks although no reason is given for that."""
    series = {each for panel in PANELS for each in panel.series if each not in CONDITIONAL}
    return [each for each in sorted(series) if not Panel("x", "story", "x", (each,)).members(present)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in TEMPLATES:
        golden(name).write_text(json.dumps(spec(name), indent=1) + "\n", encoding="utf-8")
        print(golden(name))
