"""Hooks on forward passes: which calls count, and how a look at one is taken in eager code and in graphs.

Counted are training forwards with gradients enabled, each module once per call. Recomputation inside a backward pass is
not counted, except where it is the first pass that would count: reentrant checkpointing runs the real forward without
gradients. Nor are calls in which a function is transformed or traced.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling

from trackbridge.errors import Part
from trackbridge.hooks import Inert, in_backward, in_export, in_transform


class Look(Protocol):
    """What is measured of one module's calls."""

    def add(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Eager code: in a call that counts. No sync; gradients are on, and none may come of it."""

    def trace(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """`add` as operations of a graph, whose effect depends on a gate on the device."""


class Valve:
    """Whether eager hooks of one kind look at the current step. Let go of in copies of a model, see `Inert`."""

    __slots__ = ("alive", "due", "part")

    def __init__(self, part: Part) -> None:
        self.part = part
        self.due = False
        self.alive = True

    @property
    def open(self) -> bool:
        return self.due and self.alive and self.part.alive


class Counted(Inert):
    """Decides which calls of one module count. `pending`: calls of the forward pass that a recomputation may still repeat."""

    def __init__(self, valve: Valve, module: nn.Module, model: nn.Module, *, inside_compiled: bool) -> None:
        self.valve = valve
        self.inside_compiled = inside_compiled
        self.module = id(module)  # not the module: data-parallel replicas share hooks with the original
        self.model = model
        self.pending = 0

    def in_graph(self, module: nn.Module) -> bool:
        """While a graph is traced: whether a look belongs into it."""
        return self.inside_compiled and torch.is_grad_enabled() and module.training and not in_export()

    def reset(self) -> None:
        """The step is over: no forward pass is under way."""
        self.pending = 0

    def counts(self, module: nn.Module) -> bool:
        """True for a call of eager code that counts, the valve being open. Ask once per call."""
        if not torch.is_grad_enabled() or id(module) != self.module or not self.model.training or in_transform():
            return False
        if not in_backward():
            self.pending += 1
        elif self.pending:
            self.pending -= 1
            return False
        return True


class OutputHook(Counted):
    """A forward hook: one look at the output of each call that counts."""

    def __init__(self, valve: Valve, module: nn.Module, model: nn.Module, look: Look, *, inside_compiled: bool) -> None:
        super().__init__(valve, module, model, inside_compiled=inside_compiled)
        self.look = look

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_compiling():
            if self.in_graph(module):
                self.look.trace(module, inputs, output)
        elif self.valve.open:
            with self.valve.part:
                if self.counts(module):
                    self.look.add(module, inputs, output)


def install(module: nn.Module, hook: OutputHook) -> Any:
    """Hook `module`; outside its graph when it was compiled in place, so that the graph stays as it would be without us."""
    if getattr(module, "_compiled_call_impl", None) is None:
        return module.register_forward_hook(hook)
    return OutsideCompiled(module, hook)


class OutsideCompiled:
    """Calls a module's compiled form, then the hook. A copied or pickled module drops its compiled form, and this with it."""

    def __init__(self, module: nn.Module, hook: OutputHook) -> None:
        self._module = module
        self._hook = hook
        self._compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._compiled(*args, **kwargs)
        self._hook(self._module, args, output)
        return output

    def remove(self) -> None:
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._compiled
