"""Snapshots: the state before a step, complete, bounded in memory, on disk only when pinned."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.disk import full_disk
from tests.fsdp2_here import needs_shards
from trackbridge import hostcopy, snapshots, tree
from trackbridge.config import RecorderConfig
from trackbridge.errors import Part
from trackbridge.fence import Fence
from trackbridge.journal import JournalWriter
from trackbridge.pins import Pins
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory
from trackbridge.snapshots import Snapshots, Watched

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = ["cpu", CUDA]


class Odd(nn.Module):
    """Tied weights, buffers of both kinds, a bfloat16 part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.low(self.norm(self.embed(x)).to(torch.bfloat16)).float())


def make(tmp_path: Path, *, attempt: int = 0, **config: Any) -> Snapshots:
    return Snapshots(RecorderConfig(**config), RunDirectory(tmp_path), 0, attempt, Fence(Part("the fence", strict=True)))


def keep(ring: Snapshots, what: Watched, step: int) -> None:
    """Take and publish; on a GPU the first try may only start making memory."""
    snapshot = ring.take(what, step)
    if snapshot is None and ring._making is not None:
        ring._making.join()
        snapshot = ring.take(what, step)
    assert snapshot is not None
    ring.publish(snapshot, step)


def folder(tmp_path: Path, step: int) -> Path:
    return tmp_path / "rank-0000" / "snapshots" / f"step-{step}"


