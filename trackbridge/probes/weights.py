"""Weights, Adam's moments and the size of the update, on a cadence: they move slowly and reading them costs memory traffic.

Measured after the update. The update is the real difference of the weights, so that a step too small for the weights' dtype
counts as the zero it is; it needs a copy of the weights for the time of one `optimizer.step`. Where there is no room for that
(`room`: the device is asked for nothing) the weights are taken in `PARTS`, one in turn on each step of the cadence: by the
step's number and the sizes of whole parameters, so that ranks and replays take the same.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ParametersConfig
from trackbridge.probes import cpu, reduce
from trackbridge.probes.base import BoolArray, Gate, Stats
from trackbridge.probes.room import spare_bytes
from trackbridge.probes.rows import Rows, alike, parted, root_sum
from trackbridge.probes.subject import Members, Subject, local
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

PARTS = 10
STATISTICS = ("weight_norm", "weight_rms", "weight_max", "weight_nonfinite", "exp_avg_norm", "exp_avg_sq_norm", "update_ratio")
TOTALS = ("param/norm", "param/nonfinite", "optim/exp_avg_norm", "optim/exp_avg_sq_norm", "optim/update_ratio")
MOMENTS = ("exp_avg", "exp_avg_sq")


class WeightProbe:
    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate) -> None:
        self._subject = subject
        self._weights_every, self._moments_every = config.weights_every, config.moments_every
        self._gate = gate
        self._copies: dict[int, dict[int, Tensor]] = {}  # by optimizer: what was copied, by row
        self._parts = shares([p.numel() * p.element_size() for p in subject.parameters], PARTS)
        self._refused = False
        size = len(subject.parameters)
        self.fields: tuple[Field, ...] = (
            *(Field(f"{name}_norm", size, over_ranks="norm") for name in ("weight", "update", *MOMENTS)),
            Field("weight_max", size),
            Field("weight_nonfinite", size, over_ranks="count"),
            *(Field(f"{name}_seen", size, "host") for name in ("weight", *MOMENTS)),
            Field("update_seen", size, "host", over_ranks="every"),  # one of them may have had no room
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
        self._held = {"weight": slab.host_view("weight_held"), "exp_avg": slab.host_view("moment_held")}
        self._covered: dict[str, set[int]] = {kind: set() for kind in self._held}  # by which optimizers, in this step

    def measure(self) -> None:
        """Note which parameters a total must cover: when only one of two optimizers stepped, there is no total."""
        for kind, covered in self._covered.items():
            if covered:
                for optimizer in self._subject.optimizers.values():
                    if id(optimizer) not in covered:
                        self._cover(kind, optimizer)
                covered.clear()

    def _cover(self, kind: str, optimizer: Any) -> None:
        self._covered[kind].add(id(optimizer))
        rows, _ = self._trained(optimizer) if kind == "weight" else self._states(optimizer)[kind]
        self._held[kind][rows] = 1.0

    def detach(self) -> None:
        self._copies.clear()

    @torch.no_grad()
    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        if not self._gate.due(self._weights_every):
            return
        rows, tensors = self._trained(optimizer)
        room = spare_bytes(self._subject.device)
        if (size := _bytes(tensors)) > room:
            part = self._gate.turn(self._weights_every) % PARTS
            rows, tensors = parted([(row, t) for row, t in zip(rows, tensors, strict=True) if self._parts[row] == part])
            size = _bytes(tensors)
        if size <= room:
            copies = self._copies[id(optimizer)] = {}
            for some, group in alike(rows, tensors):
                copies.update(zip(some, _copied(group), strict=True))
        elif not self._refused:
            self._refused = True
            logger.info("trackbridge: some parameters have no update_ratio: no room for a copy of %d bytes", size)

    @torch.no_grad()
    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        copies = self._copies.pop(id(optimizer), {})
        if self._gate.due(self._weights_every):
            members = list(zip(*self._trained(optimizer), strict=True))
            for rows, tensors in alike(*parted([member for member in members if member[0] in copies])):
                moved = self._change(rows, tensors, [copies[row] for row in rows]).moved
                assert moved is not None
                self._write("update", rows, moved)
            for rows, tensors in alike(*parted([member for member in members if member[0] not in copies])):
                self._change(rows, tensors)
            self._seen["update"][[row for row, tensor in members if not tensor.numel()]] = 1.0
            self._cover("weight", optimizer)
        if self._gate.due(self._moments_every):
            for kind, states in self._states(optimizer).items():
                for rows, tensors in alike(*states):
                    self._write(kind, rows, reduce.norms(tensors))
            self._cover("exp_avg", optimizer)

    def _trained(self, optimizer: Any) -> Members:
        """Rows and this rank's shards of what `optimizer` trains; some may be empty."""
        rows, parameters = self._subject.members(optimizer)
        if not all(parameter.requires_grad for parameter in parameters):
            rows, parameters = parted([(row, p) for row, p in zip(rows, parameters, strict=True) if p.requires_grad])
        return Members(rows, list(map(local, parameters)))

    def _states(self, optimizer: Any) -> dict[str, Members]:
        """By kind of moment: rows and states of the parameters that have it."""
        rows, parameters = self._subject.members(optimizer)
        found: dict[str, Members] = {kind: Members([], []) for kind in MOMENTS}
        for row, state in zip(rows, map(optimizer.state.get, parameters), strict=True):
            if isinstance(state, Mapping):
                for kind, (some, tensors) in found.items():
                    value = state.get(kind)
                    if isinstance(value, Tensor) and value.is_floating_point():
                        some.append(row)
                        tensors.append(value)
        return found

    def _change(self, rows: list[int], tensors: list[Tensor], old: list[Tensor] | None = None) -> reduce.Change:
        found = reduce.change(tensors, old)
        self._write("weight", rows, found.norm)
        self._peak.write(rows, found.peak)
        self._nonfinite.write(rows, found.nonfinite)
        return found

    def _write(self, kind: str, rows: list[int], norms: Tensor) -> None:
        self._norm[kind].write(rows, norms)
        self._seen[kind][rows] = 1.0

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        seen = {kind: stats[f"{kind}_seen"] > 0 for kind in ("weight", "update", *MOMENTS)}
        if not any(each.any() for each in seen.values()):
            return np.zeros(len(self.series)), np.zeros(len(self.series), dtype=bool)
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


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """To which of `count` parts, of about the same size, each of `sizes` belongs: the largest first, to the smallest part."""
    parts = [(0, number) for number in range(count)]
    found = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        size, part = heapq.heappop(parts)
        found[place] = part
        heapq.heappush(parts, (size + sizes[place], part))
    return found


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].device.type == "cpu":
        return cpu.copied(tensors)
    copies = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _covers(seen: BoolArray, held: BoolArray) -> bool:
    return bool(held.any() and not (held & ~seen).any())
