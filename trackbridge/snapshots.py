"""Parameter snapshots: the newest two stay in host memory, and go to disk when an anomaly pins one.

On disk a snapshot is ``rank-NNNN/snapshots/step-N/``: ``state.safetensors`` and ``state.json`` (`trackbridge.tree`) of the
tree ``{"models", "buffers", "optimizers", "scaler", "state"}`` before step N. ``state.json`` holds ``metadata``: step,
attempt, rank, `gone_back` (how often this process had gone back to an earlier step), `missing` (what could not be stored and
why), and `first`: step N is the first of its process.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge import hostcopy, tree
from trackbridge.config import RecorderConfig
from trackbridge.errors import UsageError
from trackbridge.fence import Fence
from trackbridge.rundir import RunDirectory

KEPT = 2
MOST = 64  # while the scribe is behind
MARGIN = 32  # steps before a detection's window that an onset may lie
RESTS = 4  # times as long as a region of page-locked memory took to make, before the next: launches wait meanwhile


class _Unwanted(Exception):  # noqa: N818 - a signal
    """Nobody waits for the memory any more."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state before one step, the `first` of this process or a later one. `memory` is the buffer that the copy lives in;
    `writing` keeps it from being reused."""

    skeleton: Any
    copy: hostcopy.HostCopy
    memory: hostcopy.HostMemory
    missing: dict[str, str]
    first: bool
    step: int = -1
    gone_back: int = 0
    writing: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What the newest snapshot took: `seconds` on the training thread, `bytes` of host memory. A device copies them behind the
    work that was queued before, at 55 GB/s on an H200: weights and optimizer state beside the next forward and backward pass
    once updates are known to be announced (`trackbridge.fence`), all else, and the first one, on its current stream."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class Watched:
    """What a replay must restore, as `run.watch` got it."""

    models: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    scaler: Any = None
    state: Mapping[str, Any] = field(default_factory=dict)


class Snapshots:
    """`due`, `take`, `publish` and `discard` are for the training thread, `pin` for another."""

    def __init__(
        self,
        config: RecorderConfig,
        directory: RunDirectory,
        rank: int,
        attempt: int,
        fence: Fence,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = Cost()
        self._fence = fence
        self.why_not = "" if config.snapshot_every else "recorder.snapshot_every is 0"
        self.passed: int | None = None  # the newest step that was looked at for anomalies; set by another thread
        self._margin = config.before + MARGIN
        self._every = config.snapshot_every
        self._budget = config.snapshot_bytes
        self._folder = directory.snapshots(rank)
        self._facts = {"attempt": attempt, "rank": rank, "gone_back": 0}
        self._clock = clock
        self._kept: list[Snapshot] = []  # oldest first
        self._spare: hostcopy.HostMemory | None = None
        self._making: threading.Thread | None = None
        self._unwanted = threading.Event()  # what is being made
        self._last: int | None = None
        self._before_last: int | None = None
        self._lock = threading.Lock()

    def due(self, step: int) -> bool:
        """The first step of an attempt, every N-th step, and never more than N steps apart."""
        if not self._every:
            return False
        late = self._making is not None or self._last is None or step - self._last >= self._every
        return late or step % self._every == 0

    def take(self, watched: Watched, step: int, *, beside: bool = True) -> Snapshot | None:
        """Start copying the state to the host; `publish` or `discard` is to follow. None, with `why_not` set, when that is not
        possible now. `step` is where the next one is counted from; `beside`: it begins here, and may run beside the copies."""
        if self._making is not None and self._making.is_alive():
            return None
        started = self._clock()
        self._making = None
        gathers = next((name for name, model in watched.models.items() if _gathers(model)), None)
        if gathers is None:
            skeleton, leaves, missing = _pack(watched)
            sizes = hostcopy.sizes(leaves)
            memory = self._memory(sizes, locked=any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves.values()))
        else:
            memory = None
            self.why_not = f"the state of model {gathers!r} is gathered from all ranks by FSDP1; use FSDP2 (fully_shard)"
        first = self._last is None
        self._before_last, self._last = self._last, step
        if memory is None:
            return None
        sources = self._fence.sources(leaves) if beside else {}
        snapshot = Snapshot(skeleton, hostcopy.copy(leaves, memory, beside=sources), memory, missing, first)
        if sources:
            self._fence.hold(snapshot.copy, sources.values())
        self.why_not = ""
        self.cost = Cost(self._clock() - started, sum(sizes))
        return snapshot

    def publish(self, snapshot: Snapshot, step: int) -> None:
        """The step that `snapshot` was taken before is over and has a number now. Dropped, with `why_not` set, if what it is a
        copy of was written meanwhile: the next step is due one then."""
        if why_not := self._fence.end():
            self.discard(snapshot)
            self.why_not = why_not
            return
        snapshot.step = self._last = step
        snapshot.gone_back = self._facts["gone_back"]
        with self._lock:
            self._kept.append(snapshot)

    def went_back(self, step: int) -> None:
        """The training goes on from before `step`, an earlier one: snapshots of later steps are of what it left."""
        self._facts = {**self._facts, "gone_back": self._facts["gone_back"] + 1}
        self._last = None if self._last is None else min(self._last, step)
        with self._lock:
            left = [snapshot for snapshot in self._kept if snapshot.step > step]
            self._kept = [snapshot for snapshot in self._kept if snapshot.step <= step]
        for snapshot in left:
            if not snapshot.writing:
                snapshot.memory.free()

    def discard(self, snapshot: Snapshot) -> None:
        """`snapshot` is not of the state before a step after all."""
        snapshot.copy.later.clear()  # of what has not begun, nothing is to come
        self._fence.end()
        self._spare = snapshot.memory
        self._last = self._before_last

    def pin(self, first_step: int) -> str | None:
        """Write the newest snapshot of a step up to `first_step` to disk. Returns why that is not possible, None if done."""
        with self._lock:
            usable = [snapshot for snapshot in self._kept if snapshot.step <= first_step]
            if not usable:
                return self.why_not or (
                    f"the oldest snapshot in memory is of step {self._kept[0].step}, after step {first_step}"
                    if self._kept
                    else "none has been taken yet"
                )
            snapshot = usable[-1]
            if snapshot.writing:
                return None
            snapshot.writing = True
        try:
            self._write(snapshot)
        except OSError as error:
            return f"the snapshot of step {snapshot.step} could not be written: {error.strerror or error}"
        finally:
            snapshot.writing = False
        return None

    def clear(self) -> None:
        """Let go of all host memory, and of what is being made."""
        with self._lock:
            self._unwanted.set()
            dropped, self._kept = self._kept, []
            spare, self._spare = self._spare, None
        for memory in (*(snapshot.memory for snapshot in dropped), spare):
            if memory is not None:
                memory.free()

    def _memory(self, sizes: list[int], *, locked: bool) -> hostcopy.HostMemory | None:
        """Memory for tensors of `sizes`, making room within the budget. Page-locked memory takes a third of a second a
        gigabyte to make, and some to let go of: only the first step waits for it, later it is made on another thread and the
        snapshot is due until it is there."""
        room = self._budget // max(sum(sizes), 1)
        if room == 0:
            self.why_not = f"models and optimizers take {sum(sizes)} bytes, recorder.snapshot_bytes is {self._budget}"
            return None
        with self._lock:
            while len(self._kept) >= self._wanted(room):
                if self._kept[0].writing:
                    self.why_not = f"the snapshot of step {self._kept[0].step} was still being written"
                    return None
                if self._spare is not None:
                    self._spare.free()
                self._spare = self._kept.pop(0).memory
        memory, self._spare = self._spare, None
        if memory is not None and memory.fits(sizes, locked=locked):
            return memory
        if not locked or self._last is None:
            if memory is not None:
                memory.free()  # before its successor is made
            return hostcopy.HostMemory(sizes, locked=locked)
        self.why_not = "page-locked memory for it is being made"
        self._unwanted = threading.Event()
        self._making = threading.Thread(
            target=self._make, args=(sizes, memory, self._unwanted), name="trackbridge-snapshots", daemon=True
        )
        self._making.start()
        return None

    def _wanted(self, room: int) -> int:
        """How many snapshots there should be. Two; more, as far as there is room, while the steps after the second have not
        been looked at for anomalies yet: a loop of microsecond steps runs far ahead of the scribe."""
        wanted = min(KEPT, room)
        if self.passed is not None:
            behind = [snapshot for snapshot in self._kept[1:] if snapshot.step > self.passed - self._margin]
            wanted = max(wanted, min(len(behind) + KEPT, room, MOST))
        return wanted

    def _make(self, sizes: list[int], old: hostcopy.HostMemory | None, unwanted: threading.Event) -> None:
        """Page-locked memory of `sizes` in the place of `old`."""

        def rest(seconds: float) -> None:
            if unwanted.wait(RESTS * seconds):
                raise _Unwanted

        try:
            if old is not None:
                old.free(rest)
            memory = hostcopy.HostMemory(sizes, locked=True, rest=rest)
        except _Unwanted:
            return
        except RuntimeError as error:
            self._every = 0
            self.why_not = f"page-locked host memory could not be made: {error}"
            return
        with self._lock:
            if not unwanted.is_set():
                self._spare = memory

    def _write(self, snapshot: Snapshot) -> None:
        folder = self._folder / f"step-{snapshot.step}"
        if _is(folder, {"attempt": self._facts["attempt"], "gone_back": snapshot.gone_back}):
            return
        snapshot.copy.wait()
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        facts = {**self._facts, "gone_back": snapshot.gone_back}
        metadata = {"step": snapshot.step, **facts, "missing": snapshot.missing, "first": snapshot.first}
        try:
            tree.save(temporary, _with_scaler_numbers(snapshot), tree.to_numpy(snapshot.copy.leaves), metadata=metadata)
            if folder.exists():  # of an earlier attempt or before going back: its capsules were sealed from it or never will be
                shutil.rmtree(folder)
            temporary.rename(folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk half a snapshot is in the way
            raise


def _pack(watched: Watched) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """(skeleton, leaves, missing): the tree of state dicts; a part that cannot be stored is left out and named."""
    missing: dict[str, str] = {}

    def of(kind: str, objects: Mapping[str, Any], state: Callable[[Any], Any]) -> dict[str, Any]:
        found = {}
        for name, each in objects.items():
            try:
                found[name] = state(each)
            except Exception as error:  # the user's object
                missing[f"{kind}/{name}"] = f"its state_dict() raised {type(error).__name__}: {error}".splitlines()[0]
        return found

    parts: dict[str, dict[str, Any]] = {
        "models": of("models", watched.models, lambda model: model.state_dict()),
        "buffers": {name: _lasting_buffers(model) for name, model in watched.models.items()},
        "optimizers": of("optimizers", watched.optimizers, lambda optimizer: optimizer.state_dict()),
        "scaler": of("scaler", {"": watched.scaler}, _scaler_state).get("", {}),
        "state": of("state", watched.state, lambda item: item.state_dict()),
    }
    try:
        return *tree.pack(parts), missing
    except UsageError:
        for kind, group in parts.items():
            for name in list(group):
                try:
                    tree.pack(group[name])
                except UsageError as error:
                    missing[f"{kind}/{name}"] = str(error)
                    del group[name]
        return *tree.pack(parts), missing


def _scaler_state(scaler: Any) -> dict[str, Any]:
    """``scaler.state_dict()``, but of torch's own scalers without reading their two numbers, which waits for the device."""
    if scaler is None:
        return {}
    numbers = {"scale": getattr(scaler, "_scale", None), "_growth_tracker": getattr(scaler, "_growth_tracker", None)}
    lazy = any(number is None for number in numbers.values())  # not made before the first scale()
    if lazy or not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return dict(scaler.state_dict())
    factors = {
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    return {**factors, **numbers}


def _with_scaler_numbers(snapshot: Snapshot) -> Any:
    """The skeleton with the scaler's numbers as ``load_state_dict`` wants them, now that they have arrived."""
    scaler = dict(snapshot.skeleton["scaler"])
    for key, number in (("scale", float), ("_growth_tracker", int)):
        if isinstance(scaler.get(key), dict):
            leaf = snapshot.copy.leaves[scaler[key]["$tensor"]]
            scaler[key] = number(leaf)
    return {**snapshot.skeleton, "scaler": scaler}


def _lasting_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that ``state_dict`` leaves out (``persistent=False``): they can be state all the same."""
    return {
        f"{prefix}.{name}" if prefix else name: module._buffers[name]
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def _gathers(model: nn.Module) -> bool:
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def _is(folder: Path, facts: Mapping[str, int]) -> bool:
    """Whether a snapshot of which `facts` are true is in `folder`."""
    try:
        metadata = json.loads((folder / tree.STATE_JSON).read_text(encoding="utf-8"))["metadata"]
        return all(metadata[name] == value for name, value in facts.items())
    except (OSError, ValueError, LookupError, TypeError):
        return False
