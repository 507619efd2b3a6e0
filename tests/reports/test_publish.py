"""``trackbridge report`` against a W&B server: made, fetched back by the real client, updated, and never twice."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests import replays
from tests.reports.conftest import PROJECT
from tests.reports.specs import charts
from tests.wandb_server import Status, WandbServer
from trackbridge import load, panels, shipper
from trackbridge.backends.wandb_process import Process
from trackbridge.cli import app
from trackbridge.panels import TEMPLATES
from trackbridge.reports import wandb_report, wandb_workspace

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

ITS_OWN_CLIENT = "test_a_run_on_this_disk_knows_where_it_is_in_wandb"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *(str(argument) for argument in arguments)])


def said(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@pytest.fixture
def server(served: WandbServer) -> Iterator[WandbServer]:
    served.views.all.clear()
    yield served
    served.faults.clear()


@pytest.fixture(scope="module")
def process(served: WandbServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """W&B's client, started once: starting it is most of what a command takes."""
    process = Process(tmp_path_factory.mktemp("client"), served.url)
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def one_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, process: Process) -> None:
    """Every command talks through it, but in the test that starts its own."""
    if request.node.originalname != ITS_OWN_CLIENT:
        command = importlib.import_module("trackbridge.cli.report")
        monkeypatch.setattr(command, "_client", lambda base_url: nullcontext(process))


@pytest.fixture
def ref(recorded: Path) -> str:
    return f"wandb:team/{PROJECT}/{recorded.name}"


REPORTS = [name for name in TEMPLATES if name != "workspace"]


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_made_fetched_back_and_updated(name: str, server: WandbServer, ref: str, tmp_path: Path) -> None:
    import wandb
    import wandb_workspaces.reports.v2 as wr

    ask = (ref, "--template", name, "--dir", tmp_path)
    url = said(*ask)
    (view,) = server.views.all.values()
    assert url.startswith(server.url) and view.id in url
    wandb.teardown()  # settings are read from the environment once
    again = wandb_report.to_spec(wr.Report.from_url(url))
    wandb.teardown()
    assert again == json.loads(view.spec), "the real client reads what we wrote"

    view.spec = "{}"
    assert said(*ask) == url, "the same report, made again"
    assert [json.loads(held.spec) for held in server.views.all.values()] == [again]

    view.name = "renamedbywandb"
    assert said(*ask) == url, "found by its title and its description"
    assert len(server.views.all) == 1


def test_a_report_of_the_same_title_is_not_replaced(server: WandbServer, ref: str, tmp_path: Path) -> None:
    """Another run's of the same name, or one that a person wrote."""
    said(ref, "--dir", tmp_path)
    (theirs,) = server.views.all.values()
    theirs.name, theirs.description, theirs.spec = "somebodyelse", "what I found", "{}"
    said(ref, "--dir", tmp_path)
    assert theirs.spec == "{}"
    assert [view.display for view in server.views.all.values()] == [theirs.display] * 2


def test_what_it_says_comes_from_the_capsule(server: WandbServer, ref: str, recorded: Path, tmp_path: Path) -> None:
    """From the tracker alone: this machine has never seen the run."""
    spike = max(load(recorded).anomalies, key=lambda anomaly: anomaly.severity)
    said(f"{ref}@{spike.step}", "--dir", tmp_path)
    (view,) = server.views.all.values()
    spec = json.loads(view.spec)
    text = "\n".join(str(block.get("content", "")) for block in spec["blocks"])
    assert f"step **{spike.onset}**" in text and f"**{spike.value:.4g}**" in text
    for wanted in (
        "# Post-mortem",
        "| micro-batch |",
        f"trackbridge pull wandb:team/{PROJECT}/spike-{recorded.name}-{spike.step}",
    ):
        assert wanted in text
    assert spike.kind in view.display and "tiny lr=1e-3" in view.display


@pytest.mark.parametrize("name", REPORTS)
def test_every_series_and_artifact_it_names_exists_in_the_run(
    name: str, server: WandbServer, ref: str, recorded: Path, tmp_path: Path
) -> None:
    said(ref, "--template", name, "--dir", tmp_path)
    (view,) = server.views.all.values()
    held = server.run(PROJECT, recorded.name)
    series = {key for row in held.history() for key in row}
    found = list(charts(json.loads(view.spec)))
    assert len(found) >= 2
    for chart in found:
        config = chart["config"]
        listed = [name.removeprefix("summary_metrics.") for name in config.get("metrics") or ()]
        assert set(listed) <= series
        assert set(config.get("mediaKeys") or ()) <= series
        if "metricRegex" in config:
            assert any(re.fullmatch(config["metricRegex"], each) for each in series), config["chartTitle"]
    artifacts = re.findall(r"spike-[\w.-]+?-\d+(?=[:\"])", view.spec)
    assert {("team", PROJECT, artifact) for artifact in artifacts} <= set(server.artifacts.collections)


def test_the_workspace_of_a_project(server: WandbServer, ref: str, tmp_path: Path) -> None:
    import wandb
    import wandb_workspaces.workspaces as ws

    url = said(f"wandb:team/{PROJECT}", "--template", "workspace")
    (view,) = server.views.all.values()
    assert (view.kind, view.display) == ("project-view", "trackbridge")
    wandb.teardown()
    again = wandb_workspace.to_spec(ws.Workspace.from_url(url))
    wandb.teardown()
    assert again == json.loads(view.spec)
    assert said(ref, "--template", "workspace", "--dir", tmp_path) == url, "a run's project is meant"
    assert len(server.views.all) == 1


