"""What went wrong for others with trackers, one test per public report (group B of the collection), on the real trackers."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_mlflow import read_back as read_mlflow
from test_tensorboard import event_files, scalars
from test_tensorboard import read_back as read_tensorboard
from wandb_kit import QUICK, Connect, points, seqs

from tests.wandb_server import KEY, WandbServer
from trackbridge import shipper
from trackbridge.backends import folders
from trackbridge.backends.eventfile import records as event_records
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.backends.wandb import WandbBackend, WandbConfig
from trackbridge.backends.wandb_file import load as load_wandb
from trackbridge.config import StreamConfig
from trackbridge.errors import RetryLater
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.names import is_wide
from trackbridge.records import Record, Row, RunInfo, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile
from trackbridge.stream import Stream
from trackbridge.testing import anomaly, artifact, deliver, end, newest, row, rows, run_info

FLAKY = Path(__file__).parents[1] / "flaky"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def mlflow(database: str, tmp_path: Path) -> MlflowConfig:
    return MlflowConfig(tracking_uri=database, experiment=str(tmp_path), artifact_location=f"{tmp_path}/mlruns")


@pytest.fixture
def offline(run: RunInfo) -> Iterator[WandbBackend]:
    """The real client in offline mode."""
    backend = WandbBackend(WandbConfig(mode="offline"), QUICK)
    backend.open(run)
    yield backend
    backend.close(None, timeout=30)


def streamed(given: list[Record]) -> list[Record]:
    """As the shipper hands them over."""
    stream = Stream(StreamConfig())
    return [*stream.push(given), *stream.finish()]


def journal(path: Path, given: list[Record], backends: list[dict[str, Any]] | None = None) -> RunDirectory:
    directory = RunDirectory(path)
    life = Attempt(number=0, start_step=0, time=0.0, pid=os.getpid(), host="elsewhere")
    directory.write(RunFile(project="p", run_id=path.name, name="n", created=1.0, attempts=[life], backends=backends or []))
    writer = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=1e9)
    for record in given:
        writer.append(record)
    writer.close()
    return directory


def test_b1_no_row_is_dropped_for_its_step(run: RunInfo, offline: WandbBackend) -> None:
    """Steps 10, 9, the next one, 10 again, then an evaluation every second step: all of it is there, on our own axis."""
    steps = [10, 9, 11, 10, *range(12, 20)]
    given = [row(seq, step, {"train/loss": float(seq)}) for seq, step in enumerate(steps)]
    given += [row(len(steps) + i, step, {"eval/loss": 0.5}, kind="log") for i, step in enumerate(range(12, 20, 2))]
    deliver(offline, given)
    offline.close(end(99), timeout=30)
    history = load_wandb(Path(run.directory) / "wandb").history
    assert [(r["trackbridge/step"], r["train/loss"]) for r in history if "train/loss" in r] == [
        (step, float(seq)) for seq, step in enumerate(steps)
    ]
    assert [r["trackbridge/step"] for r in history if "eval/loss" in r] == [12, 14, 16, 18]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_b2_a_resume_from_an_older_checkpoint_reads_as_one_history(kind: str, run: RunInfo, mlflow: MlflowConfig) -> None:
    """0 to 212, again from 200 to 230: one value per step, the newest; the older ones can be reached by attempt."""
    config: Any = {"tensorboard": TensorboardConfig(), "mlflow": mlflow, "wandb": WandbConfig(mode="offline")}[kind]
    old = rows(range(213), ["train/loss"])
    new = rows(range(200, 231), ["train/loss"], first_seq=214, attempt=1)
    for info, given, last in (
        (run, old, end(213, "killed")),
        (run_info(Path(run.directory), attempt=1, start_step=200), new, end(245, attempt=1)),
    ):
        backend = WandbBackend(config, QUICK) if kind == "wandb" else config.build()
        backend.open(info)
        deliver(backend, given)
        assert backend.close(last, timeout=40) >= given[-1].seq
    if kind == "wandb":
        now, before = points(load_wandb(Path(run.directory) / "wandb").history)
    else:
        back = read_mlflow(config, run) if kind == "mlflow" else read_tensorboard(config.root(run))
        now, before = back.series, back.superseded
    kept = np.float32 if kind == "tensorboard" else np.float64
    wanted = {r.step: float(kept(r.values[0])) for r in [*old, *new]}
    assert dict(now["train/loss"]) == wanted and len(now["train/loss"]) == 231
    assert [step for step, _ in before["train/loss"]] == list(range(200, 213))


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_b3_nan_is_visible_everywhere(kind: str, run: RunInfo, mlflow: MlflowConfig, offline: WandbBackend) -> None:
    """NaN at four of five steps: a finite counter says so, and what the tracker can store of it is there as well."""
    given: list[Record] = [row(i, i, {"train/loss": 1.0 if i == 2 else math.nan}) for i in range(5)]
    backend: Any = {"tensorboard": TensorboardConfig().build(), "mlflow": mlflow.build(), "wandb": offline}[kind]
    backend.open(run)
    deliver(backend, streamed(given))
    backend.close(end(5), timeout=30)
    if kind == "tensorboard":
        series = read_tensorboard(TensorboardConfig().root(run)).series
    elif kind == "mlflow":
        series = read_mlflow(mlflow, run).series
    else:
        series = points(load_wandb(Path(run.directory) / "wandb").history)[0]
    assert [step for step, value in series["nonfinite/train/loss"] if value == 1.0] == [0, 1, 3, 4]
    assert [math.isnan(value) for _, value in series["train/loss"]] == [True, True, False, True, True]
    for path in Path(run.directory).rglob("*.json"):
        json.loads(path.read_text(), parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_b5_what_is_read_back_is_everything_not_a_sample(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    """1,152 points with one spike. A sampled history would give 500 of them, and perhaps not the spike."""
    given = [row(i, i, {"train/loss": 77.0 if i == 801 else 1.0}) for i in range(1152)]
    backend = connect(run)
    deliver(backend, given)
    assert backend.close(None, timeout=60) == 1151, "safe is what was read back: all of it"
    assert seqs(wandb_server, run) == list(range(1152))
    assert max(r["train/loss"] for r in wandb_server.run(run.project, run.run_id).history()) == 77.0


def test_b6_a_failed_upload_harms_nothing_and_a_moved_run_is_whole(
    tmp_path: Path, run: RunInfo, mlflow: MlflowConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload fails after half the files: our copy is whole and is tried again. Then the run folder moves elsewhere."""
    content = {f"part-{i}.bin": bytes([i]) * 5000 for i in range(6)} | {"manifest.json": b"{}"}
    record = artifact(1, 0, run, "capsule", content)
    backend = mlflow.build()
    backend.open(run)
    deliver(backend, rows([0]))
    upload, sent = backend._run._upload, []  # type: ignore[attr-defined]

    def fails(path: Path, target: str) -> None:
        if len(sent) == 3:
            raise RetryLater(0.0, "reset by peer")
        sent.append(target)
        upload(path, target)

    monkeypatch.setattr(backend._run, "_upload", fails)  # type: ignore[attr-defined]
    with pytest.raises(RetryLater):
        backend.write([record], timeout=10)
    ours = Path(run.directory) / record.path
    assert {name: path.read_bytes() for name, path in folders.files(ours)} == content
    monkeypatch.undo()
    assert deliver(backend, [record]) == 1
    assert read_mlflow(mlflow, run).artifacts["capsule"] == content

    directory = journal(tmp_path / "here" / "r", [row(0, 0, {"train/loss": 1.0})])
    kept = artifact(1, 0, run_info(directory.path), "capsule", content)
    writer = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=1e9)
    writer.append(kept)
    writer.close()
    moved = tmp_path / "laptop" / "r"
    shutil.copytree(directory.path, moved)
    shutil.rmtree(tmp_path / "here")
    assert shipper.sync(moved, [TensorboardConfig()]).complete
    assert {n: p.read_bytes() for n, p in folders.files(moved / "tensorboard" / "artifacts" / "capsule")} == content


