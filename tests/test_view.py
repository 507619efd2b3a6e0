"""`trackbridge view` and the page of a run: what it says of each kind of run, where the file goes, what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.capsules import adopt, make
from tests.recordings import Trainer
from tests.test_page import some_histograms, words
from trackbridge import capsule as capsules
from trackbridge import history
from trackbridge.cli import app
from trackbridge.reports.run_page import run_page, run_page_data

SEALED = "capsules/spike-13"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["view", "--no-open", *map(str, arguments)])


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    made = Trainer(tmp_path / "runs" / "live")
    made.train(20)
    return made


def said(trainer: Trainer) -> str:
    return words(run_page(history.load(trainer.directory.path)))


# -- what the page of a run says


def test_a_running_run_says_how_to_follow_it(trainer: Trainer) -> None:
    assert "running" in said(trainer)
    assert re.search(r"Follow the run: trackbridge view \S+/runs/live --live", said(trainer))


def test_a_finished_run_has_nothing_to_do(trainer: Trainer) -> None:
    trainer.finish()
    assert "no anomaly" in said(trainer) and "Nothing has to be done." in said(trainer)


def test_a_failed_run_says_its_error(trainer: Trainer) -> None:
    trainer.finish("failed", "RuntimeError: shapes do not match")
    assert "Look at the error that ended it: RuntimeError: shapes do not match" in said(trainer)


def test_a_killed_run_says_what_to_look_for(trainer: Trainer) -> None:
    trainer.finish("killed")
    assert "Find out what killed the process" in said(trainer)


def test_an_anomaly_without_a_capsule_says_that_it_is_missing(trainer: Trainer) -> None:
    trainer.spike()
    trainer.finish()
    assert "Spike in train/loss at step 20" in said(trainer)
    assert "No capsule of the spike at step 20" in said(trainer)


def test_the_subject_is_the_worst_anomaly_and_each_has_an_inspector(trainer: Trainer) -> None:
    trainer.spike()
    trainer.train(10)
    from tests.capsules import an_anomaly

    trainer.writer.append(an_anomaly(id="mild", severity=0.2, onset=5, step=6))
    trainer.finish()
    html = run_page(history.load(trainer.directory.path))
    assert "Spike in train/loss at step 20" in words(html) and "The worst of 2 anomalies" in words(html)
    assert html.count("data-spike=") == 2 and "All 2 anomalies" in words(html)


def test_a_sealed_capsule_is_part_of_the_runs_page(trainer: Trainer) -> None:
    from tests.capsules import an_anomaly

    make(trainer.directory.path / SEALED)
    trainer.writer.append(an_anomaly(capsule=SEALED))
    trainer.finish()
    page = said(trainer)
    assert "Tier re-feed" in page and "Batches at the onset" in page
    assert f"trackbridge replay {trainer.directory.path}@13 --build my_module:build" in page
    (trainer.directory.path / SEALED / "layers.parquet").write_bytes(b"damaged")
    assert f"The capsule {SEALED} is not here, or is damaged." in said(trainer)


@pytest.mark.parametrize("file", ["layers.parquet", "rank-0000/batches.parquet"])
def test_tables_that_are_not_a_capsules_are_one_line(trainer: Trainer, file: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.capsules import an_anomaly

    capsule = make(trainer.directory.path / SEALED)
    table = pq.read_table(capsule / file)
    sink = pa.BufferOutputStream()
    pq.write_table(table.rename_columns([f"not_{name}" if name != "grad_norm" else name for name in table.column_names]), sink)
    adopt(capsule, file, sink.getvalue().to_pybytes())
    done = invoke(capsule)
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    trainer.writer.append(an_anomaly(capsule=SEALED))
    trainer.finish()
    assert f"The capsule {SEALED} is not here, or is damaged." in said(trainer)


def test_ranks_are_compared_where_there_are_several(tmp_path: Path) -> None:
    trainers = [Trainer(tmp_path / "runs" / "wide", rank=rank, world_size=4) for rank in range(3)]
    for trainer in trainers:
        trainer.train(30)
        trainer.finish()
    html = run_page(history.load(trainers[0].directory.path))
    assert "3 of 4 ranks" in words(html) and "The journals of 1 of 4 ranks are not on this disk." in words(html)
    assert '"label":"rank 2"' in html
    alone = Trainer(tmp_path / "alone")
    alone.train(3)
    assert '<section id="ranks" hidden>' in run_page(history.load(alone.directory.path))


def test_a_long_runs_histograms_are_read_sparingly(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    records = some_histograms(60, 2)
    for record in records:
        trainer.writer.append(record)
    trainer.finish()
    monkeypatch.setattr("trackbridge.reports.run_page.HISTOGRAM_MEMORY", 10 * records[0].counts.nbytes)
    shown = run_page_data(history.load(trainer.directory.path)).histograms
    assert len(shown) <= 11 and (shown[0].step, shown[-1].step) == (0, 590)


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    empty = Trainer(tmp_path / "empty")
    assert "No step was recorded." in said(empty)


# -- the command


def test_a_runs_page_lands_in_its_folder(trainer: Trainer) -> None:
    done = invoke(trainer.directory.path, "--json")
    target = trainer.directory.path / "report.html"
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"path": str(target), "bytes": target.stat().st_size}
    by_name = invoke("live", "--dir", trainer.directory.path.parent, "--out", trainer.directory.path.parent / "x" / "y.html")
    assert by_name.exit_code == 0 and (trainer.directory.path.parent / "x" / "y.html").exists()


def test_a_capsules_page_never_lands_in_it(tmp_path: Path) -> None:
    capsule = make(tmp_path / "spike-13")
    done = invoke(capsule, "--json")
    assert json.loads(done.stdout)["path"] == str(tmp_path / "spike-13.html")
    assert capsules.load(capsule).verify(), "it is still whole"


def test_an_anomaly_of_a_run_by_its_step(trainer: Trainer) -> None:
    make(trainer.directory.path / SEALED)
    trainer.finish()
    done = invoke(f"{trainer.directory.path}@13", "--json")
    assert json.loads(done.stdout)["path"] == str(trainer.directory.path / "spike-13.html")


def test_a_capsule_in_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logdir = tmp_path / "logs" / "run-1"
    shutil.copytree(make(tmp_path / "spike-13"), logdir / "artifacts" / "spike-13")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = invoke(f"tensorboard:{logdir}", "--json")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["spike-13.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no run 'nowhere'"),
        (["RUN", "--port", "8000"], "--port is for --live"),
        (["RUN", "--live", "--out", "x.html"], "--live serves the page"),
        (["RUN@13", "--live"], "--live follows a run"),
        (["RUN", "--live", "--port", "99999999"], "no port"),
        (["RUN@99"], "holds no spike capsule"),
        (["RUN", "--out", "RUN"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line_with_the_fix(trainer: Trainer, arguments: list[str], message: str) -> None:
    done = invoke(*(text.replace("RUN", str(trainer.directory.path)) for text in arguments))
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
