"""W&B reports from templates, as the JSON that W&B's server stores: built and read without a network.

What is on a report is data (`trackbridge.panels`). W&B makes up ids at random; ours count, so that the same subject gives the
same bytes. A report has its own name on the server, made of what it is about, so that making it again updates it.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trackbridge import panels
from trackbridge.answers import QUESTIONS, answers
from trackbridge.panels import Panel, Template, Use
from trackbridge.plugins import require
from trackbridge.records import Anomaly

WINDOW = 50
"""Steps shown before the onset and after the detection."""
COLUMNS = 24
HEIGHT = 8
PICTURE_HEIGHT = 12
_TITLE = 128

ASKED_NOBODY = "Made without looking at the run: see the charts below, or make this report again without --dry-run."
# Of all runs of a project: where each question is answered.
_COMPARED = (
    "Anomalies of each run: the bars below; each is described in the run's summary under anomaly/.",
    "Where the anomaly score has a point: that is the step of the detection.",
    "The height of that point, in robust sigmas, or a ratio for a fault by name; and how far the loss went beside it.",
    "The extremes over all layers, run against run.",
    "Open the worst run's spike forensics: `trackbridge report wandb:{entity}/{project}/RUN_ID --template spike-forensics`.",
)


@dataclass(frozen=True)
class Subject:
    """What a report is about. `run_id` is "" for all runs of a project.

    `step` is the anomaly's, where it is all that is known of it. `present`: the series of the run in W&B (None: unknown, then
    every panel is drawn). `pictures`: the names of the pictures (`panels.picture`) and the page that are there (None: unknown).
    `texts`: Markdown by its id in `panels.CONTENTS`. `artifact`: the name of the capsule's artifact. `ref`: what
    `trackbridge pull` takes.
    """

    entity: str
    project: str
    run_id: str = ""
    name: str = ""
    anomaly: Anomaly | None = None
    step: int | None = None
    present: Collection[str] | None = None
    pictures: Collection[str] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    artifact: str | None = None

    @property
    def ref(self) -> str:
        at = self.detected
        where = f"{self.artifact}:step-{at}" if self.artifact else f"{self.run_id}{'' if at is None else f'@{at}'}"
        return f"wandb:{self.entity}/{self.project}/{where}"

    @property
    def commands(self) -> tuple[str, ...]:
        return (f"trackbridge pull {self.ref}", f"trackbridge replay {self.ref} --build my_module:build")

    @property
    def detected(self) -> int | None:
        """The step that anomaly, capsule and pictures go by."""
        return self.anomaly.step if self.anomaly else self.step

    @property
    def onset(self) -> int | None:
        return self.anomaly.onset if self.anomaly else self.step


def build(template: Template, subject: Subject) -> dict[str, Any]:
    """The report's spec. Raises `KeyError` for a series that the catalogue does not have, `MissingExtraError` without
    wandb-workspaces."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    blocks = [wr.MarkdownBlock(five_answers(template, subject))]
    for use in template.uses:
        blocks += _section(use, template, subject)
    title = title_of(template, subject)
    return to_spec(wr.Report(entity=subject.entity, project=subject.project, title=title, width="readable", blocks=blocks))


def five_answers(template: Template, subject: Subject) -> str:
    """The five questions with their answers, as Markdown: the top of every report."""
    if template.about == "project":
        given = [text.format(entity=subject.entity, project=subject.project) for text in _COMPARED]
        pairs = list(zip(QUESTIONS, given, strict=True))
    elif subject.anomaly is not None:
        pairs = answers(subject.anomaly, subject.commands if subject.artifact else ())
    elif subject.step is not None or subject.present is None:
        at = "" if subject.step is None else f"Around step {subject.step}. "
        look = f"Bring the evidence to your machine: `{subject.commands[0]}`"
        pairs = list(zip(QUESTIONS, (f"{at}{ASKED_NOBODY}", at or "See the anomaly score.", "See the anomaly score.",
                                     "See below, layer by layer.", look), strict=True))  # fmt: skip
    else:
        said = ("No anomaly was detected.", "Nowhere in this run.", "Not at all.", "Nothing.", "Nothing needs to be done.")
        pairs = list(zip(QUESTIONS, said, strict=True))
    return "\n\n".join(f"**{question}.** {answer}" for question, answer in pairs)


