"""Memory: snapshots of the allocator when there is trouble and when asked; nothing at all without a CUDA device."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trackbridge
from trackbridge.config import MemorySnapshotsConfig
from trackbridge.errors import Part
from trackbridge.memory import FILE, KIND, MemorySnapshots, fitting
from trackbridge.probes.host import DeviceUse, HostSampler
from trackbridge.records import Anomaly, Artifact
from trackbridge.rundir import RunDirectory


class Allocator:
    """What `torch.cuda.memory` does of it, as far as it is asked."""

    def __init__(self, events: int = 1000) -> None:
        self.calls: list[Any] = []
        self.events = events
        self.threads: set[int] = set()

    def _record_memory_history(self, *args: Any, **options: Any) -> None:
        self.calls.append((args, options))

    def _snapshot(self) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        return {"segments": [{"address": 1}], "device_traces": [[{"action": "alloc", "addr": n} for n in range(self.events)]]}


def anomaly(kind: str = "memory", step: int = 7) -> Anomaly:
    return Anomaly(f"{kind}-{step}", kind, step, step, 0.5, "mem/allocated_bytes", 2.0, 1.0, 9.0)


def made(folder: Path, **config: Any) -> tuple[MemorySnapshots, Allocator, list[Artifact]]:
    allocator, told = Allocator(), []
    config = {"snapshots": 2, **config}
    directory = RunDirectory(folder)
    part = Part("memory snapshots", strict=True)
    snapshots = MemorySnapshots(MemorySnapshotsConfig(**config), directory, 0, told.append, part, allocator=allocator)
    snapshots.start()
    return snapshots, allocator, told


def test_memory_that_creeps_up_gets_a_snapshot(tmp_path: Path) -> None:
    snapshots, allocator, told = made(tmp_path)
    snapshots.note(3, [anomaly("spike", 3)], squeezed=False)
    snapshots.note(8, [anomaly("memory", 7)], squeezed=False)
    snapshots.note(9, [anomaly("memory", 8)], squeezed=False)  # the same reason
    assert snapshots.close(30.0)
    (artifact,) = told
    assert (artifact.kind, artifact.step, artifact.name) == (KIND, 7, "memory-7")
    assert artifact.metadata["why"] == "mem/allocated_bytes creeps up"
    found = pickle.loads((tmp_path / artifact.path / FILE).read_bytes())
    assert len(found["device_traces"][0]) == 1000 and found["segments"]
    assert threading.get_ident() not in allocator.threads
    assert [args for args, _ in allocator.calls] == [("all",), (None,)]  # begun, and ended


def test_steps_that_were_named_and_an_allocator_in_need(tmp_path: Path) -> None:
    snapshots, _, told = made(tmp_path, snapshots=3, at=(4, 6))
    for step in range(10):
        snapshots.note(step, [], squeezed=step == 5)
    assert snapshots.close(30.0)
    assert [(one.step, one.metadata["why"]) for one in told] == [
        (4, "asked for at this step"), (5, "the allocator had to give memory back"), (6, "asked for at this step"),
    ]  # fmt: skip


def test_no_more_than_allowed_and_none_after_the_end(tmp_path: Path) -> None:
    snapshots, _, told = made(tmp_path)
    assert [snapshots.ask(1, "asked for", again=True) for _ in range(3)] == [True, True, False]
    assert snapshots.close(30.0) and [one.name for one in told] == ["memory-1", "memory-1-1"]
    assert not snapshots.ask(2, "asked for", again=True)


def test_older_events_are_left_out_to_fit() -> None:
    snapshot = Allocator(50_000)._snapshot()
    whole = len(pickle.dumps(snapshot))
    data = fitting(snapshot, whole // 10)
    assert data is not None and len(data) <= whole // 10
    kept = pickle.loads(data)["device_traces"][0]
    assert kept == snapshot["device_traces"][0][-len(kept) :] and len(kept) > 2000
    assert fitting(snapshot, 10) is None


def test_off_by_default_and_silent_without_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    off = MemorySnapshots(MemorySnapshotsConfig(), RunDirectory(tmp_path), 0, lambda _: None, Part("it"), allocator=Allocator())
    off.start()
    assert not off.ask(0, "asked for") and off._allocator.calls == []
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with caplog.at_level(logging.WARNING, "trackbridge"):
        run = trackbridge.init(dir=tmp_path / "runs", memory={"snapshots": 2, "at": [1]})
        run.watch(model := nn.Linear(2, 1))
        for _ in range(3):
            run.step(loss=model(torch.ones(1, 2)).mean().detach())
        assert not run.memory_snapshot()
        run.finish()
    record = trackbridge.load(tmp_path / "runs")
    assert not [name for name in record.names if name.startswith("mem/")] and not caplog.records
    assert not list(record.path.glob("artifacts/memory*"))


def test_without_a_gpu_a_sample_has_no_device_memory() -> None:
    sampler = HostSampler()
    sampler.watch([torch.device("cpu")])
    assert set(sampler.sample(0)) == {"host/rss_bytes"} and sampler.sample(1) == {} and not sampler.squeezed


def answered(use: DeviceUse) -> int | None:
    deadline = time.monotonic() + 10
    while (found := use.take()) is None and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    return found


def test_the_driver_is_asked_on_another_thread_and_once_at_a_time() -> None:
    go, asked = threading.Event(), []

    def read(device: torch.device) -> tuple[int, int]:
        asked.append(threading.get_ident())
        go.wait(10)
        return 30, 100

    use = DeviceUse(read)
    for _ in range(5):
        use.ask([torch.device("cuda", 0), torch.device("cuda", 1)])
        assert use.take() is None
    go.set()
    assert answered(use) == 140 and use.take() is None
    assert len(asked) == 2 and threading.get_ident() not in asked
    use.close()


def test_a_driver_that_cannot_tell_makes_the_series_absent() -> None:
    def broken(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("MIG")

    use = DeviceUse(broken)
    use.ask([torch.device("cuda")])
    deadline = time.monotonic() + 10
    while not use._broken and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    assert use._broken and use.take() is None
    use.close()