def watched(device: str = "cpu") -> tuple[Watched, Any]:
    torch.manual_seed(3)
    model = Odd().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    x = torch.arange(8, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return Watched({"": model}, {"": optimizer}, None, {"sched": scheduler}), step


def flat(tree_of: Any) -> list[bytes]:
    skeleton, leaves = tree.pack(tree_of)
    return [json.dumps(skeleton).encode(), *(array.tobytes() for array in tree.to_numpy(leaves).values())]


@pytest.mark.parametrize("device", DEVICES)
def test_a_pinned_snapshot_restores_the_state_before_the_step(tmp_path: Path, device: str) -> None:
    ring = make(tmp_path)
    seen, step = watched(device)
    step()
    (model,), (optimizer,) = seen.models.values(), seen.optimizers.values()
    parts = (model, optimizer, seen.state["sched"])
    expected = [flat(part.state_dict()) for part in parts]
    buffer = model.seen.tolist()
    keep(ring, seen, 5)
    for _ in range(3):
        step()  # must not reach the copy
    assert ring.pin(7) is None
    skeleton, arrays, metadata = tree.load(folder(tmp_path, 5))
    assert metadata == {"step": 5, "attempt": 0, "rank": 0, "gone_back": 0, "missing": {}, "first": True}
    state = tree.unpack(skeleton, arrays)
    assert state["models"][""]["head.weight"] is state["models"][""]["embed.weight"]  # stored once
    fresh, _ = watched(device)
    (model,), (optimizer,) = fresh.models.values(), fresh.optimizers.values()
    model.load_state_dict(state["models"][""])
    optimizer.load_state_dict(state["optimizers"][""])
    fresh.state["sched"].load_state_dict(state["state"]["sched"])
    assert [flat(part.state_dict()) for part in (model, optimizer, fresh.state["sched"])] == expected
    assert state["buffers"] == {"": {"seen": state["buffers"][""]["seen"]}} and state["buffers"][""]["seen"].tolist() == buffer


def test_an_optimizer_without_state_and_nothing_at_all(tmp_path: Path) -> None:
    ring = make(tmp_path)
    model = nn.Linear(2, 2)
    keep(ring, Watched({"m": model}, {"o": torch.optim.Adam(model.parameters())}), 0)
    keep(ring, Watched(), 1)
    assert ring.pin(0) is None and ring.pin(1) is None
    skeleton, arrays, _ = tree.load(folder(tmp_path, 0))
    assert tree.unpack(skeleton, arrays)["optimizers"]["o"]["state"] == {}
    assert tree.load(folder(tmp_path, 1))[1] == {}


def test_what_cannot_be_stored_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    class Strange:
        def state_dict(self) -> dict[str, Any]:
            return {"f": open}

    ring = make(tmp_path)
    seen, _ = watched()
    keep(ring, Watched(seen.models, seen.optimizers, None, {"odd": Strange(), **seen.state}), 0)
    assert ring.pin(0) is None
    skeleton, arrays, metadata = tree.load(folder(tmp_path, 0))
    assert list(metadata["missing"]) == ["state/odd"] and "'f'" in metadata["missing"]["state/odd"]
    assert list(tree.unpack(skeleton, arrays)["state"]) == ["sched"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_scaler_is_stored_as_it_loads(tmp_path: Path, device: str) -> None:
    ring = make(tmp_path)
    for number, used in enumerate((False, True)):
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=7)
        if used:
            weight = torch.ones(2, device=device, requires_grad=True)
            optimizer = torch.optim.SGD([weight])
            for _ in range(3):
                scaler.scale((weight * 2).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        keep(ring, Watched(scaler=scaler), number)
        assert ring.pin(number) is None
        skeleton, arrays, _ = tree.load(folder(tmp_path, number))
        assert tree.unpack(skeleton, arrays)["scaler"] == scaler.state_dict()
    off = torch.amp.GradScaler(device, enabled=False)
    keep(ring, Watched(scaler=off), 9)
    assert ring.pin(9) is None and tree.load(folder(tmp_path, 9))[0]["scaler"] == {}


def test_taking_a_scalers_state_does_not_read_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    ring = make(tmp_path)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("waited for a device"))
    assert ring.take(Watched(scaler=scaler), 0) is not None


def test_when_a_snapshot_is_due(tmp_path: Path) -> None:
    ring = make(tmp_path, snapshot_every=10)
    taken = []
    for step in [*range(7, 35), 1000, 1001, 1010]:
        if ring.due(step):
            keep(ring, Watched(), step)
            taken.append(step)
    assert taken == [7, 10, 20, 30, 1000, 1010]
    assert not make(tmp_path, snapshot_every=0).due(0)


def test_the_newest_two_are_kept_and_pin_says_why_not(tmp_path: Path) -> None:
    ring = make(tmp_path, snapshot_every=10)
    assert ring.pin(5) == "none has been taken yet"
    for step in (0, 10, 20, 30):
        keep(ring, Watched({"": nn.Linear(2, 2)}), step)
    assert ring.pin(19) == "the oldest snapshot in memory is of step 20, after step 19"
    assert ring.pin(29) is None and ring.pin(20) is None
    assert [path.name for path in folder(tmp_path, 0).parent.iterdir()] == ["step-20"]
    assert make(tmp_path, snapshot_every=0).pin(5) == "recorder.snapshot_every is 0"
    ring.clear()
    assert ring.pin(29) == "none has been taken yet"


def test_while_the_scribe_is_behind_more_are_kept(tmp_path: Path) -> None:
    """A loop of microsecond steps: what an anomaly far behind will need is still there when it is found."""
    ring = make(tmp_path, snapshot_every=10, before=8)
    ring.passed = 25
    for step in range(0, 200, 10):
        keep(ring, Watched({"": nn.Linear(2, 2)}), step)
    assert [snapshot.step for snapshot in ring._kept] == list(range(0, 200, 10)), "none of them has been passed"
    assert ring.pin(17) is None and folder(tmp_path, 10).exists()
    ring.passed = 195
    keep(ring, Watched({"": nn.Linear(2, 2)}), 200)
    assert [snapshot.step for snapshot in ring._kept] == [150, 160, 170, 180, 190, 200]
    little = make(tmp_path, snapshot_every=10, snapshot_bytes=100)
    little.passed = 0
    for step in range(0, 100, 10):
        keep(little, Watched({"": nn.Linear(2, 2)}), step)
    assert len(little._kept) == 4, "as many as the budget holds"


def test_a_state_dict_that_raises_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not on this rank\nand a second line")

    ring = make(tmp_path)
    keep(ring, Watched({"": nn.Linear(2, 2)}, state={"ema": Broken(), "fine": torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), lambda step: 1.0)}), 0)  # fmt: skip
    assert ring.pin(0) is None
    skeleton, arrays, metadata = tree.load(folder(tmp_path, 0))
    assert metadata["missing"] == {"state/ema": "its state_dict() raised RuntimeError: not on this rank"}
    assert tree.unpack(skeleton, arrays)["models"][""]["weight"].shape == (2, 2)
    assert list(tree.unpack(skeleton, arrays)["state"]) == ["fine"]