def test_b8_one_bad_name_does_not_cost_the_others(run: RunInfo, mlflow: MlflowConfig) -> None:
    names = ["layer[0].weight", "layer_0_.weight", "a//b", "/x", "a/../b", "n" * 300, "потеря", "val@1", "val_at_1"]
    backend = mlflow.build()
    backend.open(run)
    deliver(backend, [row(0, 0, {name: float(i) for i, name in enumerate(names)})])
    series = read_mlflow(mlflow, run).series
    assert {name: series[name] for name in names} == {name: [(0, float(i))] for i, name in enumerate(names)}


@pytest.mark.timeout(300)
def test_b9_an_outage_costs_training_nothing(tmp_path: Path, wandb_server: WandbServer) -> None:
    """The server is away at `init` and until after `finish`: training does not notice, and the history is complete later."""
    script = """
import time, trackbridge
run = trackbridge.init(backend={"kind": "wandb", "base_url": URL, "mode": "online"}, id="r", project="p")
for step in range(50): run.step(loss=1.0 / (step + 1))
(open("a.txt", "w")).write("hello"); run.log_artifact("a.txt")
begun = time.monotonic()
report = run.finish(timeout=2)
assert time.monotonic() - begun < 20, "finish is bounded"
assert not report and "trackbridge sync" in str(report), str(report)
"""
    wandb_server.stop()
    environment = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
    begun = f"URL = {wandb_server.url!r}\n{script}"
    command = [sys.executable, "-c", begun]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = tmp_path / "runs" / "r"
    _end_shipper(directory)
    wandb_server.start()
    os.environ["WANDB_API_KEY"] = KEY
    assert shipper.sync(directory, timeout=120).complete
    history = wandb_server.run("p", "r").history()
    assert [r["trackbridge/step"] for r in history if "train/loss" in r] == list(range(50))
    assert wandb_server.operations["CommitArtifact"] >= 1


