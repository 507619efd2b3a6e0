"""How long the forward passes, the backward passes and the optimizer took, and what was left of the step.

On the device's own clock where it has one: there each end of an interval is an event, read on the scribe's thread. The backward
pass is timed from the moment the gradient of the model's output is there to the end of that pass; the loss function, outside
the model, belongs to neither.

Phases nest (a closure inside `optimizer.step`, a model inside a model, an optimizer inside a backward pass): the time of the
inner one is not the outer one's. So on one clock, with the waiting for data and the rest, they are the step exactly. On CUDA
the host fetches a batch while the device still works; what is counted twice by that is a series of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from trackbridge.errors import Part
from trackbridge.hooks import Inert, in_backward, in_transform
from trackbridge.hostcopy import capturing
from trackbridge.probes.base import BoolArray, Gate, Stats
from trackbridge.probes.outputs import first_tensor
from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

FORWARD, BACKWARD, OPTIMIZER, PAUSED = range(4)
ANY = -1  # a backward pass goes through all models at once
ROUNDING = 1e-6  # seconds: sums of clock readings differ by less
Mark: TypeAlias = "float | torch.cuda.Event"


class PhaseProbe:
    series: tuple[str, ...] = (
        "perf/forward_s", "perf/backward_s", "perf/optimizer_s", "perf/other_s", "perf/overlap_s",
    )  # fmt: skip
    fields: tuple[Field, ...] = (
        Field("phase_s", 3, "host"),
        Field("phase_seen", 3, "host"),
        Field("step_s", 2, "host"),  # the step without pauses, and of it the waiting for data
    )

    def __init__(
        self, subject: Subject, gate: Gate, part: Part, on_backward: Callable[[bool], None] = lambda begins: None
    ) -> None:
        """`on_backward` is told when a backward pass begins (True) and ends."""
        self._subject = subject
        self._gate = gate
        self._part = part
        self._on_backward = on_backward
        self._cuda = subject.device if subject.device.type == "cuda" else None
        self._events: deque[torch.cuda.Event] = deque()
        self._intervals: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: list[tuple[int, int]] = []  # phases under way, outermost first
        self._mark: Mark | None = None  # since when the innermost is charged
        self._handles: list[Any] = []

    def attach(self, slab: Slab) -> None:
        self._seconds, self._seen = slab.host_view("phase_s"), slab.host_view("phase_seen")
        self._step_s = slab.host_view("step_s")
        for number, model in enumerate(self._subject.models.values()):
            self._handles += [
                model.register_forward_pre_hook(_Enter(self, number, model)),
                model.register_forward_hook(_Leave(self, number, model), always_call=True),
            ]

    def start(self, phase: int, number: int) -> None:
        """Begin a phase inside the one under way; one that has begun, and was not left, begins anew. A backward pass that two
        outputs share begins once."""
        if self._cuda is not None and capturing():
            return
        key = (phase, number)
        if phase == BACKWARD:
            if key in self._open:
                return
        elif (BACKWARD, ANY) in self._open and not in_backward():  # it raised: nobody told us of its end
            self._drop((BACKWARD, ANY))
            self._on_backward(False)
        self._drop(key)
        self._charge()
        self._open.append(key)

    def stop(self, phase: int, number: int) -> None:
        key = (phase, number)
        if key not in self._open or (self._cuda is not None and capturing()):
            return
        place = self._open.index(key)
        if place != len(self._open) - 1:  # something inside was never left
            self._mark = None
        self._charge()
        del self._open[place:]

    def spent(self, step_s: float, fetch_s: float) -> None:
        """The wall time of the step that ends, and how much of it went into waiting for data."""
        self._step_s[0], self._step_s[1] = step_s, fetch_s

    def pause(self) -> None:
        """What follows belongs to no phase, until `resume`."""
        if self._open:
            self.start(PAUSED, ANY)

    def resume(self) -> None:
        self.stop(PAUSED, ANY)

    def _charge(self) -> None:
        """The time since the last mark is the innermost phase's."""
        now, begun, self._mark = self._now(), self._mark, None
        if begun is not None and self._open and (phase := self._open[-1][0]) != PAUSED:
            if isinstance(begun, float):
                self._seconds[phase] += now - begun
            else:
                self._intervals.append((phase, begun, now))
            self._seen[phase] = 1.0
        self._mark = now

    def _drop(self, key: tuple[int, int]) -> None:
        """A phase that was left without a word: its time is nobody's."""
        if key in self._open:
            del self._open[self._open.index(key) :]
            self._mark = None

    def entered(self, number: int, model: nn.Module) -> None:
        if self._counts(model):
            self.start(FORWARD, number)

    def left(self, number: int, model: nn.Module, output: Any) -> None:
        if not self._counts(model):
            return
        self.stop(FORWARD, number)
        tensor = first_tensor(output)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_Backward(self))

    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        if not self._gate.paused:
            self.start(OPTIMIZER, id(optimizer))

    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        self.stop(OPTIMIZER, id(optimizer))

    def measure(self) -> None:
        self._open.clear()
        self._mark = None

    def take(self) -> list[tuple[int, torch.cuda.Event, torch.cuda.Event]]:
        """The CUDA intervals of the step that ends, to travel with its slot."""
        taken, self._intervals = self._intervals, []
        return taken

    def read(self, intervals: list[tuple[int, torch.cuda.Event, torch.cuda.Event]], seconds: FloatArray) -> None:
        """Add the device's time between events that are over to `seconds`. On the scribe's thread."""
        used: dict[int, torch.cuda.Event] = {}  # an event may end one interval and begin the next
        for phase, begun, ended in intervals:
            if not ended.query():  # type: ignore[no-untyped-call]  # the slot's own event came later on the same stream, so this is the exception
                ended.synchronize()
            seconds[phase] += begun.elapsed_time(ended) / 1e3
            used |= {id(begun): begun, id(ended): ended}
        self._events.extend(used.values())

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        seconds, seen = stats["phase_s"], stats["phase_seen"] > 0
        step, fetch = stats["step_s"]
        rest = step - fetch - seconds[seen].sum()
        known = bool(seen.any() and step > 0)
        values = np.concatenate((seconds, [max(rest, 0.0), max(-rest, 0.0)]))
        return values, np.concatenate((seen, [known, known and rest < -ROUNDING]))

    def _counts(self, model: nn.Module) -> bool:
        if self._gate.paused or not model.training or not torch.is_grad_enabled():
            return False
        return not in_backward() and not in_transform()

    def _now(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = self._events.popleft() if self._events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._cuda))
        return event


class _Hook(Inert):
    """On one model; silent for replicas and while tracing, where a clock means nothing."""

    def __init__(self, probe: PhaseProbe, number: int, model: nn.Module) -> None:
        self._probe = probe
        self._number = number
        self._model = id(model)

    def _live(self, module: nn.Module) -> bool:
        return id(module) == self._model and self._probe._part.alive


class _Enter(_Hook):
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling() and self._live(module):
            with self._probe._part:
                self._probe.entered(self._number, module)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._live(module):
            with self._probe._part:
                self._probe.left(self._number, module, output)


class _Backward:
    """On the node that made the model's output: called when that gradient is there."""

    def __init__(self, probe: PhaseProbe) -> None:
        self._probe = probe

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        probe = self._probe
        if probe._gate.paused or not probe._part.alive:
            return
        with probe._part:
            probe.start(BACKWARD, ANY)
            probe._on_backward(True)
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._probe.stop(BACKWARD, ANY)
        self._probe._on_backward(False)