def test_memory_stays_within_the_budget_and_is_reused(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)  # 40,400 bytes
    for budget, kept in ((90_000, 2), (60_000, 1), (40_000, 0)):
        ring = make(tmp_path, snapshot_bytes=budget)
        places = set()
        for step in range(6):
            snapshot = ring.take(Watched({"": model}), step)
            if kept == 0:
                assert snapshot is None
                continue
            places.add(snapshot.memory.regions[0].data_ptr())
            ring.publish(snapshot, step)
        assert [s.step for s in ring._kept] == list(range(6))[6 - kept :]
        assert len(places) == kept
        assert ring.cost.bytes <= budget
    assert "40400 bytes, recorder.snapshot_bytes is 40000" in str(ring.pin(5))


def test_a_model_that_outgrows_the_budget_says_so(tmp_path: Path) -> None:
    ring = make(tmp_path, snapshot_bytes=40_000)
    keep(ring, Watched({"": nn.Linear(10, 10)}), 0)
    assert ring.take(Watched({"": nn.Linear(200, 200)}), 100) is None
    assert ring.pin(0) is None  # the small one is still good for its own steps
    assert not ring.due(150) and ring.due(200)


def test_a_snapshot_taken_too_early_is_replaced_without_more_memory(tmp_path: Path) -> None:
    ring = make(tmp_path, snapshot_every=5)
    model = nn.Linear(2, 2)
    first = ring.take(Watched({"": model}), 3)
    ring.discard(first)
    assert ring.due(3)
    nn.init.zeros_(model.weight)
    second = ring.take(Watched({"": model}), 3)
    assert second.memory is first.memory
    ring.publish(second, 3)
    assert ring.pin(3) is None
    skeleton, arrays, _ = tree.load(folder(tmp_path, 3))
    assert tree.unpack(skeleton, arrays)["models"][""]["weight"].count_nonzero() == 0


def test_a_snapshot_being_written_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(tmp_path, snapshot_every=1)
    model = nn.Linear(2, 2)
    expected = model.weight.tolist()
    for step in (0, 1):
        keep(ring, Watched({"": model}), step)
    started, go = threading.Event(), threading.Event()
    save = tree.save

    def slow(*args: Any, **options: Any) -> None:
        started.set()
        assert go.wait(20)
        save(*args, **options)

    monkeypatch.setattr(snapshots.tree, "save", slow)
    why: list[str | None] = []
    writer = threading.Thread(target=lambda: why.append(ring.pin(0)))
    writer.start()
    assert started.wait(20)
    nn.init.zeros_(model.weight)
    assert ring.take(Watched({"": model}), 2) is None and "still being written" in ring.why_not
    go.set()
    writer.join()
    assert why == [None]
    skeleton, arrays, _ = tree.load(folder(tmp_path, 0))
    assert tree.unpack(skeleton, arrays)["models"][""]["weight"].tolist() == expected
    assert ring.take(Watched({"": model}), 3) is not None


def test_an_earlier_attempts_snapshot_of_the_same_step_gives_way(tmp_path: Path) -> None:
    for attempt, value in ((0, 1.0), (1, 2.0)):
        ring = make(tmp_path, attempt=attempt)
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, value)
        keep(ring, Watched({"": model}), 4)
        for _ in range(2):
            assert ring.pin(4) is None
        skeleton, arrays, metadata = tree.load(folder(tmp_path, 4))
        assert metadata["attempt"] == attempt and tree.unpack(skeleton, arrays)["models"][""]["weight"].item() == value


def test_what_was_left_by_going_back_is_not_pinned(tmp_path: Path) -> None:
    """Steps 10 and 20 were reached, then the training went back to step 12 and came to step 20 as another model."""
    what, step = watched()
    ring = make(tmp_path)
    for number in (10, 20):
        keep(ring, what, number)
    assert ring.pin(20) is None
    before = (folder(tmp_path, 20) / "state.safetensors").read_bytes()
    ring.went_back(12)
    step()
    assert [snapshot.step for snapshot in ring._kept] == [10]
    keep(ring, what, 20)
    assert ring.pin(25) is None
    assert (folder(tmp_path, 20) / "state.safetensors").read_bytes() != before
    stamp = (folder(tmp_path, 20) / "state.json").stat().st_mtime_ns
    assert ring.pin(25) is None and (folder(tmp_path, 20) / "state.json").stat().st_mtime_ns == stamp, "once is enough"


