"""The fence between a snapshot that is copied beside training and the next write to what it reads.

Parameters and optimizer state are written by updates and read by everything else. So they can be copied on a stream of their
own while the next step's forward and backward pass run, if each stream that updates them waits for the copy first: that is the
fence. It falls before a watched optimizer's step or `load_state_dict`, and at the latest where the step is closed. The host
never waits.

An update has to announce itself for that, by torch's hooks. Nothing is copied beside training before each watched optimizer
has, and nothing any more once one was seen in the capture of a CUDA graph (a replay calls no hooks) or with a closure (the
forward pass is inside: nothing comes between it and the update). A write that does not announce itself (weight noise, say)
moves the tensor's version: a copy beside it may be torn, so it is dropped, and later snapshots are queued in order. A write
through ``.data``, or by a kernel that is handed the address, moves no version: one between the start of a step and its update
can go unseen, and into the copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge import hostcopy, process
from trackbridge.errors import Part
from trackbridge.hooks import Inert, has_closure, takes_hooks, unwrapped
from trackbridge.hostcopy import HostCopy, Leaf

CAPTURED = "an optimizer's step was captured in a CUDA graph while the weights were being copied"
WRITTEN = "weights or optimizer state were written outside of optimizer.step while they were being copied"
BROKEN = "what holds updates back while the weights are being copied has failed"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor of the user's, the `leaf` with its memory, and both of their versions before the copy. Being held, the memory
    outlives the copy."""

    of: Tensor
    leaf: Tensor
    version: tuple[int, int]

    @property
    def moved(self) -> bool:
        """It was written to, or has other memory now."""
        here = _local(self.of)
        return here is None or _place(here) != _place(self.leaf) or (self.of._version, here._version) != self.version


class Fence:
    """Of one recorder: one copy at a time is under way. `fall` may come from a thread of autograd's, all else is for the
    training thread. Where something breaks here, nothing is copied beside training any more."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._pid = process.pid()
        self._models: Mapping[str, nn.Module] = {}
        self._optimizers: tuple[Optimizer, ...] = ()
        self._announced = weakref.WeakSet[Optimizer]()  # each has stepped where we saw it
        self._in_order = False  # for good
        self._copy: HostCopy | None = None
        self._sources: tuple[Source, ...] = ()
        self._why_not = ""
        self._handles: list[Any] = []
        self._lock = threading.Lock()

    def attach(self, models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Look at what is done to these, instead of others. Not where no parameter is on a device that copies by itself."""
        self.detach()
        with self._part:
            known = tuple(map(unwrapped, optimizers))
            self._announced.intersection_update(known)
            parameters = [_local(parameter) for model in models.values() for parameter in model.parameters()]
            if not any(movable(parameter) for parameter in parameters if parameter is not None):
                return
            self._models, self._optimizers = models, known
            before_update = torch.compiler.disable(self._before_update)  # type: ignore[no-untyped-call]
            for optimizer in self._optimizers:
                self._handles += [
                    optimizer.register_step_pre_hook(before_update),
                    optimizer.register_load_state_dict_pre_hook(self._before_load),
                ]
            modules = {module for model in models.values() for module in model.modules() if takes_hooks(module)}
            hook = LoadHook(self)  # on all modules: a wrapped model is loaded by what is inside
            for module in modules:
                self._handles.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Take the hooks off. The fence falls."""
        self.fall()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._models, self._optimizers = {}, ()

    def sources(self, leaves: Mapping[str, Leaf]) -> dict[str, Source]:
        """Those of `leaves` that can be copied beside training, by name: parameters that a watched optimizer holds, and tensors
        of its state. None while an update might not announce itself."""
        known = self._optimizers and all(optimizer in self._announced for optimizer in self._optimizers)
        if self._in_order or not known or not self._part.alive:
            return {}
        found = {}
        with self._part, torch.no_grad():
            updated = {_place(here): (of, here) for of in self._updated() if (here := _local(of)) is not None}
            for name, leaf in leaves.items():
                if not isinstance(leaf, np.ndarray) and movable(leaf) and (place := _place(leaf)) in updated:
                    of, here = updated[place]
                    found[name] = Source(of, leaf, (of._version, here._version))
        return found if self._part.alive else {}

    def hold(self, copy: HostCopy, sources: Iterable[Source]) -> None:
        """`copy`, of `sources` among others, is under way or will be."""
        self._copy, self._sources = copy, tuple(sources)

    def begin(self) -> None:
        """The step begins, and what the recorder copies to the host before is queued: now the large copy."""
        if self._copy is not None and self._copy.later and not hostcopy.capturing():
            with self._part, self._lock:
                self._copy.begin()

    def fall(self) -> None:
        """Something may be written. Each stream that comes here waits for the copy, until `end`."""
        if self._copy is None or self._pid != process.pid():
            return
        with self._part, self._lock:  # devices have a thread each in a backward pass
            if hostcopy.capturing():
                self._why_not = self._why_not or CAPTURED  # no event of another stream may get into a graph
                return
            with torch.no_grad():
                if not self._why_not and any(source.moved for source in self._sources):
                    self._why_not, self._in_order = WRITTEN, True
            self._copy.fence()
            self._sources = ()  # last: who is interrupted here looks again at the next fall

    def end(self) -> str:
        """The step is over: the fence falls if it has not. Returns why the copy may be torn; empty, it is not."""
        self.fall()
        why_not = self._why_not if self._copy is None or self._part.alive else BROKEN
        self._copy, self._sources, self._why_not = None, (), ""
        return why_not

    def _updated(self) -> Iterable[Tensor]:
        parameters = {id(parameter) for model in self._models.values() for parameter in model.parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from (parameter for parameter in group["params"] if id(parameter) in parameters)
            for state in optimizer.state.values():
                if isinstance(state, Mapping):
                    yield from (item for item in state.values() if isinstance(item, Tensor))

    def _before_update(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._part.alive:
            self.fall()
            with self._part:
                if hostcopy.capturing() or has_closure(args, kwargs):
                    self._in_order = True
                self._announced.add(optimizer)

    def _before_load(self, *_: Any) -> None:
        if self._part.alive:
            self.fall()


class LoadHook(Inert):
    """Before a module's own parameters are loaded."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def __call__(self, *_: Any) -> None:
        self._fence._before_load()


def movable(leaf: Tensor) -> bool:
    """Whether it is copied by a device, without memory in between."""
    return leaf.is_cuda and leaf.is_contiguous()


def _local(tensor: Tensor) -> Tensor | None:
    """A DTensor's shard, the tensor itself otherwise; None where that has no memory and version of its own."""
    here = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = type(here) in (Tensor, nn.Parameter) and here.layout == torch.strided
    return here if plain and here.numel() and not here.is_inference() else None


def _place(tensor: Tensor) -> tuple[torch.device, int, int]:
    return tensor.device, tensor.data_ptr(), tensor.nbytes