def test_a_run_on_this_disk_knows_where_it_is_in_wandb(server: WandbServer, recorded: Path) -> None:
    told = json.loads(said(recorded.name, "--dir", recorded.parent, "--json"))
    assert told["template"] == "spike-forensics" and told["created"] is True
    assert f"/team/{PROJECT}/reports/" in told["url"]


def test_a_dry_run_contacts_nobody(server: WandbServer, recorded: Path, ref: str, tmp_path: Path) -> None:
    before = server.operations.copy()
    for given in (recorded, f"{recorded}@{replays.BAD}", ref, f"{ref}@7"):
        for name in TEMPLATES:
            if given == f"{recorded}@{replays.BAD}" and name != "spike-forensics":
                continue
            spec = json.loads(said(given, "--template", name, "--dry-run", "--dir", tmp_path))
            assert list(charts(spec))
    assert server.operations == before


def test_a_run_without_anomalies_has_a_health_report_and_no_spike_report(
    server: WandbServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from trackbridge.journal import JournalWriter
    from trackbridge.rundir import Attempt, RunDirectory, RunFile
    from trackbridge.testing import T0, row

    directory = RunDirectory(tmp_path / "calm")
    life = Attempt(number=0, start_step=0, time=T0, pid=1, host="h")
    directory.write(RunFile(project="p", run_id="calm", name="n", created=T0, attempts=[life]))
    journal = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=5.0)
    for step in range(5):
        journal.append(row(-1, step, {"train/loss": float(np.sqrt(step))}))
    journal.close()
    result = call(directory.path, "--dry-run")
    assert (result.exit_code, "run calm has no anomaly" in result.output) == (2, True)
    spec = said(directory.path, "--template", "run-health", "--dry-run")
    assert "No anomaly was detected." in spec and "wandb:ENTITY" not in spec


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wandb:team/reports/nothing"], "W&B has no run team/reports/nothing"),
        (["wandb:team/nowhere", "--template", "workspace"], "W&B has no project team/nowhere"),
        (["wandb:team/reports", "--template", "run-health"], "is about one run"),
        (["wandb:team/reports/a:b"], "names no run"),
        (["mlflow:abc"], "reports are made in W&B"),
        (["nothing-here"], "no run 'nothing-here'"),
        (["wandb:team/reports/r", "--template", "run-heath"], "did you mean 'run-health'"),
    ],
)
def test_mistakes_are_told_in_a_line(server: WandbServer, arguments: list[str], words: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert words in result.output and result.output.strip().count("\n") == 0


def test_an_anomaly_that_is_not_there(server: WandbServer, ref: str, recorded: Path, tmp_path: Path) -> None:
    for given in (f"{ref}@3", f"{recorded}@3"):
        result = call(given, "--dir", tmp_path)
        assert result.exit_code == 2 and re.search(r"no anomaly at step 3; it has them at \d+", result.output)


def test_a_server_that_refuses(server: WandbServer, ref: str, tmp_path: Path) -> None:
    with server.fault(Status(401), operation="TrackbridgeSurvey"):
        result = call(ref, "--dir", tmp_path)
    assert result.exit_code == 2 and result.output.startswith("trackbridge: W&B: ")
    assert "wandb login" in result.output


def test_the_post_mortem(server: WandbServer, recorded: Path, ref: str, tmp_path: Path) -> None:
    record = load(recorded)
    newest = record.anomalies[-1]
    text = said(recorded, "--post-mortem")
    assert text == (recorded / str(newest.capsule) / "post-mortem.md").read_text(encoding="utf-8").strip()
    assert said(f"{recorded}@{newest.step}", "--post-mortem") == text
    assert said(recorded / str(newest.capsule), "--post-mortem") == text
    assert said(f"{ref}@{newest.step}", "--post-mortem") == text, "out of the tracker"


def test_a_capsule_brings_its_pictures_and_its_page(server: WandbServer, recorded: Path, ref: str, tmp_path: Path) -> None:
    held = server.run(PROJECT, recorded.name)
    (row,) = [row for row in held.history() if "pictures/gradient-map" in row]
    (whole,) = [row for row in held.history() if "pictures/gradient-map-run" in row]
    assert whole["trackbridge/step"] == replays.STEPS - 1 and whole["page"]["_type"] == "html-file", (
        "and those of the whole run"
    )
    spike = load(recorded).anomalies[0]
    assert row["trackbridge/step"] == spike.step and "trackbridge/seq" not in row
    kinds = {key: row[key]["_type"] for key in row if isinstance(row[key], dict)}
    assert kinds == {
        **{panels.picture(panel): "image-file" for panel in panels.PANELS if panel.view == "heatmap"}, "page": "html-file",
    }  # fmt: skip
    said(ref, "--dir", tmp_path)
    (view,) = server.views.all.values()
    media = [key for chart in charts(json.loads(view.spec)) for key in chart["config"].get("mediaKeys") or ()]
    assert set(media) == set(kinds), "and the report shows them all"


def test_the_run_makes_the_report_itself_on_its_first_anomaly(recorded: Path, served: WandbServer, tmp_path: Path) -> None:
    """A setting of the backend; done by the process that speaks to W&B, with the command that a person would type."""
    from wandb_kit import QuickConfig

    copy = tmp_path / recorded.name
    shutil.copytree(recorded, copy, ignore=shutil.ignore_patterns("shipper", "wandb"))
    served.views.all.clear()
    config = QuickConfig(base_url=served.url, project="by-itself", report=True)
    assert shipper.sync(copy, [config], timeout=100).complete
    (view,) = served.views.all.values()
    assert (view.entity, view.project) == ("team", "by-itself") and view.display.startswith("Spike forensics: spike")
    assert served.run("by-itself", recorded.name).summary["trackbridge/report"].endswith(view.id)
    assert view.id in said(copy), "made again by hand it is the same"
