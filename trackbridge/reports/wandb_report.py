"""The spike-forensics report for W&B, as the JSON that W&B's server stores: built and read without a network.

What is on it is data (`SECTIONS`); series come from the catalogue in `names`, so a renamed one breaks the build and not the
chart. W&B makes up ids at random; ours count, so that the same anomaly gives the same bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from trackbridge import names
from trackbridge.backends import words
from trackbridge.config import StreamConfig
from trackbridge.errors import UsageError
from trackbridge.history import RunRecord
from trackbridge.plugins import require
from trackbridge.records import Anomaly, Row
from trackbridge.stream import Stream

WINDOW = 50
"""Steps shown before the onset and after the detection."""
COLUMNS = 24
HEIGHT = 8


class RunLike(Protocol):
    @property
    def run_id(self) -> str: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Panel:
    """One line plot over the step. `series` are names from the catalogue; one with ``<...>`` in it is a family, drawn by a
    regular expression. `near`: only the steps around the anomaly."""

    title: str
    series: tuple[str, ...]
    log: bool = False
    near: bool = True
    width: int = COLUMNS // 2

    @property
    def regex(self) -> str | None:
        """What the family members among the series match; None without a family."""
        return "|".join(names.regex(series) for series in self.series if "<" in series) or None

    def draws(self, series: str) -> bool:
        return series in self.series or (self.regex is not None and re.fullmatch(self.regex, series) is not None)


SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What happened",
        (
            Panel("Loss around the anomaly", ("train/loss",)),
            Panel("Gradient norm around the anomaly", ("grad/norm", "grad/norm_clipped"), log=True),
            Panel("Loss, whole run", ("train/loss",), near=False),
            Panel("Anomaly score (sparse: no point is lost)", ("anomaly/score",), near=False),
        ),
    ),
    (
        "What moved first",
        (
            Panel("Largest gradient norm of any parameter", ("layers/grad_norm_max",), log=True),
            Panel("Largest kurtosis of any module", ("layers/kurtosis_max",)),
            Panel("Gradient norm by parameter", ("layer/<parameter>/grad_norm",), log=True),
            Panel("Kurtosis by module", ("act/<module>/kurtosis",)),
            Panel("Update-to-weight ratio by parameter", ("layer/<parameter>/update_ratio",), log=True),
            Panel("Largest activation by module", ("act/<module>/max",), log=True),
        ),
    ),
    (
        "Under which conditions",
        (
            Panel("Learning rate", ("train/lr",), width=8),
            Panel("Loss scale", ("train/loss_scale",), log=True, width=8),
            Panel("Updates skipped", ("optim/skipped",), width=8),
            Panel("Throughput", ("perf/tokens_per_s",), width=8),
            Panel("Step time and its parts", ("perf/step_s", "perf/fetch_s", "perf/forward_s", "perf/backward_s"), width=8),
            Panel("Device memory", ("mem/allocated_bytes", "mem/reserved_bytes"), width=8),
            Panel("Series that were NaN or infinite", ("nonfinite/<series>",), near=False, width=24),
        ),
    ),
)


def build_spec(
    run: RunLike,
    anomaly: Anomaly,
    entity: str,
    project: str,
    *,
    artifact: str | None = None,
    present: Collection[str] | None = None,
) -> dict[str, Any]:
    """The report's spec for one anomaly of one run. `artifact` is the name of the capsule's artifact, if there is one;
    `present` the series of the run: panels that would be empty are left out."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    blocks = [
        wr.MarkdownBlock(words.anomaly_markdown(anomaly)),
        wr.MarkdownBlock(_commands(run, anomaly, entity, project, artifact)),
    ]
    for title, section in SECTIONS:
        panels = [panel for panel in section if present is None or any(panel.draws(series) for series in present)]
        if panels:
            blocks += [wr.H2(title), wr.PanelGrid(runsets=[_runset(run)], panels=list(_plots(panels, anomaly)))]
    if artifact is not None:
        blocks += [wr.H2("The capsule"), wr.WeaveBlockArtifact(entity, project, artifact, "files")]
    report = wr.Report(entity=entity, project=project, title=title_of(anomaly), width="readable", blocks=blocks)
    return to_spec(report)