def test_the_recorder_sees_that_the_training_went_back(tmp_path: Path) -> None:
    recorder = Recorder(RecorderConfig(snapshot_every=4), RunDirectory(tmp_path), 0, attempt=0, strict=True)
    what, step = watched()
    recorder.attach(what.models, what.optimizers)
    for number in (0, 1, 2, 3, 4, 5, 5, 2, 3):
        step()
        recorder.close_step(number)
    kept = [snapshot.step for snapshot in recorder._snapshots._kept]
    assert kept == [0]
    recorder.detach()


def test_a_failed_write_leaves_no_half_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make(tmp_path)
    keep(ring, Watched({"": nn.Linear(1, 1)}), 0)
    real = tree._write
    monkeypatch.setattr(snapshots.tree, "_write", lambda path, parts: real(path, parts) if path.suffix != ".json" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ring.pin(0)
    assert not folder(tmp_path, 0).exists()
    monkeypatch.undo()
    assert ring.pin(0) is None and tree.load(folder(tmp_path, 0))[2]["step"] == 0
    assert [path.name for path in folder(tmp_path, 0).parent.iterdir()] == ["step-0"]


def test_gathered_state_is_not_taken(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Module):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            pytest.fail("this gathers")

    ring = make(tmp_path)
    assert ring.take(Watched({"m": FullyShardedDataParallel()}), 0) is None
    assert "FSDP1" in str(ring.pin(0))


@pytest.mark.parametrize("device", DEVICES)
def test_host_copies_are_of_the_moment(device: str) -> None:
    leaves: dict[str, Any] = {
        "a": torch.arange(6, device=device).reshape(2, 3).T,
        "b": torch.ones(3, device=device).to(torch.float8_e4m3fn),
        "empty": torch.ones(0, 2, device=device),
        "scalar": torch.tensor(4.5, device=device),
        "numpy": torch.arange(3).numpy(),
    }
    expected = tree.to_numpy(
        {name: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy() for name, leaf in leaves.items()}
    )
    for memory in (None, hostcopy.HostMemory(hostcopy.sizes(leaves), locked=device == "cuda")):
        held = {name: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy() for name, leaf in leaves.items()}
        taken = hostcopy.copy(held, memory)
        for leaf in held.values():
            leaf.fill_(0) if isinstance(leaf, torch.Tensor) and leaf.dtype != torch.float8_e4m3fn else None
        held["numpy"][:] = -1
        taken.wait()
        got = tree.to_numpy(taken.leaves)
        assert all((got[name] == expected[name]).all() and got[name].shape == expected[name].shape for name in expected)


def test_memory_is_laid_out_in_regions_that_no_tensor_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcopy, "REGION", 256)
    sizes = [100, 64, 1, 500, 3, 200, 64]
    memory = hostcopy.HostMemory(sizes, locked=False)
    assert [region.numel() for region in memory.regions] == [256, 512, 64, 256, 64]
    places = list(memory.places(sizes))
    assert [place.numel() for place in places] == sizes
    for number, place in enumerate(places):
        place.fill_(number)
    assert [set(place.tolist()) for place in places] == [{number} for number in range(len(sizes))]
    assert memory.fits(sizes, locked=False) and not memory.fits(sizes, locked=True) and not memory.fits([600], locked=False)


def test_page_locking_rests_after_each_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcopy, "REGION", 256)
    order: list[str] = []
    monkeypatch.setattr(hostcopy, "_lock", lambda region: order.append(f"lock {region.numel()}"))
    hostcopy.HostMemory([200, 500, 64], locked=True, rest=lambda seconds: order.append("rest" if seconds >= 0 else "?"))
    assert order == ["lock 256", "rest", "lock 512", "rest", "lock 64", "rest"]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_memory_that_is_being_made_when_a_run_ends_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """`after`: regions that were locked by then."""
    monkeypatch.setattr(hostcopy, "REGION", 256)
    ring, locked = make(tmp_path), []

    def lock(region: torch.Tensor) -> None:
        if len(locked) == after:
            ring.clear()
        locked.append(region.numel())

    monkeypatch.setattr(hostcopy, "_lock", lock)
    ring._make([200] * 5, None, ring._unwanted)
    assert ring._spare is None and len(locked) == after + 1
    locked.extend([0] * 9)  # nobody ends it now
    ring._make([200] * 5, None, threading.Event())
    assert ring._spare is not None and len(ring._spare.regions) == 5 and ring._every


