"""The command line on a real recorded run: what it says, that its JSON is JSON, and its exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import trackbridge
from tests import replays
from trackbridge import __version__, load
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


@pytest.mark.parametrize("height", [9.0, 300.0, 3e4, 1e300])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_spike_does_not_flatten_the_course(height: float, sign: int) -> None:
    """However far off it is, it has the highest bar alone, and the fall from 10 to 2 before it is still seen."""
    course = 2 + 8 / np.sqrt(np.arange(1, 401))
    values = sign * course
    values[300:303] = sign * height
    line, usual = sparkline(values, 40), sparkline(sign * course, 40)
    far = "█" if sign > 0 else "▁"
    assert line[30] == far and (height < 20 or line.count(far) == 1)
    assert len(set(line[:30])) >= len(set(usual[:30])) - 2, f"{line} beside {usual}"


@given(st.lists(st.floats(), max_size=60), st.integers(1, 50))
def test_any_values_give_a_sparkline(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values)) and set(line) <= set("▁▂▃▄▅▆▇█!")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_a_higher_value_never_has_a_lower_bar(values: list[float]) -> None:
    bars = sorted(zip(values, map("▁▂▃▄▅▆▇█".index, sparkline(values)), strict=True))
    assert [bar for _, bar in bars] == sorted(bar for _, bar in bars)
    assert bars[0][1] == 0 and (bars[-1][1] == 7 or bars[0][0] == bars[-1][0])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the commands a terminal so wide."""
    real = rich.console.Console

    def set_width(width: int) -> None:
        monkeypatch.setattr("rich.console.Console", lambda **given: real(**{**given, "width": width}))

    return set_width


@pytest.mark.parametrize("width", [72, 80, 120])
def test_show_fits_the_terminal_and_shows_every_bar(recorded: Path, width: int, terminal: Callable[[int], None]) -> None:
    terminal(width)
    said = call("show", recorded).stdout
    curves = [line.rstrip() for line in said.splitlines() if re.match("(train|grad|perf|optim|trackbridge)/", line)]
    assert len(curves) > 3 and "…" not in said
    assert all(len(line) <= width for line in curves)
    steps, loss = load(recorded).series("train/loss")
    (shown,) = [line for line in curves if line.startswith("train/loss")]
    assert shown.endswith(f"at {steps[loss.argmax()]}") and "█" in shown


def test_a_runs_id_is_never_cut(recorded: Path, tmp_path: Path, terminal: Callable[[int], None]) -> None:
    run = tmp_path / "20261128-205907-9fab09"
    shutil.copytree(recorded, run)
    told = (run / "run.json").read_text(encoding="utf-8")
    (run / "run.json").write_text(told.replace(f'"{recorded.name}"', f'"{run.name}"'), encoding="utf-8")
    terminal(80)
    assert run.name in call("runs", tmp_path).stdout


def test_a_command_that_is_advised_is_never_broken(recorded: Path, undelivered: Path, terminal: Callable[[int], None]) -> None:
    advice = [finding["advice"] for finding in answer("show", recorded, "--findings")["findings"] if finding["advice"]]
    where = answer("show", recorded)["backends"][0]["where"]
    terminal(60)
    said = call("show", recorded, "--findings").stdout
    assert advice and all(text in said for text in advice)
    assert where.startswith("tensorboard --logdir") and where in call("show", recorded).stdout
    assert "--samples_per_plugin scalars=1000000" in call("sync", undelivered).stdout


def test_a_reference_that_is_no_run_here_says_what_is_wrong(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in ("show", "sync", "export", "rollback"):
        for reference, words in (
            (f"{recorded}@{replays.BAD}", f"leave @{replays.BAD} away"),
            (f"mlflow:{recorded.name}", "is in a tracker, and this reads runs on this disk"),
            (str(tmp_path / "file"), "is a file; give a run directory"),
        ):
            result = call(command, reference)
            assert result.exit_code == 2 and words in one_line(result.stderr), (command, reference)


def test_scan_takes_the_run_as_the_other_commands_do(recorded: Path, tmp_path: Path) -> None:
    folder = recorded.parent
    for reference in (recorded, folder, recorded.name, "tiny [lr=1e-3]"):
        found = answer("scan", reference, "--dir", folder)
        assert found["steps"] == replays.STEPS and replays.BAD in [anomaly["onset"] for anomaly in found["anomalies"]]
    near = call("scan", recorded.name[:-1], "--dir", folder)
    assert near.exit_code == 2 and f"did you mean '{recorded.name}'" in one_line(near.stderr)
    whole = call("scan", f"{recorded.name}@{replays.BAD}", "--dir", folder)
    assert whole.exit_code == 2 and f"leave @{replays.BAD} away" in one_line(whole.stderr)
    capsule = call("scan", next((recorded / "capsules").glob("*/manifest.json")).parent)
    assert capsule.exit_code == 2 and f"scan its run, {recorded}" in one_line(capsule.stderr)
    for name in ("one", "two"):
        shutil.copytree(recorded, tmp_path / name)
    several = call("scan", tmp_path)
    assert several.exit_code == 2 and "holds 2 runs, name one of: one, two" in one_line(several.stderr)


def test_every_command_that_takes_json_prints_json(recorded: Path, tmp_path: Path) -> None:
    assert answer("report", recorded, "--post-mortem")["post_mortem"].startswith("# Post-mortem")
    plan = answer("replay", recorded, "--plan", tmp_path / "skip.json")
    assert plan["batches"] == len(json.loads(Path(plan["path"]).read_text())["skips"]) > 0


def test_show_has_the_throughput_of_a_run_that_counts_samples(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, id="images") as run:
        for _ in range(4):
            run.step(loss=1.0, samples=8)
    assert "perf/samples_per_s" in call("show", "images", "--dir", tmp_path).output