def _end_shipper(directory: Path) -> None:
    """The one that goes on after the trainer, for half an hour."""
    claim = directory / "shipper" / "wandb.claim"
    if claim.exists():
        os.kill(int(json.loads(claim.read_text())["pid"]), 9)
        deadline = time.monotonic() + 20
        while not _gone(int(json.loads(claim.read_text())["pid"])) and time.monotonic() < deadline:
            time.sleep(0.05)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_b10_a_wide_step_is_as_few_requests_as_the_limit_allows(
    run: RunInfo, mlflow: MlflowConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = mlflow.build()
    backend.open(run)
    sizes: list[int] = []
    send = backend._run.client.log_batch

    def counted(run_id: str, **what: Any) -> Any:
        sizes.append(len(what.get("metrics", ())))
        return send(run_id, **what)

    monkeypatch.setattr(backend._run.client, "log_batch", counted)
    deliver(backend, [row(0, 0, {f"layer/{i}/grad_norm": float(i) for i in range(3000)})])
    requests = [size for size in sizes if size]
    assert sum(requests) == 3002 and len(requests) == math.ceil(3002 / 999) and max(requests) <= 1000


@pytest.mark.timeout(300)
def test_b11_the_process_ends_in_time_and_the_last_record_is_there(tmp_path: Path) -> None:
    """A tracker that blocks for ever; one that works, with `finish` and without it."""
    script = """
import sys, time, trackbridge
run = trackbridge.init(backend={"kind": "flaky", "path": sys.argv[1], "hang": float(sys.argv[2])}, id=sys.argv[3])
for step in range(30): run.step(loss=1.0)
if sys.argv[4] == "finish":
    begun = time.monotonic(); run.finish(timeout=1); run.finish(timeout=1)
    assert time.monotonic() - begun < 20
"""
    environment = {**os.environ, "PYTHONPATH": str(FLAKY)}
    for name, hang, how in (("stuck", "3600", "finish"), ("forgotten", "0", "no"), ("well", "0", "finish")):
        tracker = tmp_path / f"{name}.jsonl"
        command = [sys.executable, "-c", script, str(tracker), hang, name, how]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        spool = [r for r in JournalReader(tmp_path / "runs" / name / "rank-0000" / "rows").read() if isinstance(r, Row)]
        assert [r.step for r in spool] == list(range(30))
        if name == "forgotten":
            lines = [json.loads(line) for line in tracker.read_text().splitlines()]
            assert [line["step"] for line in lines if line["type"] == "Row"] == list(range(30))
            assert lines[-1]["status"] == "finished"
        if name == "stuck":
            assert "trackbridge sync" in done.stderr


def test_b13_damage_costs_what_it_hit_and_is_counted(tmp_path: Path, run: RunInfo) -> None:
    """Our journal and an event file, cut in the middle of a record and with one flipped byte."""
    directory = journal(tmp_path / "r", list(rows(range(21))))
    (segment,) = directory.rows().glob("*.tbj")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-7])
    reader = JournalReader(directory.rows())
    assert len(reader.read()) == 20 and reader.unread_bytes > 0
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 1
    segment.write_bytes(broken)
    reader = JournalReader(directory.rows())
    assert len(reader.read()) == 20
    assert reader.damage.records_lost == 1 and "1 record" in str(reader.damage)
    backend = TensorboardConfig().build()
    backend.open(run)
    deliver(backend, rows(range(21)))
    (file,) = event_files(TensorboardConfig().root(run))
    intact = len(list(event_records(file)))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert len(list(event_records(file))) < intact
    again = TensorboardConfig().build()  # after the crash: a new file, never behind the damage
    held = again.open(run)
    deliver(again, [r for r in rows(range(30)) if r.seq > held])
    again.close(end(30), timeout=5)
    assert len(event_files(TensorboardConfig().root(run))) == 2
    assert max(step for step, _ in scalars(event_files(TensorboardConfig().root(run))[-1])["train/loss"]) == 29


