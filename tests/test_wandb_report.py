"""The W&B report is built offline, equals the checked-in spec, loads again, and names only series of the catalogue.

``python -m tests.test_wandb_report`` writes the checked-in spec anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dashboards
from tests.wandb_server import KEY, WandbServer
from trackbridge import load, names
from trackbridge.errors import UsageError
from trackbridge.journal import JournalWriter
from trackbridge.reports import wandb_report
from trackbridge.reports.wandb_report import Panel, build_spec, from_spec, title_of, to_spec
from trackbridge.rundir import Attempt, RunDirectory, RunFile
from trackbridge.testing import T0, anomaly, row, run_info

# wandb-workspaces declares its models the old way.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

GOLDEN = "wandb/spike_forensics.json"


def example() -> dict[str, Any]:
    run = run_info(Path("/runs/run-0001"))
    return build_spec(run, anomaly(7, 120), "my-team", "my-project", artifact="spike-run-0001-120")


def plots(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for block in spec["blocks"]:
        if block["type"] == "panel-grid":
            for panel in block["metadata"]["panelBankSectionConfig"]["panels"]:
                yield panel["config"]


def test_the_checked_in_spec_is_what_the_code_builds() -> None:
    assert json.loads(dashboards.path(GOLDEN).read_text()) == example(), "run: python -m tests.test_wandb_report"


def test_it_loads_again_and_equals_itself() -> None:
    spec = example()
    assert to_spec(from_spec(spec, "my-team", "my-project", "a title")) == spec


def test_every_series_is_in_the_catalogue() -> None:
    families = [metric.name for metric in names.CATALOGUE if "<" in metric.name]
    drawn = list(plots(example()))
    assert len(drawn) == sum(len(panels) for _, panels in wandb_report.SECTIONS)
    for plot in drawn:
        for series in [plot["xAxis"], *plot["metrics"]]:
            assert names.describe(series) is not None, series
        if "metricRegex" in plot:
            members = [re.sub("<.*>", "h.0.w", family) for family in families]
            assert any(re.fullmatch(plot["metricRegex"], member) for member in members), plot["metricRegex"]
        assert plot["metrics"] or "metricRegex" in plot


def test_a_renamed_series_breaks_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for gone in ("train/loss", "act/<module>/kurtosis"):
        left = tuple(metric for metric in names.CATALOGUE if metric.name != gone)
        with monkeypatch.context() as patch:
            patch.setattr(names, "CATALOGUE", left)
            with pytest.raises(KeyError, match=re.escape(gone)):
                example()


def test_one_step_is_never_averaged_away() -> None:
    for plot in plots(example()):
        assert plot["pointVisualizationMethod"] == "bucketing-gorilla"
        assert plot["smoothingType"] == "none"
        assert plot["ignoreOutliers"] is False


def test_the_window_is_around_the_anomaly() -> None:
    early = build_spec(run_info(Path("/r")), anomaly(7, 20).updated(onset=18), "e", "p")
    first, *_ = plots(early)
    assert (first["xAxisMin"], first["xAxisMax"]) == (0, 20 + wandb_report.WINDOW)


def test_panels_without_a_series_in_the_run_are_left_out() -> None:
    spec = build_spec(run_info(Path("/r")), anomaly(7, 20), "e", "p", present=["train/loss", "layer/h.0.w/grad_norm"])
    titles = [plot["chartTitle"] for plot in plots(spec)]
    assert titles == ["Loss around the anomaly", "Loss, whole run", "Gradient norm by parameter"]
    assert not Panel("x", ("train/loss",)).draws("eval/train/loss")


def test_a_recorded_run_gets_the_panels_of_what_it_sends(tmp_path: Path) -> None:
    """By default single parameters stay in the journal and their extremes are sent."""
    directory = RunDirectory(tmp_path / "run")
    life = Attempt(number=0, start_step=0, time=T0, pid=1, host="h")
    directory.write(RunFile(project="p", run_id="r", name="n", created=T0, attempts=[life]))
    values = {"train/loss": 1.0, "layer/w/grad_norm": 2.0, "act/h/kurtosis": float("nan")}
    journal = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=5.0)
    for record in [*(row(-1, step, values) for step in range(5)), anomaly(-1, 4), row(-1, 5, values)]:
        journal.append(record)
    journal.close()
    spec = wandb_report.spike_forensics(load(directory.path), entity="e")
    titles = [plot["chartTitle"] for plot in plots(spec)]
    assert "Gradient norm by parameter" not in titles
    assert {"Largest gradient norm of any parameter", "Kurtosis by module", "Series that were NaN or infinite"} <= set(titles)
    assert "Anomaly score (sparse: no point is lost)" in titles


def test_a_run_without_anomalies_has_no_report(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    life = Attempt(number=0, start_step=0, time=T0, pid=1, host="h")
    directory.write(RunFile(project="p", run_id="r", name="n", created=T0, attempts=[life]))
    with pytest.raises(UsageError, match="run r has no anomaly"):
        wandb_report.spike_forensics(load(directory.path))


def test_facts_and_the_way_back_are_on_it() -> None:
    text = "\n".join(block.get("content", "") for block in example()["blocks"])
    assert "step 120" in text and "9.5" in text and "corrupt-batch" in text
    assert "trackbridge pull wandb:my-team/my-project/spike-run-0001-120:step-120" in text


def test_the_real_client_saves_and_fetches_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb_workspaces.reports.v2 as wr

    with WandbServer() as server:
        for name, value in {"BASE_URL": server.url, "API_KEY": KEY, "SILENT": "true", "DATA_DIR": str(tmp_path)}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        import wandb

        wandb.teardown()  # settings are read from the environment once
        report = from_spec(example(), server.entity, "my-project", title_of(anomaly(7, 120)))
        report.save()
        again = wr.Report.from_url(report.url)
        wandb.teardown()
        assert to_spec(again) == example()
        assert [view.display for view in server.views.all.values()] == [title_of(anomaly(7, 120))]


if __name__ == "__main__":
    target = Path(dashboards.__file__).parent / GOLDEN
    target.write_text(json.dumps(example(), indent=1) + "\n")