def test_memory_that_does_not_fit_any_more_is_let_go_beside_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To unlock it stops launches as locking does: region by region, with rests, and before the new memory is made."""
    monkeypatch.setattr(hostcopy, "REGION", 256)
    done: list[str] = []
    monkeypatch.setattr(hostcopy, "_lock", lambda region: done.append(threading.current_thread().name))
    ring = make(tmp_path)
    old = hostcopy.HostMemory([200] * 3, locked=True)
    for number, region in enumerate(old.regions):
        weakref.finalize(region, lambda n=number: done.append(f"{n} unlocked: {threading.current_thread().name}"))
    del region
    done.clear()
    ring._spare, ring._last = old, 0
    rests, wait = [], threading.Event.wait

    def waited(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None:
            rests.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", waited)
    assert ring._memory([300] * 2, locked=True) is None and ring._making is not None
    ring._making.join()
    assert len(rests) == 5
    beside = "trackbridge-snapshots"
    assert done == [*(f"{n} unlocked: {beside}" for n in (2, 1, 0)), beside, beside]
    assert ring._spare is not None and ring._spare.fits([300] * 2, locked=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_memory_is_made_beside_training(tmp_path: Path) -> None:
    """Only the first snapshot waits for it; a later, larger one comes as soon as its memory is there."""
    ring = make(tmp_path, snapshot_every=10)
    model = nn.Linear(2000, 2000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    keep(ring, Watched({"": model}, {"": optimizer}), 3)
    model(torch.ones(1, 2000, device="cuda")).sum().backward()
    optimizer.step()
    assert ring.due(10) and ring.take(Watched({"": model}, {"": optimizer}), 10) is None
    assert "being made" in ring.why_not and ring.due(11)
    ring._making.join()
    snapshot = ring.take(Watched({"": model}, {"": optimizer}), 11)
    assert snapshot is not None and all(region.is_pinned() for region in snapshot.memory.regions)
    ring.publish(snapshot, 11)
    assert not ring.due(12) and ring.due(20)
    ring.clear()


SHARDED = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trackbridge import tree
from trackbridge.config import RecorderConfig
from trackbridge.errors import Part
from trackbridge.fence import Fence
from trackbridge.journal import JournalWriter
from trackbridge.pins import Pins
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory

rank, where = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
mesh = init_device_mesh("cpu", (2,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
record = Recorder(RecorderConfig(snapshot_every=1), RunDirectory(where), rank, attempt=0, strict=True)
record.attach({"": model}, {"": optimizer})
for step in range(3):
    before = [p.to_local().clone() for p in model.parameters()]
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    record.close_step(step)
assert record.pin(2) is None
skeleton, arrays, metadata = tree.load(Path(where) / f"rank-{rank:04d}" / "snapshots" / "step-2")
state = tree.unpack(skeleton, arrays)
for mine, (name, stored) in zip(before, state["models"][""].items(), strict=True):
    assert torch.equal(mine, stored) and stored.shape[0] in (2, 4), (name, stored.shape)
assert state["optimizers"][""]["state"][0]["exp_avg"].shape == (4, 4)
dist.destroy_process_group()
print("sharded", rank)
"""


@needs_shards
def test_each_rank_of_fsdp2_keeps_its_own_shards(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=120)
        assert out.decode().strip() == f"sharded {rank}", err.decode()[-2000:]


# the recorder decides when -----------------------------------------------------------------------------------------------


