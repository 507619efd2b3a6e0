"""TensorBoard with our layout, and MLflow's run page with our page inside, in a real browser on the demo's run."""

from __future__ import annotations

import json
import sqlite3
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.browser import servers
from tests.browser.conftest import Demo, Opener, Watched
from trackbridge.panels import SECTIONS

pytestmark = pytest.mark.timeout(600)  # the demo, then two servers

NOT_OURS = (
    "ResizeObserver loop",  # MLflow's charts, in every Chromium
    "Multiple instances of Three.js",  # TensorBoard's bundle
)


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def errors(watched: Watched, *, known: tuple[str, ...] = ()) -> list[str]:
    return [text for text in watched.said if not any(words in text for words in (*NOT_OURS, *known))]


@pytest.fixture(scope="module")
def tensorboard(demo: Demo) -> Iterator[str]:
    with servers.tensorboard(demo.folder) as url:
        yield url


@pytest.fixture(scope="module")
def mlflow(demo: Demo) -> Iterator[str]:
    with servers.mlflow(demo.folder) as url:
        yield url


def run_of(demo: Demo) -> tuple[str, str]:
    """(experiment, run) of the demo in its MLflow store."""
    with sqlite3.connect(demo.folder / "mlflow.db") as store:
        ((experiment, run),) = store.execute("select experiment_id, run_uuid from runs").fetchall()
    return str(experiment), str(run)


# -- TensorBoard


def test_tensorboard_draws_our_layout_on_the_demos_run(watch: Opener, demo: Demo, tensorboard: str) -> None:
    watched = watch()
    tab = watched.tab
    tab.goto(f"{tensorboard}/#custom_scalars")
    tab.get_by_text(SECTIONS["outcome"], exact=True).wait_for()
    line = tab.locator("tf-custom-scalar-multi-line-chart-card path.line").first
    line.wait_for(state="attached")
    assert line.get_attribute("d").count("L") >= len(demo.record.series("train/loss")[0]) - 2, "a point for every step"
    for title in (SECTIONS["movers"], SECTIONS["settings"]):
        assert tab.get_by_text(title, exact=True).count() == 1
    assert errors(watched) == [] and watched.outside == []


def test_tensorboards_charts_have_every_step_and_the_spike_at_its_own(demo: Demo, tensorboard: str) -> None:
    tags = ask(f"{tensorboard}/data/plugin/scalars/tags")
    (run,) = [name for name in tags if "anomaly/score" in tags[name]]

    def series(tag: str) -> dict[int, float]:
        query = urllib.parse.urlencode({"run": run, "tag": tag})
        return {step: value for _, step, value in ask(f"{tensorboard}/data/plugin/scalars/scalars?{query}")}

    steps, values = demo.record.series("train/loss")
    assert series("train/loss") == {int(s): float(np.float32(v)) for s, v in zip(steps, values, strict=True)}
    assert list(series("anomaly/score")) == [anomaly.step for anomaly in demo.record.anomalies]


def test_tensorboards_text_tab_answers_the_questions(watch: Opener, demo: Demo, tensorboard: str) -> None:
    watched = watch()
    watched.tab.goto(f"{tensorboard}/#text")
    watched.tab.get_by_text(f"From step {demo.onset}").first.wait_for()
    assert errors(watched) == [] and watched.outside == []


# -- MLflow


def test_mlflows_run_page_answers_the_questions_and_asks_nobody(watch: Opener, demo: Demo, mlflow: str) -> None:
    watched = watch(size=(1366, 1600))
    missing: list[str] = []
    watched.tab.on("response", lambda answer: missing.append(answer.url) if answer.status >= 400 else None)
    experiment, run = run_of(demo)
    watched.tab.goto(f"{mlflow}/#/experiments/{experiment}/runs/{run}")
    watched.tab.get_by_text("What happened.").first.wait_for()
    assert watched.tab.get_by_text(f"From step {demo.onset}").first.is_visible()
    ours = [url for url in missing if "trackbridge" in url or "artifact" in url or "metric" in url]
    assert ours == [] and watched.outside == []
    assert errors(watched, known=("Failed to load resource",)) == []  # MLflow asks its own server for what it does not have


def test_mlflows_charts_have_data(watch: Opener, demo: Demo, mlflow: str) -> None:
    watched = watch()
    experiment, run = run_of(demo)
    watched.tab.goto(f"{mlflow}/#/experiments/{experiment}/runs/{run}/model-metrics")
    watched.tab.locator(".js-plotly-plot .scatterlayer path.js-line").first.wait_for(state="attached")
    assert watched.outside == []
    history = ask(f"{mlflow}/api/2.0/mlflow/metrics/get-history?run_id={run}&metric_key=anomaly/score")["metrics"]
    assert [int(point.get("step", 0)) for point in history] == [anomaly.step for anomaly in demo.record.anomalies]


def test_our_page_opens_inside_mlflow(watch: Opener, demo: Demo, mlflow: str) -> None:
    """As an HTML artifact, in the frame without rights that MLflow gives it."""
    watched = watch(size=(1600, 1000))
    experiment, run = run_of(demo)
    tab = watched.tab
    capsule = ask(f"{mlflow}/api/2.0/mlflow/artifacts/list?run_id={run}")["files"]
    (folder,) = [entry["path"] for entry in capsule if entry["path"].startswith("spike-")]
    tab.goto(f"{mlflow}/#/experiments/{experiment}/runs/{run}/artifacts/{folder}/report.html")
    inside = tab.frame_locator("iframe")
    inside.locator("html[data-ready]").wait_for(state="attached")
    assert f"at step {demo.onset}" in inside.locator("h1").inner_text()
    inside.locator("#charts").scroll_into_view_if_needed()
    inside.locator("#charts canvas").first.wait_for()
    inside.get_by_role("link", name="Layers").click()
    inside.locator("#layer canvas").first.wait_for()
    assert watched.outside == []
