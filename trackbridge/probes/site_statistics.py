"""The statistics of activation sites: moments of what a module returned, and the kurtosis over its channels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from trackbridge import names
from trackbridge.config import ActivationsConfig
from trackbridge.probes import channels, moments
from trackbridge.probes.base import BoolArray, Stats
from trackbridge.probes.gates import ALWAYS, CHANNELS, OUTPUTS, Gates
from trackbridge.probes.observe import observe, observers
from trackbridge.probes.output_copies import Copies, Held, plain
from trackbridge.probes.outputs import elements, first_tensor
from trackbridge.probes.sites import choose
from trackbridge.probes.strides import Known, odd_prime, stride
from trackbridge.probes.subject import Subject, prefix
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

SILENT_STEPS = 3
STRIDES = (7, 5, 3)  # between the tokens that are looked at where that is dear, unless told otherwise
TOKENS, ELEMENTS = 1 << 7, 1 << 14  # that are looked at then, at least
STATISTICS = (*moments.STATISTICS, channels.NAME)


class Sites:
    """All sites of the watched models. `targets`: (module, its model, the look at it)."""

    def __init__(self, subject: Subject, config: ActivationsConfig, gates: Gates) -> None:
        self._gates = gates
        self._inside = config.inside_compiled
        self.least = None if config.tokens is None else odd_prime(config.tokens)
        self._channels_every = config.channels_every
        site_names: list[str] = []
        self.targets: list[tuple[nn.Module, nn.Module, Site]] = []
        for key, model in subject.models.items():
            for name, module in choose(model, config):
                self.targets.append((module, model, Site(self, len(site_names), module)))
                site_names.append(prefix(key) + name)
        self._names = tuple(site_names)
        count = len(site_names)
        self.fields: tuple[Field, ...] = (
            Field("activations", moments.WIDTH * count, over_ranks="moments"),
            Field(channels.NAME, count, over_ranks="shape"),
        )
        self.series: tuple[str, ...] = tuple(names.act(name, each) for each in STATISTICS for name in site_names)
        self._fired = np.zeros(count, dtype=bool)
        self._steps = 0

    def bind(self, slab: Slab) -> None:
        self.slab = slab.tensor
        self._offset, self._gate = slab.offset("activations"), slab.offset(Gates.FIELD)
        self._channels_offset = slab.offset(channels.NAME)
        count = len(self.targets)
        self.kernels: Any = observers() if slab.device.type == "cuda" and count else None
        self.cells: Any = None
        if self.kernels is not None:
            from trackbridge.probes import graph_kernels  # noqa: F401 - its operations are for `trace`

            self.cells = self.kernels.cells_for(count, slab.device)
        on_cpu = slab.device.type == "cpu"
        rows = slab.device_view("activations")
        self.copies = Copies(rows.numpy().reshape(-1, moments.WIDTH), self._add_by_channel) if on_cpu else None
        self.channels: Any = None
        if count and self._channels_every:
            width = channels.widest(module for module, _, _ in self.targets)
            self.channels = channels.channels_of(count, width, slab.device, self.kernels)

    @property
    def by_channel(self) -> bool:
        """Whether the step has statistics of channels."""
        return self.channels is not None and self._gates.due[CHANNELS]

    def add(self, y: Tensor, site: int, module: nn.Module) -> None:
        due = self.by_channel
        every = spacing(y, module, self.least or (None if self.copies is not None else 1))
        if every > 1:
            y, x = some(y, module, every)
        else:
            x = channels.by_channel(y, module) if due else None
        always = self._gate + ALWAYS
        if self.copies is not None and y.device.type == "cpu":
            if due:
                self.copies.settle(site)
            self.copies.add(y, site)
        elif self._readable(y):
            self.kernels.observe(y, self.cells, self.slab, site, always)
        else:
            observe(y, self.slab, self._offset + site * moments.WIDTH, always)
        if due and x is not None:
            self._add_by_channel(x, site)

    def _add_by_channel(self, x: Tensor, site: int) -> None:
        with self.copies.lock if self.copies is not None else nullcontext():
            self.channels.add(x, self.slab, site, self._gate + ALWAYS)

    def trace(self, y: Tensor, site: int, module: nn.Module) -> None:
        """`add` as operations of a graph; what they do depends on the gates."""
        ops, cells = torch.ops.trackbridge, self.channels
        outputs, by_channel = self._gate + OUTPUTS, self._gate + CHANNELS
        readable = self._readable(y)
        y, x = some(y, module, spacing(y, module, self.least, surely))
        if readable and x is not None and cells is not None and cells.takes(x):  # x has the elements of y
            ops.observe_with_channels_triton(x, self.cells, cells.cells, cells.widths, self.slab, site, outputs, by_channel)
            return
        if readable:
            ops.observe_triton(y, self.cells, self.slab, site, outputs)
        else:
            ops.observe(y, self.slab, self._offset + site * moments.WIDTH, outputs)
        if x is not None and cells is not None:
            cells.trace(x, self.slab, site, by_channel)

    def collect(self) -> None:
        """The end of a step: cells to rows; and copies, where they are looked at by channel."""
        if self.kernels is not None:
            self.kernels.collect(self.cells, self.slab, self._offset)
        if self.channels is not None and self._gates.opened[CHANNELS]:
            if self.copies is not None:
                self.copies.measure()
            self.channels.collect(self.slab, self._channels_offset)

    def take(self) -> Held | None:
        """The copies of the step that ends, to travel with its slot."""
        return None if self.copies is None else self.copies.take()

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        rows = stats["activations"].reshape(-1, moments.WIDTH)
        values, present = moments.finish(rows)
        if self._steps < SILENT_STEPS and stats["activations_due"][0]:
            self._listen(rows[:, moments.FIRES] > 0)
        kurtosis = stats[channels.NAME]
        known = (kurtosis > 0) & (rows[:, moments.NONFINITE] == 0)
        return np.concatenate((values.reshape(-1), kurtosis)), np.concatenate((present.reshape(-1), known))

    def _readable(self, y: Tensor) -> bool:
        return self.kernels is not None and y.device == self.slab.device and y.dtype in self.kernels.READABLE

    def _listen(self, fired: BoolArray) -> None:
        """Say once which sites never ran in the first steps."""
        self._fired |= fired
        self._steps += 1
        if self._steps == SILENT_STEPS and not self._fired.all():
            silent = [name for name, heard in zip(self._names, self._fired, strict=True) if not heard]
            logger.warning(
                "trackbridge: no activation statistics from %d of %d modules (%s%s): they did not run in training mode, or %s.",
                len(silent), len(self._names), ", ".join(silent[:5]), ", ..." if len(silent) > 5 else "",
                "the model was compiled and run before run.watch; call run.watch first" if self._inside
                else "they are compiled, and activations.inside_compiled is off",
            )  # fmt: skip


class Site:
    """The look at one site: the first tensor of what its module returned."""

    def __init__(self, sites: Sites, number: int, module: nn.Module) -> None:
        self.sites = sites
        self.number = number
        self.ends_in_channels = not isinstance(module, channels.CHANNELS_SECOND)

    def add(self, module: nn.Module, inputs: Any, output: Any) -> None:
        sites = self.sites
        if self.ends_in_channels and sites.copies is not None and plain(output):
            every = _every(output.shape, sites.least)
            if every:  # the usual case in few operations; `sites.add` would find the same elements
                x = output.numpy(force=True)
                tokens = x.reshape(-1, x.shape[-1])[::every]
                by_channel = sites.by_channel and channels.channels_last(output, module) is not None
                sites.copies.hold(tokens, self.number, x.shape[-1] if by_channel else 0)
                return
        with torch.no_grad():
            tensor = _activation(output)
            if tensor is not None:
                sites.add(tensor.detach(), self.number, module)

    def trace(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = _activation(output)
        if tensor is not None:
            self.sites.trace(tensor.detach(), self.number, module)


def surely(condition: Any) -> bool:
    """A condition that is true of every length that a graph leaves open: to look at one would guard it. Older compilers cannot
    be asked."""
    return torch.__version__ >= "2.8" and statically_known_true(condition)


def sparse(numel: int, shape: Sequence[int], least: int | None = None, known: Known = bool) -> int:
    """The stride between tokens of an output of `shape`, channels last: from `least` on; without it one that leaves enough, 1
    where none does or where a length is open. For where looking is dear: on the CPU, which the model needs itself,
    and in graphs, where the compiler would write an output to memory for us."""
    lengths = shape[1:-1]
    if least is not None:
        return stride(least, lengths, known)
    for usual in STRIDES:
        if known(numel >= usual * ELEMENTS):
            every = stride(usual, lengths, known)
            enough = known(numel >= every * ELEMENTS) and known(numel >= every * TOKENS * shape[-1])
            if enough and all(known(length % every != 0) for length in lengths):
                return every
    return 1


def spacing(y: Tensor, module: nn.Module, least: int | None, known: Known = bool) -> int:
    """Every how many-th token of an output `y` of `module` is looked at: `sparse`, wherever the channels are."""
    if least == 1 or y.dim() < 2:
        return least or 1
    last = channels.channels_last(y, module)
    return sparse(y.numel(), (y if last is None else last).shape, least, known)


@lru_cache(maxsize=1024)
def _every(shape: torch.Size, least: int | None) -> int:
    """Every how many-th token of a CPU tensor of this shape is looked at; 0 where it has no tokens."""
    if len(shape) < 2 or not shape.numel():
        return 0
    return sparse(shape.numel(), shape, least)


def some(y: Tensor, module: nn.Module, every: int) -> tuple[Tensor, Tensor | None]:
    """Every `every`-th token of an output `y` of `module`, and the same as (tokens, channels), None where the channels are not
    known. All of it for 1."""
    if every == 1 or not y.dim():  # a scalar has no tokens
        return y, channels.by_channel(y, module)
    if y.dim() == 1:
        return y[::every], None
    last = channels.channels_last(y, module)
    tokens = channels.every(y if last is None else last, every)
    return tokens, None if last is None else tokens


def _activation(output: Any) -> Tensor | None:
    tensor = first_tensor(output)
    return None if tensor is None else elements(tensor)
