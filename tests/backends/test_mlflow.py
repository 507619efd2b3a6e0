"""MLflow, read back with its own client: a SQLite file, and a real server on loopback that is killed and started again."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.disk import full_disk
from trackbridge.backends import mlflow, mlflow_names
from trackbridge.backends.mlflow import MlflowConfig, fetch_capsule
from trackbridge.backends.resolve import resolve
from trackbridge.errors import ConfigError, ReferenceNotFoundError, Rejected, RetryLater, TrackbridgeError
from trackbridge.records import Params, RunInfo
from trackbridge.testing import BackendContract, ReadBack, anomaly, artifact, deliver, end, newest, row, rows, run_info


@pytest.fixture(autouse=True)
def shipper_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shipper sets in its own process."""
    for name, text in MlflowConfig.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def read_back(config: MlflowConfig, run: RunInfo) -> ReadBack:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(config.uri)
    experiment = client.get_experiment_by_name(config.experiment or run.project)
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`trackbridge.run_id` = '{run.run_id}'")
    run_id, tags = found.info.run_id, found.data.tags
    original = {mlflow_names.key(text): text for tag, text in tags.items() if tag.startswith("trackbridge.name.")}
    history = {original.get(key, key): client.get_metric_history(run_id, key) for key in found.data.metrics}
    attempt_at = {metric.timestamp: int(metric.value) for metric in history["trackbridge/attempt"]}
    split = {name: newest((attempt_at[m.timestamp], m.step, m.value) for m in points) for name, points in history.items()}
    status = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed", "RUNNING": None}[found.info.status]
    names = [tag.removeprefix("trackbridge.artifact.") for tag in tags if tag.startswith("trackbridge.artifact.")]
    prefix = "trackbridge.anomaly."
    return ReadBack(
        series={name: current for name, (current, _) in split.items()},
        superseded={name: old for name, (_, old) in split.items()},
        artifacts={name: download(client, run_id, name) for name in names},
        params={original.get(key, key): text for key, text in found.data.params.items()},
        anomalies={tag.removeprefix(prefix): text for tag, text in tags.items() if tag.startswith(prefix)},
        status=status,  # type: ignore[arg-type]
    )