def test_b14_a_spike_survives_sampling_and_the_page_stays_usable(tmp_path: Path, run: RunInfo) -> None:
    """5,000 steps with one spike, read with TensorBoard's 1,000 samples; a model of 2,000 layers within the cap of series."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given: list[Record] = []
    for step in range(5000):
        given.append(row(len(given), step, {"train/loss": 50.0 if step == 2222 else 1.0}))
        if step == 2222:
            given.append(anomaly(len(given), step))
    backend = TensorboardConfig().build()
    backend.open(run)
    deliver(backend, streamed(given))
    backend.close(end(len(given)), timeout=10)
    reader = EventAccumulator(str(TensorboardConfig().root(run)), size_guidance={"scalars": 1000}).Reload()
    assert len(reader.Scalars("train/loss")) == 1000
    assert [(event.step, event.value) for event in reader.Scalars("anomaly/score")] == [(2222, 31.0)]
    assert newest([(0, e.step, e.value) for e in reader.Scalars("anomaly/count")])[0] == [(2222, 1.0)]

    schema = Schema(
        ("train/loss", *(f"{family}/h.{i}/{s}" for i in range(2000) for family, s in (("layer", "grad_norm"), ("act", "rms"))))
    )
    (wide,) = streamed([Row(0, 0, 0.0, 0, schema, np.ones(len(schema.names)))])
    assert isinstance(wide, Row)
    assert sum(is_wide(name) for name in wide.schema.names) <= 1000
    assert wide.get("layers/grad_norm_max") == 1.0
