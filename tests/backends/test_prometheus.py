"""Prometheus against its own client's parser, over HTTP; the alert rules against promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trackbridge import names
from trackbridge.backends import prometheus
from trackbridge.backends.prometheus import PrometheusBackend, PrometheusConfig, State
from trackbridge.config import StreamConfig
from trackbridge.errors import RetryLater
from trackbridge.records import Row, RunInfo, Schema
from trackbridge.stream import Stream
from trackbridge.testing import BackendContract, Points, ReadBack, anomaly, deliver, row, rows

DASHBOARDS = Path(__file__).parents[2] / "dashboards" / "prometheus"
ANYWHERE = PrometheusConfig(port=0, max_series=10_000)
Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def current(config: PrometheusConfig, run: RunInfo) -> tuple[Samples, State]:
    """The page of a run, served anew from its state."""
    backend = config.build()
    assert isinstance(backend, PrometheusBackend)
    backend.open(run)
    assert backend.url is not None
    try:
        return scrape(backend.url), backend._state
    finally:
        backend.close(None, timeout=5)


@pytest.fixture
def backend(run: RunInfo) -> Iterator[PrometheusBackend]:
    made = PrometheusBackend(ANYWHERE)
    made.open(run)
    yield made
    made.close(None, timeout=5)


class TestPrometheus(BackendContract):
    """The contract, of which a page of current values can show the newest point of each series."""

    has_params = False

    def config(self, tmp_path: Path) -> PrometheusConfig:
        return ANYWHERE

    def read_back(self, config: PrometheusConfig, run: RunInfo) -> ReadBack:  # type: ignore[override]
        samples, state = current(config, run)
        series: Points = {}
        for name, found in samples.items():
            for labels, value in found:
                original = _original(name, labels)
                if original is not None:
                    series[original] = [(0, value)]
        status = next(labels["status"] for labels, value in samples["trackbridge_run_status"] if value)
        told = {key: f"{kind} train/loss 9.5" for key, kind in state.anomalies.items()}
        return ReadBack(series, anomalies=told, status=None if status == "running" else status)  # type: ignore[arg-type]

    def assert_series(self, got: Points, wanted: Points) -> None:
        super().assert_series(got, {name: [(0, points[-1][1])] for name, points in wanted.items()})

    def test_artifacts_arrive_intact(self) -> None:  # type: ignore[override]
        """A page of numbers holds no artifacts."""

    def test_resume_goes_back(self) -> None:  # type: ignore[override]
        """It has no history that could be gone back over: see `test_a_resume`."""

    def test_the_end_may_be_older_than_the_last_record(self) -> None:  # type: ignore[override]
        """What comes after the end there is an artifact."""


def _original(name: str, labels: dict[str, str]) -> str | None:
    if name == "trackbridge_logged":
        return labels["series"]
    if name == "trackbridge_layer":
        return f"layer/{labels['layer']}/{labels['statistic']}"
    plain = {f"trackbridge_{m.name.replace('/', '_')}": m.name for m in names.CATALOGUE if "<" not in m.name}
    return plain.get(name)


def test_a_resume(run: RunInfo, backend: PrometheusBackend) -> None:
    deliver(backend, rows(range(10)))
    deliver(backend, rows(range(5, 8), first_seq=10, attempt=1))
    samples = scrape(str(backend.url))
    assert [value for _, value in samples["trackbridge_step"]] == [7.0]
    assert [value for _, value in samples["trackbridge_attempt"]] == [1.0]


def test_counters_survive_a_restart_and_repetition(run: RunInfo) -> None:
    records = [*rows(range(3)), anomaly(3, 2), anomaly(4, 2).updated(recovered_after=1), anomaly(5, 9, kind="nonfinite")]
    stamped = row(6, 9, {"train/loss": float("nan"), "nonfinite/train/loss": 1.0})
    for _ in range(2):
        made = PrometheusBackend(ANYWHERE)
        made.open(run)
        deliver(made, [*records, stamped])
        samples = scrape(str(made.url))
        made.close(None, timeout=5)
    counts = {labels["kind"]: value for labels, value in samples["trackbridge_anomalies_total"]}
    assert (counts["spike"], counts["nonfinite"], counts["drift"]) == (1.0, 1.0, 0.0)
    assert [(labels["series"], value) for labels, value in samples["trackbridge_nonfinite_total"]] == [("train/loss", 1.0)]
    assert {labels["run"] for labels, _ in samples["trackbridge_step"]} == {run.run_id}


def test_cardinality_is_bounded(run: RunInfo) -> None:
    made = PrometheusBackend(PrometheusConfig(port=0, max_series=50))
    made.open(run)
    wide = Schema(tuple(f"layer/{i}.weight/grad_norm" for i in range(2000)) + tuple(f"mine/{i}" for i in range(100)))
    for seq in range(3):
        made.write([row(seq, seq, dict.fromkeys(wide.names, 1.0))], timeout=5)
    samples = scrape(str(made.url))
    made.close(None, timeout=5)
    labelled = sum(len(samples.get(name, [])) for name in ("trackbridge_layer", "trackbridge_logged", "trackbridge_act"))
    assert labelled == 50
    assert [value for _, value in samples["trackbridge_series_left_out"]] == [2050.0]


def test_every_series_of_the_catalogue_has_a_name_of_its_own(run: RunInfo, backend: PrometheusBackend) -> None:
    plain = [m.name for m in names.CATALOGUE if "<" not in m.name]
    shown = {name.removeprefix("trackbridge/").replace("/", "_") for name in plain}
    assert len(shown) == len(plain)
    backend.write([row(0, 0, dict.fromkeys(plain, 2.5))], timeout=5)
    samples = scrape(str(backend.url))
    assert samples["trackbridge_train_loss"] == [({"run": run.run_id, "project": run.project}, 2.5)]


def test_several_runs_on_one_host_and_loopback_by_default(
    tmp_path: Path, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PrometheusBackend(ANYWHERE)
    first.open(run)
    port = int(str(first.url).split(":")[2].split("/")[0])
    second = PrometheusBackend(PrometheusConfig(port=port))
    other = RunInfo("p", "other", "n", str(tmp_path / "other"))
    second.open(other)
    assert first.url != second.url and str(second.url).startswith("http://127.0.0.1:")
    assert PrometheusConfig(port=port).where(other) == second.url
    monkeypatch.setattr(prometheus, "PORTS", 1)
    with pytest.raises(RetryLater, match="cannot serve"):
        PrometheusBackend(PrometheusConfig(port=port)).open(RunInfo("p", "third", "n", str(tmp_path / "third")))
    for each in (first, second):
        each.close(None, timeout=5)
    assert PrometheusConfig(port=port).where(other) is None


def test_a_damaged_state_starts_from_nothing(run: RunInfo) -> None:
    path = Path(run.directory) / "prometheus" / "state.json"
    path.parent.mkdir()
    for broken in ("{", json.dumps({"held": 3, "gauges": 1}), json.dumps([1])):
        path.write_text(broken)
        assert current(ANYWHERE, run)[1].held == -1


def test_what_the_stream_adds_is_shown_or_left_out_on_purpose(run: RunInfo, backend: PrometheusBackend) -> None:
    stream = Stream(StreamConfig())
    given = [row(0, 0, {"train/loss": float("inf"), "layer/a/grad_norm": 2.0, "act/h.0/max": 3.0}), anomaly(1, 0)]
    out = [*stream.push(given), *stream.finish()]
    assert any(isinstance(record, Row) for record in out)
    backend.write(out, timeout=5)
    samples = scrape(str(backend.url))
    assert samples["trackbridge_layers_grad_norm_max"][0][1] == 2.0
    assert samples["trackbridge_act"][0][0]["module"] == "h.0"
    assert "trackbridge_logged" not in samples


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in the Debian package prometheus")
def test_the_alert_rules_are_what_promtool_takes_and_fire_when_they_should() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=DASHBOARDS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_rules_use_metrics_that_exist(run: RunInfo, backend: PrometheusBackend) -> None:
    """Also without promtool: every metric that a rule names is on the page."""
    import re

    values = {"train/loss": float("nan"), "nonfinite/train/loss": 1.0}
    lost = {"trackbridge/rows_lost": 1.0, "trackbridge/rows_dropped": 1.0, "trackbridge/contexts_dropped": 1.0}
    backend.write([row(0, 0, {**values, **lost}), anomaly(1, 0)], timeout=5)
    there = set(scrape(str(backend.url)))
    used = set(re.findall(r"\btrackbridge_\w+", (DASHBOARDS / "alerts.yml").read_text()))
    assert used and used <= there


@pytest.mark.parametrize("family", names.WIDE)
def test_every_wide_family_has_a_gauge(family: str, run: RunInfo, backend: PrometheusBackend) -> None:
    backend.write([row(0, 0, {f"{family}h.0/some": 0.5, f"{family}odd": 1.5, "nonfinite/\ud800": 1.0})], timeout=5)
    samples = scrape(str(backend.url))[f"trackbridge_{family.rstrip('/')}"]
    assert sorted(value for _, value in samples) == [0.5, 1.5]
    assert {"run", "project", "statistic"} < samples[0][0].keys() and len(samples[0][0]) == 4


def test_a_state_of_a_version_that_knew_other_series_still_makes_a_page(run: RunInfo) -> None:
    path = Path(run.directory) / "prometheus" / "state.json"
    path.parent.mkdir()
    gauges = {"train/loss": 2.0, "train/of_tomorrow": 1.0}
    path.write_text(json.dumps({"held": 3, "gauges": gauges, "labelled": {}, "nonfinite": {}}))
    samples, state = current(ANYWHERE, run)
    assert state.held == 3 and samples["trackbridge_train_loss"][0][1] == 2.0
