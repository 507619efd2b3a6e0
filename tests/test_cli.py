"""The command line on a real recorded run: what it says, that its JSON is JSON, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tests import replays
from trackbridge import __version__
from trackbridge.cli import app
from trackbridge.cli.common import sparkline
from trackbridge.cli.doctor import show
from trackbridge.cli.doctor.finding import Finding
from trackbridge.rundir import RunDirectory

BUILD = "tests.replays:build"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answer(*arguments: object, status: int = 0) -> Any:
    """Strict JSON on stdout: no NaN, and nothing beside it."""
    result = call(*arguments, "--json")
    assert result.exit_code == status, result.output

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(result.stdout, parse_constant=refuse)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a spike, delivered to TensorBoard."""
    return replays.record(tmp_path_factory.mktemp("cli") / "runs", backend="tensorboard", name="tiny [lr=1e-3]")


@pytest.fixture
def undelivered(recorded: Path, tmp_path: Path) -> Path:
    """The same run as if its shipper had never come far."""
    copy = tmp_path / "runs" / recorded.name
    shutil.copytree(recorded, copy)
    shutil.rmtree(copy / "shipper")
    shutil.rmtree(copy / "tensorboard")
    return copy


def test_version_and_help() -> None:
    assert call("--version").stdout == f"trackbridge {__version__}\n"
    said = call("--help").stdout
    for command in ("demo", "runs", "show", "sync", "pull", "replay", "doctor"):
        assert command in said


def test_runs_lists_the_run(recorded: Path) -> None:
    (run,) = answer("runs", recorded.parent)
    assert (run["run_id"], run["status"], run["step"]) == (recorded.name, "finished", replays.STEPS - 1)
    assert run["anomalies"] >= 1
    assert run["lag"] == {"tensorboard": 0}
    said = call("runs", recorded.parent).stdout
    assert recorded.name in said and "finished" in said and "tiny [lr=1e-3]" in said


def test_show_tells_the_run_its_anomalies_and_where_it_is(recorded: Path) -> None:
    shown = answer("show", recorded)
    assert shown["run"]["run_id"] == recorded.name
    assert shown["series"]["train/loss"]["steps"] == replays.STEPS
    assert replays.BAD in [anomaly["onset"] for anomaly in shown["anomalies"]]
    assert [backend["kind"] for backend in shown["backends"]] == ["tensorboard"]
    said = call("show", recorded).stdout
    assert "train/loss" in said and "everything delivered" in said and "tensorboard --logdir" in said


@pytest.mark.parametrize("reference", ["id", "name"])
def test_show_finds_a_run_by_its_id_or_name(recorded: Path, reference: str) -> None:
    words = {"id": recorded.name, "name": "tiny [lr=1e-3]"}[reference]
    assert answer("show", words, "--dir", recorded.parent)["run"]["run_id"] == recorded.name


def test_sync_delivers_what_is_missing(undelivered: Path) -> None:
    assert "lacks" in call("runs", undelivered.parent).stdout
    done = answer("sync", undelivered)
    assert done["complete"] and done["backends"][0]["lag"] == 0
    assert list((undelivered / "tensorboard").glob("events.out.tfevents.*"))
    assert answer("runs", undelivered.parent)[0]["lag"] == {"tensorboard": 0}


