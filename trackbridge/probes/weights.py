"""Weights, Adam's moments and the size of the update, on a cadence: they move slowly and reading them costs memory traffic.

Measured after the update. The update is the real difference of the weights, so that a step too small for the weights' dtype
counts as the zero it is; it needs a copy of the weights for the time of one `optimizer.step`, and is left out where there is
no room: above `COPY_BYTES` on the host, and on a GPU above half of what the allocator has idle at that time (activations are
free by then), so that it asks the device for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ParametersConfig
from trackbridge.probes import reduce
from trackbridge.probes.base import BoolArray, Gate, Stats
from trackbridge.probes.rows import Rows, alike, root_sum
from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

COPY_BYTES = 1 << 30
STATISTICS = ("weight_norm", "weight_rms", "weight_max", "weight_nonfinite", "exp_avg_norm", "exp_avg_sq_norm", "update_ratio")
TOTALS = ("param/norm", "param/nonfinite", "optim/exp_avg_norm", "optim/exp_avg_sq_norm", "optim/update_ratio")
MOMENTS = ("exp_avg", "exp_avg_sq")
Groups = list[tuple[list[int], list[Tensor]]]


class WeightProbe:
    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate) -> None:
        self._subject = subject
        self._weights_every, self._moments_every = config.weights_every, config.moments_every
        self._gate = gate
        self._copies: dict[int, Groups] = {}
        self._refused = False
        size = len(subject.parameters)
        self.fields: tuple[Field, ...] = (
            *(Field(f"{name}_norm", size, over_ranks="norm") for name in ("weight", "update", *MOMENTS)),
            Field("weight_max", size),
            Field("weight_nonfinite", size, over_ranks="count"),
            *(Field(f"{name}_seen", size, "host") for name in ("weight", "update", *MOMENTS)),
            Field("weight_held", size, "host"),
            Field("moment_held", size, "host"),
        )
        self.series: tuple[str, ...] = (
            *TOTALS,
            *(names.layer(parameter, name) for name in STATISTICS for parameter in subject.names),
        )

    def attach(self, slab: Slab) -> None:
        kinds = ("weight", "update", *MOMENTS)
        self._norm = {kind: Rows(slab, f"{kind}_norm") for kind in kinds}
        self._peak, self._nonfinite = Rows(slab, "weight_max"), Rows(slab, "weight_nonfinite")
        self._seen = {kind: slab.host_view(f"{kind}_seen") for kind in kinds}
        self._held = slab.host_view("weight_held"), slab.host_view("moment_held")

    def measure(self) -> None:
        """Note which parameters a total must cover: when only one of two optimizers stepped, there is no total."""
        weights, moments = self._held
        for optimizer in self._subject.optimizers.values():
            if self._seen["weight"].any():
                weights[[row for row, parameter in self._subject.members(optimizer) if parameter.requires_grad]] = 1.0
            if self._seen["exp_avg"].any():
                moments[[row for row, _ in _states(self._subject, optimizer, "exp_avg")]] = 1.0

    def detach(self) -> None:
        self._copies.clear()

    @torch.no_grad()
    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        if not self._gate.due(self._weights_every):
            return
        groups = alike((row, p) for row, p in self._subject.members(optimizer) if p.requires_grad)
        size = sum(tensor.numel() * tensor.element_size() for _, tensors in groups for tensor in tensors)
        if size <= spare_bytes(self._subject.device):
            self._copies[id(optimizer)] = [(rows, _copied(tensors)) for rows, tensors in groups]
        elif not self._refused:
            self._refused = True
            logger.info("trackbridge: no update_ratio: there is no room for a copy of the weights (%d bytes)", size)

    @torch.no_grad()
    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        copies = self._copies.pop(id(optimizer), [])
        if self._gate.due(self._weights_every):
            now = alike((row, p.detach()) for row, p in self._subject.members(optimizer) if p.requires_grad)
            known = [rows for rows, _ in copies] == [rows for rows, _ in now]
            for place, (rows, tensors) in enumerate(now):
                found = reduce.change(tensors, copies[place][1] if known else None)
                self._write("weight", rows, found.norm)
                self._peak.write(rows, found.peak)
                self._nonfinite.write(rows, found.nonfinite)
                if found.moved is not None:
                    self._write("update", rows, found.moved)
        if self._gate.due(self._moments_every):
            for kind in MOMENTS:
                for rows, tensors in alike(_states(self._subject, optimizer, kind)):
                    self._write(kind, rows, reduce.norms(tensors))

    def _write(self, kind: str, rows: list[int], norms: Tensor) -> None:
        self._norm[kind].write(rows, norms)
        self._seen[kind][rows] = 1.0

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        seen = {kind: stats[f"{kind}_seen"] > 0 for kind in ("weight", "update", *MOMENTS)}
        weight, update, bad = stats["weight_norm"], stats["update_norm"], stats["weight_nonfinite"]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = update / weight
            whole = root_sum(weight, seen["weight"])
            totals = (
                whole,
                float(bad[seen["weight"]].sum()),
                root_sum(stats["exp_avg_norm"], seen["exp_avg"]),
                root_sum(stats["exp_avg_sq_norm"], seen["exp_avg_sq"]),
                np.float64(root_sum(update, seen["update"])) / whole,
            )
        weights, moments = stats["weight_held"] > 0, stats["moment_held"] > 0
        known = (
            _covers(seen["weight"], weights),
            _covers(seen["weight"], weights),
            _covers(seen["exp_avg"], moments),
            _covers(seen["exp_avg_sq"], moments),
            _covers(seen["update"], weights) and whole != 0.0,
        )
        rms = weight / np.sqrt(np.maximum(stats["param_size"], 1.0))
        moving = seen["update"] & (weight != 0.0)
        values = (totals, weight, rms, stats["weight_max"], bad, stats["exp_avg_norm"], stats["exp_avg_sq_norm"], ratio)
        present = (known, *[seen["weight"]] * 4, seen["exp_avg"], seen["exp_avg_sq"], moving)
        return np.concatenate(values), np.concatenate(present)


def spare_bytes(device: torch.device) -> int:
    """What a probe may use for a moment without asking the device for memory."""
    if device.type != "cuda":
        return COPY_BYTES
    return (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _covers(seen: BoolArray, held: BoolArray) -> bool:
    return bool(held.any() and not (held & ~seen).any())


def _states(subject: Subject, optimizer: Any, kind: str) -> Iterator[tuple[int, Tensor]]:
    """(row, state tensor) of the parameters that have this kind of optimizer state."""
    for row, parameter in subject.members(optimizer):
        state = optimizer.state.get(parameter)
        value = state.get(kind) if isinstance(state, Mapping) else None
        if isinstance(value, Tensor) and value.is_floating_point():
            yield row, value