def test_a_snapshot_is_of_the_state_with_which_its_step_starts(tmp_path: Path) -> None:
    """A scheduler steps after `run.step`, an epoch ends with changes, and only then the next step starts."""
    from trackbridge.batches import Feed

    record = Recorder(RecorderConfig(snapshot_every=2), RunDirectory(tmp_path), 0, attempt=0)
    seen, _ = watched()
    (model,), (optimizer,) = seen.models.values(), seen.optimizers.values()
    record.attach(seen.models, seen.optimizers, None, seen.state)
    before: dict[int, list[bytes]] = {}
    step = 0
    feed = Feed([torch.arange(8)] * 3, record)
    for _ in range(3):
        for x in feed:
            before[step] = flat([model.state_dict(), optimizer.state_dict(), seen.state["sched"].state_dict()])
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            record.close_step(step)
            step += 1
        seen.state["sched"].step()  # after the loader said that it is exhausted
        with torch.no_grad():
            model.embed.weight.mul_(0.5)
    assert [s.step for s in record._snapshots._kept] == [6, 8]
    for number in (6, 8):
        assert record.pin(number) is None
        skeleton, arrays, _ = tree.load(folder(tmp_path, number))
        state = tree.unpack(skeleton, arrays)
        assert flat([state["models"][""], state["optimizers"][""], state["state"]["sched"]]) == before[number]


def test_without_a_feed_it_is_taken_at_the_forward_pass(tmp_path: Path) -> None:
    record = Recorder(RecorderConfig(snapshot_every=2), RunDirectory(tmp_path), 0, attempt=0)
    model = nn.Linear(1, 1)
    record.attach({"": model}, {})
    for step in range(4):
        nn.init.constant_(model.weight, float(step))
        model(torch.ones(1, 1))
        model(torch.ones(1, 1))
        nn.init.constant_(model.weight, -1.0)
        record.close_step(step + 40)
    assert record.pin(43) is None and record.pin(41) is None
    for number in (40, 42):
        skeleton, arrays, _ = tree.load(folder(tmp_path, number))
        assert tree.unpack(skeleton, arrays)["models"][""]["weight"].item() == number - 40
    assert record.snapshot_cost.bytes > 0 and record.snapshot_cost.seconds > 0


def test_without_any_sign_it_is_taken_at_the_close_and_again_after_a_pause(tmp_path: Path) -> None:
    record = Recorder(RecorderConfig(snapshot_every=1), RunDirectory(tmp_path), 0, attempt=0)
    model = nn.Linear(1, 1)
    record.attach({"": model}, {})
    record.close_step(0)
    for value in (1.0, 2.0):
        record.pause()
        nn.init.constant_(model.weight, value)
        record.resume()
    record.close_step(1)
    assert record.pin(1) is None
    skeleton, arrays, _ = tree.load(folder(tmp_path, 1))
    assert tree.unpack(skeleton, arrays)["models"][""]["weight"].item() == 2.0
    assert record.pin(0) == "the oldest snapshot in memory is of step 1, after step 0"


# -- a full disk


@pytest.mark.parametrize("room", [0, 300, 900], ids=["nothing fits", "the receipt fits", "half a snapshot fits"])
def test_a_full_disk_costs_the_snapshot_leaves_no_half_of_one_and_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    what, _ = watched()
    ring = make(tmp_path)
    keep(ring, what, 0)
    directory = RunDirectory(tmp_path)
    contexts = JournalWriter(directory.contexts(0), segment_bytes=1 << 20, fsync_seconds=60.0)
    recorder = cast(Recorder, SimpleNamespace(pin=ring.pin))
    pins = Pins(directory, 0, recorder, contexts, 100)
    with full_disk(room), caplog.at_level(logging.INFO, "trackbridge"):
        pins.pin("spike-5", 0, 5, 9)
        assert pins.wait(30.0)
    assert list(folder(tmp_path, 0).parent.iterdir()) == []
    receipt = directory.pin("spike-5", 0)
    if room:
        assert "could not be written: File too large" in json.loads(receipt.read_text())["why_not"]
        assert caplog.records == []
    else:
        assert not receipt.exists()
        (record,) = caplog.records
        assert record.levelname == "WARNING" and record.exc_info is None
        assert "a capsule could not be made: [Errno 27] File too large" in record.getMessage()
    assert ring.pin(0) is None, "there is room again"
    assert (folder(tmp_path, 0) / tree.STATE_JSON).exists()
    contexts.close()
