"""What a person sees in MLflow: the description, searchable tags, tables, and the charts laid out; read with its own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.tracking import MlflowClient

from trackbridge import panels
from trackbridge.answers import QUESTIONS
from trackbridge.backends import mlflow_names, mlflow_run, mlflow_view, words
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.panels import PANELS, SECTIONS, Panel
from trackbridge.records import Record, RunInfo
from trackbridge.testing import anomaly, artifact, deliver, end, rows, run_info

SERIES = ("train/loss", "grad/norm", "act/h.0/kurtosis", "act/h.1/kurtosis", "perf/step_s", "mine[0]")
CAPSULE = {
    "manifest.json": b"{}", "report.html": b"<p>", "post-mortem.md": b"#",
    "tables/layers.json": b'{"columns": ["layer"], "data": [["h.0"]]}',
}  # fmt: skip


@pytest.fixture(autouse=True)
def its_global_setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow keeps it in the environment, too."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unused")
    yield
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MlflowConfig:
    folder = tmp_path_factory.mktemp("mlflow")
    return MlflowConfig(tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=f"{folder}/artifacts")


def ship(config: MlflowConfig, run: RunInfo, *records: Record, last: Any = None) -> Any:
    """Deliver as the shipper does; the run as MLflow has it then."""
    backend = config.build()
    backend.open(run)
    deliver(backend, records)
    backend.close(last, timeout=30)
    return found(config, run)


def found(config: MlflowConfig, run: RunInfo) -> Any:
    client = MlflowClient(config.uri)
    experiment = client.get_experiment_by_name(config.experiment or run.project)
    (held,) = client.search_runs([experiment.experiment_id], f"tags.`trackbridge.run_id` = '{run.run_id}'")
    return held


def table(config: MlflowConfig, held: Any, path: str) -> Any:
    """As MLflow itself loads a table: by way of its global setting."""
    mlflow.set_tracking_uri(config.uri)
    return MlflowClient(config.uri).load_table(held.info.experiment_id, path, [held.info.run_id])


def charts(config: MlflowConfig, held: Any) -> dict[str, Any]:
    tags = MlflowClient(config.uri).get_experiment(held.info.experiment_id).tags
    view = json.loads(tags["mlflow.sharedViewState.trackbridge"])
    assert view["name"] == "trackbridge" and isinstance(view["createdAt"], int) and isinstance(view["updatedAt"], int)
    return mlflow_view.state(tags["mlflow.sharedViewState.trackbridge"])


def test_the_description_answers_the_five_questions_and_leads_on(config: MlflowConfig, tmp_path: Path) -> None:
    run = run_info(tmp_path, run_id="described", project="described")
    spike = anomaly(10, 7, onset=6, recovered_after=3, capsule="capsules/spike-7")
    sealed = artifact(11, 7, run, "spike-described-7", CAPSULE)
    held = ship(config, run, *rows(range(10), SERIES), spike, sealed, last=end(12))
    note = held.data.tags["mlflow.note.content"]
    places = [note.index(f"**{question}.**") for question in QUESTIONS]
    assert places == sorted(places)
    assert "trackbridge pull mlflow:described@7" in note and "corrupt-batch" in note
    at = f"#/experiments/{held.info.experiment_id}/runs/{held.info.run_id}/artifacts"
    assert f"{at}/spike-described-7/report.html" in note and f"{at}/trackbridge/anomalies.json" in note
    assert f"#/experiments/{held.info.experiment_id}/runs?viewStateShareKey=trackbridge" in note
    assert held.data.tags["trackbridge.anomalies"] == "1" and held.data.tags["trackbridge.anomaly_kind"] == "spike"
    client = MlflowClient(config.uri)
    assert "spike-described-7/report.html" in [
        item.path for item in client.list_artifacts(held.info.run_id, "spike-described-7")
    ]


def test_anomalies_and_layers_are_tables(config: MlflowConfig, tmp_path: Path) -> None:
    run = run_info(tmp_path, run_id="tables", project="tables")
    sealed = artifact(12, 7, run, "spike-tables-7", CAPSULE)
    ship(config, run, *rows(range(10), SERIES), anomaly(10, 7), anomaly(11, 3, kind="nonfinite", value=float("nan")), sealed)
    again = ship(config, run, anomaly(13, 7, recovered_after=2), anomaly(14, 9), last=end(15))
    frame = table(config, again, "trackbridge/anomalies.json")
    assert list(frame.columns) == list(words.ANOMALY_COLUMNS)
    assert frame["step"].tolist() == [3, 7, 9], "each once, those of an earlier life of the shipper too"
    assert frame.set_index("step").loc[7, "over after"] == 2, "the newest version"
    assert frame.set_index("step").loc[7, "hypothesis"] == "corrupt-batch"
    assert table(config, again, "spike-tables-7/tables/layers.json")["layer"].tolist() == ["h.0"]
    note = again.data.tags["mlflow.note.content"]
    assert "seen at step 9" in note and "spike in train/loss at step 7" in note and "nonfinite" in note


def test_the_charts_are_laid_out_for_the_series_of_the_run(config: MlflowConfig, tmp_path: Path) -> None:
    held = ship(config, run_info(tmp_path, run_id="charted", project="charted"), *rows(range(4), SERIES), last=end(4))
    view = charts(config, held)
    metrics = set(held.data.metrics)
    by_id = {chart["uuid"]: chart for chart in view["compareRunCharts"]}
    assert by_id["kurtosis"]["selectedMetricKeys"] == ["act/h.0/kurtosis", "act/h.1/kurtosis"], "no expressions here"
    assert by_id["gradient-norm"]["scaleType"] == "log" and by_id["loss"]["scaleType"] == "linear"
    for chart in view["compareRunCharts"]:
        assert set(chart["selectedMetricKeys"]) <= metrics and chart["selectedMetricKeys"], "no chart is empty"
        assert chart["xAxisKey"] == "step" and chart["lineSmoothness"] == 0
    sections = [section["uuid"] for section in view["compareRunSections"]]
    assert sections == [section for section in SECTIONS if section in {chart["metricSectionId"] for chart in by_id.values()}]


def test_a_later_run_adds_its_series_and_takes_none_away(config: MlflowConfig, tmp_path: Path) -> None:
    one = run_info(tmp_path, run_id="one", project="both")
    two = run_info(tmp_path, run_id="two", project="both")
    ship(config, one, *rows(range(3), SERIES), last=end(3))
    held = ship(config, two, *rows(range(3), ("train/loss", "act/g/kurtosis", "host/rss_bytes")), last=end(3))
    by_id = {chart["uuid"]: chart["selectedMetricKeys"] for chart in charts(config, held)["compareRunCharts"]}
    assert by_id["kurtosis"] == ["act/g/kurtosis", "act/h.0/kurtosis", "act/h.1/kurtosis"]
    assert "host-memory" in by_id and "step-time" in by_id
    before = MlflowClient(config.uri).get_experiment(held.info.experiment_id).tags
    ship(config, run_info(tmp_path, run_id="three", project="both"), *rows(range(3), SERIES), last=end(3))
    assert MlflowClient(config.uri).get_experiment(held.info.experiment_id).tags == before, "nothing new, nothing written"


def test_charts_that_may_not_be_laid_out_hold_nothing_up(
    config: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_info(tmp_path, run_id="denied", project="denied")
    with monkeypatch.context() as patch:

        def denied(*arguments: object) -> None:
            raise MlflowException("no right to change the experiment", error_code=PERMISSION_DENIED)

        patch.setattr(MlflowClient, "set_experiment_tag", denied)
        held = ship(config, run, *rows(range(4), SERIES))
    assert held.data.tags["trackbridge.seq"] == "3"
    assert charts(config, ship(config, run, *rows(range(4, 6), SERIES, first_seq=4), last=end(6)))["compareRunCharts"]


def test_all_anomalies_are_counted_also_those_without_a_tag(
    config: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_run, "ANOMALY_TAGS", 2)
    held = ship(config, run_info(tmp_path, run_id="many", project="many"), *(anomaly(k, 10 + k) for k in range(4)))
    assert held.data.tags["trackbridge.anomalies"] == "4"


def test_a_new_panel_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Panel("new", "speed", "Something new", ("train/tokens",))
    monkeypatch.setattr(panels, "PANELS", (*PANELS, new))
    monkeypatch.setattr(mlflow_view, "PANELS", panels.PANELS)
    view = mlflow_view.state(mlflow_view.build(["train/tokens"], None, 1, mlflow_names.key))
    assert [chart["displayName"] for chart in view["compareRunCharts"]] == ["Something new (tokens)"]


def test_thousands_of_layers_fit_the_tag() -> None:
    present = [f"{family}/blocks.{k}.a_rather_long_name.weight/{statistic}" for k in range(2000)
               for family, statistic in (("layer", "grad_norm"), ("act", "kurtosis"), ("act", "max"))]  # fmt: skip
    value = mlflow_view.build(present, None, 1, mlflow_names.key)
    assert value is not None and len(value) <= mlflow_view.MOST
    assert len(mlflow_view.state(value)["compareRunCharts"]) == 3


@given(st.one_of(st.none(), st.text(), st.just('{"state": "deflate;AAAA", "createdAt": 3}'), st.just('{"state": 7}')))
def test_what_somebody_else_wrote_there_does_not_stop_us(old: str | None) -> None:
    value = mlflow_view.build(["train/loss"], old, 5, mlflow_names.key)
    assert value is not None and re.search('"createdAt": 5', value)
