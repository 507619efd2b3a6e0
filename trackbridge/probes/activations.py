"""Activation statistics, taken in forward hooks while the output is at hand; nothing of it is kept.

Counted are training forwards with gradients enabled, each module once per call. Recomputation inside a backward pass is
not counted, except where it is the first pass that would count: reentrant checkpointing runs the real forward without
gradients.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from trackbridge import names
from trackbridge.config import ActivationsConfig
from trackbridge.errors import Part
from trackbridge.probes import moments
from trackbridge.probes.base import BoolArray, Gate, Inert, Stats
from trackbridge.probes.observe import observe, observers
from trackbridge.probes.outputs import first_tensor, is_transformed
from trackbridge.probes.phases import in_backward
from trackbridge.probes.sites import choose
from trackbridge.probes.subject import Subject, prefix
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

SILENT_STEPS = 3


class ActivationProbe:
    def __init__(self, subject: Subject, config: ActivationsConfig, gate: Gate, part: Part) -> None:
        self._every = config.every
        self._inside = config.inside_compiled
        self._gate = gate
        self._part = part
        self._sites: list[tuple[nn.Module, nn.Module]] = []  # the module and its model
        site_names: list[str] = []
        for key, model in subject.models.items():
            for name, module in choose(model, config):
                site_names.append(prefix(key) + name)
                self._sites.append((module, model))
        self._names = tuple(site_names)
        self.fields: tuple[Field, ...] = (
            Field("activations", moments.WIDTH * len(site_names), over_ranks="moments"),
            Field("activations_due", 1, "host"),
            Field("activations_gate", 2, lasting=True),  # of compiled regions; and one that stays open
        )
        self.series: tuple[str, ...] = tuple(
            names.act(name, statistic) for statistic in moments.STATISTICS for name in site_names
        )
        self._hooks: list[SiteHook] = []
        self._handles: list[Any] = []
        self._fired = np.zeros(len(site_names), dtype=bool)
        self._steps = 0

    def attach(self, slab: Slab) -> None:
        self._due = slab.host_view("activations_due")
        self._switch, always = torch.split(slab.device_view("activations_gate"), 1)
        always.fill_(1.0)
        # its address never changes: CUDA graphs may then write to it (otherwise the compiler gives up on them)
        torch._dynamo.mark_static_address(slab.tensor)
        self._place = Place(slab, slab.offset("activations"), slab.offset("activations_gate"), len(self._sites))
        for number, (module, model) in enumerate(self._sites):
            hook = SiteHook(self, module, model, self._place, number, self._inside)
            self._hooks.append(hook)
            self._handles.append(_install(module, hook))
        self.gate()

    def gate(self) -> None:
        """Tell compiled regions whether this step is measured."""
        due = self._gate.due(self._every)
        self._switch.fill_(float(due))
        self._due[0] = max(self._due[0], float(due))

    def backward(self, begins: bool) -> None:
        """Close compiled regions while a backward pass recomputes what was checkpointed: there no Python looks whether."""
        if begins:
            self._switch.fill_(0.0)
        else:
            self._switch.fill_(float(self._gate.due(self._every)))

    def measure(self) -> None:
        self._place.collect()
        for hook in self._hooks:
            hook.pending = 0

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for hook in self._hooks:
            hook.probe = None
        self._handles.clear()
        self._hooks.clear()
        self._sites.clear()

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        rows = stats["activations"].reshape(-1, moments.WIDTH)
        values, present = moments.finish(rows)
        if self._steps < SILENT_STEPS and stats["activations_due"][0]:
            self._listen(rows[:, moments.FIRES] > 0)
        return values.reshape(-1), present.reshape(-1)

    def _listen(self, fired: BoolArray) -> None:
        """Say once which sites never ran in the first steps."""
        self._fired |= fired
        self._steps += 1
        if self._steps == SILENT_STEPS and not self._fired.all():
            silent = [name for name, heard in zip(self._names, self._fired, strict=True) if not heard]
            logger.warning(
                "trackbridge: no activation statistics from %d of %d modules (%s%s): they did not run, or the model was "
                "compiled and run before run.watch; call run.watch first.",
                len(silent), len(self._names), ", ".join(silent[:5]), ", ..." if len(silent) > 5 else "",
            )  # fmt: skip


class Place:
    """Where outputs of sites are added up: rows of the slab, and on a GPU cells that become rows at the end of a step."""

    def __init__(self, slab: Slab, offset: int, gate: int, sites: int) -> None:
        self.slab = slab.tensor
        self.offset = offset
        self.gate = gate  # of compiled regions; the next element stays open
        self.kernels: Any = observers() if slab.device.type == "cuda" and sites else None
        self.cells = self.kernels.cells_for(sites, slab.device) if self.kernels is not None else None
        on_cpu = slab.device.type == "cpu"
        self._rows = slab.device_view("activations").numpy().reshape(-1, moments.WIDTH) if on_cpu else None

    def add(self, y: torch.Tensor, site: int) -> None:
        if self._rows is not None and y.device.type == "cpu":
            moments.add_on_cpu(y, self._rows[site])
        elif self._readable(y):
            self.kernels.observe(y, self.cells, self.slab, site, self.gate + 1)
        else:
            observe(y, self.slab, self.offset + site * moments.WIDTH, self.gate + 1)

    def trace(self, y: torch.Tensor, site: int) -> None:
        """`add` as operations of a graph; what they do depends on the gate."""
        if self._readable(y):
            self.kernels.trace(y, self.cells, self.slab, site, self.gate)
        else:
            torch.ops.trackbridge.observe(y, self.slab, self.offset + site * moments.WIDTH, self.gate)

    def collect(self) -> None:
        """The end of a step: cells to rows."""
        if self.kernels is not None:
            self.kernels.collect(self.cells, self.slab, self.offset)

    def _readable(self, y: torch.Tensor) -> bool:
        return self.kernels is not None and y.device == self.slab.device and y.dtype in self.kernels.READABLE


class SiteHook(Inert):
    """The forward hook of one site. `pending` counts calls in the forward pass that a recomputation may still repeat."""

    def __init__(
        self, probe: ActivationProbe, module: nn.Module, model: nn.Module, place: Place, site: int, inside_compiled: bool
    ) -> None:
        self.probe: ActivationProbe | None = probe
        self.module = id(module)  # not the module: data-parallel replicas share hooks with the original
        self.model = model
        self.place = place
        self.site = site
        self.inside_compiled = inside_compiled
        self.pending = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if self.inside_compiled and torch.is_grad_enabled() and module.training:
                tensor = first_tensor(output)
                if tensor is not None:
                    self.place.trace(tensor.detach(), self.site)
            return
        probe = self.probe
        if probe is None or not probe._part.alive or not torch.is_grad_enabled() or id(module) != self.module:
            return
        if not self.model.training or not probe._gate.due(probe._every):
            return
        with probe._part:
            if in_backward():
                if self.pending:
                    self.pending -= 1
                    return
            else:
                self.pending += 1
            tensor = first_tensor(output)
            if tensor is not None and not is_transformed(tensor):
                with torch.no_grad():
                    self.place.add(tensor.detach(), self.site)


def _install(module: nn.Module, hook: SiteHook) -> Any:
    """Hook `module`; outside its graph when it was compiled in place, so that the graph stays as it would be without us."""
    if getattr(module, "_compiled_call_impl", None) is None:
        return module.register_forward_hook(hook)
    return OutsideCompiled(module, hook)


class OutsideCompiled:
    """Calls a module's compiled form, then the hook. A copied or pickled module drops its compiled form, and this with it."""

    def __init__(self, module: nn.Module, hook: SiteHook) -> None:
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
