"""Parameter snapshots: the newest two stay in host memory, and go to disk when an anomaly pins one.

On disk a snapshot is ``rank-NNNN/snapshots/step-N/``: ``state.safetensors`` and ``state.json`` (`trackbridge.tree`) of the
tree ``{"models", "buffers", "optimizers", "scaler", "state"}`` before step N. ``state.json`` holds ``metadata``: step,
attempt, rank, and `missing`, what could not be stored and why.
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
from trackbridge.rundir import RunDirectory

KEPT = 2


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state before one step. `memory` is the buffer that the copy lives in; `writing` keeps it from being reused."""

    skeleton: Any
    copy: hostcopy.HostCopy
    memory: Tensor
    missing: dict[str, str]
    step: int = -1
    writing: bool = False


@dataclass(slots=True)
class Cost:
    """What the newest snapshot took: `seconds` on the training thread, `bytes` of host memory; a device copies them behind
    the work that was queued before."""

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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cost = Cost()
        self.why_not = "" if config.snapshot_every else "recorder.snapshot_every is 0"
        self._every = config.snapshot_every
        self._budget = config.snapshot_bytes
        self._folder = directory.snapshots(rank)
        self._facts = {"attempt": attempt, "rank": rank}
        self._clock = clock
        self._kept: list[Snapshot] = []  # oldest first
        self._spare: Tensor | None = None
        self._last: int | None = None
        self._lock = threading.Lock()

    def due(self, step: int) -> bool:
        """The first step of an attempt, every N-th step, and never more than N steps apart."""
        if not self._every:
            return False
        return self._last is None or step % self._every == 0 or step - self._last >= self._every

    def take(self, watched: Watched, step: int) -> Snapshot | None:
        """Start copying the state to the host. None, with `why_not` set, when that is not possible. `step` is where the
        next one is counted from."""
        started = self._clock()
        self._last = step
        gathers = next((name for name, model in watched.models.items() if _gathers(model)), None)
        if gathers is not None:
            self.why_not = f"the state of model {gathers!r} is gathered from all ranks by FSDP1; use FSDP2 (fully_shard)"
            return None
        skeleton, leaves, missing = _pack(watched)
        size = hostcopy.nbytes(leaves)
        memory = self._memory(size, pinned=any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves.values()))
        if memory is None:
            return None
        snapshot = Snapshot(skeleton, hostcopy.copy(leaves, memory), memory, missing)
        self.why_not = ""
        self.cost = Cost(self._clock() - started, size)
        return snapshot

    def publish(self, snapshot: Snapshot, step: int) -> None:
        """The step that `snapshot` was taken before has a number now."""
        snapshot.step = self._last = step
        with self._lock:
            self._kept.append(snapshot)

    def discard(self, snapshot: Snapshot) -> None:
        """`snapshot` is not of the state before a step after all."""
        self._spare = snapshot.memory

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
        finally:
            snapshot.writing = False
        return None

    def clear(self) -> None:
        """Let go of all host memory."""
        with self._lock:
            self._kept.clear()
        self._spare = None

    def _memory(self, size: int, *, pinned: bool) -> Tensor | None:
        """A buffer of at least `size` bytes, making room within the budget."""
        copies = min(KEPT, self._budget // max(size, 1))
        if copies == 0:
            self.why_not = f"models and optimizers take {size} bytes, recorder.snapshot_bytes is {self._budget}"
            return None
        with self._lock:
            while len(self._kept) >= copies:
                if self._kept[0].writing:
                    self.why_not = f"the snapshot of step {self._kept[0].step} was still being written"
                    return None
                self._spare = self._kept.pop(0).memory
        memory, self._spare = self._spare, None
        if memory is not None and memory.numel() >= size and memory.is_pinned() == pinned:
            return memory
        del memory  # before its successor is allocated
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def _write(self, snapshot: Snapshot) -> None:
        folder = self._folder / f"step-{snapshot.step}"
        if _attempt_of(folder) == self._facts["attempt"]:
            return
        snapshot.copy.wait()
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        metadata = {"step": snapshot.step, **self._facts, "missing": snapshot.missing}
        tree.save(temporary, _with_scaler_numbers(snapshot), tree.to_numpy(snapshot.copy.leaves), metadata=metadata)
        if folder.exists():  # an earlier attempt's, whose capsules were sealed from it or never will be
            shutil.rmtree(folder)
        temporary.rename(folder)


def _pack(watched: Watched) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """(skeleton, leaves, missing): the tree of state dicts; a part that cannot be stored is left out and named."""
    parts: dict[str, dict[str, Any]] = {
        "models": {name: model.state_dict() for name, model in watched.models.items()},
        "buffers": {name: _lasting_buffers(model) for name, model in watched.models.items()},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in watched.optimizers.items()},
        "scaler": _scaler_state(watched.scaler),
        "state": {name: item.state_dict() for name, item in watched.state.items()},
    }
    try:
        return *tree.pack(parts), {}
    except UsageError:
        missing: dict[str, str] = {}
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


def _attempt_of(folder: Path) -> int | None:
    try:
        attempt = json.loads((folder / tree.STATE_JSON).read_text(encoding="utf-8"))["metadata"]["attempt"]
    except (OSError, ValueError, LookupError):
        return None
    return int(attempt)
