"""``trackbridge doctor``: each thing it looks at, as it is and as it should not be."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trackbridge
from tests.recordings import Trainer
from tests.wandb_server import WandbServer
from trackbridge.cli import app
from trackbridge.cli.doctor import device, place, software, trackers
from trackbridge.cli.doctor.finding import Finding
from trackbridge.rundir import RunDirectory


def doctor(*arguments: object, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    assert result.exit_code == status, result.output
    return {finding["what"]: finding for finding in json.loads(result.stdout)}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


# -- servers


class Answers(BaseHTTPRequestHandler):
    """Says what `said` holds, and remembers what it was asked with."""

    said: tuple[int, bytes] = (200, b"")
    headers_seen: list[str] = []

    def do_GET(self) -> None:
        self.headers_seen.append(str(self.headers))
        status, body = self.said
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answers, "headers_seen", [])
    with HTTPServer(("127.0.0.1", 0), Answers) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        ((200, b"3.17.0"), "ok", "version 3.17.0"),
        ((200, b"2.9.1"), "note", "is 2.9.1, the client here 3.17.2"),
        ((401, b"who are you"), "ok", "answers"),
        ((200, b"<html>a proxy's page</html>"), "ok", "answers"),
    ],
)
def test_mlflow_says_its_version(
    server: str, monkeypatch: pytest.MonkeyPatch, said: tuple[int, bytes], state: str, words: str
) -> None:
    monkeypatch.setattr(Answers, "said", said)
    found = trackers.mlflow(server.replace("//", "//me:hidden-word@"), "3.17.2")
    assert found.state == state and words in found.found
    assert "hidden-word" not in str(found) + "".join(Answers.headers_seen), "no password leaves, or is shown"


def test_a_wandb_server_that_wants_a_key_first_answers() -> None:
    with WandbServer() as wandb:
        answers, key = trackers.wandb("online", wandb.url, "0.31.0")
    assert answers == Finding("W&B server", "ok", f"{wandb.url} answers")
    assert key.state == "note" and "wandb login" in key.advice


def test_a_client_newer_than_its_wandb_server_is_noted(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"data": {"serverInfo": {"cliVersionInfo": {"max_cli_version": "0.30.1"}}}}
    monkeypatch.setattr(Answers, "said", (200, json.dumps(answer).encode()))
    older, _ = trackers.wandb("online", server, "0.30.1")
    assert older.state == "ok" and "up to 0.30.1" in older.found
    newer, _ = trackers.wandb("online", server, "0.31.0")
    assert newer.state == "note" and "wandb<=0.30.1" in newer.advice


def test_where_a_key_is_but_not_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password something-secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    *_, key = trackers.wandb("online", "http://127.0.0.1:9", "0.31.0")
    assert key == Finding("W&B key", "ok", f"in {tmp_path / 'netrc'}")


def test_a_server_that_accepts_and_says_nothing_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = trackers.mlflow(f"http://127.0.0.1:{silent.getsockname()[1]}", "3.0")
    assert found.state == "note" and "does not answer" in found.found and found.advice


def test_what_takes_longer_than_it_may_is_given_up() -> None:
    never = threading.Event()

    def wait() -> bytes:
        never.wait()
        return b"late"

    assert trackers.within(0.05, wait) is None
    never.set()


# -- settings and packages


def test_a_variable_that_is_no_setting_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKBRIDGE_RECORDR__ENABLED", "false")
    found = doctor(tmp_path, status=1)["settings"]
    assert found["state"] == "problem" and "did you mean 'recorder'" in found["found"]


def test_a_package_that_a_setting_asks_for_is_a_problem_where_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(software.EXTRAS, "no-such-distribution", "wandb")
    found = {finding.what: finding for finding in software.look()}["no-such-distribution"]
    assert found == Finding("no-such-distribution", "note", "not installed", "to use it: pip install 'trackbridge[wandb]'")
    monkeypatch.setattr(software, "_wanted", lambda: {"no-such-distribution": "TRACKBRIDGE_BACKEND"})
    found = {finding.what: finding for finding in software.look()}["no-such-distribution"]
    assert found.state == "problem" and "TRACKBRIDGE_BACKEND asks for it" in found.found


def test_every_extra_is_looked_at() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    body = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    extras = {line.split(" = ")[0] for line in body.splitlines() if " = [" in line}
    assert extras - {"torch", "all", "docs", "dev"} == set(software.EXTRAS.values())


# -- the device


def test_a_driver_without_a_device_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "built without CUDA" in device._no_gpu({"cuda": None}).found
    assert "CUDA_VISIBLE_DEVICES='7'" in device._no_gpu({"cuda": "13.0"}).found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "torch sees no device" in device._no_gpu({"cuda": "13.0"}).found


def test_what_a_bit_exact_replay_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8 and call" in device._determinism({"deterministic_algorithms": False}).advice
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert device._determinism({"deterministic_algorithms": True}).state == "ok"


# -- the folder


def test_a_folder_that_takes_no_file_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    found = doctor(tmp_path, status=1)
    assert found["run folder"]["state"] == "problem" and "Read-only" in found["run folder"]["found"]
    assert "disk speed" not in found


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    doctor(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_a_slow_or_full_disk_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert place._speed(5e6).state == "note" and place._speed(5e8).state == "ok"
    monkeypatch.setattr(place, "NO_DISK", 1e18)
    monkeypatch.setattr(place, "LOW_DISK", 1e18)
    assert doctor(tmp_path, status=1)["disk"]["state"] == "problem"


def test_runs_that_were_never_delivered_are_named_with_the_command(tmp_path: Path) -> None:
    for name in ("waiting", "done"):
        with trackbridge.init(id=name, dir=tmp_path) as run:
            run.step(loss=1.0)
        file = (directory := RunDirectory(run.dir)).read()
        gone = [attempt.model_copy(update={"pid": 2**22 + 1}) for attempt in file.attempts]
        trackers_of = [{"kind": "tensorboard"}] if name == "waiting" else []
        directory.write(file.model_copy(update={"attempts": gone, "backends": trackers_of}))
    found = doctor(tmp_path)["runs left over"]
    assert found["found"] == "1 not wholly delivered: waiting"
    assert found["advice"] == f"trackbridge sync {tmp_path / 'waiting'}"


def test_a_run_that_is_being_recorded_is_not_left_over(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "live")  # alive as long as this process
    trainer.train(3)
    assert place.left_over(tmp_path) == Finding("runs left over", "ok", "none; 1 running")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    assert place.left_over(tmp_path).found == "1 cannot be read: torn; 1 running"
    trainer.finish()
