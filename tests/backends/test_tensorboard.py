"""TensorBoard, read back with both of its readers: `EventAccumulator` and the data server that serves the web page."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.disk import full_disk
from trackbridge.backends import eventfile
from trackbridge.backends.tensorboard import TensorboardConfig, fetch_capsule
from trackbridge.errors import ConfigError, ReferenceNotFoundError, Rejected, RetryLater, TrackbridgeError, UsageError
from trackbridge.records import Artifact, RunInfo
from trackbridge.testing import (
    BackendContract,
    Points,
    ReadBack,
    anomaly,
    artifact,
    deliver,
    end,
    newest,
    row,
    rows,
    run_info,
    value,
)  # fmt: skip


def accumulate(path: Path):  # type: ignore[no-untyped-def]
    """TensorBoard's Python reader over a folder (one run) or one file, keeping everything."""
    from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

    return EventAccumulator(str(path), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def scalars(path: Path) -> Points:
    reader = accumulate(path)
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def texts(path: Path) -> dict[str, str]:
    """The newest text of every tag."""
    reader = accumulate(path)
    tags = [tag for tag in reader.Tags()["tensors"] if not tag.endswith("__")]
    return {tag: reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags}


def table(markdown: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ", 1) for line in markdown.splitlines()[2:]]
    return {cell[0]: cell[1] if len(cell) > 1 else "" for cell in cells}


def event_files(root: Path) -> list[Path]:
    return sorted(root.glob("events.out.tfevents.*"))


def read_back(root: Path) -> ReadBack:
    seen = scalars(root)
    points: dict[str, list[tuple[int, int, float]]] = {}
    for path in event_files(root):
        for name, found in scalars(path).items():
            points.setdefault(name, []).extend((int(path.name[-4:]), *point) for point in found)
    words = texts(root)
    folders = [path for path in (root / "artifacts").glob("*") if path.is_dir()]
    return ReadBack(
        series=seen,
        superseded={name: newest(found)[1] for name, found in points.items()},
        artifacts={f.name: {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders},
        params={k: v for tag, text in words.items() if tag.startswith("params/") for k, v in table(text).items()},
        anomalies={tag.removeprefix("anomaly/"): text for tag, text in words.items() if tag.startswith("anomaly/")},
        status=table(words["status"])["status"] if "status" in words else None,  # type: ignore[arg-type]
    )


class TestTensorboard(BackendContract):
    number = np.float32
    signed_zero = True

    def config(self, tmp_path: Path) -> TensorboardConfig:
        return TensorboardConfig()

    def read_back(self, config: TensorboardConfig, run: RunInfo) -> ReadBack:
        return read_back(config.root(run))


# -- the default reader


def page(logdir: Path) -> dict[str, Points]:
    """What TensorBoard's web page gets, by run: the points of its data server, which is not the Python reader."""
    from tensorboard.context import RequestContext
    from tensorboard.data.server_ingester import SubprocessServerDataIngester, get_server_binary
    from tensorboard.util.grpc_util import ChannelCredsType

    everything = 1_000_000
    server = SubprocessServerDataIngester(
        get_server_binary(),
        str(logdir),
        reload_interval=0,
        channel_creds_type=ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": everything},
    )
    server.start()
    try:
        ask = {"experiment_id": "", "plugin_name": "scalars"}
        deadline = time.monotonic() + 20
        while not (listing := server.data_provider.list_scalars(RequestContext(), **ask)) and time.monotonic() < deadline:
            pass
        found = server.data_provider.read_scalars(RequestContext(), downsample=everything, **ask)
        assert found.keys() == listing.keys()
        return {run: {tag: [(d.step, d.value) for d in data] for tag, data in tags.items()} for run, tags in found.items()}
    finally:
        server._stdin_handle.close()  # it dies with its stdin


def test_the_web_page_shows_the_newest_attempt_every_name_and_nan(tmp_path: Path) -> None:
    contract, config = TestTensorboard(), TensorboardConfig(logdir=tmp_path / "tb")
    run = run_info(tmp_path / "run-0001")
    names = ("train/loss", "layer[0].weight", "a//b", "/x", "n" * 301, "β")
    old = [*rows(range(13), names), row(13, 12, {"train/loss": math.nan})]
    contract.ship(config, run, [*old, anomaly(14, 5)], end(15, "killed"))
    new = [*rows(range(8, 20), names, first_seq=16, attempt=1), row(28, 20, {"train/loss": math.inf}, attempt=1)]
    contract.ship(config, run_info(tmp_path / "run-0001", attempt=1, start_step=8), new, end(29, attempt=1))
    other = run_info(tmp_path / "run-0002", run_id="run-0002", rank=1, world_size=2)
    contract.ship(config, other, rows(range(3)), None)
    shown = page(tmp_path / "tb")
    assert set(shown) == {"run-0001", "run-0002/rank-0001"}
    contract.assert_series(shown["run-0001"], contract.expected([*old[:8], *new]))
    contract.assert_series(shown["run-0002/rank-0001"], contract.expected(rows(range(3))))


def test_three_attempts_delivered_at_once_look_like_three_delivered_in_turn(tmp_path: Path) -> None:
    """`trackbridge sync` of a finished run to a TensorBoard that was not configured when it ran."""
    contract, config = TestTensorboard(), TensorboardConfig()
    run = run_info(tmp_path / "run-0001", attempt=2, start_step=9)
    lives = [rows(range(10)), rows(range(6, 14), first_seq=10, attempt=1), rows(range(9, 12), first_seq=18, attempt=2)]
    contract.ship(config, run, [*lives[0], *lives[1], *lives[2]], end(21, attempt=2))
    back = read_back(config.root(run))
    contract.assert_series(back.series, contract.expected([*lives[0][:6], *lives[1][:3], *lives[2]]))
    assert sorted(step for step, _ in back.superseded["train/loss"]) == [6, 7, 8, 9, 9, 10, 11, 12, 13]
    contract.assert_series({k: sorted(v) for k, v in page(config.root(run))["."].items()}, contract.expected(
        [*lives[0][:6], *lives[1][:3], *lives[2]]
    ))  # fmt: skip


# -- crashes and full disks


@pytest.mark.parametrize("cut", [1, 4, 5, 100, 150, 400])
def test_a_torn_tail_is_written_again_and_nothing_else(tmp_path: Path, cut: int) -> None:
    contract, config, run, records = TestTensorboard(), TensorboardConfig(), run_info(tmp_path), rows(range(10))
    contract.ship(config, run, records, None)
    (torn,) = event_files(config.root(run))
    os.truncate(torn, torn.stat().st_size - cut)
    before = torn.read_bytes()
    held = contract.ship(config, run, records, None)
    assert held < 9
    assert torn.read_bytes() == before, "an old event file was appended to"
    back = read_back(config.root(run))
    contract.assert_series(back.series, contract.expected(records))
    assert not any(back.superseded.values())


def test_a_flipped_byte_hides_what_follows_and_that_is_written_again(tmp_path: Path) -> None:
    contract, config, run, records = TestTensorboard(), TensorboardConfig(), run_info(tmp_path), rows(range(10))
    contract.ship(config, run, records, None)
    (damaged,) = event_files(config.root(run))
    data = bytearray(damaged.read_bytes())
    data[-400] ^= 0x10  # in the rows: the header is long
    damaged.write_bytes(data)
    held = contract.ship(config, run, records, None)
    assert -1 < held < 9
    contract.assert_series(read_back(config.root(run)).series, contract.expected(records))


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """No space for a batch: `RetryLater`, and once there is space everything is there once."""
    config, run, records = TensorboardConfig(), run_info(tmp_path), rows(range(400))
    backend = config.build()
    backend.open(run)
    backend.write(records[:100], timeout=9)
    (path,) = event_files(config.root(run))
    size = path.stat().st_size
    with full_disk(size + 5000), pytest.raises(RetryLater, match="cannot write"):
        backend.write(records[100:], timeout=9)
    assert path.stat().st_size == size
    assert deliver(backend, records) == 399
    TestTensorboard().assert_series(read_back(config.root(run)).series, TestTensorboard().expected(records))
    fresh = config.build()
    fresh.open(run)
    with full_disk(100), pytest.raises(RetryLater):
        fresh.write([row(400, 400, {"train/loss": 1.0})], timeout=9)
    assert event_files(config.root(run)) == [path], "an empty event file was left behind"


# -- artifacts and capsules


def test_a_big_artifact_goes_on_where_time_ran_out(tmp_path: Path) -> None:
    config, run = TensorboardConfig(), run_info(tmp_path)
    files = {f"{name}.bin": name.encode() * 5000 for name in "abc"} | {"manifest.json": b"{}"}
    record = artifact(1, 0, run, "spike-0", files)
    backend = config.build()
    backend.open(run)
    folder = config.root(run) / "artifacts"
    tries = 0
    while True:
        tries += 1
        try:
            assert backend.write([row(0, 0, {"x": 1.0}), record], timeout=0) == 1
            break
        except RetryLater:
            assert not (folder / "spike-0").exists(), "a partial artifact is visible"
    assert tries == 4
    assert {path.name: path.read_bytes() for path in (folder / "spike-0").iterdir()} == files
    assert scalars(config.root(run))["x"] == [(0, 1.0)]


def test_a_lost_artifact_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    config, run = TensorboardConfig(), run_info(tmp_path)
    backend = config.build()
    backend.open(run)
    lost = Artifact(1, 0, 0.0, "gone", "file", "artifacts/gone")
    with pytest.raises(Rejected) as refused:
        backend.write([row(0, 0, {"x": 1.0}), lost, row(2, 1, {"x": 2.0})], timeout=9)
    assert list(refused.value.reasons) == [1] and "gone" in refused.value.reasons[1]
    assert scalars(config.root(run))["x"] == [(0, 1.0), (1, 2.0)]


def capsule(step: int, created: float) -> dict[str, bytes]:
    manifest = {"format_version": 1, "step": step, "created": created}
    return {"manifest.json": json.dumps(manifest).encode(), "rank-0000/rng.safetensors": bytes([step])}


def test_fetch_capsule(tmp_path: Path) -> None:
    contract, config = TestTensorboard(), TensorboardConfig(logdir=tmp_path / "tb")
    for number, found in {1: (3, 7), 2: (7,)}.items():
        run = run_info(tmp_path / f"r{number}", run_id=f"r{number}")
        records = [artifact(i, s, run, f"spike-{s}", capsule(s, 10.0 * number - s)) for i, s in enumerate(found)]
        notes = artifact(9, 9, run, "notes", {"manifest.json": b"[1]"}, kind="file")
        contract.ship(config, run, [*records, notes], None)
    logdir, dest = str(tmp_path / "tb"), tmp_path / "pulled"
    for ref in (logdir, f"{logdir}/r1"):
        got = fetch_capsule(ref, 3, dest)
        assert got == dest / "spike-3"
        assert {path.relative_to(got).as_posix(): path.read_bytes() for path in got.rglob("*.*")} == capsule(3, 7.0)
    assert json.loads((fetch_capsule(logdir, None, dest) / "manifest.json").read_text())["created"] == 13.0
    with pytest.raises(UsageError, match=r"several runs .* step 7; name one of them: .*/r1, .*/r2"):
        fetch_capsule(logdir, 7, dest)
    with pytest.raises(ReferenceNotFoundError, match=r"no capsule of step 4; it has steps 3, 7"):
        fetch_capsule(f"{logdir}/r1", 4, dest)
    with pytest.raises(ReferenceNotFoundError, match="holds no spike capsule"):
        fetch_capsule(str(dest), None, dest)
    with pytest.raises(ReferenceNotFoundError, match="no folder"):
        fetch_capsule(f"{logdir}/nowhere", None, dest)
    (dest / "spike-3" / "manifest.json").unlink()
    with pytest.raises(UsageError, match="is not a capsule"):
        fetch_capsule(f"{logdir}/r1", 3, dest)
    assert sorted(path.name for path in dest.iterdir()) == ["spike-3", "spike-7"]


def test_fetch_capsule_from_run_directories(tmp_path: Path) -> None:
    run, config = run_info(tmp_path / "runs" / "r1"), TensorboardConfig()
    TestTensorboard().ship(config, run, [artifact(0, 3, run, "spike-3", capsule(3, 1.0))], None)
    for ref in (tmp_path / "runs", tmp_path / "runs" / "r1", tmp_path / "runs" / "r1" / "tensorboard"):
        assert fetch_capsule(str(ref), None, tmp_path / "pulled").name == "spike-3"


# -- settings, framing, imports


def test_logdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TensorboardConfig(logdir=Path("tb"))
    assert config.logdir == tmp_path / "tb", "the shipper may run in another working directory"
    assert config.where(run_info(tmp_path)).startswith(f"tensorboard --logdir {tmp_path}/tb ")
    assert TensorboardConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match="mount it"):
        TensorboardConfig.model_validate({"logdir": "gs://bucket/tb"})


@given(st.binary(max_size=200))
def test_crc_fallback_equals_google_crc32c(data: bytes) -> None:
    import google_crc32c

    assert eventfile.crc32c_python(data) == google_crc32c.value(data)


def test_no_torch_no_tensorflow_and_no_crc_package_needed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["google_crc32c"] = None
from pathlib import Path
from trackbridge.backends.tensorboard import TensorboardConfig
assert not [m for m in ("tensorboard", "google") if m in sys.modules]
from trackbridge.testing import rows, run_info
backend = TensorboardConfig().build()
backend.open(run_info(Path({str(tmp_path)!r})))
backend.write(rows(range(5)), timeout=9)
assert not [m for m in ("torch", "tensorflow") if m in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert scalars(tmp_path / "tensorboard")["grad/norm"] == [(s, float(np.float32(value("grad/norm", s)))) for s in range(5)]


def test_another_recording_of_the_same_id_is_another_run(tmp_path: Path) -> None:
    """In a shared logdir: what an earlier one of the same id wrote must not be taken for what this one has delivered."""
    config = TensorboardConfig(logdir=tmp_path / "tb")
    first = run_info(tmp_path / "one")
    second = replace(run_info(tmp_path / "two"), created=first.created + 3600)
    for run, values in ((first, rows(range(20))), (second, rows(range(5))), (first, rows(range(20, 22), first_seq=20))):
        backend = config.build()
        backend.open(run)
        assert deliver(backend, values) == values[-1].seq
        backend.close(None, timeout=5)
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {first.run_id, f"{first.run_id}-{second.created:.0f}"}
    for run, count in ((first, 22), (second, 5)):
        assert len(read_back(config.root(run)).series["train/loss"]) == count


def test_a_place_that_cannot_be_written_needs_a_person(tmp_path: Path) -> None:
    """Where no time helps, `sync` must not wait."""
    (tmp_path / "logs").write_text("a file")
    backend = TensorboardConfig(logdir=tmp_path / "logs").build()
    backend.open(run_info(tmp_path))
    with pytest.raises(TrackbridgeError, match=r"^cannot write below .*: Not a directory$"):
        backend.write(rows(range(3)), timeout=5)
