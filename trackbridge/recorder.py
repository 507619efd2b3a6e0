"""The flight recorder on the training thread: what each step started from, and which batches it consumed.

A step starts at the first of: the fetch of its first batch (`run.batches`), the forward pass of a watched model with
gradients on, or, where neither is seen, the close of the step before. Starting is late on purpose: a scheduler steps, an
epoch ends and an evaluation runs between two training steps.

| what | when it is captured |
|---|---|
| random state | after the first fetch; without `run.batches` at the first forward pass |
| random state around a later fetch | before and after; kept with that micro-batch if the fetch moved it |
| random state before an epoch | before the loader's iterator is made; kept with the first batch |
| parameters, optimizer, scaler, state | at the start of every `snapshot_every`-th step |
| batch | as it is fetched, before the loop can change it |

Comparing, hashing and packing happen in `Recorder.pack`, on the scribe's thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge import fingerprints, hostcopy, process, rng, tree
from trackbridge.batches import Fetch, plain_ids
from trackbridge.config import RecorderConfig
from trackbridge.errors import Part, Timer, UsageError
from trackbridge.fence import Fence
from trackbridge.hooks import Inert, in_transform
from trackbridge.records import MicroBatch, StepContext
from trackbridge.rng import RngState
from trackbridge.rundir import RunDirectory
from trackbridge.snapshots import Cost, Snapshot, Snapshots, Watched

MAX_MICRO = 1024
MAX_OBJECTS = 2000
_STATE_BYTES = 12_000  # one captured random state

AFTER_USE = "the batch was copied after the step had used it"
NO_START = "no start of this step was seen: its random state is unknown"
EARLY_START = "no forward pass was seen: the random state is that of the end of the step before"
MANY_FETCHES = f"more than {MAX_MICRO} batches were fetched in this step; only the first {MAX_MICRO} are recorded"
UNATTRIBUTED = "sample_ids were given for several micro-batches: they belong to none of them"


@dataclass(frozen=True, slots=True, eq=False)
class RawBatch:
    """A batch on its way to host memory. If it was too large, `copy` holds samples of tensors of these `shapes`; `why` says
    why it was not kept."""

    skeleton: Any = None
    copy: hostcopy.HostCopy | None = None
    sampled: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    why: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RawMicro:
    """One fetched batch. `before` and `after` are the random states around a fetch in the middle of a step; `forwards`
    counts the forward passes that the step had made by then."""

    fetch: Fetch | None
    batch: RawBatch
    before: RngState | None = None
    after: RngState | None = None
    opening: RngState | None = None
    forwards: int = 0


class RawContext(NamedTuple):
    """What the training thread knows of one step; `Recorder.pack` makes a `StepContext` of it."""

    step: int
    attempt: int
    rng: RngState | None
    micros: tuple[RawMicro, ...]
    notes: tuple[str, ...]
    nbytes: int = 0  # about what this holds in memory
    after: RngState | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """The step under way. `early` says that it was started at the close of the one before, for want of something better."""

    room: int
    micros: list[RawMicro] = field(default_factory=list)
    rng: RngState | None = None
    forwards: int = 0
    early: bool = False
    snapshot: Snapshot | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def fresh(self) -> bool:
        """Nothing of the step has been seen yet."""
        return self.forwards == 0 and (self.rng is None or self.early)


class Recorder:
    """One per run and rank. All methods but `pack`, `judged` and `pin` belong to the training thread."""

    def __init__(
        self,
        config: RecorderConfig,
        directory: RunDirectory,
        rank: int,
        *,
        attempt: int,
        strict: bool = False,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._attempt = attempt
        self._fence = Fence(Part("the fence around snapshots", strict=strict, timer=timer))
        self._snapshots = Snapshots(config, directory, rank, attempt, self._fence, clock)
        self._watched = Watched()
        self._generators: Mapping[str, Any] = {}
        self._devices: tuple[torch.device, ...] | None = None
        self._handles: list[Any] = []
        self._part = Part("the recorder's forward hook", strict=strict, timer=timer)
        self._paused = 0
        self._pid = process.pid()
        self._next = 0  # a guess, until a step is closed
        self._open = _Open(config.batch_bytes)
        self._before: RngState | None = None
        self._opening: RngState | None = None

    @property
    def snapshot_cost(self) -> Cost:
        """What the newest snapshot cost this thread, and its size."""
        return self._snapshots.cost

    def attach(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
    ) -> None:
        """Watch these, instead of what was watched before. Raises `UsageError` for a generator of no known kind."""
        rng.check(generators or {})
        self._unhook()
        self._watched = Watched(dict(models), dict(optimizers), scaler, dict(state or {}))
        self._generators = dict(generators or {})
        self._devices = None
        self._handles = [
            model.register_forward_pre_hook(StartHook(self, model), prepend=True) for model in self._watched.models.values()
        ]
        self._fence.attach(self._watched.models, self._watched.optimizers.values())

    def detach(self) -> None:
        """Remove the hooks and let go of models, batches and snapshots."""
        self._unhook()
        self._drop_snapshot()  # its memory is freed with the others', once what is being copied into it has arrived
        self._fence.detach()
        self._watched = Watched()
        self._generators = {}
        self._open = _Open(self._config.batch_bytes)
        self._before = self._opening = None
        self._snapshots.clear()

    def pause(self) -> None:
        """Evaluation: nothing starts, nothing is recorded until `resume`. Nests."""
        if not self._paused and not self._open.fresh and self._before is None and not hostcopy.capturing():
            # A replay of the step does not draw what is drawn in the pause. The next fetch makes up for it: it counts as
            # having moved the state.
            self._before = self._capture()
        self._fence.fall()  # an evaluation may use other weights
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1
        if not self._paused and self._open.early and self._open.fresh:
            self._start(early=True)  # what ran in between may have drawn numbers

    # what a feed tells

    def before_fetch(self, *, opening: bool = False) -> None:
        """A batch is about to be fetched, or (`opening`) the loader's iterator to be made."""
        if self._paused or hostcopy.capturing():
            return
        if opening:
            self._opening = self._capture()
        elif self._open.fresh:
            self._snapshot()
        else:
            self._before = self._before or self._opening or self._capture()

    def fetched(self, batch: Any, fetch: Fetch) -> None:
        """`batch` is about to be handed to the loop."""
        if self._paused or hostcopy.capturing():
            return
        step = self._open
        opening, self._opening = self._opening, None
        if len(step.micros) >= MAX_MICRO:
            step.notes = [MANY_FETCHES]
            return
        before, self._before = self._before, None
        now = self._capture()
        if step.fresh:
            step.rng, step.early, before = now, False, None
        micro = RawMicro(fetch, self._keep(batch), before, now if before else None, opening, step.forwards)
        step.micros.append(micro)
        self._fence.begin()  # no forward pass is seen of a model that is compiled

    def exhausted(self) -> None:
        """The loader had no further batch: an epoch ended, and what ends with it may change the state of the next step."""
        self._before = self._opening = None
        if self._open.fresh:
            self._drop_snapshot()

    # the step

    def forward(self) -> None:
        """A watched model is about to run with gradients on."""
        if self._paused or self._pid != process.pid() or hostcopy.capturing():
            return
        if self._open.fresh:
            self._start()
            self._open.early = False
        self._fence.begin()
        self._open.forwards += 1

    def close_step(
        self,
        step: int,
        *,
        batch: Any = None,
        batch_index: int | None = None,
        sample_ids: Sequence[int | str] | None = None,
    ) -> RawContext:
        """The optimizer has stepped, and this was step number `step`. `batch` and its identity are the user's own, used
        where `run.batches` saw none."""
        done = self._open
        off = self._paused > 0 or hostcopy.capturing()
        micros, ahead = _consumed(done) if done.micros else ([], [])
        after = None if ahead or off else self._capture_after()
        if batch is not None and not micros:
            micros = [RawMicro(None, self._keep(batch))]
            done.notes.append(AFTER_USE)
        if batch_index is not None or sample_ids is not None:
            if len(micros) <= 1:
                micros = [_identified(micros[0] if micros else RawMicro(None, RawBatch()), batch_index, sample_ids)]
            else:
                done.notes.append(UNATTRIBUTED)
        if done.rng is None:
            done.notes.append(NO_START)
        elif done.early:
            done.notes.append(EARLY_START)
        if step < self._next - 1:
            self._snapshots.went_back(step)
        if done.snapshot is not None:
            self._snapshots.publish(done.snapshot, step)
        self._next = step + 1
        self._before = None
        self._open = _Open(self._config.batch_bytes, micros=ahead)
        if (done.rng is None or done.early) and not off:
            self._start(early=True)
            self._open.early = True
        nbytes = _STATE_BYTES * (1 + 2 * len(micros)) + self._config.batch_bytes - done.room
        return RawContext(step, self._attempt, done.rng, tuple(micros), tuple(done.notes), nbytes, after)

    # other threads

    def pack(self, raw: RawContext) -> StepContext:
        """The journal's record of a step. Waits for copies from the device."""
        return StepContext(
            seq=-1,
            step=raw.step,
            attempt=raw.attempt,
            rng={} if raw.rng is None else raw.rng.pack(),
            micro=tuple([self._pack_micro(micro) for micro in raw.micros]),
            notes=raw.notes,
            rng_after=None if raw.after is None else raw.after.digests(),
        )

    def judged(self, step: int) -> None:
        """`step` was looked at for anomalies: snapshots that only it could still ask for may go."""
        self._snapshots.passed = step

    def pin(self, first_step: int) -> str | None:
        """Write the newest snapshot of a step up to `first_step` to ``snapshots/step-N/``. Returns why not, None if done."""
        return self._snapshots.pin(first_step)

    def _pack_micro(self, micro: RawMicro) -> MicroBatch:
        fetch, batch = micro.fetch, micro.batch
        moved = micro.before is not None and micro.after is not None and not rng.same(micro.before, micro.after)
        packed = MicroBatch(
            loader=fetch.loader if fetch else None,
            epoch=fetch.epoch if fetch else None,
            index=fetch.index if fetch else None,
            sample_ids=plain_ids(fetch.sample_ids) if fetch else None,
            rng=micro.after.pack() if moved and micro.after is not None else None,
            why_no_tensors=batch.why,
            workers=fetch.workers if fetch else None,
            base_seed=fetch.base_seed if fetch else None,
            opening_rng=micro.opening.pack() if micro.opening is not None else None,
        )
        if batch.copy is None:
            return packed
        batch.copy.wait()
        arrays = tree.to_numpy(batch.copy.leaves)
        values = tree.values(batch.skeleton, arrays)
        if batch.sampled:
            shapes = {name: batch.shapes[name if name in batch.shapes else name.rpartition("#")[0]] for name in values}
            return replace(packed, fingerprint=fingerprints.sample_fingerprint(values, shapes))
        if len(json.dumps(batch.skeleton)) > self._config.batch_bytes:
            return replace(packed, why_no_tensors=self._too_large("its text"))
        return replace(
            packed,
            fingerprint=fingerprints.fingerprint(values) if values else None,
            skeleton=batch.skeleton,
            tensors=arrays,
        )

    # parts

    def _start(self, *, early: bool = False) -> None:
        self._open.rng = self._capture()
        self._snapshot(early=early)

    def _snapshot(self, *, early: bool = False) -> None:
        """Take a snapshot if this step is due one, replacing one that was taken too early. One that is `early` itself is not
        copied beside training: between two steps an evaluation may borrow the weights' memory for others."""
        if self._open.snapshot is not None:
            if not self._open.early:
                return
            self._drop_snapshot()
        elif not self._snapshots.due(self._next):
            return
        self._devices = None  # a model may have moved since
        self._open.snapshot = self._snapshots.take(self._watched, self._next, beside=not early)

    def _drop_snapshot(self) -> None:
        if self._open.snapshot is not None:
            self._snapshots.discard(self._open.snapshot)
            self._open.snapshot = None

    def _capture(self) -> RngState:
        if self._devices is None:
            self._devices = _devices(self._watched.models)
        return rng.capture(self._generators, self._devices)

    def _capture_after(self) -> RngState:
        """What a replay of the step must end with. Only torch's generators: they are what a step draws from, and cheap."""
        if self._devices is None:
            self._devices = _devices(self._watched.models)
        return rng.capture_torch(self._generators, self._devices)

    def _keep(self, batch: Any) -> RawBatch:
        """A copy of `batch` if it fits what is left of the step's budget, else a sample for its fingerprint."""
        try:
            skeleton, leaves = tree.pack(batch, max_objects=MAX_OBJECTS)
        except UsageError as error:
            return RawBatch(why=str(error))
        size = sum(int(leaf.nbytes) for leaf in leaves.values())
        if size <= self._open.room:
            self._open.room -= size
            return RawBatch(skeleton, hostcopy.copy(leaves))
        why = self._too_large(f"{size} bytes")
        if not all(leaf.is_contiguous() if isinstance(leaf, Tensor) else leaf.flags.c_contiguous for leaf in leaves.values()):
            return RawBatch(why=why)  # to sample it would be to copy it
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        samples = {
            name: leaf.reshape(-1)[:: fingerprints.stride(leaf.nbytes // leaf.itemsize)] for name, leaf in leaves.items()
        }
        return RawBatch(skeleton, hostcopy.copy(samples), True, shapes, why)

    def _too_large(self, what: str) -> str:
        return f"{what} did not fit recorder.batch_bytes ({self._config.batch_bytes})"

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class StartHook(Inert):
    """Marks the start of a step in a model's forward pass. Silent in replicas and where a function is transformed or traced."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder = recorder
        self._model = id(model)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        recorder = self._recorder
        if id(module) == self._model and recorder._part.alive and torch.is_grad_enabled() and not in_transform():
            with recorder._part:
                recorder.forward()


def _consumed(step: _Open) -> tuple[list[RawMicro], list[RawMicro]]:
    """(the step's own batches, those fetched ahead). A batch after whose fetch no forward pass ran was not used in this
    step, if forward passes are seen at all: the loop fetches the next batch before it closes the step. A batch that no feed
    fetched was told of just before its use."""
    ahead = len(step.micros)
    while step.forwards and ahead and step.micros[ahead - 1].forwards == step.forwards and _fed(step.micros[ahead - 1]):
        ahead -= 1
    # Its fetch lies before the start of the step that will use it.
    later = [replace(micro, before=None, after=None, forwards=0) for micro in step.micros[ahead:]] if step.forwards else []
    return (step.micros[:ahead] if step.forwards else step.micros), later


def _fed(micro: RawMicro) -> bool:
    return micro.fetch is not None and micro.fetch.loader is not None


def _identified(micro: RawMicro, index: int | None, sample_ids: Sequence[int | str] | None) -> RawMicro:
    """`micro` with the user's identity where it has none of its own."""
    fetch = micro.fetch
    if fetch is None:
        why = micro.batch.why or (None if micro.batch.copy is not None else "no batch was given")
        given = Fetch(None, None, index, sample_ids, 0.0)
        return replace(micro, fetch=given, batch=replace(micro.batch, why=why))
    ids = sample_ids if fetch.sample_ids is None else fetch.sample_ids
    return replace(micro, fetch=replace(fetch, sample_ids=ids, index=index if fetch.index is None else fetch.index))


def _devices(models: Mapping[str, nn.Module]) -> tuple[torch.device, ...]:
    """The CUDA devices that hold parameters or buffers, in order."""
    found = {
        tensor.device
        for model in models.values()
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
        if tensor.is_cuda
    }
    return tuple(sorted(found, key=lambda device: device.index))