def test_sync_takes_a_runs_id(undelivered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(undelivered.parent.parent)
    assert undelivered.parent.name == "runs" and answer("sync", undelivered.name)["complete"]


def test_sync_says_what_is_left(undelivered: Path) -> None:
    (undelivered / "tensorboard").touch()  # where a folder has to be
    done = answer("sync", undelivered, "--timeout", 1, status=1)
    assert not done["complete"] and done["backends"][0]["lag"] > 0 and done["backends"][0]["last_error"]


def test_pull_checks_and_places_a_capsule(recorded: Path, tmp_path: Path) -> None:
    pulled = answer("pull", f"tensorboard:{recorded}@{replays.BAD}", "--dest", tmp_path / "pulled")
    assert (Path(pulled["path"]) / "manifest.json").exists()
    assert Path(pulled["path"]).is_relative_to(tmp_path)
    assert pulled["files"] > 3 and pulled["bytes"] > 0
    said = call("pull", recorded).stdout
    assert "re-execute" in said and str(recorded / "capsules") in said.replace("\n", "")


def test_pull_says_that_the_batches_are_elsewhere(recorded: Path, tmp_path: Path) -> None:
    elsewhere = "once the batches are there (they stayed on the recording machine)"
    assert f"re-execute {elsewhere}" in call("pull", f"tensorboard:{recorded}", "--dest", tmp_path / "pulled").stdout
    assert elsewhere not in call("pull", recorded).stdout, "here they are"


def test_replay_exact_is_status_0(recorded: Path) -> None:
    report = answer("replay", recorded, "--build", BUILD)
    assert report["verdict"] == "exact"
    said = call("replay", recorded, "--build", BUILD)
    assert said.exit_code == 0 and "exact" in said.stdout and "anomaly" in said.stdout


def test_replay_not_reproduced_is_status_1(recorded: Path) -> None:
    assert (
        answer("replay", recorded, "--build", "tests.test_cli:build_with_another_step", status=1)["verdict"] == "not-reproduced"
    )


def test_replay_incomplete_is_status_2(recorded: Path, tmp_path: Path) -> None:
    pulled = answer("pull", f"tensorboard:{recorded}", "--dest", tmp_path)["path"]  # raw batches do not travel by default
    assert answer("replay", pulled, "--build", BUILD, status=2)["verdict"] == "incomplete"


@pytest.mark.parametrize(
    "build", ["tests.replays", "tests.no_such_module:build", "tests.replays:no_such_function", "builtins:dict"]
)
def test_replay_that_cannot_run_is_status_3_and_one_line(recorded: Path, build: str) -> None:
    result = call("replay", recorded, "--build", build)
    assert result.exit_code == 3
    assert one_line(result.stderr).startswith("trackbridge: ")


@pytest.mark.parametrize("build", ["build_that_exits", "build_whose_step_exits"])
def test_an_exit_of_the_users_own_code_is_no_verdict(recorded: Path, build: str) -> None:
    result = call("replay", recorded, "--build", f"tests.test_cli:{build}")
    assert result.exit_code == 3 and "your code ended the process (sys.exit(0))" in one_line(result.stderr)


def build_that_exits() -> Any:
    sys.exit(0)


def build_whose_step_exits() -> Any:
    made = replays.build()
    made.step = lambda *_: sys.exit(0)
    return made


def test_an_error_in_the_users_own_code_keeps_its_traceback(recorded: Path) -> None:
    result = call("replay", recorded, "--build", "json:loads")
    assert result.exit_code == 3
    assert "Traceback" in result.stderr and "TypeError" in result.stderr


def build_with_another_step() -> Any:
    """The recorded training but for a step that does half the update."""
    made = replays.build()
    step = made.step

    def halved(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return step(model, optimizer, batches, index)

    made.step = halved
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "no-such-run"),
        ("sync", "no-such-run"),
        ("runs", "no-such-folder"),
        ("pull", "no-such-capsule"),
        ("pull", "wnadb:a/b/c"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert one_line(result.stderr).startswith("trackbridge: ")
    assert result.stdout == ""


def one_line(text: str) -> str:
    """The last line: a status that was shown before it is not part of the error."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    return lines[0]


def test_a_damaged_journal_is_shown_with_what_was_lost(undelivered: Path) -> None:
    segment = max(RunDirectory(undelivered).rows().glob("*.tbj"), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = os.urandom(40)
    segment.write_bytes(content)
    shown = answer("show", undelivered)
    assert shown["damage"]
    assert 0 < shown["series"]["train/loss"]["steps"] <= replays.STEPS


def test_doctor_has_a_finding_for_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")  # nobody listens there
    findings = {finding["what"]: finding for finding in answer("doctor", tmp_path)}
    assert findings["torch"]["state"] == "ok"
    assert findings["W&B"]["found"] == "WANDB_MODE=offline"
    assert findings["MLflow server"]["state"] == "note" and findings["MLflow server"]["advice"]
    assert "secret" not in json.dumps(findings)
    assert all(finding["advice"] for finding in findings.values() if finding["state"] != "ok")


def test_brackets_in_a_finding_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    advice = "pip install 'trackbridge[wandb]'"
    show([Finding("wandb", "note", "[not] installed", advice)])
    said = capsys.readouterr().out
    assert advice in said and "[not] installed" in said


def test_a_spike_survives_in_the_sparkline() -> None:
    values = np.ones(10_000)
    values[7_000] = 5.0
    line = sparkline(values, 40)
    assert len(line) == 40 and line.count("█") == 1
    values[100] = np.nan
    assert sparkline(values, 40)[0] == "!"
    assert sparkline([]) == ""
