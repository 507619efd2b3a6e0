"""Weights, Adam's moments and the size of the update, on a cadence: they move slowly and reading them costs memory traffic.

Measured after the update. The update is the real difference of the weights, so that a step too small for the weights' dtype
counts as the zero it is; it takes a copy of a sample of them (`samples`) for the time of one `optimizer.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ParametersConfig
from trackbridge.probes import reduce
from trackbridge.probes.base import BoolArray, Gate, Stats
from trackbridge.probes.rows import Rows, alike, parted, root_sum
from trackbridge.probes.samples import Samples
from trackbridge.probes.subject import Members, Subject, local
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

STATISTICS = ("weight_norm", "weight_rms", "weight_max", "weight_nonfinite", "exp_avg_norm", "exp_avg_sq_norm", "update_ratio")
TOTALS = ("param/norm", "param/nonfinite", "optim/exp_avg_norm", "optim/exp_avg_sq_norm", "optim/update_ratio")
MOMENTS = ("exp_avg", "exp_avg_sq")


class WeightProbe:
    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate) -> None:
        self._subject = subject
        self._weights_every, self._moments_every = config.weights_every, config.moments_every
        self._gate = gate
        self._before: dict[int, dict[tuple[int, ...], Samples]] = {}  # by optimizer and rows: the weights before its update
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
        self._before.clear()

    @torch.no_grad()
    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        if self._gate.due(self._weights_every):
            groups = alike(*self._trained(optimizer))
            self._before[id(optimizer)] = {tuple(rows): Samples.of(tensors) for rows, tensors in groups}

    @torch.no_grad()
    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        before = self._before.pop(id(optimizer), {})
        if self._gate.due(self._weights_every):
            trained = self._trained(optimizer)
            for rows, tensors in alike(*trained):
                self._measure(rows, tensors, before.get(tuple(rows)))
            self._seen["update"][[row for row, tensor in zip(*trained, strict=True) if not tensor.numel()]] = 1.0
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

    def _measure(self, rows: list[int], tensors: list[Tensor], before: Samples | None) -> None:
        found = reduce.extent(tensors)
        self._write("weight", rows, found.norm)
        self._peak.write(rows, found.peak)
        self._nonfinite.write(rows, found.nonfinite)
        if before is not None and before.fit(tensors):  # no weight was replaced by one of another shape
            self._write("update", rows, before.distances(tensors))

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


def _covers(seen: BoolArray, held: BoolArray) -> bool:
    return bool(held.any() and not (held & ~seen).any())
