"""Activation statistics, taken in forward hooks while the output is at hand. Nothing of it is kept; on the CPU a copy of what
is looked at, until the scribe has measured it.

Which calls count, and how hooks meet `torch.compile`: see `forward_hooks`. What is measured: `site_statistics`, `routers`,
`attention`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trackbridge.config import ActivationsConfig
from trackbridge.errors import Part
from trackbridge.hooks import takes_hooks
from trackbridge.probes import moments
from trackbridge.probes.attention import After, Around, Attention, Watching
from trackbridge.probes.base import BoolArray, Gate, Stats
from trackbridge.probes.forward_hooks import Counted, Look, OutputHook, install
from trackbridge.probes.gates import LOGITS, OUTPUTS, Gates
from trackbridge.probes.output_copies import Held
from trackbridge.probes.routers import Routers
from trackbridge.probes.site_statistics import Sites
from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab


class Kind(Protocol):
    """One kind of statistics of forward passes."""

    @property
    def fields(self) -> tuple[Field, ...]: ...

    @property
    def series(self) -> tuple[str, ...]: ...

    def bind(self, slab: Slab) -> None: ...

    def collect(self) -> None: ...

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]: ...


class ActivationProbe:
    def __init__(self, subject: Subject, config: ActivationsConfig, gate: Gate, part: Part) -> None:
        self._gates = Gates(config, gate, part)
        self._inside = config.inside_compiled
        self._sites = Sites(subject, config, self._gates)
        self._routers = Routers(subject, config)
        self._attention = Attention(subject, config, self._gates)
        self._kinds: tuple[Kind, ...] = (self._sites, self._routers, self._attention)
        self.fields: tuple[Field, ...] = (
            Field("activations_due", 1, "host"),
            self._gates.field,
            *(field for kind in self._kinds for field in kind.fields),
        )
        self.series: tuple[str, ...] = tuple(name for kind in self._kinds for name in kind.series)
        self._hooks: list[Counted] = []
        self._handles: list[Any] = []

    def attach(self, slab: Slab) -> None:
        self._due = slab.host_view("activations_due")
        # its address never changes: CUDA graphs may then write to it (otherwise the compiler gives up on them)
        torch._dynamo.mark_static_address(slab.tensor)
        self._gates.bind(slab)
        for kind in self._kinds:
            kind.bind(slab)
        for targets in (self._sites.targets, self._routers.targets):
            for module, model, look in targets:
                if takes_hooks(module):
                    self._hook(module, model, look)
        for block, model, mode in self._attention.targets:
            if takes_hooks(block):
                self._surround(block, model, mode)
        self.gate()

    def _surround(self, block: nn.Module, model: nn.Module, mode: Watching) -> None:
        around = Around(self._gates.valves[LOGITS], block, model, mode, inside_compiled=self._inside)
        self._hooks.append(around)
        self._handles.append(block.register_forward_pre_hook(around))
        self._handles.append(block.register_forward_hook(After(around), always_call=True))

    def _hook(self, module: nn.Module, model: nn.Module, look: Look) -> None:
        hook = OutputHook(self._gates.valves[OUTPUTS], module, model, look, inside_compiled=self._inside)
        self._hooks.append(hook)
        self._handles.append(install(module, hook))

    def gate(self) -> None:
        """Tell hooks and compiled regions what this step has."""
        self._gates.update()
        if self._gates.due[OUTPUTS]:
            self._due[0] = 1.0

    def backward(self, begins: bool) -> None:
        """Close compiled regions while a backward pass recomputes what was checkpointed: there no Python looks whether."""
        self._gates.set(closed=begins)

    def measure(self) -> None:
        for kind in self._kinds:
            kind.collect()
        for hook in self._hooks:
            hook.reset()
        self._gates.end()

    def take(self) -> Held | None:
        """What the step's hooks copied and nobody has measured yet, to travel with its slot."""
        return self._sites.take()

    def read(self, held: Held, rows: FloatArray) -> None:
        """Measure it, into `rows`: what the slot has of the field "activations". On the scribe's thread."""
        held.measure(rows.reshape(-1, moments.WIDTH))
        held.give_back()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gates.shut()
        self._handles.clear()
        for hook in self._hooks:
            hook.reset()
        self._hooks.clear()
        self._sites.targets.clear()
        self._routers.targets.clear()
        self._attention.targets.clear()

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        found = [kind.finalize(stats) for kind in self._kinds]
        return np.concatenate([values for values, _ in found]), np.concatenate([present for _, present in found])