def title_of(template: Template, subject: Subject) -> str:
    """Without a slash: W&B makes the report's address of it, and its client cannot find a report with one in its title."""
    at = "" if subject.detected is None else f" at step {subject.detected}"
    what = f": {subject.anomaly.title}" if subject.anomaly else ("" if not at else ": anomaly")
    said = f"{template.title}{what}{at}" if template.about == "anomaly" else template.title
    of = f" ({subject.name or subject.run_id})" if subject.run_id else ""
    return f"{said}{of}".replace("/", " ").replace("--", "-")[:_TITLE]


def view_name(template: Template, subject: Subject) -> str:
    """The report's name on the server: 12 lower-case letters, as W&B's own are, and the same for the same template, run and
    step. This is how a report is found again."""
    at = str(subject.detected) if template.about == "anomaly" else ""
    key = "\n".join(("trackbridge", template.name, subject.run_id, at))
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    letters = string.ascii_lowercase
    return "".join(letters[(number // len(letters) ** place) % len(letters)] for place in range(12))


def to_spec(report: Any) -> dict[str, Any]:
    """A wandb-workspaces report as strict JSON with stable ids."""
    return stable(json.loads(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)))


def stable(spec: dict[str, Any]) -> dict[str, Any]:
    """`spec` with counted ids instead of W&B's random ones, and no NaN."""
    numbers = count(1)
    for item in _walk(spec):
        if "__id__" in item:
            item["__id__"] = f"panel{next(numbers):06d}"
        if "runFeed" in item:
            item["id"] = "runs000001"
    return spec


def from_spec(spec: dict[str, Any], entity: str, project: str, title: str) -> Any:
    """The wandb-workspaces report that `spec` describes; the inverse of `to_spec`."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    internal = require("wandb_workspaces.reports.v2.internal", "reports")
    view = internal.ReportViewspec(
        display_name=title,
        description="",
        project=internal.Project(entity_name=entity, name=project),
        spec=internal.Spec.model_validate(spec),
    )
    return wr.Report._from_model(view)


def _section(use: Use, template: Template, subject: Subject) -> Iterator[Any]:
    """The blocks of one section: its charts in a grid, then its texts and tables. Nothing if it has nothing to show."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    found = [panel for panel in panels.of(use) if shows(panel, subject, near=use.near)]
    if template.about == "project" and use.section == "outcome":
        found = [panel for panel in found if panel.view != "scalar"]
    if not found:
        return
    yield wr.H2(use.title or panels.SECTIONS[use.section])
    charts = [panel for panel in found if panel.series]
    if charts:
        onset = subject.onset if use.near else None
        drawn = list(plots(charts, onset, subject.detected, present=subject.present, across=template.about == "project"))
        if template.about == "project" and use.section == "outcome":
            drawn += _comparison(drawn)
        yield wr.PanelGrid(runsets=[_runset(subject)], panels=drawn)
    for panel in found:
        if panel.content == "capsule" and subject.artifact is not None:
            yield wr.MarkdownBlock(_commands(subject))
            if panel.content in subject.texts:
                yield wr.MarkdownBlock(subject.texts[panel.content])
            yield wr.WeaveBlockArtifact(subject.entity, subject.project, subject.artifact, "files")
            if panels.PAGE in (subject.pictures or ()):
                page = wr.MediaBrowser(
                    media_keys=[panels.PAGE], num_columns=1, layout=wr.Layout(0, 0, COLUMNS, 2 * PICTURE_HEIGHT)
                )
                yield wr.PanelGrid(runsets=[_runset(subject)], panels=[page])
        elif panel.content in subject.texts:
            yield wr.H3(panel.title)
            yield wr.MarkdownBlock(subject.texts[panel.content])


def shows(panel: Panel, subject: Subject, *, near: bool = False) -> bool:
    """Whether the subject has what `panel` shows (`near` the anomaly), as far as is known."""
    if panel.content == "capsule":
        return subject.artifact is not None
    if panel.content:
        return panel.content in subject.texts
    if panel.view == "heatmap" and subject.pictures is not None:
        # made from the journal, which has every layer; W&B may have none of them
        return panels.picture(panel, whole=not near) in subject.pictures
    return subject.present is None or any(map(panel.draws, subject.present))


def plots(
    chosen: Iterable[Panel],
    onset: int | None = None,
    detected: int | None = None,
    *,
    present: Collection[str] | None = None,
    across: bool = False,
) -> Iterator[Any]:
    """The panels as wandb-workspaces panels, in rows of `COLUMNS`. With `onset`: cut to the steps around it, which is marked;
    pictures are those of the step `detected`, but W&B opens at the newest and takes no step, so their titles say which.
    `present`: the series that there are, if that is known. `across`: for several runs."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    x = y = tallest = 0
    for panel in chosen:
        if x + panel.width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        high = PICTURE_HEIGHT if panel.view == "heatmap" else HEIGHT
        at = wr.Layout(x, y, panel.width, high)
        if panel.view == "heatmap":
            picture = panels.picture(panel, whole=onset is None)
            which = "" if onset is None else f" (slider to step {detected})"
            yield wr.MediaBrowser(title=f"{panel.title}{which}", media_keys=[picture], num_columns=1, layout=at)
        elif panel.view == "scalar":
            most = "max" if across else None
            yield wr.ScalarChart(title=panel.title, metric=wr.SummaryMetric(panel.series[0]), groupby_aggfunc=most, layout=at)
        else:
            yield _line(panel, onset, present, at)
        x, tallest = x + panel.width, max(tallest, high)


def _line(panel: Panel, onset: int | None, present: Collection[str] | None, layout: Any) -> Any:
    wr = require("wandb_workspaces.reports.v2", "reports")
    # W&B draws what is listed or what an expression matches, never both.
    listed = list(panel.series) if present is None else panel.members(sorted(present))
    given: dict[str, Any] = {"metric_regex": panel.regex} if panel.families else {"y": listed}
    title = panel.title
    if onset is not None:
        given["range_x"] = (max(onset - WINDOW, 0), onset + WINDOW)
        if panel.marked:
            title += f" (onset: step {onset})"
            if not panel.families and (panel.scale == "log" or panel.section == "outcome"):
                given["custom_expressions"] = [onset_mark(panel, listed[0], onset)]
    # Buckets keep the extremes; sampling or smoothing would hide the one step that matters.
    return wr.LinePlot(
        title=title,
        x=panel.axis,
        log_y=panel.scale == "log" or None,
        title_y=panel.unit or None,
        point_visualization_method="bucketing-gorilla",
        smoothing_type="none",
        ignore_outliers=False,
        layout=layout,
        **given,
    )


def onset_mark(panel: Panel, series: str, onset: int) -> str:
    """W&B's charts take no marker, but arithmetic over series: a needle at the onset, as high as `series` there (on a log scale
    twice as high, on top of the series, because a needle has no foot there)."""
    series, away = f"${{{series}}}", f"(${{{panel.axis}}} - {onset})"
    needle = f"1 / (1 + 1000000 * {away} * {away})"
    return f"{series} * (1 + {needle})" if panel.scale == "log" else f"{series} * {needle}"


def _comparison(above: list[Any]) -> list[Any]:
    """What only several runs have: their anomalies side by side, and what differs between them."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    y = max(panel.layout.y + panel.layout.h for panel in above)
    count_, half = panels.known("anomaly/count"), COLUMNS // 2
    assert count_ is not None
    return [
        wr.BarPlot(title="Anomalies by run", metrics=[count_.name], layout=wr.Layout(0, y, half, HEIGHT)),
        wr.RunComparer(diff_only="split", layout=wr.Layout(half, y, half, HEIGHT)),
    ]


def _commands(subject: Subject) -> str:
    commands = "\n".join(subject.commands)
    return f"Bring the evidence to your machine, and run the bad step again:\n\n```bash\n{commands}\n```"


def _runset(subject: Subject) -> Any:
    """Only this run (all runs without one). Without entity and project in it, W&B takes the report's own, and nobody is asked
    for them now."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    ws = require("wandb_workspaces.workspaces", "reports")
    if not subject.run_id:
        return wr.Runset(name="runs", groupby=[])
    return wr.Runset(name=subject.name or subject.run_id, filters=[ws.Metric("ID") == subject.run_id], groupby=[])


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every object inside `value`, in document order. Non-finite numbers become null on the way."""
    if isinstance(value, dict):
        yield value
        for key, item in value.items():
            if isinstance(item, float) and not math.isfinite(item):
                value[key] = None
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)