def spike_forensics(record: RunRecord, *, entity: str = "ENTITY", project: str | None = None) -> dict[str, Any]:
    """The spec for the most severe anomaly of a recorded run. Raises `UsageError` if it has none."""
    if not record.anomalies:
        raise UsageError(f"run {record.info.run_id} has no anomaly to report on")
    worst = max(record.anomalies, key=lambda anomaly: (anomaly.severity, anomaly.score, -anomaly.onset))
    held = [artifact.name for artifact in record.artifacts if artifact.metadata.get("anomaly_id") == worst.id]
    artifact = held[-1] if held else None
    where = project or record.info.project
    return build_spec(record.info, worst, entity, where, artifact=artifact, present=_sent(record, worst))


def _sent(record: RunRecord, anomaly: Anomaly) -> set[str]:
    """The series that the stream policy of the run sends to a tracker, as far as the steps around `anomaly` show."""
    stream = Stream(StreamConfig.model_validate(record.settings.get("stream", {})))
    near = [row for row in record.rows() if abs(row.step - anomaly.step) <= WINDOW]
    sent = stream.push(sorted([*near, anomaly], key=lambda record: record.seq)) + stream.finish()
    return {name for row in sent if isinstance(row, Row) for name in row.schema.names}


def title_of(anomaly: Anomaly) -> str:
    """Without a slash: W&B makes the report's address of it, and its client cannot find a report with one in its title."""
    return f"Spike forensics: {anomaly.kind} in {anomaly.series.replace('/', ' ')} at step {anomaly.step}"


def to_spec(report: Any) -> dict[str, Any]:
    """A wandb-workspaces report as strict JSON with stable ids."""
    spec = json.loads(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    numbers = count(1)
    for item in _walk(spec):
        if "__id__" in item:
            item["__id__"] = f"panel{next(numbers):06d}"
        if "runFeed" in item:
            item["id"] = "runs000001"
    return dict(spec)


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


def _commands(run: RunLike, anomaly: Anomaly, entity: str, project: str, artifact: str | None) -> str:
    where = f"{artifact}:step-{anomaly.step}" if artifact else f"{run.run_id}@{anomaly.step}"
    ref = f"wandb:{entity}/{project}/{where}"
    commands = f"trackbridge pull {ref}\ntrackbridge replay {ref} --build my_module:build"
    return f"Bring the evidence to your machine, and run the bad step again:\n\n```bash\n{commands}\n```"


def _runset(run: RunLike) -> Any:
    """Only this run. Without entity and project in it, W&B takes the report's own, and nobody is asked for them now."""
    wr = require("wandb_workspaces.reports.v2", "reports")
    ws = require("wandb_workspaces.workspaces", "reports")
    return wr.Runset(name=run.name or run.run_id, filters=[ws.Metric("ID") == run.run_id], groupby=[])


def _plots(panels: Iterable[Panel], anomaly: Anomaly) -> Iterator[Any]:
    wr = require("wandb_workspaces.reports.v2", "reports")
    x = y = 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        given: dict[str, Any] = {"y": [_known(series) for series in panel.series if "<" not in series]}
        if panel.regex is not None:
            given["metric_regex"] = panel.regex
        if panel.near:
            given["range_x"] = (max(anomaly.onset - WINDOW, 0), anomaly.step + WINDOW)
        # Buckets keep the extremes; sampling or smoothing would hide the one step that matters.
        yield wr.LinePlot(
            title=panel.title,
            x=names.STEP,
            log_y=panel.log or None,
            point_visualization_method="bucketing-gorilla",
            smoothing_type="none",
            ignore_outliers=False,
            layout=wr.Layout(x, y, panel.width, HEIGHT),
            **given,
        )
        x += panel.width


def _known(series: str) -> str:
    if names.describe(series) is None:
        raise KeyError(f"{series!r} is not in the catalogue")
    return series


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