def download(client: Any, run_id: str, name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(client.download_artifacts(run_id, name, temporary))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- a database


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests here, each with an experiment of its own: creating it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


class TestDatabase(BackendContract):
    infinity = "clamped"

    @pytest.fixture(autouse=True)
    def _uri(self, database: str) -> None:
        self.uri = database

    def config(self, tmp_path: Path) -> MlflowConfig:
        return MlflowConfig(tracking_uri=self.uri, experiment=str(tmp_path), artifact_location=f"{tmp_path}/mlruns")

    def read_back(self, config: MlflowConfig, run: RunInfo) -> ReadBack:
        return read_back(config, run)


HALF = 200_000
"""Bytes of a database that MLflow has not finished making."""


def test_a_disk_that_fills_up_while_the_database_is_made_leaves_none(tmp_path: Path) -> None:
    path, run = tmp_path / "new" / "mlflow.db", run_info(tmp_path)
    backend = MlflowConfig(tracking_uri=f"sqlite:///{path}").build()
    with full_disk(HALF), pytest.raises(RetryLater, match=r"^MLflow at sqlite:///\S+: .*(disk I/O error|full)$"):
        backend.open(run)
    assert list(path.parent.iterdir()) == []
    backend.open(run)
    deliver(backend, rows(range(3)))
    assert backend.close(end(3), timeout=20) == 3
    assert [file.name for file in path.parent.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("name", ["a b.db", "a%20b.db", "a%25b#[1].db"])
def test_a_database_is_where_mlflow_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """MLflow reads %20 in a URI as a space, also in the working directory's part of it. Nothing else is left in the folder."""
    here, run = tmp_path / "100%20?", run_info(tmp_path)
    here.mkdir()
    monkeypatch.chdir(here)
    config = MlflowConfig(tracking_uri=f"sqlite:///{name}", artifact_location=f"{tmp_path}/artifacts")
    backend = config.build()
    backend.open(run)
    deliver(backend, rows(range(3)))
    assert backend.close(end(3), timeout=20) == 3
    assert [file.name for file in here.iterdir()] == [unquote(name)]
    monkeypatch.chdir("/")
    assert MlflowConfig.model_validate_json(config.model_dump_json()).build().open(run) == 3


def test_a_place_where_no_database_can_be_needs_a_person(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(TrackbridgeError, match="Not a directory"):
        MlflowConfig(tracking_uri=f"sqlite:///{tmp_path}/a-file/x/mlflow.db").build().open(run_info(tmp_path))


def test_an_experiment_that_mlflow_refuses_needs_a_person(uri: str, tmp_path: Path) -> None:
    """No waiting helps there, so `sync` must not wait."""
    backend = MlflowConfig(tracking_uri=uri, experiment="x" * 501).build()
    with pytest.raises(TrackbridgeError, match=r"^MLflow at \S+ refuses experiment 'x+': .*500") as told:
        backend.open(run_info(tmp_path))
    assert not isinstance(told.value, RetryLater) and "\n" not in str(told.value)


def test_a_database_that_mlflow_left_half_made_is_named_and_left_alone(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    path, run = tmp_path / "mlflow.db", run_info(tmp_path)
    config = MlflowConfig(tracking_uri=f"sqlite:///{path}")
    with full_disk(HALF), pytest.raises(Exception, match="disk"):
        MlflowClient(config.uri).search_experiments()
    broken = path.read_bytes()
    with pytest.raises(TrackbridgeError) as told:
        config.build().open(run)
    assert not isinstance(told.value, RetryLater)
    assert f"{path} is broken (" in str(told.value) and "Move the file away" in str(told.value)
    assert "\n" not in str(told.value) and "CREATE TABLE" not in str(told.value)
    assert path.read_bytes() == broken
    path.rename(tmp_path / "aside.db")
    backend = config.build()
    backend.open(run)
    deliver(backend, rows(range(3)))
    assert backend.close(end(3), timeout=20) == 3


# -- a server


class Server:
    """A real `mlflow server` on loopback, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self.port),
                   "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
                   "--artifacts-destination", str(self.folder / "artifacts")]  # fmt: skip
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "server.log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


class TestServer(BackendContract):
    infinity = "clamped"
    wide = 1001  # just over one request: each series is read back by a request of its own

    @pytest.fixture(autouse=True)
    def _uri(self, server: Server) -> None:
        self.uri = server.uri

    def config(self, tmp_path: Path) -> MlflowConfig:
        return MlflowConfig(tracking_uri=self.uri, experiment=str(tmp_path))

    def read_back(self, config: MlflowConfig, run: RunInfo) -> ReadBack:
        return read_back(config, run)


# -- trouble with the server


def test_a_killed_server_loses_and_doubles_nothing(server: Server, tmp_path: Path) -> None:
    """SIGKILL in the middle of a run: the backend says `RetryLater` at once; afterwards everything is there exactly once."""
    config, run = MlflowConfig(tracking_uri=server.uri, experiment=str(tmp_path)), run_info(tmp_path / "run")
    names = [f"layer/{i}/grad_norm" for i in range(30)]
    records = [*rows(range(20), names), artifact(20, 19, run, "spike-19", {"manifest.json": b"{}", "a.bin": b"x" * 90_000})]
    backend = config.build()
    backend.open(run)
    held = backend.write(records[:7], timeout=30)
    assert held == 6
    server.kill()
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(RetryLater, match=r"MLflow at http://127"):
            backend.write(records, timeout=30)
    with pytest.raises(RetryLater):
        config.build().open(run)
    assert time.monotonic() - started < 10, "an outage blocked the shipper"
    server.start()
    assert deliver(backend, records) == 20
    fresh = config.build()
    assert fresh.open(run) == 20
    TestServer().ship(config, run, records, end(21))
    back = read_back(config, run)
    TestServer().assert_series(back.series, TestServer().expected(records))
    assert not any(back.superseded.values())
    assert back.artifacts == {"spike-19": {"manifest.json": b"{}", "a.bin": b"x" * 90_000}}
    assert back.status == "finished"


class Always(BaseHTTPRequestHandler):
    """Answers everything with one status, as a proxy in front of a server does when something is wrong."""

    status, body = 503, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "body", "signal"),
    [
        (503, b"", RetryLater),
        (429, b"slow down", RetryLater),
        (500, b'{"error_code": "INTERNAL_ERROR", "message": "oops"}', RetryLater),
        (400, b"<html>The plain HTTP request was sent to HTTPS port</html>", RetryLater),
        (401, b"", TrackbridgeError),
        (403, b'{"error_code": "PERMISSION_DENIED", "message": "no"}', TrackbridgeError),
    ],
)
def test_what_a_proxy_answers(tmp_path: Path, status: int, body: bytes, signal: type[Exception]) -> None:
    handler = type("Handler", (Always,), {"status": status, "body": body})
    with HTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        config = MlflowConfig(tracking_uri=f"http://127.0.0.1:{proxy.server_port}")
        with pytest.raises(signal):
            config.build().open(run_info(tmp_path))
        proxy.shutdown()


def test_a_server_that_never_answers_is_left_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(RetryLater):
        MlflowConfig(tracking_uri=f"http://127.0.0.1:{deaf.getsockname()[1]}").build().open(run_info(tmp_path))


# -- what is refused, and what is not the records' fault


@pytest.fixture(params=["database", "server"])
def uri(request: pytest.FixtureRequest) -> str:
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, str) else str(found.uri)


def test_one_refused_point_is_found_and_the_rest_arrives(uri: str, tmp_path: Path) -> None:
    """A clock before 1970 is what MLflow refuses; its message names a request, not a record."""
    config, run = MlflowConfig(tracking_uri=uri, experiment=str(tmp_path)), run_info(tmp_path)
    records = rows(range(30))
    bad = [replace(records[11], time=-5.0), replace(records[20], step=2**70)]
    backend = config.build()
    backend.open(run)
    batch = [*records[:11], bad[0], *records[12:20], bad[1], *records[21:]]
    refused: dict[int, str] = {}
    while True:
        try:
            deliver(backend, [record for record in batch if record.seq not in refused])
            break
        except Rejected as signal:
            refused |= signal.reasons
    assert set(refused) == {11, 20}
    assert backend.close(None, timeout=9) == 29
    TestDatabase().assert_series(read_back(config, run).series, TestDatabase().expected(set(batch) - set(bad)))


def test_a_refusal_by_mlflow_is_narrowed_down_to_the_record(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, with our own check of times off: the batch is cut in halves until the guilty point is found."""
    monkeypatch.setattr("trackbridge.backends.mlflow._fits", lambda row: True)
    config, run = MlflowConfig(tracking_uri=uri, experiment=str(tmp_path)), run_info(tmp_path)
    records = rows(range(12))
    batch = [*records[:7], replace(records[7], time=-5.0), *records[8:]]
    backend = config.build()
    backend.open(run)
    with pytest.raises(Rejected) as refused:
        backend.write(batch, timeout=30)
    assert list(refused.value.reasons) == [7] and "nonnegative" in refused.value.reasons[7]
    assert backend.write(batch, timeout=30) == 11
    good = [record for record in batch if record.seq != 7]
    TestDatabase().assert_series(read_back(config, run).series, TestDatabase().expected(good))


def test_a_deleted_run_is_not_the_records_fault(uri: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    config, run = MlflowConfig(tracking_uri=uri, experiment=str(tmp_path)), run_info(tmp_path)
    backend = config.build()
    backend.open(run)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(str(tmp_path)).experiment_id
    (found,) = client.search_runs([experiment])
    client.delete_run(found.info.run_id)
    with pytest.raises(TrackbridgeError, match="is deleted; restore it with: mlflow runs restore"):
        backend.write(rows(range(3)), timeout=9)
    client.restore_run(found.info.run_id)
    assert backend.write(rows(range(3)), timeout=9) == 2
    client.delete_experiment(experiment)
    with pytest.raises(TrackbridgeError, match="is deleted; restore it with: mlflow experiments restore"):
        config.build().open(run)


def test_two_recordings_that_write_into_one_run_at_once(uri: str, tmp_path: Path) -> None:
    """What one has delivered says nothing of the other, whoever opened or wrote last."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    theirs = client.create_run(client.create_experiment(str(tmp_path))).info.run_id
    config = MlflowConfig(tracking_uri=uri, joined=theirs)
    first = run_info(tmp_path)
    second = replace(first, run_id="another")
    one, two = config.build(), config.build()
    assert (one.open(first), two.open(second)) == (-1, -1)
    assert two.write(rows(range(3)), timeout=30) == 2
    assert one.write(rows(range(20)), timeout=30) == 19
    assert config.build().open(second) == 2
    assert config.build().open(first) == 19
    one.close(end(20), timeout=30)
    assert config.build().open(second) == 2


@pytest.mark.parametrize("joined", [False, True])
def test_another_recording_of_the_same_id_has_its_own_rows(uri: str, tmp_path: Path, joined: bool) -> None:
    """An id is used again (the run's directory was deleted, or is on another machine), or a second run joins the user's: what
    the first one wrote must not be taken for what the second one has delivered."""
    from mlflow.tracking import MlflowClient

    config = MlflowConfig(tracking_uri=uri, experiment=str(tmp_path))
    first = run_info(tmp_path)
    second = replace(first, created=first.created + 3600)
    if joined:
        client = MlflowClient(uri)
        theirs = client.create_run(client.create_experiment(str(tmp_path))).info.run_id
        config = config.model_copy(update={"joined": theirs})
    for run, points in ((first, rows(range(20))), (second, rows(range(30, 35)))):
        backend = config.build()
        assert backend.open(run) == -1
        assert deliver(backend, points) == points[-1].seq
        backend.close(None, timeout=5)
        assert config.build().open(run) == points[-1].seq
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(str(tmp_path)).experiment_id
    held = [client.get_metric_history(run.info.run_id, "train/loss") for run in client.search_runs([experiment])]
    assert sorted(map(len, held)) == ([25] if joined else [5, 20])


def test_time_runs_out_between_rows(database: str, tmp_path: Path) -> None:
    config, records = MlflowConfig(tracking_uri=database, experiment=str(tmp_path)), rows(range(6))
    backend = config.build()
    backend.open(run_info(tmp_path))
    assert [backend.write(records, timeout=0) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    TestDatabase().assert_series(read_back(config, run_info(tmp_path)).series, TestDatabase().expected(records))


def test_as_few_requests_as_there_can_be(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = MlflowConfig(tracking_uri=database, experiment=str(tmp_path)).build()
    backend.open(run_info(tmp_path))
    sizes: list[int] = []
    log_batch = backend._run.client.log_batch
    backend._run.client.log_batch = lambda run, metrics=(), tags=(), **more: (
        sizes.append(len(metrics)) if metrics else None,
        log_batch(run, metrics=metrics, tags=tags, **more),
    )
    backend.write(rows(range(30), [f"x{i}" for i in range(98)]), timeout=60)
    assert sizes == [900, 999, 999, 102], "30 rows of 98 series and 2 of ours: first what one request holds, then the rest"


def test_rows_whose_acknowledgement_was_lost_are_stored_once(uri: str, tmp_path: Path) -> None:
    """A crash after the points were stored and before the tag was: all is sent again."""
    from mlflow.tracking import MlflowClient

    config, run = MlflowConfig(tracking_uri=uri, experiment=str(tmp_path)), run_info(tmp_path)
    records = [*rows(range(5)), row(5, 5, {"train/loss": float("nan"), "grad/norm": float("inf")})]
    TestDatabase().ship(config, run, records, None)
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name(str(tmp_path)).experiment_id])
    client.set_tag(found.info.run_id, "trackbridge.seq", "1")
    assert TestDatabase().ship(config, run, records, None) == 1
    back = read_back(config, run)
    TestDatabase().assert_series(back.series, TestDatabase().expected(records))
    assert not any(back.superseded.values())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of twenty points: of `TEN_ROWS` the first is a group of its own, the other nine are one of eight requests."""
    monkeypatch.setattr(mlflow.MlflowBackend, "room", 20)
    monkeypatch.setattr(mlflow, "GROUP_SECONDS", 60.0)


TEN_ROWS = rows(range(10), [f"x{i}" for i in range(14)])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("failing", range(8))
def test_a_group_of_rows_is_held_only_when_all_its_requests_were_taken(
    server: Server, tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = MlflowConfig(tracking_uri=server.uri, experiment=str(tmp_path)), run_info(tmp_path)
    backend: Any = config.build()
    backend.open(run)
    log_batch, calls = backend._run.client.log_batch, itertools.count()

    def one_fails(*given: Any, metrics: Any = (), **more: Any) -> None:
        if metrics and next(calls) == 1 + failing:
            raise ConnectionResetError
        log_batch(*given, metrics=metrics, **more)

    monkeypatch.setattr(backend._run.client, "log_batch", one_fails)
    with pytest.raises(RetryLater):
        backend.write(TEN_ROWS, timeout=60)
    assert TestDatabase().ship(config, run, TEN_ROWS, None) == 0, "the tag told of rows that are not all there"
    TestDatabase().assert_series(read_back(config, run).series, TestDatabase().expected(TEN_ROWS))


def test_after_a_failure_requests_are_small_for_a_while(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = MlflowConfig(tracking_uri=database, experiment=str(tmp_path)).build()
    backend.open(run_info(tmp_path))
    log_batch, sizes = backend._run.client.log_batch, []

    def counted(*given: Any, metrics: Any = (), **more: Any) -> None:
        if metrics:
            sizes.append(len(metrics))
            if len(sizes) == 1:
                raise ConnectionResetError
        log_batch(*given, metrics=metrics, **more)

    monkeypatch.setattr(backend._run.client, "log_batch", counted)
    records = rows(range(4), [f"x{i}" for i in range(498)])
    with pytest.raises(RetryLater):
        backend.write(records, timeout=60)
    assert backend.write(records, timeout=60) == 3
    assert sizes[:7] == [500, 100, 100, 100, 100, 100, 400]


@pytest.mark.usefixtures("small")
def test_the_tag_travels_when_all_that_it_tells_of_is_safe(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = MlflowConfig(tracking_uri=server.uri, experiment=str(tmp_path)).build()
    backend.open(run_info(tmp_path))
    log_batch, flying, most = backend._run.client.log_batch, Counter[str](), Counter[str]()

    def counted(*given: Any, metrics: Any = (), tags: Any = (), **more: Any) -> None:
        what = "points" if metrics and not tags else "points and tag" if metrics else "tags"
        flying[what] += 1
        most[what] = max(most[what], flying.total())
        log_batch(*given, metrics=metrics, tags=tags, **more)
        flying[what] -= 1

    monkeypatch.setattr(backend._run.client, "log_batch", counted)
    assert backend.write(TEN_ROWS, timeout=60) == 9
    assert most["points"] == 2, "a server gets two requests at a time"
    assert most["points and tag"] == 1


@pytest.mark.usefixtures("small")
def test_a_group_that_takes_too_long_is_sent_in_smaller_ones(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps at each request of the second group by more than the time that a write is given."""
    backend: Any = MlflowConfig(tracking_uri=database, experiment=str(tmp_path)).build()
    backend.open(run_info(tmp_path))
    log_batch, requests, late = backend._run.client.log_batch, itertools.count(), 0.0

    def slow(*given: Any, metrics: Any = (), **more: Any) -> None:
        nonlocal late
        late += 100.0 if metrics and next(requests) else 0.0
        log_batch(*given, metrics=metrics, **more)

    monkeypatch.setattr(mlflow, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late))
    monkeypatch.setattr(backend._run.client, "log_batch", slow)
    with pytest.raises(RetryLater, match="fewer"):
        backend.write(TEN_ROWS, timeout=30)
    held = [backend.write(TEN_ROWS, timeout=30) for _ in range(9)]
    assert held == list(range(1, 10)), "each write sends at least one row"


# -- the run


def test_the_run_goes_on_only_when_a_later_attempt_speaks(database: str, tmp_path: Path) -> None:
    config, contract = MlflowConfig(tracking_uri=database, experiment=str(tmp_path)), TestDatabase()
    run = run_info(tmp_path)
    contract.ship(config, run, rows(range(3)), end(3, "failed", error="RuntimeError: boom"))
    contract.ship(config, run, [artifact(4, 2, run, "late", {"a.md": b"a"})], None)
    assert read_back(config, run).status == "failed", "what is sealed after the end must not revive the run"
    again = run_info(tmp_path, attempt=1, start_step=2)
    contract.ship(config, again, rows([2], first_seq=5, attempt=1), None)
    assert read_back(config, again).status is None
    contract.ship(config, again, [], end(6, attempt=1))
    assert read_back(config, again).status == "finished"


def test_tags_description_params_and_odd_file_names(server: Server, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    config = MlflowConfig(tracking_uri=server.uri, experiment=str(tmp_path))
    run, client, inf = run_info(tmp_path, group="g", tags=("a", "b")), MlflowClient(server.uri), float("inf")
    backend: Any = config.build()
    backend.open(run)
    backend.write([Params(0, 1.0, {"config": {"lr": 0.1, "long": "y" * 9000, "a": {"b": [1, 2]}}, "git": "abc"})], timeout=9)
    found = client.search_runs([client.get_experiment_by_name(str(tmp_path)).experiment_id])[0]
    run_id = found.info.run_id
    assert backend.url == f"{server.uri}/#/experiments/{found.info.experiment_id}/runs/{run_id}"
    client.set_tag(run_id, "mlflow.note.content", "mine")
    files = {"a#b.txt": b"1", "a?b.txt": b"2", "a%41.txt": b"3", "sub dir/x.txt": b"4"}
    backend.write(
        [
            Params(1, 2.0, {"config": {"lr": 0.2}}),
            row(2, 7, {"loss[0]": -inf}),
            anomaly(3, 7),
            anomaly(4, 8),
            artifact(5, 8, run, "odd", files),
        ],
        timeout=30,
    )
    data = client.get_run(run_id).data
    assert data.params == {"lr": "0.1", "lr:attempt-0": "0.2", "a.b": "[1, 2]", "git": "abc", "long": "y" * 5999 + "…"}
    whole = json.loads(Path(client.download_artifacts(run_id, "trackbridge/params-0.json", str(tmp_path))).read_text())
    assert whole == {"config": {"lr": 0.1, "long": "y" * 9000, "a": {"b": [1, 2]}}, "git": "abc"}
    assert data.tags["trackbridge.group"] == "g" and data.tags["trackbridge.tags"] == "a, b"
    note = data.tags["mlflow.note.content"]
    assert note.startswith("mine\n\n<!--") and note.count("spike in train/loss") == 1 and "at step 8" in note
    assert note.index("at step 8") < note.index("spike in train/loss at step 7"), "the newest first, the other in a line"
    assert [text for tag, text in data.tags.items() if tag.startswith("trackbridge.infinite.")] == [
        "loss[0] is -inf at step 7; SQL stores keep infinities as +-1.797e308"
    ]
    renamed = json.loads(data.tags["trackbridge.artifact.odd"])["renamed"]
    held = download(client, run_id, "odd")
    assert {renamed.get(name, name): content for name, content in held.items()} == files


def test_the_users_own_active_run_is_not_touched(database: str, tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(database)
    try:
        with mlflow.start_run() as theirs:
            config = MlflowConfig(tracking_uri=database, experiment=str(tmp_path))
            TestDatabase().ship(config, run_info(tmp_path), [*rows(range(2)), anomaly(2, 1)], end(3))
            active = mlflow.active_run()
            assert active is not None and active.info.run_id == theirs.info.run_id
        data = mlflow.get_run(theirs.info.run_id).data
        assert not data.metrics and not [tag for tag in data.tags if tag.startswith("trackbridge")]
    finally:
        mlflow.set_tracking_uri("")


# -- settings


SECRETS = [
    "https://me:hunter2secret@host/mlflow",
    "https://tokenhunter2secret@host",
    "postgresql://me:hunter2secret@db/mlflow",
    "http://host/?api_key=hunter2secret",
]


@pytest.mark.parametrize("uri", SECRETS)
def test_a_secret_in_the_uri_is_refused_and_not_repeated(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("tracking_uri", "artifact_location"):
        with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
            resolve({"kind": "mlflow", setting: uri})
        assert "hunter2" not in str(refused.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = MlflowConfig()
    assert "hunter2" not in config.model_dump_json() + config.where(run_info(tmp_path)) + repr(config)
    assert config.uri == uri


def test_the_place_is_fixed_when_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, run = MlflowConfig(), run_info(tmp_path)
    assert config.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert config.where(run) == f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db"
    assert MlflowConfig(tracking_uri="sqlite:///sub/x.db").uri == f"sqlite:///{tmp_path}/sub/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000/")
    served = MlflowConfig()
    monkeypatch.chdir("/")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert MlflowConfig.model_validate_json(config.model_dump_json()) == config
    assert MlflowConfig.model_validate_json(served.model_dump_json()).uri == "http://host:5000/"
    assert "experiment 'contract', run 'a run'" in served.where(run)


def test_settings_need_no_mlflow() -> None:
    code = """
import sys
from trackbridge.backends.mlflow import MlflowConfig
MlflowConfig(tracking_uri="http://host:5000").build()
assert not [m for m in ("mlflow", "requests", "sqlalchemy") if m in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- names

AWKWARD = st.text(st.sampled_from("ab/.:_ -[@é\ud800"), min_size=1, max_size=12) | st.text(min_size=1, max_size=260)


@given(AWKWARD)
def test_every_name_becomes_one_that_mlflow_takes(name: str) -> None:
    from mlflow.entities import Metric
    from mlflow.utils.validation import _validate_batch_log_data

    key = mlflow_names.key(name)
    _validate_batch_log_data([Metric(key, 1.0, 0, 0)], [], [])
    assert len(key) <= 250 and key.isascii()


@given(AWKWARD, AWKWARD)
def test_names_never_meet(one: str, other: str) -> None:
    assert (one == other) == (mlflow_names.key(one) == mlflow_names.key(other))


@given(AWKWARD)
def test_a_name_that_looks_like_a_mapped_one_is_mapped_itself(name: str) -> None:
    mapped = mlflow_names.key(name)
    assert mapped == name or mlflow_names.key(mapped) not in (mapped, name)


@given(st.text(st.characters(blacklist_characters="/\x00", blacklist_categories=("Cs",)), min_size=1, max_size=20))
def test_file_names_survive_a_url(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]+", mlflow_names.file(name)) and mlflow_names.file(name) not in (".", "..")


@pytest.mark.parametrize("name", ["n" * 255, "#" * 255, "x" * 250 + ".json"[:4] + " "])
def test_a_file_name_as_long_as_can_be_stays_one(name: str) -> None:
    """Linux takes 255 bytes; one more and the upload fails for ever, and all that is behind it waits."""
    assert len(mlflow_names.file(f"folder/{name}").partition("/")[2]) <= 255


# -- getting a capsule back


def capsule(step: int, created: float) -> dict[str, bytes]:
    manifest = {"format_version": 1, "step": step, "created": created}
    return {"manifest.json": json.dumps(manifest).encode(), "rank-0000/rng.safetensors": bytes([step]) * 50_000}


def test_fetch_capsule(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MlflowConfig(tracking_uri=uri, experiment=str(tmp_path), artifact_location=None)
    run = run_info(tmp_path, run_id=f"run-{uri[:4]}")
    found = {3: 9.0, 12: 5.0}
    records = [artifact(i, s, run, f"spike-{s}", capsule(s, t)) for i, (s, t) in enumerate(found.items())]
    notes = artifact(2, 12, run, "notes", {"manifest.json": b"[1]"}, kind="file")
    monkeypatch.chdir(tmp_path)
    TestDatabase().ship(config, run, [*records, notes], None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    dest = tmp_path / "pulled"
    backend: Any = config.build()
    backend.open(run)
    for ref in (run.run_id, backend._run.id):
        got = fetch_capsule(ref, 12, dest)
        assert got == dest / "spike-12"
        assert {path.relative_to(got).as_posix(): path.read_bytes() for path in got.rglob("*.*")} == capsule(12, 5.0)
    assert fetch_capsule(run.run_id, None, dest).name == "spike-3", "the newest is not the one of the highest step"
    assert sorted(path.name for path in dest.iterdir()) == ["spike-12", "spike-3"]
    with pytest.raises(ReferenceNotFoundError, match="no capsule of step 4; it has steps 3, 12"):
        fetch_capsule(run.run_id, 4, dest)
    for ref in ("nobody", "' OR 1=1"):
        with pytest.raises(ReferenceNotFoundError, match="is MLFLOW_TRACKING_URI right"):
            fetch_capsule(ref, None, dest)


def test_fetch_capsule_from_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReferenceNotFoundError, match=r"no MLflow database .*/mlflow.db; set MLFLOW_TRACKING_URI"):
        fetch_capsule("run", None, tmp_path)
    assert not list(tmp_path.iterdir())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(TrackbridgeError, match="cannot reach MLflow at http://127"):
            fetch_capsule("run", None, tmp_path)
