"""The run as a whole: no peak is lost however long the run, and each tracker gets pictures and page once."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from trackbridge import panels, shipper
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.journal import JournalWriter, last_seq
from trackbridge.panels import PANELS
from trackbridge.reports import whole
from trackbridge.reports.whole import COLUMNS, Stretches
from trackbridge.rundir import Attempt, RunDirectory, RunFile
from trackbridge.testing import T0, row

GRADIENTS = next(panel for panel in PANELS if panel.id == "gradient-map")
A, B = "layer/a.w/grad_norm", "layer/b.w/grad_norm"
MAPS = {panels.picture(panel, whole=True) for panel in PANELS if panel.view == "heatmap"}


@given(
    first=st.integers(0, 1000),
    values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=1200),
    every=st.integers(1, 7),
)
def test_the_largest_value_of_every_stretch_is_kept(first: int, values: list[float], every: int) -> None:
    stretches, steps = Stretches(), [first + every * k for k in range(len(values))]
    for step, value in zip(steps, values, strict=True):
        stretches.add(row(step, step, {"train/loss": 1.0, A: value}))
    matrix = stretches.matrix(GRADIENTS)
    assert matrix is not None and len(matrix.steps) <= COLUMNS
    for at, start in enumerate(matrix.steps):
        inside = [v for step, v in zip(steps, values, strict=True) if start <= step < start + stretches.width]
        assert matrix.values[0, at] == max(inside)
    assert stretches.width == 1 or (steps[-1] - first) // stretches.width >= COLUMNS // 2, "no coarser than it must be"


def test_a_value_that_is_not_finite_shows_and_an_absent_one_does_not() -> None:
    stretches = Stretches()
    stretches.add(row(0, 0, {A: 1.0, B: float("nan")}))
    stretches.add(row(1, 1, {A: 2.0}))
    matrix = stretches.matrix(GRADIENTS)
    assert matrix is not None and list(matrix.rows) == [A, B]
    assert matrix.there.tolist() == [[True, True], [True, False]]
    assert np.isnan(matrix.values[1, 0]) and matrix.values[0].tolist() == [1.0, 2.0]


def test_steps_that_go_back_are_no_trouble() -> None:
    stretches = Stretches()
    for step, value in ((5, 1.0), (6, 9.0), (5, 3.0), (2, 4.0)):
        stretches.add(row(step, step, {A: value}))
    matrix = stretches.matrix(GRADIENTS)
    assert matrix is not None and list(matrix.steps) == [5, 6] and matrix.values[0].tolist() == [4.0, 9.0]


def calm(path: Path, values: dict[str, float]) -> RunDirectory:
    directory = RunDirectory(path)
    life = Attempt(number=0, start_step=0, time=T0, pid=1, host="h")
    directory.write(RunFile(project="calm", run_id="calm", name="n", created=T0, attempts=[life]))
    journal = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=5.0)
    for step in range(8):
        journal.append(row(-1, step, values))
    journal.close()
    return directory


def test_it_is_made_once_and_again_when_the_run_went_on(tmp_path: Path) -> None:
    directory = calm(tmp_path / "run", {"train/loss": 1.0, A: 2.0})
    made = whole.make(directory)
    assert made == directory.views
    assert {f"pictures/{path.stem}" for path in made.glob("pictures/*.png")} == {panels.picture(GRADIENTS, whole=True)}
    assert "<html" in (made / "report.html").read_text(encoding="utf-8")
    before = (made / "report.html").stat().st_mtime_ns
    whole.make(directory)
    assert (made / "report.html").stat().st_mtime_ns == before
    journal = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=5.0)
    journal.append(row(-1, 8, {"train/loss": 1.0}))
    journal.close()
    whole.make(directory)
    assert (made / "report.html").stat().st_mtime_ns > before
    assert whole.exhibits.made(made) == last_seq(directory.rows()) == 8
    assert not list(directory.path.glob(".views.*")), "nothing is left beside it"


def test_a_run_too_large_for_a_page_has_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "PAGE_BYTES", 10)
    made = whole.make(calm(tmp_path / "run", {A: 2.0}))
    assert made is not None and not (made / "report.html").exists() and list(made.glob("pictures/*.png"))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> MlflowConfig:
    """One database for the tests here: creating it takes seconds."""
    folder = tmp_path_factory.mktemp("lake")
    return MlflowConfig(tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=f"{folder}/artifacts")


def test_every_tracker_shows_it_once(recorded: Path, lake: MlflowConfig, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    copy = tmp_path / recorded.name
    shutil.copytree(recorded, copy, ignore=shutil.ignore_patterns("shipper", "views"))
    board = TensorboardConfig()
    for _ in range(2):
        assert shipper.sync(copy, [board, lake], timeout=120).complete
    info = RunDirectory(copy).info()
    reader = EventAccumulator(str(board.root(info)), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()
    images = {tag for tag in reader.Tags()["tensors"] if reader.SummaryMetadata(tag).plugin_data.plugin_name == "images"}
    assert images >= MAPS and {len(reader.Tensors(tag)) for tag in MAPS} == {1}
    client = MlflowClient(lake.uri)
    (found,) = client.search_runs([client.get_experiment_by_name(info.project).experiment_id])
    held = {item.path for folder in ("views", "views/pictures") for item in client.list_artifacts(found.info.run_id, folder)}
    assert held >= {"views/report.html", *(f"views/{name}.png" for name in MAPS)}
    note = found.data.tags["mlflow.note.content"]
    assert f"runs/{found.info.run_id}/artifacts/views/report.html" in note and "What happened" in note


def test_a_run_without_anomalies_says_so_in_mlflow(lake: MlflowConfig, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    directory = calm(tmp_path / "calm", {"train/loss": 1.0, A: 2.0})
    shipper.sync(directory.path, [lake], timeout=120)
    client = MlflowClient(lake.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("calm").experiment_id])
    assert "No anomaly was detected in this run." in found.data.tags["mlflow.note.content"]
